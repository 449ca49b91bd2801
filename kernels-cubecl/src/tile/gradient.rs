//! The vocabulary of the loops that compute gradients.

use cubecl::prelude::*;

use super::{Band, MatrixTile, UnitGrid};

/// Statistics of one query: lse, in units of ln(2), and delta.
pub type F2 = Vector<f32, Const<2>>;

/// The two inner products of a query and a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Product {
    /// `q . k`, the score; vectors of `head_dim` elements.
    Scores,
    /// `d_out . v`, the gradient of the weight; vectors of `value_dim` elements.
    Weights,
}

/// The side of a score tile that queries are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Queries are rows: their gradient is computed.
    Rows,
    /// Queries are columns: the gradient of keys and values is computed.
    Columns,
}

/// Compile-time shape of the tiles of one gradient loop and of the units working on them.
///
/// The gradients of the rows are computed: rows stay, columns stream past. Which of them are
/// queries and which are keys is the loop's business.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientShape {
    /// How the units share a score tile.
    pub grid: UnitGrid,
    /// Elements per query and key row; a multiple of 8.
    pub head_dim: usize,
    /// Elements per value and output row; a multiple of 8.
    pub value_dim: usize,
    /// Whether the columns of both products share one room, so that they have to be loaded in turn,
    /// one of them twice.
    pub one_room: bool,
    /// What matrix units work on; `None` for plain tiles, which are f32.
    pub matrix: Option<MatrixTile>,
}

impl GradientShape {
    /// Elements of the vectors of a product.
    pub fn width(&self, product: Product) -> usize {
        match product {
            Product::Scores => self.head_dim,
            Product::Weights => self.value_dim,
        }
    }
}

/// Operations on the tiles of one gradient loop.
///
/// Every unit of the cube calls every operation, in uniform control flow. The loop places a barrier
/// between loading and multiplying; the operations place those that they need themselves.
#[cube]
pub trait GradientAlgebra: Send + Sync + 'static {
    /// Memory shared by the cube.
    type Workspace: CubeType;
    /// This unit's part of a score tile `[rows, columns]`, f32.
    type Scores: CubeType;
    /// This unit's part of a gradient tile, f32.
    type Output: CubeType;
    /// Statistics of the queries that this unit has scores of.
    type Statistics: CubeType;

    /// Allocates the workspace.
    fn workspace(#[comptime] shape: GradientShape) -> Self::Workspace;
    /// Allocates a score tile; its content is unspecified.
    fn scores(#[comptime] shape: GradientShape) -> Self::Scores;
    /// Allocates a gradient tile `[rows, width of the product]` of zeros.
    fn output(#[comptime] product: Product, #[comptime] shape: GradientShape) -> Self::Output;
    /// Allocates statistics of the queries on `axis`; their content is unspecified.
    fn statistics(#[comptime] axis: Axis, #[comptime] shape: GradientShape) -> Self::Statistics;

    /// Loads the rows of a product. Row 0 starts at element `origin`; rows from
    /// `valid` on are zeros and read no memory.
    fn load_rows<F: Float, N: Size>(
        workspace: &mut Self::Workspace,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    );
    /// Loads the columns of a product. Columns from `valid` on are zeros.
    fn load_columns<F: Float, N: Size>(
        workspace: &mut Self::Workspace,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    );
    /// Loads the statistics of the queries on `axis`. Query `i` is entry `origin + i * stride`;
    /// queries from `valid` on are zeros and read no memory.
    fn load_statistics(
        statistics: &mut Self::Statistics,
        source: &[F2],
        origin: usize,
        stride: usize,
        valid: u32,
        #[comptime] axis: Axis,
        #[comptime] shape: GradientShape,
    );

    /// `scores = rows * columns^T` of a product.
    fn mma_ab_t(
        workspace: &mut Self::Workspace,
        scores: &mut Self::Scores,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    );
    /// `output += weights * columns`, with the columns of a product and the weights last given to
    /// [`stage`](Self::stage). When it returns, every unit has finished reading columns.
    fn mma_ab(
        workspace: &mut Self::Workspace,
        output: &mut Self::Output,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    );
    /// Hands weights over to [`mma_ab`](Self::mma_ab).
    fn stage(
        workspace: &mut Self::Workspace,
        weights: &Self::Scores,
        #[comptime] shape: GradientShape,
    );

    /// Replaces scores by weights, `p = 2^(scale * score - lse)`, and gradients of weights by
    /// gradients of scores, `ds = p * (dp - delta)`. If `capped`, `p = 2^(cap * t - lse)` with
    /// `t = tanh(scale * score)`, and `ds` has the factor `1 - t^2`.
    fn differentiate(
        scores: &mut Self::Scores,
        gradients: &mut Self::Scores,
        statistics: &Self::Statistics,
        scale: f32,
        cap: f32,
        #[comptime] capped: bool,
        #[comptime] axis: Axis,
        #[comptime] shape: GradientShape,
    );
    /// Sets weights and gradients of scores outside the band to 0; its column 0 is `first_column`.
    fn mask(
        scores: &mut Self::Scores,
        gradients: &mut Self::Scores,
        band: &Band,
        first_column: i32,
        #[comptime] shape: GradientShape,
    );

    /// Writes `output * scale`. Row `r < valid` starts at element `origin + r * stride`, both
    /// multiples of 4.
    fn store<F: Float>(
        workspace: &mut Self::Workspace,
        output: &Self::Output,
        target: &mut [Vector<F, Const<4>>],
        origin: usize,
        stride: usize,
        valid: u32,
        scale: f32,
        #[comptime] product: Product,
        #[comptime] shape: GradientShape,
    );
}
