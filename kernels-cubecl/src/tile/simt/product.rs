//! The two matrix products.

use cubecl::prelude::*;

use super::{RegisterTile, SimtWorkspace, first_row, unit_x, unit_y};
use crate::tile::{TileShape, global::F4};

/// `scores = query * key^T`.
#[cube]
pub(super) fn mma_ab_t(
    workspace: &SimtWorkspace,
    scores: &mut Array<f32>,
    #[comptime] shape: TileShape,
) {
    let tile = comptime!(RegisterTile::of(shape));
    let query_at = first_row(shape) * tile.query_pitch;
    let key_at = unit_x(shape) * tile.key_value_pitch;
    #[unroll]
    for i in 0..comptime!(tile.rows * tile.keys) {
        scores[i] = 0.0f32;
    }
    for d in 0..comptime!(shape.head_dim / 4) {
        let mut query = Array::<F4>::new(tile.rows);
        #[unroll]
        for r in 0..tile.rows {
            query[r] = workspace.query[query_at + comptime!(r * tile.query_pitch) + d];
        }
        #[unroll]
        for c in 0..tile.keys {
            let pitch = comptime!(c * shape.units_x * tile.key_value_pitch);
            let key = workspace.key_value[key_at + pitch + d];
            #[unroll]
            for r in 0..tile.rows {
                let i = comptime!(r * tile.keys + c);
                scores[i] = multiply_add(query[r], key, scores[i]);
            }
        }
    }
}

/// `output += weights * value`.
#[cube]
pub(super) fn mma_ab(
    workspace: &SimtWorkspace,
    output: &mut Array<F4>,
    #[comptime] shape: TileShape,
) {
    let tile = comptime!(RegisterTile::of(shape));
    let groups = comptime!(tile.rows.div_ceil(4));
    for k in 0..shape.k_rows {
        let mut weights = Array::<F4>::new(groups);
        #[unroll]
        for g in 0..groups {
            weights[g] = workspace.weights[k * tile.weights_pitch + unit_y(shape) * groups + g];
        }
        #[unroll]
        for c in 0..tile.columns {
            let value = workspace.key_value[k * tile.key_value_pitch + column(c, shape)];
            #[unroll]
            for r in 0..tile.rows {
                let i = comptime!(r * tile.columns + c);
                let weight = weights[comptime!(r / 4)].extract(comptime!(r % 4));
                output[i] = fma(F4::new(weight), value, output[i]);
            }
        }
    }
}

/// Hands the weights over to [`mma_ab`].
#[cube]
pub(super) fn stage_weights(
    workspace: &mut SimtWorkspace,
    weights: &Array<f32>,
    #[comptime] shape: TileShape,
) {
    let tile = comptime!(RegisterTile::of(shape));
    let groups = comptime!(tile.rows.div_ceil(4));
    #[unroll]
    for c in 0..tile.keys {
        let key = unit_x(shape) + comptime!(c * shape.units_x);
        let at = key * tile.weights_pitch + unit_y(shape) * groups;
        #[unroll]
        for g in 0..groups {
            let mut group = F4::new(0.0f32);
            #[unroll]
            for r in comptime!(4 * g)..comptime!(tile.rows.min(4 * g + 4)) {
                group.insert(comptime!(r % 4), weights[comptime!(r * tile.keys + c)]);
            }
            workspace.weights[at + g] = group;
        }
    }
}

/// Output vector `c` of this unit. Where the units do not divide the row evenly, the last ones
/// recompute the last column instead of reading past the row; [`Simt::store`] drops it.
#[cube]
fn column(#[comptime] c: usize, #[comptime] shape: TileShape) -> usize {
    let width = comptime!(shape.value_dim / 4);
    let column = unit_x(shape) + comptime!(c * shape.units_x);
    if comptime!((c + 1) * shape.units_x > width) {
        min(column, comptime!(width - 1))
    } else {
        column
    }
}

/// `sum + a . b`, one fused multiply-add per element.
#[cube]
fn multiply_add(a: F4, b: F4, sum: f32) -> f32 {
    let mut total = sum;
    #[unroll]
    for e in 0..4usize {
        total = fma(a.extract(e), b.extract(e), total);
    }
    total
}
