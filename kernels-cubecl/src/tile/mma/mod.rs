//! Tiles on matrix units, the way of `FlashAttention-2`: a plane owns 16 or 32 query rows, scores stay
//! in the registers that `mma.m16n8k16` left them in and become the left operand of the second
//! product there, and the output is accumulated in registers.
//!
//! Keys and values have rooms of their own. While one product runs, the other's operand is on its
//! way into registers, and two barriers a step suffice. Or both come through rings of stages that a
//! producer fills by asynchronous copies: `ring`.

use cubecl::{ir::ElemType, prelude::*};

mod copy;
mod emulated;
mod emulated_copy;
mod gradient;
mod panel;
mod product;
mod ring;
pub(super) mod room;
mod row;
mod sizes;
mod unit;

pub use emulated::Emulated;
pub use panel::RingShape;
pub use unit::{MatrixUnit, TensorCore};

pub(crate) use gradient::gradient_memory;
pub(crate) use sizes::shared_memory;
pub(crate) use unit::LANES;

use core::{f32::consts::LN_2, marker::PhantomData};

use super::{
    Band, CmmaShape, MASKED, Streamed, TileAlgebra, TileShape,
    simt::{reference, tanh},
};
use product::steps;
use room::{Chunk, Pair};
use sizes::{Sizes, operand_room, tile_chunks};
use unit::{M, group_place, lane, plane};

/// What the units of a matrix instruction work on, and how it reaches them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixTile {
    /// Element type of the operands: 16 bits.
    pub operand: ElemType,
    /// Elements per read and write of shared memory: 8, or 4 where vectors are shorter.
    pub chunk: usize,
    /// Whether loops over fragments are unrolled, without which they are not held in registers.
    pub unroll: bool,
    /// Shape of cooperative matrices, where they are used.
    pub cmma: Option<CmmaShape>,
    /// The rings that keys and values come through, where they are copied by themselves.
    pub ring: Option<RingShape>,
}

/// Tiles on matrix units. See the module documentation.
pub struct Mma<U: MatrixUnit> {
    _unit: PhantomData<U>,
}

/// Memory of a plane's tiles: rooms shared by the cube, and registers.
#[derive(CubeType)]
pub struct MmaWorkspace<U: MatrixUnit> {
    query: Shared<[Chunk]>,
    key: Shared<[Chunk]>,
    value: Shared<[Chunk]>,
    /// First chunk of the tiles that are multiplied.
    key_at: RuntimeCell<usize>,
    value_at: RuntimeCell<usize>,
    fetched: Array<Chunk>,
    held: Array<Pair>,
    weights: Array<Pair>,
    exchange: U::Exchange,
}

/// First row of this plane.
#[cube]
fn first_row(#[comptime] row_tiles: usize) -> usize {
    plane() * comptime!(row_tiles * M)
}

/// Row `i` that this unit has a part of, counted from the plane's first.
#[cube]
fn own_row(i: usize) -> usize {
    lane() / 4 + i / 2 * M + i % 2 * 8
}

#[cube]
impl<U: MatrixUnit> TileAlgebra for Mma<U> {
    type Workspace = MmaWorkspace<U>;
    type Scores = Array<f32>;
    type Output = Array<f32>;
    type Rows = Array<f32>;

    fn workspace(#[comptime] shape: TileShape) -> MmaWorkspace<U> {
        let sizes = comptime!(Sizes::of(shape));
        let matrix = comptime!(sizes.matrix);
        room::register(matrix);
        MmaWorkspace::<U> {
            query: room::room(shape.q_rows, shape.head_dim, matrix),
            key: operand_room(shape.k_rows, shape.head_dim, matrix),
            value: operand_room(shape.k_rows, shape.value_dim, matrix),
            key_at: RuntimeCell::new(0usize),
            value_at: RuntimeCell::new(0usize),
            fetched: Array::<Chunk>::new(sizes.fetched),
            held: Array::<Pair>::new(comptime!(if sizes.holds_query() {
                sizes.query_pairs
            } else {
                1
            })),
            weights: Array::<Pair>::new(comptime!(4 * sizes.row_tiles * steps(shape.k_rows))),
            exchange: U::exchange(shape.units_y),
        }
    }

    fn scores(#[comptime] shape: TileShape) -> Array<f32> {
        let sizes = comptime!(Sizes::of(shape));
        Array::<f32>::new(comptime!(4 * sizes.row_tiles * sizes.scores))
    }

    fn output(#[comptime] shape: TileShape) -> Array<f32> {
        let sizes = comptime!(Sizes::of(shape));
        let length = comptime!(4 * sizes.row_tiles * sizes.outputs);
        let mut output = Array::<f32>::new(length);
        product::zero(&mut output, length);
        output
    }

