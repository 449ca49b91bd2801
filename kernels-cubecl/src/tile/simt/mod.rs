//! The plain implementation of the tile algebra: fused multiply-adds on register tiles.
//!
//! Unit `(y, x)` owns query rows `y * rows_per_unit ..` and, of those, the scores of keys
//! `x + units_x * j` and the output vectors `x + units_x * j`. Operands lie in shared memory as f32
//! vectors of 4, the weights transposed: one vector holds a key's weights for the (at most 4) rows of
//! a unit. Shared rows are one vector longer than their content, so that the units of a column read
//! different banks.

use cubecl::prelude::*;

mod gradient;
mod product;
pub(super) mod store;

pub(super) use gradient::store as store_gradient;

use super::{
    Band, MASKED, MASKED_THRESHOLD, Streamed, TileAlgebra, TileShape, UnitGrid,
    global::{F4, load_rows},
};
use crate::exp2::exp2;

/// Plain SIMT tiles. See the module documentation.
pub struct Simt;

/// Shared memory of [`Simt`].
#[derive(CubeType)]
pub struct SimtWorkspace {
    query: Shared<[F4]>,
    key_value: Shared<[F4]>,
    weights: Shared<[F4]>,
    partial: Shared<[f32]>,
}

/// Sizes that follow from a [`TileShape`].
#[derive(Clone, Copy)]
struct RegisterTile {
    rows: usize,
    keys: usize,
    columns: usize,
    query_pitch: usize,
    key_value_pitch: usize,
    weights_pitch: usize,
}

impl RegisterTile {
    fn of(shape: TileShape) -> Self {
        let grid = shape.grid();
        Self {
            rows: grid.rows,
            keys: grid.columns,
            columns: grid.vectors(shape.value_dim),
            query_pitch: pitch(shape.head_dim),
            key_value_pitch: pitch(shape.head_dim.max(shape.value_dim)),
            weights_pitch: product::weights_pitch(grid),
        }
    }
}

/// Vectors of 4 between shared rows of `width` elements.
fn pitch(width: usize) -> usize {
    width / 4 + 1
}

impl Simt {
    /// Bytes of shared memory that [`SimtWorkspace`] takes for this shape.
    pub fn shared_memory(shape: TileShape) -> usize {
        let tile = RegisterTile::of(shape);
        let vectors = shape.q_rows * tile.query_pitch
            + shape.k_rows * (tile.key_value_pitch + tile.weights_pitch);
        vectors * 4 * size_of::<f32>() + shape.q_rows * shape.units_x * size_of::<f32>()
    }
}

/// This unit's position along columns.
#[cube]
pub(super) fn unit_x(#[comptime] grid: UnitGrid) -> usize {
    UNIT_POS as usize % grid.x
}

/// This unit's position along rows.
#[cube]
fn unit_y(#[comptime] grid: UnitGrid) -> usize {
    UNIT_POS as usize / grid.x
}

/// First row of this unit.
#[cube]
pub(super) fn first_row(#[comptime] grid: UnitGrid) -> usize {
    unit_y(grid) * grid.rows
}

/// `tanh(x) = 1 - 2 / (exp(2x) + 1)`: saturates on both sides and keeps NaN, which built-in tanh
/// does not promise.
#[cube]
pub(super) fn tanh(x: f32) -> f32 {
    1.0f32 - 2.0f32 / (f32::exp(2.0f32 * x) + 1.0f32)
}

/// What the scores of a row are compared with: its maximum, or 0 where it has seen no key yet, so that
/// its masked scores vanish, too.
#[cube]
pub(super) fn reference(maximum: f32) -> f32 {
    select(maximum < f32::new(MASKED_THRESHOLD), f32::new(0.0f32), maximum)
}

/// Zeros of an output tile `width` elements wide.
#[cube]
pub(super) fn zeros(#[comptime] width: usize, #[comptime] grid: UnitGrid) -> Array<F4> {
    let length = comptime!(grid.rows * grid.vectors(width));
    let mut output = Array::<F4>::new(length);
    #[unroll]
    for i in 0..length {
        output[i] = F4::new(0.0f32);
    }
    output
}

