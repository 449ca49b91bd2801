//! Tiles on cooperative matrices: Vulkan, Metal, HIP and CUDA.
//!
//! Where in a fragment an element lies is the device's secret, so that the result of a product goes
//! through shared memory to the units that own it. Those work on it as plain tiles do; the two
//! products are the difference.

mod gradient;
mod product;

use cubecl::prelude::*;

pub(crate) use gradient::gradient_memory;
pub use product::CmmaShape;

use super::{
    Band, MatrixTile, Streamed, TileAlgebra, TileShape, UnitGrid,
    global::F4,
    mma::room::{self, Chunk, Operand},
    simt::{self, Simt, store::store},
};
use product::{Target, add, multiply, read, weights_pitch};

/// Tiles on cooperative matrices. See the module documentation.
pub struct Cmma;

/// Shared memory of [`Cmma`].
#[derive(CubeType)]
pub struct CmmaWorkspace {
    query: Shared<[Chunk]>,
    key_value: Shared<[Chunk]>,
    weights: Shared<[Operand]>,
    products: Shared<[f32]>,
    partial: Shared<[f32]>,
}

/// Bytes of shared memory that [`CmmaWorkspace`] takes for this shape.
pub(crate) fn shared_memory(shape: TileShape) -> usize {
    let matrix = matrix(shape);
    let rooms = shape.q_rows * room::pitch(shape.head_dim, matrix)
        + shape.k_rows * room::pitch(wider(shape), matrix);
    let operands = rooms * matrix.chunk + shape.q_rows * weights_pitch(shape.k_rows);
    let singles = shape.q_rows * (product::pitch(results(shape)) + shape.units_x);
    operands * matrix.operand.size() + singles * size_of::<f32>()
}

fn matrix(shape: TileShape) -> MatrixTile {
    shape.matrix.expect("a matrix tile has operands")
}

/// The wider of key and value rows, which share a room.
fn wider(shape: TileShape) -> usize {
    shape.head_dim.max(shape.value_dim)
}

/// Columns of the wider product.
fn results(shape: TileShape) -> usize {
    shape.k_rows.max(shape.value_dim)
}

#[cube]
fn load<F: Float, N: Size>(
    room: &mut [Chunk],
    source: &Tensor<Vector<F, N>>,
    origin: usize,
    valid: u32,
    #[comptime] rows: usize,
    #[comptime] width: usize,
    #[comptime] room_width: usize,
    #[comptime] units: usize,
    #[comptime] matrix: MatrixTile,
) {
    let length = comptime!(room::chunks(rows, width, units, matrix));
    let mut fetched = Array::<Chunk>::new(length);
    room::fetch::<F, N>(source, origin, valid, &mut fetched, rows, width, units, matrix);
    room::stage_wide(&fetched, room, rows, width, room_width, units, matrix);
}

#[cube]
impl TileAlgebra for Cmma {
    type Workspace = CmmaWorkspace;
    type Scores = Array<f32>;
    type Output = Array<F4>;
    type Rows = Array<f32>;

    fn workspace(#[comptime] shape: TileShape) -> CmmaWorkspace {
        let matrix = comptime!(matrix(shape));
        room::register(matrix);
        CmmaWorkspace {
            query: room::room(shape.q_rows, shape.head_dim, matrix),
            key_value: room::room(shape.k_rows, comptime!(wider(shape)), matrix),
            weights: Shared::<[Operand]>::new_aligned_slice(
                comptime!(shape.q_rows * weights_pitch(shape.k_rows)),
                16usize,
            ),
            products: Shared::<[f32]>::new_aligned_slice(
                comptime!(shape.q_rows * product::pitch(results(shape))),
                16usize,
            ),
            partial: Shared::<[f32]>::new_slice(comptime!(shape.q_rows * shape.units_x)),
        }
    }

    fn scores(#[comptime] shape: TileShape) -> Array<f32> {
        Simt::scores(shape)
    }

    fn output(#[comptime] shape: TileShape) -> Array<F4> {
        <Simt as TileAlgebra>::output(shape)
    }

    fn rows(value: f32, #[comptime] shape: TileShape) -> Array<f32> {
        Simt::rows(value, shape)
    }

