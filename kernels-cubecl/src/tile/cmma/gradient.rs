//! Gradient loops on cooperative matrices.

use cubecl::prelude::*;

use super::{
    Cmma, load,
    product::{self, Target, add, multiply, read, weights_pitch},
};
use crate::tile::{
    Axis, Band, F2, GradientAlgebra, GradientShape, MatrixTile, Product, Simt,
    global::F4,
    mma::room::{self, Chunk, Operand},
};

/// Shared memory of a gradient loop.
#[derive(CubeType)]
pub struct CmmaGradientWorkspace {
    score_rows: Shared<[Chunk]>,
    weight_rows: Shared<[Chunk]>,
    score_columns: Shared<[Chunk]>,
    weight_columns: Shared<[Chunk]>,
    staged: Shared<[Operand]>,
    products: Shared<[f32]>,
}

/// Bytes of shared memory that [`CmmaGradientWorkspace`] takes for this shape.
pub(crate) fn gradient_memory(shape: GradientShape) -> usize {
    let matrix = matrix(shape);
    let (rows, columns) = (shape.grid.tile_rows(), shape.grid.tile_columns());
    let pitches = room::pitch(shape.head_dim, matrix) + room::pitch(shape.value_dim, matrix);
    let operands = (rows + columns) * pitches * matrix.chunk + rows * weights_pitch(columns);
    operands * matrix.operand.size() + rows * result_pitch(shape) * size_of::<f32>()
}

fn matrix(shape: GradientShape) -> MatrixTile {
    shape.matrix.expect("a matrix tile has operands")
}

fn result_pitch(shape: GradientShape) -> usize {
    product::pitch(shape.grid.tile_columns().max(shape.head_dim).max(shape.value_dim))
}

/// Elements between rows of a product's operands.
fn operand_pitch(product: Product, shape: GradientShape) -> usize {
    room::pitch(shape.width(product), matrix(shape)) * matrix(shape).chunk
}

#[cube]
impl GradientAlgebra for Cmma {
    type Workspace = CmmaGradientWorkspace;
    type Scores = Array<f32>;
    type Output = Array<F4>;
    type Statistics = Array<F2>;

    fn workspace(#[comptime] shape: GradientShape) -> CmmaGradientWorkspace {
        let matrix = comptime!(matrix(shape));
        let rows = comptime!(shape.grid.tile_rows());
        let columns = comptime!(shape.grid.tile_columns());
        room::register(matrix);
        CmmaGradientWorkspace {
            score_rows: room::room(rows, shape.head_dim, matrix),
            weight_rows: room::room(rows, shape.value_dim, matrix),
            score_columns: room::room(columns, shape.head_dim, matrix),
            weight_columns: room::room(columns, shape.value_dim, matrix),
            staged: Shared::<[Operand]>::new_aligned_slice(
                comptime!(rows * weights_pitch(columns)),
                16usize,
            ),
            products: Shared::<[f32]>::new_aligned_slice(
                comptime!(rows * result_pitch(shape)),
                16usize,
            ),
        }
    }

    fn scores(#[comptime] shape: GradientShape) -> Array<f32> {
        <Simt as GradientAlgebra>::scores(shape)
    }

    fn output(#[comptime] product: Product, #[comptime] shape: GradientShape) -> Array<F4> {
        <Simt as GradientAlgebra>::output(product, shape)
    }

    fn statistics(#[comptime] axis: Axis, #[comptime] shape: GradientShape) -> Array<F2> {
        <Simt as GradientAlgebra>::statistics(axis, shape)
    }

    fn load_rows<F: Float, N: Size>(
        workspace: &mut CmmaGradientWorkspace,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    ) {
        let rows = comptime!(shape.grid.tile_rows());
        let width = comptime!(shape.width(product));
        let units = comptime!(shape.grid.units());
        let matrix = comptime!(matrix(shape));
        if comptime!(product == Product::Scores) {
            let room = &mut workspace.score_rows;
            load::<F, N>(room, source, origin, valid, rows, width, width, units, matrix);
        } else {
            let room = &mut workspace.weight_rows;
            load::<F, N>(room, source, origin, valid, rows, width, width, units, matrix);
        }
    }