/// See [`TileAlgebra::row_max`], through one element of `partial` for each unit and row.
#[cube]
pub(super) fn row_max(
    partial: &mut [f32],
    scores: &Array<f32>,
    maximum: &mut Array<f32>,
    correction: &mut Array<f32>,
    scale: f32,
    #[comptime] shape: TileShape,
) {
    let tile = comptime!(RegisterTile::of(shape));
    let grid = comptime!(shape.grid());
    let at = first_row(grid) * shape.units_x;
    #[unroll]
    for r in 0..tile.rows {
        let mut own = scores[comptime!(r * tile.keys)];
        #[unroll]
        for c in 1..tile.keys {
            own = max(own, scores[comptime!(r * tile.keys + c)]);
        }
        partial[at + comptime!(r * shape.units_x) + unit_x(grid)] = own;
    }
    sync_cube();
    #[unroll]
    for r in 0..tile.rows {
        let mut raised = maximum[r];
        #[unroll]
        for x in 0..shape.units_x {
            raised = max(raised, partial[at + comptime!(r * shape.units_x + x)]);
        }
        correction[r] = exp2(scale * (maximum[r] - raised));
        maximum[r] = raised;
    }
}

#[cube]
impl TileAlgebra for Simt {
    type Workspace = SimtWorkspace;
    type Scores = Array<f32>;
    type Output = Array<F4>;
    type Rows = Array<f32>;

    fn workspace(#[comptime] shape: TileShape) -> SimtWorkspace {
        let tile = comptime!(RegisterTile::of(shape));
        SimtWorkspace {
            query: Shared::<[F4]>::new_slice(comptime!(shape.q_rows * tile.query_pitch)),
            key_value: Shared::<[F4]>::new_slice(comptime!(shape.k_rows * tile.key_value_pitch)),
            weights: Shared::<[F4]>::new_slice(comptime!(shape.k_rows * tile.weights_pitch)),
            partial: Shared::<[f32]>::new_slice(comptime!(shape.q_rows * shape.units_x)),
        }
    }

    fn scores(#[comptime] shape: TileShape) -> Array<f32> {
        let tile = comptime!(RegisterTile::of(shape));
        Array::<f32>::new(comptime!(tile.rows * tile.keys))
    }

    fn output(#[comptime] shape: TileShape) -> Array<F4> {
        zeros(shape.value_dim, comptime!(shape.grid()))
    }

    fn rows(value: f32, #[comptime] shape: TileShape) -> Array<f32> {
        let tile = comptime!(RegisterTile::of(shape));
        let mut rows = Array::<f32>::new(tile.rows);
        #[unroll]
        for i in 0..tile.rows {
            rows[i] = value;
        }
        rows
    }

    fn load_query<F: Float, N: Size>(
        workspace: &mut SimtWorkspace,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        factor: f32,
        #[comptime] shape: TileShape,
    ) {
        let tile = comptime!(RegisterTile::of(shape));
        load_rows::<F, N>(
            source,
            origin,
            valid,
            factor,
            &mut workspace.query,
            shape.q_rows,
            comptime!(shape.head_dim / 4),
            tile.query_pitch,
            comptime!(shape.units()),
        );
    }

    /// Reads nothing ahead: a tile would take most of a unit's registers.
    fn fetch<F: Float, N: Size>(
        _workspace: &mut SimtWorkspace,
        _source: &Tensor<Vector<F, N>>,
        _origin: usize,
        _valid: u32,
        #[comptime] _streamed: Streamed,
        #[comptime] _shape: TileShape,
    ) {
    }

    fn stage<F: Float, N: Size>(
        workspace: &mut SimtWorkspace,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        #[comptime] streamed: Streamed,
        #[comptime] shape: TileShape,
    ) {
        let tile = comptime!(RegisterTile::of(shape));
        load_rows::<F, N>(
            source,
            origin,
            valid,
            1.0f32,
            &mut workspace.key_value,
            shape.k_rows,
            comptime!(shape.width(streamed) / 4),
            tile.key_value_pitch,
            comptime!(shape.units()),
        );
    }

