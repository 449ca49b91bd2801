//! Gradient loops on plain SIMT tiles.
//!
//! Units own rows, scores and output vectors as in the forward loop. Statistics are held in
//! registers, one for every query that the unit has scores of.

use cubecl::prelude::*;

use super::{Simt, first_row, pitch, product, tanh, unit_x, zeros};
use crate::{
    exp2::exp2,
    tile::{
        Axis, Band, F2, GradientAlgebra, GradientShape, Product, UnitGrid,
        global::{F4, load_rows},
    },
};

/// Shared memory of a gradient loop. With one room for the columns, it is that of the scores.
#[derive(CubeType)]
pub struct GradientWorkspace {
    score_rows: Shared<[F4]>,
    weight_rows: Shared<[F4]>,
    score_columns: Shared<[F4]>,
    weight_columns: Shared<[F4]>,
    staged: Shared<[F4]>,
}

/// Vectors of 4 between the columns of a product.
fn column_pitch(product: Product, shape: GradientShape) -> usize {
    pitch(match shape.one_room {
        true => shape.head_dim.max(shape.value_dim),
        false => shape.width(product),
    })
}

/// Vectors of 4 in the room for the columns of `d_out . v`, which is not used where there is only
/// one. An empty room cannot be allocated.
fn weight_columns(shape: GradientShape) -> usize {
    match shape.one_room {
        true => 1,
        false => shape.grid.tile_columns() * column_pitch(Product::Weights, shape),
    }
}

/// Queries that a unit has scores of.
fn queries(axis: Axis, grid: UnitGrid) -> usize {
    match axis {
        Axis::Rows => grid.rows,
        Axis::Columns => grid.columns,
    }
}

impl Simt {
    /// Bytes of shared memory that [`GradientWorkspace`] takes for this shape.
    pub fn gradient_memory(shape: GradientShape) -> usize {
        let grid = shape.grid;
        let rows = grid.tile_rows() * (pitch(shape.head_dim) + pitch(shape.value_dim));
        let score_columns = grid.tile_columns() * column_pitch(Product::Scores, shape);
        let staged = grid.tile_columns() * product::weights_pitch(grid);
        (rows + score_columns + weight_columns(shape) + staged) * 4 * size_of::<f32>()
    }
}

#[cube]
impl GradientAlgebra for Simt {
    type Workspace = GradientWorkspace;
    type Scores = Array<f32>;
    type Output = Array<F4>;
    type Statistics = Array<F2>;

    fn workspace(#[comptime] shape: GradientShape) -> GradientWorkspace {
        let rows = comptime!(shape.grid.tile_rows());
        let columns = comptime!(shape.grid.tile_columns());
        GradientWorkspace {
            score_rows: Shared::<[F4]>::new_slice(comptime!(rows * pitch(shape.head_dim))),
            weight_rows: Shared::<[F4]>::new_slice(comptime!(rows * pitch(shape.value_dim))),
            score_columns: Shared::<[F4]>::new_slice(comptime!(
                columns * column_pitch(Product::Scores, shape)
            )),
            weight_columns: Shared::<[F4]>::new_slice(comptime!(weight_columns(shape))),
            staged: Shared::<[F4]>::new_slice(comptime!(
                columns * product::weights_pitch(shape.grid)
            )),
        }
    }

    fn scores(#[comptime] shape: GradientShape) -> Array<f32> {
        Array::<f32>::new(comptime!(shape.grid.rows * shape.grid.columns))
    }

    fn output(#[comptime] product: Product, #[comptime] shape: GradientShape) -> Array<F4> {
        zeros(comptime!(shape.width(product)), shape.grid)
    }

    fn statistics(#[comptime] axis: Axis, #[comptime] shape: GradientShape) -> Array<F2> {
        Array::<F2>::new(comptime!(queries(axis, shape.grid)))
    }

    fn load_rows<F: Float, N: Size>(
        workspace: &mut GradientWorkspace,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    ) {
        let rows = comptime!(shape.grid.tile_rows());
        let width = comptime!(shape.width(product) / 4);
        let pitch = comptime!(pitch(shape.width(product)));
        let units = comptime!(shape.grid.units());
        if comptime!(product == Product::Scores) {
            let room = &mut workspace.score_rows;
            load_rows::<F, N>(source, origin, valid, 1.0f32, room, rows, width, pitch, units);
        } else {
            let room = &mut workspace.weight_rows;
            load_rows::<F, N>(source, origin, valid, 1.0f32, room, rows, width, pitch, units);
        }
    }

