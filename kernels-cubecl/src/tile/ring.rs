//! Tiles that come while others are multiplied.

use cubecl::{ir::ElemType, prelude::*};

use super::{Streamed, TileAlgebra, TileShape};

/// What keys and values are read from, on the host and in the kernel.
pub trait Transfer: Send + Sync + 'static {
    /// The tensor `[tokens, heads, width]` in the kernel.
    type Source<F: Float, N: Size>: ?Sized
        + LaunchArg<RuntimeArg = Self::Argument, CompilationArg = Self::Compiled>;
    /// The tensor at launch.
    type Argument: Send + Sync;
    /// What the compiler is told about it.
    type Compiled: CompilationArg;

    /// The tensor for a launch, of which tiles of `rows` tokens of one head are copied.
    fn argument(tensor: TensorBinding, rows: usize, dtype: ElemType) -> Self::Argument;
    /// What the compiler is told.
    fn compiled() -> Self::Compiled;
}

/// A [`TileAlgebra`] with a producer: tiles of keys and values are copied into rings of stages while
/// others are multiplied. It replaces [`fetch`](TileAlgebra::fetch), [`stage`](TileAlgebra::stage)
/// and all barriers of the loop.
///
/// Tiles are numbered from 0 in the order of the loop; tile `t` takes stage `t % stages`. Every tile is
/// filled, waited for, used and released once, in this order, by all units in uniform control flow;
/// filling tile `t` waits until all have released tile `t - stages`.
#[cube]
pub trait RingAlgebra: TileAlgebra + Transfer {
    /// What tells that a stage is full, and that it is free again.
    type Rings: CubeType;

    /// Allocates the rings' barriers, and waits until they can be used.
    fn rings(#[comptime] shape: TileShape) -> Self::Rings;

    /// Begins to copy a tile: tokens `token ..` of `head`. Rows past the segment's end are those of the
    /// next segment, rows past the tensor's end zeros.
    fn fill<F: Float, N: Size>(
        workspace: &mut Self::Workspace,
        rings: &mut Self::Rings,
        source: &Self::Source<F, N>,
        tile: u32,
        token: usize,
        head: usize,
        #[comptime] streamed: Streamed,
        #[comptime] shape: TileShape,
    );
    /// Waits for a tile, which its product reads from then on.
    fn wait(
        workspace: &mut Self::Workspace,
        rings: &mut Self::Rings,
        tile: u32,
        #[comptime] streamed: Streamed,
        #[comptime] shape: TileShape,
    );
    /// Gives the stage of a tile back.
    fn release(
        rings: &mut Self::Rings,
        tile: u32,
        #[comptime] streamed: Streamed,
        #[comptime] shape: TileShape,
    );

    /// Makes zeros of the rows from `valid` on of the tile of values last waited for, whose weights are
    /// 0: what another segment has there may be NaN. Only for the last tile, whose stage is not filled
    /// again.
    fn clear_value(workspace: &mut Self::Workspace, valid: u32, #[comptime] shape: TileShape);
}