    fn mma_ab_t(
        workspace: &mut SimtWorkspace,
        scores: &mut Array<f32>,
        #[comptime] shape: TileShape,
    ) {
        let tile = comptime!(RegisterTile::of(shape));
        product::mma_ab_t(
            &workspace.query,
            &workspace.key_value,
            scores,
            comptime!(shape.head_dim / 4),
            tile.query_pitch,
            tile.key_value_pitch,
            comptime!(shape.grid()),
        );
    }

    fn mma_ab(workspace: &mut SimtWorkspace, output: &mut Array<F4>, #[comptime] shape: TileShape) {
        let tile = comptime!(RegisterTile::of(shape));
        product::mma_ab(
            &workspace.weights,
            &workspace.key_value,
            output,
            comptime!(shape.value_dim / 4),
            tile.key_value_pitch,
            comptime!(shape.grid()),
        );
        // Keys come next, into the room that the values were read from.
        sync_cube();
    }

    fn stage_weights(
        workspace: &mut SimtWorkspace,
        weights: &Array<f32>,
        #[comptime] shape: TileShape,
    ) {
        product::stage_weights(&mut workspace.weights, weights, comptime!(shape.grid()));
    }

    fn softcap(scores: &mut Array<f32>, scale: f32, cap: f32, #[comptime] shape: TileShape) {
        let tile = comptime!(RegisterTile::of(shape));
        #[unroll]
        for i in 0..comptime!(tile.rows * tile.keys) {
            scores[i] = cap * tanh(scale * scores[i]);
        }
    }

    fn mask(scores: &mut Array<f32>, band: &Band, first_key: i32, #[comptime] shape: TileShape) {
        let tile = comptime!(RegisterTile::of(shape));
        let grid = comptime!(shape.grid());
        let row = first_row(grid) as i32;
        let key = first_key + unit_x(grid) as i32;
        #[unroll]
        for r in 0..tile.rows {
            #[unroll]
            for c in 0..tile.keys {
                let i = comptime!(r * tile.keys + c);
                let visible = band
                    .sees(row + comptime!(r as i32), key + comptime!((c * shape.units_x) as i32));
                scores[i] = select(visible, scores[i], f32::new(MASKED));
            }
        }
    }

    fn row_max(
        workspace: &mut SimtWorkspace,
        scores: &Array<f32>,
        maximum: &mut Array<f32>,
        correction: &mut Array<f32>,
        scale: f32,
        #[comptime] shape: TileShape,
    ) {
        row_max(&mut workspace.partial, scores, maximum, correction, scale, shape);
    }

    fn exp2(
        scores: &mut Array<f32>,
        maximum: &Array<f32>,
        scale: f32,
        #[comptime] shape: TileShape,
    ) {
        let tile = comptime!(RegisterTile::of(shape));
        #[unroll]
        for r in 0..tile.rows {
            let reference = reference(maximum[r]);
            #[unroll]
            for c in 0..tile.keys {
                let i = comptime!(r * tile.keys + c);
                scores[i] = exp2(scale * (scores[i] - reference));
            }
        }
    }

    fn row_sum(
        scores: &Array<f32>,
        sum: &mut Array<f32>,
        correction: &Array<f32>,
        #[comptime] shape: TileShape,
    ) {
        let tile = comptime!(RegisterTile::of(shape));
        #[unroll]
        for r in 0..tile.rows {
            let mut own = sum[r] * correction[r];
            #[unroll]
            for c in 0..tile.keys {
                own += scores[comptime!(r * tile.keys + c)];
            }
            sum[r] = own;
        }
    }

    fn rescale(output: &mut Array<F4>, correction: &Array<f32>, #[comptime] shape: TileShape) {
        let tile = comptime!(RegisterTile::of(shape));
        #[unroll]
        for r in 0..tile.rows {
            let factor = F4::new(correction[r]);
            #[unroll]
            for c in 0..tile.columns {
                let i = comptime!(r * tile.columns + c);
                output[i] *= factor;
            }
        }
    }

    fn store<F: Float>(
        workspace: &mut SimtWorkspace,
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
        store::store::<F>(
            &mut workspace.partial,
            output,
            maximum,
            sum,
            scale,
            out,
            lse,
            target_row,
            row_stride,
            valid,
            minus_infinity,
            shape,
        );
    }
}
