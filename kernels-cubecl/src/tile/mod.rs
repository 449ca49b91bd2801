//! Tile algebra: the vocabulary that attention loops are written in.
//!
//! A loop names what happens to a tile (load, multiply, mask, reduce, rescale, store); an
//! implementation of [`TileAlgebra`] decides where the tile lives (registers, shared memory, matrix
//! fragments) and which units hold which part of it. [`Simt`] serves every device: it needs neither
//! matrix units nor plane operations and at most 32 KiB of shared memory. [`Mma`] holds scores and
//! output in the fragments of `mma.sync`; [`Cmma`] multiplies on cooperative matrices.

mod band;
mod cmma;
mod global;
mod gradient;
mod mma;
mod ring;
mod simt;

pub use band::Band;
pub use cmma::{Cmma, CmmaShape};
pub(crate) use cmma::{
    gradient_memory as cmma_gradient_memory, shared_memory as cmma_shared_memory,
};
pub(crate) use global::{dot, read_vector};
pub use gradient::{Axis, F2, GradientAlgebra, GradientShape, Product};
pub use mma::{Emulated, MatrixTile, Mma, RingShape, TensorCore};
pub(crate) use mma::{
    LANES, gradient_memory as mma_gradient_memory, shared_memory as mma_shared_memory,
};
pub use ring::{RingAlgebra, Transfer};
pub use simt::Simt;

use cubecl::prelude::*;

/// Lower bound of every score, standing in for minus infinity inside the loop: shader languages do not
/// promise infinities, and `inf - inf` would make NaN of a masked row. Times a scale it is finite, too,
/// and far below all other scores, from [`LEAST_SCALE`] up to 3e8.
pub const MASKED: f32 = -1.0e30;

/// Scores below this came from [`MASKED`].
pub const MASKED_THRESHOLD: f32 = -5.0e29;

/// The least scale of scores that are compared before they are scaled. Scores of a million times a
/// million, scaled by less, are the same to f32's weights.
pub const LEAST_SCALE: f32 = 1e-20;

/// Compile-time shape of the tiles of one attention loop and of the units working on them.
///
/// Units form a grid of `units_y x units_x`: `y` runs over query rows, `x` over keys or output
/// columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileShape {
    /// Query rows per tile.
    pub q_rows: usize,
    /// Keys per tile.
    pub k_rows: usize,
    /// Elements per query and key row; a multiple of 8.
    pub head_dim: usize,
    /// Elements per value and output row; a multiple of 8.
    pub value_dim: usize,
    /// Units along keys and output columns.
    pub units_x: usize,
    /// Units along query rows.
    pub units_y: usize,
    /// What matrix units work on; `None` for plain tiles, which are f32.
    pub matrix: Option<MatrixTile>,
}

impl TileShape {
    /// Units of one cube.
    pub fn units(&self) -> usize {
        self.units_x * self.units_y
    }

    /// Elements per row of what streams past.
    pub fn width(&self, streamed: Streamed) -> usize {
        match streamed {
            Streamed::Keys => self.head_dim,
            Streamed::Values => self.value_dim,
        }
    }

    /// How the units share a score tile.
    pub fn grid(&self) -> UnitGrid {
        UnitGrid {
            x: self.units_x,
            y: self.units_y,
            rows: self.q_rows / self.units_y,
            columns: self.k_rows / self.units_x,
        }
    }
}

/// What streams past a query tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Streamed {
    /// Right operand of the first product; rows of `head_dim` elements.
    Keys,
    /// Right operand of the second product; rows of `value_dim` elements.
    Values,
}

/// How the units of a cube share a tile: `y` runs over rows, `x` over columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnitGrid {
    /// Units along columns.
    pub x: usize,
    /// Units along rows.
    pub y: usize,
    /// Rows of a tile that each unit has a part of.
    pub rows: usize,
    /// Columns of a score tile that each unit has a part of.
    pub columns: usize,
}

impl UnitGrid {
    /// Units of one cube.
    pub fn units(&self) -> usize {
        self.x * self.y
    }

    /// Rows of a tile.
    pub fn tile_rows(&self) -> usize {
        self.y * self.rows
    }

    /// Columns of a score tile.
    pub fn tile_columns(&self) -> usize {
        self.x * self.columns
    }

    /// Vectors of 4 that each unit has of an output row of `width` elements.
    pub fn vectors(&self, width: usize) -> usize {
        (width / 4).div_ceil(self.x)
    }
}