    fn load_query<F: Float, N: Size>(
        workspace: &mut CmmaWorkspace,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        factor: f32,
        #[comptime] shape: TileShape,
    ) {
        let matrix = comptime!(matrix(shape));
        let (rows, width, units) = comptime!((shape.q_rows, shape.head_dim, shape.units()));
        let length = comptime!(room::chunks(rows, width, units, matrix));
        let mut fetched = Array::<Chunk>::new(length);
        room::fetch::<F, N>(source, origin, valid, &mut fetched, rows, width, units, matrix);
        room::multiply(&mut fetched, factor, length);
        room::stage(&fetched, &mut workspace.query, rows, width, units, matrix);
    }

    fn fetch<F: Float, N: Size>(
        _workspace: &mut CmmaWorkspace,
        _source: &Tensor<Vector<F, N>>,
        _origin: usize,
        _valid: u32,
        #[comptime] _streamed: Streamed,
        #[comptime] _shape: TileShape,
    ) {
    }

    fn stage<F: Float, N: Size>(
        workspace: &mut CmmaWorkspace,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        #[comptime] streamed: Streamed,
        #[comptime] shape: TileShape,
    ) {
        load::<F, N>(
            &mut workspace.key_value,
            source,
            origin,
            valid,
            shape.k_rows,
            comptime!(shape.width(streamed)),
            comptime!(wider(shape)),
            comptime!(shape.units()),
            comptime!(matrix(shape)),
        );
    }

    fn mma_ab_t(
        workspace: &mut CmmaWorkspace,
        scores: &mut Array<f32>,
        #[comptime] shape: TileShape,
    ) {
        let matrix = comptime!(matrix(shape));
        let target = comptime!(Target {
            rows: shape.q_rows,
            columns: shape.k_rows,
            pitch: product::pitch(results(shape)),
            sum: shape.head_dim,
            right_is_transposed: true,
        });
        multiply(
            &workspace.query,
            comptime!(room::pitch(shape.head_dim, matrix) * matrix.chunk),
            matrix.chunk,
            &workspace.key_value,
            comptime!(room::pitch(wider(shape), matrix) * matrix.chunk),
            &mut workspace.products,
            target,
            matrix,
        );
        sync_cube();
        read(&workspace.products, scores, target.pitch, comptime!(shape.grid()));
    }

    fn mma_ab(workspace: &mut CmmaWorkspace, output: &mut Array<F4>, #[comptime] shape: TileShape) {
        let matrix = comptime!(matrix(shape));
        let target = comptime!(Target {
            rows: shape.q_rows,
            columns: shape.value_dim,
            pitch: product::pitch(results(shape)),
            sum: shape.k_rows,
            right_is_transposed: false,
        });
        multiply(
            &workspace.weights,
            comptime!(weights_pitch(shape.k_rows)),
            1usize,
            &workspace.key_value,
            comptime!(room::pitch(wider(shape), matrix) * matrix.chunk),
            &mut workspace.products,
            target,
            matrix,
        );
        sync_cube();
        add(&workspace.products, output, target, comptime!(shape.grid()));
    }

    fn stage_weights(
        workspace: &mut CmmaWorkspace,
        weights: &Array<f32>,
        #[comptime] shape: TileShape,
    ) {
        product::stage_weights(&mut workspace.weights, weights, comptime!(shape.grid()));
    }

    fn softcap(scores: &mut Array<f32>, scale: f32, cap: f32, #[comptime] shape: TileShape) {
        Simt::softcap(scores, scale, cap, shape);
    }

    fn mask(scores: &mut Array<f32>, band: &Band, first_key: i32, #[comptime] shape: TileShape) {
        Simt::mask(scores, band, first_key, shape);
    }

    fn row_max(
        workspace: &mut CmmaWorkspace,
        scores: &Array<f32>,
        maximum: &mut Array<f32>,
        correction: &mut Array<f32>,
        scale: f32,
        #[comptime] shape: TileShape,
    ) {
        simt::row_max(&mut workspace.partial, scores, maximum, correction, scale, shape);
    }

    fn exp2(
        scores: &mut Array<f32>,
        maximum: &Array<f32>,
        scale: f32,
        #[comptime] shape: TileShape,
    ) {
        Simt::exp2(scores, maximum, scale, shape);
    }

    fn row_sum(
        scores: &Array<f32>,
        sum: &mut Array<f32>,
        correction: &Array<f32>,
        #[comptime] shape: TileShape,
    ) {
        Simt::row_sum(scores, sum, correction, shape);
    }

    fn rescale(output: &mut Array<F4>, correction: &Array<f32>, #[comptime] shape: TileShape) {
        Simt::rescale(output, correction, shape);
    }

    fn store<F: Float>(
        workspace: &mut CmmaWorkspace,
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
        store::<F>(
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
