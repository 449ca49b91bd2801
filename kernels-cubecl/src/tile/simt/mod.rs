//! The plain implementation of the tile algebra: fused multiply-adds on register tiles.
//!
//! Unit `(y, x)` owns query rows `y * rows_per_unit ..` and, of those, the scores of keys
//! `x + units_x * j` and the output vectors `x + units_x * j`. Operands lie in shared memory as f32
//! vectors of 4, the weights transposed: one vector holds a key's weights for the (at most 4) rows of
//! a unit. Shared rows are one vector longer than their content, so that the units of a column read
//! different banks.

use cubecl::prelude::*;

mod product;
mod store;

use super::{
    Band, MASKED, MASKED_THRESHOLD, TileAlgebra, TileShape,
    global::{F4, load_rows},
};

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

/// Register-tile sizes that follow from a [`TileShape`].
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
        Self {
            rows: shape.q_rows / shape.units_y,
            keys: shape.k_rows / shape.units_x,
            columns: (shape.value_dim / 4).div_ceil(shape.units_x),
            query_pitch: shape.head_dim / 4 + 1,
            key_value_pitch: shape.head_dim.max(shape.value_dim) / 4 + 1,
            weights_pitch: shape.units_y * (shape.q_rows / shape.units_y).div_ceil(4) + 1,
        }
    }
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

/// This unit's position along keys and output columns.
#[cube]
fn unit_x(#[comptime] shape: TileShape) -> usize {
    UNIT_POS as usize % shape.units_x
}

/// This unit's position along query rows.
#[cube]
fn unit_y(#[comptime] shape: TileShape) -> usize {
    UNIT_POS as usize / shape.units_x
}

/// First query row of this unit.
#[cube]
fn first_row(#[comptime] shape: TileShape) -> usize {
    unit_y(shape) * comptime!(RegisterTile::of(shape).rows)
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
        let tile = comptime!(RegisterTile::of(shape));
        let mut output = Array::<F4>::new(comptime!(tile.rows * tile.columns));
        #[unroll]
        for i in 0..comptime!(tile.rows * tile.columns) {
            output[i] = F4::new(0.0f32);
        }
        output
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
        scale: f32,
        #[comptime] shape: TileShape,
    ) {
        let tile = comptime!(RegisterTile::of(shape));
        load_rows::<F, N>(
            source,
            origin,
            valid,
            scale,
            &mut workspace.query,
            shape.q_rows,
            comptime!(shape.head_dim / 4),
            tile.query_pitch,
            comptime!(shape.units()),
        );
    }

    fn load_key<F: Float, N: Size>(
        workspace: &mut SimtWorkspace,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
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
            comptime!(shape.head_dim / 4),
            tile.key_value_pitch,
            comptime!(shape.units()),
        );
    }

    fn load_value<F: Float, N: Size>(
        workspace: &mut SimtWorkspace,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
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
            comptime!(shape.value_dim / 4),
            tile.key_value_pitch,
            comptime!(shape.units()),
        );
    }

    fn mma_ab_t(workspace: &SimtWorkspace, scores: &mut Array<f32>, #[comptime] shape: TileShape) {
        product::mma_ab_t(workspace, scores, shape);
    }

    fn mma_ab(workspace: &SimtWorkspace, output: &mut Array<F4>, #[comptime] shape: TileShape) {
        product::mma_ab(workspace, output, shape);
    }

    fn stage_weights(
        workspace: &mut SimtWorkspace,
        weights: &Array<f32>,
        #[comptime] shape: TileShape,
    ) {
        product::stage_weights(workspace, weights, shape);
    }

    fn softcap(scores: &mut Array<f32>, cap: f32, #[comptime] shape: TileShape) {
        let tile = comptime!(RegisterTile::of(shape));
        #[unroll]
        for i in 0..comptime!(tile.rows * tile.keys) {
            // tanh(x) = 1 - 2 / (exp(2x) + 1): saturates on both sides and keeps NaN, which
            // built-in tanh does not promise.
            scores[i] = cap * (1.0f32 - 2.0f32 / (f32::exp(2.0f32 * scores[i]) + 1.0f32));
        }
    }

    fn mask(scores: &mut Array<f32>, band: &Band, first_key: i32, #[comptime] shape: TileShape) {
        let tile = comptime!(RegisterTile::of(shape));
        let row = first_row(shape) as i32;
        let key = first_key + unit_x(shape) as i32;
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
        #[comptime] shape: TileShape,
    ) {
        let tile = comptime!(RegisterTile::of(shape));
        let at = first_row(shape) * shape.units_x;
        #[unroll]
        for r in 0..tile.rows {
            let mut own = scores[comptime!(r * tile.keys)];
            #[unroll]
            for c in 1..tile.keys {
                own = max(own, scores[comptime!(r * tile.keys + c)]);
            }
            workspace.partial[at + comptime!(r * shape.units_x) + unit_x(shape)] = own;
        }
        sync_cube();
        #[unroll]
        for r in 0..tile.rows {
            let mut raised = maximum[r];
            #[unroll]
            for x in 0..shape.units_x {
                raised = max(raised, workspace.partial[at + comptime!(r * shape.units_x + x)]);
            }
            correction[r] = f32::exp(maximum[r] - raised);
            maximum[r] = raised;
        }
    }

    fn exp(scores: &mut Array<f32>, maximum: &Array<f32>, #[comptime] shape: TileShape) {
        let tile = comptime!(RegisterTile::of(shape));
        #[unroll]
        for r in 0..tile.rows {
            // A row that has seen no key yet is compared with 0: its masked scores vanish too.
            let unseen = maximum[r] < f32::new(MASKED_THRESHOLD);
            let reference = select(unseen, f32::new(0.0f32), maximum[r]);
            #[unroll]
            for c in 0..tile.keys {
                let i = comptime!(r * tile.keys + c);
                scores[i] = f32::exp(scores[i] - reference);
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
        out: &mut [Vector<F, Const<4>>],
        lse: &mut [f32],
        target_row: usize,
        row_stride: usize,
        valid: u32,
        minus_infinity: f32,
        #[comptime] shape: TileShape,
    ) {
        store::store::<F>(
            workspace,
            output,
            maximum,
            sum,
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