    fn rows(value: f32, #[comptime] shape: TileShape) -> Array<f32> {
        let length = comptime!(Sizes::of(shape).rows());
        let mut rows = Array::<f32>::new(length);
        #[unroll]
        for r in 0..length {
            rows[r] = value;
        }
        rows
    }

    fn load_query<F: Float, N: Size>(
        workspace: &mut MmaWorkspace<U>,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        factor: f32,
        #[comptime] shape: TileShape,
    ) {
        let sizes = comptime!(Sizes::of(shape));
        let (units, matrix) = comptime!((sizes.units, sizes.matrix));
        let fetched = &mut workspace.fetched;
        let (rows, width) = comptime!((shape.q_rows, shape.head_dim));
        room::fetch::<F, N>(source, origin, valid, fetched, rows, width, units, matrix);
        room::multiply(fetched, factor, comptime!(room::chunks(rows, width, units, matrix)));
        room::stage(&workspace.fetched, &mut workspace.query, rows, width, units, matrix);
        sync_cube();
        if comptime!(sizes.holds_query()) {
            #[unroll(matrix.unroll)]
            for step in 0..comptime!(steps(width)) {
                #[unroll(matrix.unroll)]
                for r in 0..sizes.row_tiles {
                    let row = first_row(sizes.row_tiles) + r * M;
                    let operand = room::left::<U>(
                        &mut workspace.exchange,
                        &workspace.query,
                        row,
                        step,
                        width,
                        matrix,
                    );
                    #[unroll]
                    for i in 0..4usize {
                        workspace.held[4 * (step * sizes.row_tiles + r) + i] = operand[i];
                    }
                }
            }
        }
    }

    fn fetch<F: Float, N: Size>(
        workspace: &mut MmaWorkspace<U>,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        #[comptime] streamed: Streamed,
        #[comptime] shape: TileShape,
    ) {
        let sizes = comptime!(Sizes::of(shape));
        room::fetch::<F, N>(
            source,
            origin,
            valid,
            &mut workspace.fetched,
            shape.k_rows,
            comptime!(shape.width(streamed)),
            sizes.units,
            sizes.matrix,
        );
    }

    fn stage<F: Float, N: Size>(
        workspace: &mut MmaWorkspace<U>,
        _source: &Tensor<Vector<F, N>>,
        _origin: usize,
        _valid: u32,
        #[comptime] streamed: Streamed,
        #[comptime] shape: TileShape,
    ) {
        let sizes = comptime!(Sizes::of(shape));
        let (rows, width) = comptime!((shape.k_rows, shape.width(streamed)));
        let (units, matrix) = comptime!((sizes.units, sizes.matrix));
        let fetched = &workspace.fetched;
        if comptime!(streamed == Streamed::Keys) {
            room::stage(fetched, &mut workspace.key, rows, width, units, matrix);
        } else {
            room::stage(fetched, &mut workspace.value, rows, width, units, matrix);
        }
    }

    fn mma_ab_t(
        workspace: &mut MmaWorkspace<U>,
        scores: &mut Array<f32>,
        #[comptime] shape: TileShape,
    ) {
        let sizes = comptime!(Sizes::of(shape));
        let (tiles, matrix) = comptime!((sizes.row_tiles, sizes.matrix));
        let (keys, width) = comptime!((shape.k_rows, shape.head_dim));
        product::zero(scores, comptime!(4 * tiles * sizes.scores));
        let at = workspace.key_at.read();
        let tile = &workspace.key[at..at + comptime!(tile_chunks(keys, width, matrix))];
        let exchange = &mut workspace.exchange;
        if comptime!(sizes.holds_query()) {
            #[unroll(matrix.unroll)]
            for step in 0..comptime!(steps(width)) {
                product::step_ab_t::<U>(
                    exchange,
                    &workspace.held,
                    4 * step * tiles,
                    tile,
                    scores,
                    step,
                    tiles,
                    keys,
                    width,
                    matrix,
                );
            }
        } else {
            product::mma_ab_t::<U>(
                exchange,
                &workspace.query,
                first_row(tiles),
                tile,
                scores,
                tiles,
                keys,
                width,
                matrix,
            );
        }
    }

    fn mma_ab(
        workspace: &mut MmaWorkspace<U>,
        output: &mut Array<f32>,
        #[comptime] shape: TileShape,
    ) {
        let sizes = comptime!(Sizes::of(shape));
        let (keys, width, matrix) = comptime!((shape.k_rows, shape.value_dim, sizes.matrix));
        let at = workspace.value_at.read();
        product::mma_ab::<U>(
            &mut workspace.exchange,
            &workspace.weights,
            &workspace.value[at..at + comptime!(tile_chunks(keys, width, matrix))],
            output,
            sizes.row_tiles,
            keys,
            width,
            matrix,
        );
    }

    fn stage_weights(
        workspace: &mut MmaWorkspace<U>,
        weights: &Array<f32>,
        #[comptime] shape: TileShape,
    ) {
        let tiles = comptime!(Sizes::of(shape).row_tiles);
        product::operands(weights, &mut workspace.weights, tiles, shape.k_rows);
    }

