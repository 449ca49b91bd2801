//! Gradient loops on matrix units.
//!
//! A plane owns 16 rows of both products and of the gradients. Weights and gradients of scores stay
//! in the registers that the first products left them in, as in the forward loop.

use cubecl::prelude::*;

use super::{
    MatrixTile, MatrixUnit, Mma, first_row, own_row,
    product::{self, fragments, steps},
    room::{self, Chunk, Pair},
    row,
    unit::{M, lane},
};
use crate::tile::{Axis, Band, F2, GradientAlgebra, GradientShape, Product, simt::tanh};

/// Memory of a plane's gradient tiles: rooms shared by the cube, and registers.
#[derive(CubeType)]
pub struct MmaGradientWorkspace<U: MatrixUnit> {
    score_rows: Shared<[Chunk]>,
    weight_rows: Shared<[Chunk]>,
    score_columns: Shared<[Chunk]>,
    weight_columns: Shared<[Chunk]>,
    fetched: Array<Chunk>,
    staged: Array<Pair>,
    exchange: U::Exchange,
}

/// Sizes that follow from a [`GradientShape`].
#[derive(Clone, Copy)]
struct Sizes {
    matrix: MatrixTile,
    units: usize,
    row_tiles: usize,
    rows: usize,
    columns: usize,
    /// Score fragments per row tile.
    scores: usize,
    /// Chunks under way at once.
    fetched: usize,
}

impl Sizes {
    fn of(shape: GradientShape) -> Self {
        let matrix = shape.matrix.expect("a matrix tile has operands");
        let (grid, units) = (shape.grid, shape.grid.units());
        let (rows, columns) = (grid.tile_rows(), grid.tile_columns());
        let width = shape.head_dim.max(shape.value_dim);
        Self {
            matrix,
            units,
            row_tiles: grid.rows / M,
            rows,
            columns,
            scores: fragments(columns),
            fetched: room::chunks(rows.max(columns), width, units, matrix),
        }
    }

    /// Elements that a unit has of a result `width` elements wide.
    fn elements(&self, width: usize) -> usize {
        4 * self.row_tiles * fragments(width)
    }

    /// Queries that a unit has scores of.
    fn queries(&self, axis: Axis) -> usize {
        match axis {
            Axis::Rows => 2 * self.row_tiles,
            Axis::Columns => 2 * self.scores,
        }
    }
}

/// Bytes of shared memory that the rooms take for this shape.
pub(crate) fn gradient_memory(shape: GradientShape) -> usize {
    let sizes = Sizes::of(shape);
    let pitches =
        room::pitch(shape.head_dim, sizes.matrix) + room::pitch(shape.value_dim, sizes.matrix);
    let chunks = (sizes.rows + sizes.columns) * pitches;
    chunks * sizes.matrix.chunk * sizes.matrix.operand.size()
}

#[cube]
fn load<U: MatrixUnit, F: Float, N: Size>(
    workspace: &mut MmaGradientWorkspace<U>,
    source: &Tensor<Vector<F, N>>,
    origin: usize,
    valid: u32,
    #[comptime] product: Product,
    #[comptime] are_rows: bool,
    #[comptime] shape: GradientShape,
) {
    let sizes = comptime!(Sizes::of(shape));
    let (units, matrix) = comptime!((sizes.units, sizes.matrix));
    let width = comptime!(shape.width(product));
    let count = comptime!(if are_rows { sizes.rows } else { sizes.columns });
    let fetched = &mut workspace.fetched;
    room::fetch::<F, N>(source, origin, valid, fetched, count, width, units, matrix);
    if comptime!(are_rows && product == Product::Scores) {
        room::stage(&workspace.fetched, &mut workspace.score_rows, count, width, units, matrix);
    } else if comptime!(are_rows) {
        room::stage(&workspace.fetched, &mut workspace.weight_rows, count, width, units, matrix);
    } else if comptime!(product == Product::Scores) {
        room::stage(&workspace.fetched, &mut workspace.score_columns, count, width, units, matrix);
    } else {
        room::stage(&workspace.fetched, &mut workspace.weight_columns, count, width, units, matrix);
    }
}

#[cube]
impl<U: MatrixUnit> GradientAlgebra for Mma<U> {
    type Workspace = MmaGradientWorkspace<U>;
    type Scores = Array<f32>;
    type Output = Array<f32>;
    type Statistics = Array<F2>;

    fn workspace(#[comptime] shape: GradientShape) -> MmaGradientWorkspace<U> {
        let sizes = comptime!(Sizes::of(shape));
        let matrix = comptime!(sizes.matrix);
        room::register(matrix);
        MmaGradientWorkspace::<U> {
            score_rows: room::room(sizes.rows, shape.head_dim, matrix),
            weight_rows: room::room(sizes.rows, shape.value_dim, matrix),
            score_columns: room::room(sizes.columns, shape.head_dim, matrix),
            weight_columns: room::room(sizes.columns, shape.value_dim, matrix),
            fetched: Array::<Chunk>::new(sizes.fetched),
            staged: Array::<Pair>::new(comptime!(4 * sizes.row_tiles * steps(sizes.columns))),
            exchange: U::exchange(shape.grid.y),
        }
    }

    fn scores(#[comptime] shape: GradientShape) -> Array<f32> {
        let sizes = comptime!(Sizes::of(shape));
        Array::<f32>::new(comptime!(sizes.elements(sizes.columns)))
    }

    fn output(#[comptime] product: Product, #[comptime] shape: GradientShape) -> Array<f32> {
        let length = comptime!(Sizes::of(shape).elements(shape.width(product)));
        let mut output = Array::<f32>::new(length);
        product::zero(&mut output, length);
        output
    }

