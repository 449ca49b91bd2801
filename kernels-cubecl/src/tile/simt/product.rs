//! The two matrix products on operands in shared memory.

use cubecl::prelude::*;

use super::{first_row, unit_x, unit_y};
use crate::tile::{
    UnitGrid,
    global::{F4, dot},
};

/// Vectors of 4 that the weights of a unit's rows take.
pub(super) fn groups(grid: UnitGrid) -> usize {
    grid.rows.div_ceil(4)
}

/// Vectors of 4 between the weights of neighbouring columns.
pub(super) fn weights_pitch(grid: UnitGrid) -> usize {
    grid.y * groups(grid) + 1
}

/// `scores = rows * columns^T` over `width` vectors of 4. Rows and columns of the operands lie
/// `row_pitch` and `column_pitch` vectors apart.
#[cube]
pub(super) fn mma_ab_t(
    rows: &[F4],
    columns: &[F4],
    scores: &mut Array<f32>,
    #[comptime] width: usize,
    #[comptime] row_pitch: usize,
    #[comptime] column_pitch: usize,
    #[comptime] grid: UnitGrid,
) {
    let row_at = first_row(grid) * row_pitch;
    let column_at = unit_x(grid) * column_pitch;
    #[unroll]
    for i in 0..comptime!(grid.rows * grid.columns) {
        scores[i] = 0.0f32;
    }
    for d in 0..width {
        let mut own = Array::<F4>::new(grid.rows);
        #[unroll]
        for r in 0..grid.rows {
            own[r] = rows[row_at + comptime!(r * row_pitch) + d];
        }
        #[unroll]
        for c in 0..grid.columns {
            let column = columns[column_at + comptime!(c * grid.x * column_pitch) + d];
            #[unroll]
            for r in 0..grid.rows {
                let i = comptime!(r * grid.columns + c);
                scores[i] = dot(own[r], column, scores[i]);
            }
        }
    }
}

/// `output += weights * values` over `width` vectors of 4, with the weights last given to
/// [`stage_weights`](fn@stage_weights). Rows of `values` lie `pitch` vectors apart.
#[cube]
pub(super) fn mma_ab(
    weights: &[F4],
    values: &[F4],
    output: &mut Array<F4>,
    #[comptime] width: usize,
    #[comptime] pitch: usize,
    #[comptime] grid: UnitGrid,
) {
    let groups = comptime!(groups(grid));
    let weights_pitch = comptime!(weights_pitch(grid));
    let vectors = comptime!(grid.vectors(4 * width));
    for k in 0..comptime!(grid.tile_columns()) {
        let mut own = Array::<F4>::new(groups);
        #[unroll]
        for g in 0..groups {
            own[g] = weights[k * weights_pitch + unit_y(grid) * groups + g];
        }
        #[unroll]
        for c in 0..vectors {
            let value = values[k * pitch + column(c, width, grid)];
            #[unroll]
            for r in 0..grid.rows {
                let i = comptime!(r * vectors + c);
                let weight = own[comptime!(r / 4)].extract(comptime!(r % 4));
                output[i] = fma(F4::new(weight), value, output[i]);
            }
        }
    }
}

/// Hands the weights over to [`mma_ab`](fn@mma_ab).
#[cube]
pub(super) fn stage_weights(staged: &mut [F4], weights: &Array<f32>, #[comptime] grid: UnitGrid) {
    let groups = comptime!(groups(grid));
    let pitch = comptime!(weights_pitch(grid));
    #[unroll]
    for c in 0..grid.columns {
        let column = unit_x(grid) + comptime!(c * grid.x);
        let at = column * pitch + unit_y(grid) * groups;
        #[unroll]
        for g in 0..groups {
            let mut group = F4::new(0.0f32);
            #[unroll]
            for r in comptime!(4 * g)..comptime!(grid.rows.min(4 * g + 4)) {
                group.insert(comptime!(r % 4), weights[comptime!(r * grid.columns + c)]);
            }
            staged[at + g] = group;
        }
    }
}

/// Output vector `c` of this unit. Where the units do not divide the row evenly, the last ones
/// recompute the last column instead of reading past the row; storing drops it.
#[cube]
fn column(#[comptime] c: usize, #[comptime] width: usize, #[comptime] grid: UnitGrid) -> usize {
    let column = unit_x(grid) + comptime!(c * grid.x);
    if comptime!((c + 1) * grid.x > width) { min(column, comptime!(width - 1)) } else { column }
}