    fn load_columns<F: Float, N: Size>(
        workspace: &mut GradientWorkspace,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    ) {
        let columns = comptime!(shape.grid.tile_columns());
        let width = comptime!(shape.width(product) / 4);
        let pitch = comptime!(column_pitch(product, shape));
        let units = comptime!(shape.grid.units());
        if comptime!(product == Product::Scores || shape.one_room) {
            let room = &mut workspace.score_columns;
            load_rows::<F, N>(source, origin, valid, 1.0f32, room, columns, width, pitch, units);
        } else {
            let room = &mut workspace.weight_columns;
            load_rows::<F, N>(source, origin, valid, 1.0f32, room, columns, width, pitch, units);
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
        let grid = shape.grid;
        #[unroll]
        for i in 0..comptime!(queries(axis, grid)) {
            let query = if comptime!(axis == Axis::Rows) {
                first_row(grid) + i
            } else {
                unit_x(grid) + comptime!(i * grid.x)
            };
            let mut value = F2::new(0.0f32);
            if (query as u32) < valid {
                value = source[origin + query * stride];
            }
            statistics[i] = value;
        }
    }

    fn mma_ab_t(
        workspace: &mut GradientWorkspace,
        scores: &mut Array<f32>,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    ) {
        let width = comptime!(shape.width(product) / 4);
        let pitch = comptime!(pitch(shape.width(product)));
        let stride = comptime!(column_pitch(product, shape));
        let grid = shape.grid;
        if comptime!(product == Product::Scores) {
            let (rows, columns) = (&workspace.score_rows, &workspace.score_columns);
            product::mma_ab_t(rows, columns, scores, width, pitch, stride, grid);
        } else if comptime!(shape.one_room) {
            let (rows, columns) = (&workspace.weight_rows, &workspace.score_columns);
            product::mma_ab_t(rows, columns, scores, width, pitch, stride, grid);
        } else {
            let (rows, columns) = (&workspace.weight_rows, &workspace.weight_columns);
            product::mma_ab_t(rows, columns, scores, width, pitch, stride, grid);
        }
    }

    fn mma_ab(
        workspace: &mut GradientWorkspace,
        output: &mut Array<F4>,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    ) {
        let width = comptime!(shape.width(product) / 4);
        let pitch = comptime!(column_pitch(product, shape));
        let staged = &workspace.staged;
        if comptime!(product == Product::Scores || shape.one_room) {
            product::mma_ab(staged, &workspace.score_columns, output, width, pitch, shape.grid);
        } else {
            product::mma_ab(staged, &workspace.weight_columns, output, width, pitch, shape.grid);
        }
        sync_cube();
    }

    fn stage(
        workspace: &mut GradientWorkspace,
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
        let grid = shape.grid;
        #[unroll]
        for r in 0..grid.rows {
            #[unroll]
            for c in 0..grid.columns {
                let i = comptime!(r * grid.columns + c);
                let own = statistics[comptime!(if axis == Axis::Rows { r } else { c })];
                let (lse, delta) = (own.extract(0usize), own.extract(1usize));
                let mut gradient = gradients[i] - delta;
                if comptime!(capped) {
                    let tanh = tanh(scale * scores[i]);
                    gradient *= 1.0f32 - tanh * tanh;
                    scores[i] = exp2(fma(tanh, cap, -lse));
                } else {
                    scores[i] = exp2(fma(scores[i], scale, -lse));
                }
                gradients[i] = gradient * scores[i];
            }
        }
    }

    fn mask(
        scores: &mut Array<f32>,
        gradients: &mut Array<f32>,
        band: &Band,
        first_column: i32,
        #[comptime] shape: GradientShape,
    ) {
        let grid = shape.grid;
        let row = first_row(grid) as i32;
        let column = first_column + unit_x(grid) as i32;
        #[unroll]
        for r in 0..grid.rows {
            #[unroll]
            for c in 0..grid.columns {
                let i = comptime!(r * grid.columns + c);
                let visible =
                    band.sees(row + comptime!(r as i32), column + comptime!((c * grid.x) as i32));
                scores[i] = select(visible, scores[i], f32::new(0.0f32));
                gradients[i] = select(visible, gradients[i], f32::new(0.0f32));
            }
        }
    }

    fn store<F: Float>(
        _workspace: &mut GradientWorkspace,
        output: &Array<F4>,
        target: &mut [Vector<F, Const<4>>],
        origin: usize,
        stride: usize,
        valid: u32,
        scale: f32,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    ) {
        store::<F>(output, target, origin, stride, valid, scale, product, shape);
    }
}

/// See [`GradientAlgebra::store`].
#[cube]
pub(in crate::tile) fn store<F: Float>(
    output: &Array<F4>,
    target: &mut [Vector<F, Const<4>>],
    origin: usize,
    stride: usize,
    valid: u32,
    scale: f32,
    #[comptime] product: Product,
    #[comptime] shape: GradientShape,
) {
    let grid = shape.grid;
    let width = comptime!(shape.width(product) / 4);
    let vectors = comptime!(grid.vectors(shape.width(product)));
    let row = first_row(grid);
    #[unroll]
    for r in 0..grid.rows {
        if ((row + r) as u32) < valid {
            let at = (origin + (row + r) * stride) / 4;
            #[unroll]
            for c in 0..vectors {
                let column = unit_x(grid) + comptime!(c * grid.x);
                if column < width {
                    let value = output[comptime!(r * vectors + c)] * F4::new(scale);
                    target[at + column] = Vector::cast_from(value);
                }
            }
        }
    }
}