    fn statistics(#[comptime] axis: Axis, #[comptime] shape: GradientShape) -> Array<F2> {
        Array::<F2>::new(comptime!(Sizes::of(shape).queries(axis)))
    }

    fn load_rows<F: Float, N: Size>(
        workspace: &mut MmaGradientWorkspace<U>,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    ) {
        load::<U, F, N>(workspace, source, origin, valid, product, true, shape);
    }

    fn load_columns<F: Float, N: Size>(
        workspace: &mut MmaGradientWorkspace<U>,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    ) {
        load::<U, F, N>(workspace, source, origin, valid, product, false, shape);
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
        let sizes = comptime!(Sizes::of(shape));
        #[unroll]
        for i in 0..comptime!(sizes.queries(axis)) {
            let query = if comptime!(axis == Axis::Rows) {
                first_row(sizes.row_tiles) + own_row(i)
            } else {
                2 * (lane() % 4) + comptime!(i / 2 * 8 + i % 2)
            };
            let mut value = F2::new(0.0f32);
            if (query as u32) < valid {
                value = source[origin + query * stride];
            }
            statistics[i] = value;
        }
    }

    fn mma_ab_t(
        workspace: &mut MmaGradientWorkspace<U>,
        scores: &mut Array<f32>,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    ) {
        let sizes = comptime!(Sizes::of(shape));
        let (tiles, columns, matrix) = comptime!((sizes.row_tiles, sizes.columns, sizes.matrix));
        let width = comptime!(shape.width(product));
        let first = first_row(tiles);
        let exchange = &mut workspace.exchange;
        product::zero(scores, comptime!(sizes.elements(columns)));
        if comptime!(product == Product::Scores) {
            product::mma_ab_t::<U>(
                exchange,
                &workspace.score_rows,
                first,
                &workspace.score_columns,
                scores,
                tiles,
                columns,
                width,
                matrix,
            );
        } else {
            product::mma_ab_t::<U>(
                exchange,
                &workspace.weight_rows,
                first,
                &workspace.weight_columns,
                scores,
                tiles,
                columns,
                width,
                matrix,
            );
        }
    }

    fn mma_ab(
        workspace: &mut MmaGradientWorkspace<U>,
        output: &mut Array<f32>,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    ) {
        let sizes = comptime!(Sizes::of(shape));
        let (tiles, columns, matrix) = comptime!((sizes.row_tiles, sizes.columns, sizes.matrix));
        let width = comptime!(shape.width(product));
        let exchange = &mut workspace.exchange;
        let staged = &workspace.staged;
        if comptime!(product == Product::Scores) {
            let room = &workspace.score_columns;
            product::mma_ab::<U>(exchange, staged, room, output, tiles, columns, width, matrix);
        } else {
            let room = &workspace.weight_columns;
            product::mma_ab::<U>(exchange, staged, room, output, tiles, columns, width, matrix);
        }
        sync_cube();
    }

    fn stage(
        workspace: &mut MmaGradientWorkspace<U>,
        weights: &Array<f32>,
        #[comptime] shape: GradientShape,
    ) {
        let sizes = comptime!(Sizes::of(shape));
        product::operands(weights, &mut workspace.staged, sizes.row_tiles, sizes.columns);
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
        let sizes = comptime!(Sizes::of(shape));
        #[unroll]
        for r in 0..comptime!(2 * sizes.row_tiles) {
            #[unroll]
            for c in 0..comptime!(2 * sizes.scores) {
                let i = row::element(r, c, sizes.scores);
                let own = if comptime!(axis == Axis::Rows) { statistics[r] } else { statistics[c] };
                let (lse, delta) = (own.extract(0usize), own.extract(1usize));
                let mut gradient = gradients[i] - delta;
                if comptime!(capped) {
                    let tanh = tanh(scale * scores[i]);
                    gradient *= 1.0f32 - tanh * tanh;
                    scores[i] = U::exp2(fma(tanh, cap, -lse));
                } else {
                    scores[i] = U::exp2(fma(scores[i], scale, -lse));
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
        let sizes = comptime!(Sizes::of(shape));
        let first = first_row(sizes.row_tiles);
        let column = first_column + (2 * (lane() % 4)) as i32;
        #[unroll]
        for r in 0..comptime!(2 * sizes.row_tiles) {
            let row = (first + own_row(r)) as i32;
            #[unroll]
            for c in 0..comptime!(2 * sizes.scores) {
                let i = row::element(r, c, sizes.scores);
                let visible = band.sees(row, column + comptime!((c / 2 * 8 + c % 2) as i32));
                scores[i] = select(visible, scores[i], f32::new(0.0f32));
                gradients[i] = select(visible, gradients[i], f32::new(0.0f32));
            }
        }
    }

    fn store<F: Float>(
        workspace: &mut MmaGradientWorkspace<U>,
        output: &Array<f32>,
        target: &mut [Vector<F, Const<4>>],
        origin: usize,
        stride: usize,
        valid: u32,
        scale: f32,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    ) {
        let sizes = comptime!(Sizes::of(shape));
        let width = comptime!(shape.width(product));
        let exchange = &mut workspace.exchange;
        #[unroll(sizes.matrix.unroll)]
        for r in 0..comptime!(2 * sizes.row_tiles) {
            let row = first_row(sizes.row_tiles) + own_row(r);
            let inside = (row as u32) < valid;
            let at = (origin + row * stride) / 4;
            row::store::<U, F>(exchange, output, r, scale, target, at, inside, width, sizes.matrix);
        }
    }
}