/// Operations on the tiles of one attention loop.
///
/// A score is a product of a query and a key. It is compared before it is scaled, so that of the softmax
/// scale, of log2(e) and of the row's maximum one fused multiply-add remains. `scale` makes log2 of
/// weights of scores, and is [`LEAST_SCALE`] or more; after a cap it is 1. That of
/// [`softcap`](Self::softcap) is the softmax scale by the cap, of any sign.
///
/// Every unit of the cube calls every operation, in uniform control flow. Operations that exchange
/// data through the workspace synchronise themselves where their documentation says so; the loop
/// places the other barriers.
#[cube]
pub trait TileAlgebra: Send + Sync + 'static {
    /// Memory shared by the cube.
    type Workspace: CubeType;
    /// This unit's part of a score tile `[q_rows, k_rows]`, f32.
    type Scores: CubeType;
    /// This unit's part of the output tile `[q_rows, value_dim]`, f32.
    type Output: CubeType;
    /// One f32 for every query row that this unit has a part of.
    type Rows: CubeType;

    /// Allocates the workspace.
    fn workspace(#[comptime] shape: TileShape) -> Self::Workspace;
    /// Allocates a score tile; its content is unspecified.
    fn scores(#[comptime] shape: TileShape) -> Self::Scores;
    /// Allocates an output tile of zeros.
    fn output(#[comptime] shape: TileShape) -> Self::Output;
    /// Allocates row values, all `value`.
    fn rows(value: f32, #[comptime] shape: TileShape) -> Self::Rows;

    /// Loads a query tile times `factor`. Row 0 starts at element `origin`; rows from `valid` on are
    /// zeros and read no memory.
    fn load_query<F: Float, N: Size>(
        workspace: &mut Self::Workspace,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        factor: f32,
        #[comptime] shape: TileShape,
    );
    /// May begin to read the tile that [`stage`](Self::stage) is given next, so that the memory's
    /// latency passes behind a product. There is room for one tile under way.
    fn fetch<F: Float, N: Size>(
        workspace: &mut Self::Workspace,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        #[comptime] streamed: Streamed,
        #[comptime] shape: TileShape,
    );
    /// Puts a tile where its product reads it. Rows from `valid` on are zeros.
    fn stage<F: Float, N: Size>(
        workspace: &mut Self::Workspace,
        source: &Tensor<Vector<F, N>>,
        origin: usize,
        valid: u32,
        #[comptime] streamed: Streamed,
        #[comptime] shape: TileShape,
    );

    /// `scores = query * key^T`.
    fn mma_ab_t(
        workspace: &mut Self::Workspace,
        scores: &mut Self::Scores,
        #[comptime] shape: TileShape,
    );
    /// `output += weights * value`, with the weights last given to
    /// [`stage_weights`](Self::stage_weights). The key room may be written afterwards.
    fn mma_ab(
        workspace: &mut Self::Workspace,
        output: &mut Self::Output,
        #[comptime] shape: TileShape,
    );
    /// Hands the weights over to [`mma_ab`](Self::mma_ab).
    fn stage_weights(
        workspace: &mut Self::Workspace,
        weights: &Self::Scores,
        #[comptime] shape: TileShape,
    );

    /// `scores = cap * tanh(scale * scores)`.
    fn softcap(scores: &mut Self::Scores, scale: f32, cap: f32, #[comptime] shape: TileShape);
    /// Sets scores outside the band to [`MASKED`]; column 0 is key `first_key` of the segment.
    fn mask(scores: &mut Self::Scores, band: &Band, first_key: i32, #[comptime] shape: TileShape);
    /// Raises `maximum` to the maxima of the score rows and sets `correction` to
    /// `2^(scale * (old - new))`. Where keys and values share a room, every unit has finished reading
    /// keys when it returns.
    fn row_max(
        workspace: &mut Self::Workspace,
        scores: &Self::Scores,
        maximum: &mut Self::Rows,
        correction: &mut Self::Rows,
        scale: f32,
        #[comptime] shape: TileShape,
    );
    /// `scores = 2^(scale * (scores - maximum))`; 0 where masked. An engine may round `scale * maximum`
    /// first: all weights of a row then have a factor that is off by as much as an f32 of that size is.
    fn exp2(
        scores: &mut Self::Scores,
        maximum: &Self::Rows,
        scale: f32,
        #[comptime] shape: TileShape,
    );
    /// `sum = sum * correction + row sums`, of this unit's part only: reduced by
    /// [`store`](Self::store).
    fn row_sum(
        scores: &Self::Scores,
        sum: &mut Self::Rows,
        correction: &Self::Rows,
        #[comptime] shape: TileShape,
    );
    /// `output *= correction`, row by row.
    fn rescale(output: &mut Self::Output, correction: &Self::Rows, #[comptime] shape: TileShape);

    /// Writes `output / sum` and `lse = ln(2) * scale * maximum + ln(sum)`; rows without any visible key get 0 and
    /// `minus_infinity`. Row `r < valid` goes to `out[(first_row + r * row_stride) * value_dim ..]`
    /// and `lse[first_row + r * row_stride]`.
    fn store<F: Float>(
        workspace: &mut Self::Workspace,
        output: &Self::Output,
        maximum: &Self::Rows,
        sum: &Self::Rows,
        scale: f32,
        out: &mut [Vector<F, Const<4>>],
        lse: &mut [f32],
        first_row: usize,
        row_stride: usize,
        valid: u32,
        minus_infinity: f32,
        #[comptime] shape: TileShape,
    );
}
