//! Normalising and writing the output tile.

use core::f32::consts::LN_2;

use cubecl::prelude::*;

use super::{RegisterTile, first_row, unit_x};
use crate::tile::{TileShape, global::F4};

/// See [`TileAlgebra::store`](crate::tile::TileAlgebra::store).
#[cube]
pub(in crate::tile) fn store<F: Float>(
    partial: &mut [f32],
    output: &Array<F4>,
    maximum: &Array<f32>,
    sum: &Array<f32>,
    scale: f32,
    out: &mut [Vector<F, Const<4>>],
    lse: &mut [f32],
    target_row: usize,
    row_stride: usize,
    valid: u32,
    minus_infinity: f32,
    #[comptime] shape: TileShape,
) {
    let tile = comptime!(RegisterTile::of(shape));
    let grid = comptime!(shape.grid());
    let width = comptime!(shape.value_dim / 4);
    let row = first_row(grid);
    let at = row * shape.units_x;
    #[unroll]
    for r in 0..tile.rows {
        partial[at + comptime!(r * shape.units_x) + unit_x(grid)] = sum[r];
    }
    sync_cube();
    #[unroll]
    for r in 0..tile.rows {
        let mut total = f32::new(0.0f32);
        #[unroll]
        for x in 0..shape.units_x {
            total += partial[at + comptime!(r * shape.units_x + x)];
        }
        let empty = total == 0.0f32;
        let inverse = select(empty, f32::new(0.0f32), 1.0f32 / total);
        let target = target_row + (row + r) * row_stride;
        if ((row + r) as u32) < valid {
            if unit_x(grid) == 0 {
                lse[target] =
                    select(empty, minus_infinity, scale * maximum[r] * LN_2 + f32::ln(total));
            }
            #[unroll]
            for c in 0..tile.columns {
                let column = unit_x(grid) + comptime!(c * shape.units_x);
                if column < width {
                    let value = output[comptime!(r * tile.columns + c)] * F4::new(inverse);
                    out[target * width + column] = Vector::cast_from(value);
                }
            }
        }
    }
}