    fn softcap(scores: &mut Array<f32>, scale: f32, cap: f32, #[comptime] shape: TileShape) {
        let sizes = comptime!(Sizes::of(shape));
        #[unroll]
        for i in 0..comptime!(4 * sizes.row_tiles * sizes.scores) {
            scores[i] = cap * tanh(scale * scores[i]);
        }
    }

    fn mask(scores: &mut Array<f32>, band: &Band, first_key: i32, #[comptime] shape: TileShape) {
        let sizes = comptime!(Sizes::of(shape));
        let first = first_row(sizes.row_tiles);
        let key = first_key + (2 * (lane() % 4)) as i32;
        #[unroll]
        for r in 0..comptime!(sizes.rows()) {
            let row = (first + own_row(r)) as i32;
            #[unroll]
            for c in 0..comptime!(2 * sizes.scores) {
                let i = row::element(r, c, sizes.scores);
                let visible = band.sees(row, key + comptime!((c / 2 * 8 + c % 2) as i32));
                scores[i] = select(visible, scores[i], f32::new(MASKED));
            }
        }
    }

    fn row_max(
        workspace: &mut MmaWorkspace<U>,
        scores: &Array<f32>,
        maximum: &mut Array<f32>,
        correction: &mut Array<f32>,
        scale: f32,
        #[comptime] shape: TileShape,
    ) {
        let sizes = comptime!(Sizes::of(shape));
        #[unroll(sizes.matrix.unroll)]
        for r in 0..comptime!(sizes.rows()) {
            let mut raised = maximum[r];
            #[unroll]
            for c in 0..comptime!(2 * sizes.scores) {
                raised = max(raised, scores[row::element(r, c, sizes.scores)]);
            }
            // The four lanes of a group hold one row.
            raised = max(raised, U::shuffle_xor(&mut workspace.exchange, raised, 1u32));
            raised = max(raised, U::shuffle_xor(&mut workspace.exchange, raised, 2u32));
            correction[r] = U::exp2(scale * (maximum[r] - raised));
            maximum[r] = raised;
        }
    }

    fn exp2(
        scores: &mut Array<f32>,
        maximum: &Array<f32>,
        scale: f32,
        #[comptime] shape: TileShape,
    ) {
        let sizes = comptime!(Sizes::of(shape));
        #[unroll]
        for r in 0..comptime!(sizes.rows()) {
            let reference = scale * reference(maximum[r]);
            #[unroll]
            for c in 0..comptime!(2 * sizes.scores) {
                let i = row::element(r, c, sizes.scores);
                scores[i] = U::exp2(fma(scores[i], scale, -reference));
            }
        }
    }

    fn row_sum(
        scores: &Array<f32>,
        sum: &mut Array<f32>,
        correction: &Array<f32>,
        #[comptime] shape: TileShape,
    ) {
        let sizes = comptime!(Sizes::of(shape));
        #[unroll]
        for r in 0..comptime!(sizes.rows()) {
            let mut own = sum[r] * correction[r];
            #[unroll]
            for c in 0..comptime!(2 * sizes.scores) {
                own += scores[row::element(r, c, sizes.scores)];
            }
            sum[r] = own;
        }
    }

    fn rescale(output: &mut Array<f32>, correction: &Array<f32>, #[comptime] shape: TileShape) {
        let sizes = comptime!(Sizes::of(shape));
        #[unroll]
        for r in 0..comptime!(sizes.rows()) {
            #[unroll]
            for c in 0..comptime!(2 * sizes.outputs) {
                output[row::element(r, c, sizes.outputs)] *= correction[r];
            }
        }
    }

    fn store<F: Float>(
        workspace: &mut MmaWorkspace<U>,
        output: &Array<f32>,
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
        let sizes = comptime!(Sizes::of(shape));
        let exchange = &mut workspace.exchange;
        #[unroll(sizes.matrix.unroll)]
        for r in 0..comptime!(sizes.rows()) {
            let mut total = sum[r];
            total += U::shuffle_xor(exchange, total, 1u32);
            total += U::shuffle_xor(exchange, total, 2u32);
            let empty = total == 0.0f32;
            let inverse = select(empty, f32::new(0.0f32), 1.0f32 / total);
            let row = first_row(sizes.row_tiles) + own_row(r);
            let inside = (row as u32) < valid;
            let target = target_row + row * row_stride;
            if inside && group_place() == 0 {
                lse[target] =
                    select(empty, minus_infinity, scale * maximum[r] * LN_2 + f32::ln(total));
            }
            let at = target * comptime!(shape.value_dim / 4);
            row::store::<U, F>(
                exchange,
                output,
                r,
                inverse,
                out,
                at,
                inside,
                shape.value_dim,
                sizes.matrix,
            );
        }
    }
}