    fn load_columns<F: Float, N: Size>(
        workspace: &mut CmmaGradientWorkspace,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    ) {
        let columns = comptime!(shape.grid.tile_columns());
        let width = comptime!(shape.width(product));
        let units = comptime!(shape.grid.units());
        let matrix = comptime!(matrix(shape));
        if comptime!(product == Product::Scores) {
            let room = &mut workspace.score_columns;
            load::<F, N>(room, source, origin, valid, columns, width, width, units, matrix);
        } else {
            let room = &mut workspace.weight_columns;
            load::<F, N>(room, source, origin, valid, columns, width, width, units, matrix);
        }
    }

    fn load_statistics(
        statistics: &mut Array<F2>,
        source: &[F2],
        origin: usize,
        stride: usize,
        valid: u32,
        #[comptime] axis: Axis,
        #[comptime] shape: GradientShape,
    ) {
        <Simt as GradientAlgebra>::load_statistics(
            statistics, source, origin, stride, valid, axis, shape,
        );
    }

    fn mma_ab_t(
        workspace: &mut CmmaGradientWorkspace,
        scores: &mut Array<f32>,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    ) {
        let target = comptime!(Target {
            rows: shape.grid.tile_rows(),
            columns: shape.grid.tile_columns(),
            pitch: result_pitch(shape),
            sum: shape.width(product),
            right_is_transposed: true,
        });
        let pitch = comptime!(operand_pitch(product, shape));
        let matrix = comptime!(matrix(shape));
        let result = &mut workspace.products;
        if comptime!(product == Product::Scores) {
            let (rows, columns) = (&workspace.score_rows, &workspace.score_columns);
            multiply(rows, pitch, matrix.chunk, columns, pitch, result, target, matrix);
        } else {
            let (rows, columns) = (&workspace.weight_rows, &workspace.weight_columns);
            multiply(rows, pitch, matrix.chunk, columns, pitch, result, target, matrix);
        }
        sync_cube();
        read(&workspace.products, scores, target.pitch, shape.grid);
        // The next product goes to the same place.
        sync_cube();
    }

    fn mma_ab(
        workspace: &mut CmmaGradientWorkspace,
        output: &mut Array<F4>,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    ) {
        let target = comptime!(Target {
            rows: shape.grid.tile_rows(),
            columns: shape.width(product),
            pitch: result_pitch(shape),
            sum: shape.grid.tile_columns(),
            right_is_transposed: false,
        });
        let pitch = comptime!(operand_pitch(product, shape));
        let staged_pitch = comptime!(weights_pitch(shape.grid.tile_columns()));
        let matrix = comptime!(matrix(shape));
        let result = &mut workspace.products;
        let staged = &workspace.staged;
        if comptime!(product == Product::Scores) {
            let columns = &workspace.score_columns;
            multiply(staged, staged_pitch, 1usize, columns, pitch, result, target, matrix);
        } else {
            let columns = &workspace.weight_columns;
            multiply(staged, staged_pitch, 1usize, columns, pitch, result, target, matrix);
        }
        sync_cube();
        add(&workspace.products, output, target, shape.grid);
        sync_cube();
    }

    fn stage(
        workspace: &mut CmmaGradientWorkspace,
        weights: &Array<f32>,
        #[comptime] shape: GradientShape,
    ) {
        product::stage_weights(&mut workspace.staged, weights, shape.grid);
        sync_cube();
    }

    fn differentiate(
        scores: &mut Array<f32>,
        gradients: &mut Array<f32>,
        statistics: &Array<F2>,
        scale: f32,
        cap: f32,
        #[comptime] capped: bool,
        #[comptime] axis: Axis,
        #[comptime] shape: GradientShape,
    ) {
        Simt::differentiate(scores, gradients, statistics, scale, cap, capped, axis, shape);
    }

    fn mask(
        scores: &mut Array<f32>,
        gradients: &mut Array<f32>,
        band: &Band,
        first_column: i32,
        #[comptime] shape: GradientShape,
    ) {
        <Simt as GradientAlgebra>::mask(scores, gradients, band, first_column, shape);
    }

    fn store<F: Float>(
        _workspace: &mut CmmaGradientWorkspace,
        output: &Array<F4>,
        target: &mut [Vector<F, Const<4>>],
        origin: usize,
        stride: usize,
        valid: u32,
        scale: f32,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    ) {
        crate::tile::simt::store_gradient::<F>(
            output, target, origin, stride, valid, scale, product, shape,
        );
    }
}
