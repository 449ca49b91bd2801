//! Rings of stages: which tile is where, and which turn of a barrier says so.

use cubecl::{ir::ElemType, prelude::*};

use super::{
    MatrixTile, Mma, MmaWorkspace,
    copy::AsyncUnit,
    panel::{Panels, RingShape, STAGE_ALIGNMENT, ring_chunks, stage_chunks},
    room::{Chunk, ROW},
};
use crate::tile::{RingAlgebra, Streamed, TileShape, Transfer};

/// Bytes of a barrier.
const BARRIER: usize = 8;

/// The barriers of the rings of keys and values: that stage `s` is full is barrier `s`, that it is
/// free again is barrier `stages + s`.
#[derive(CubeType)]
pub struct Rings<U: AsyncUnit> {
    key: U::Barriers,
    value: U::Barriers,
}

impl<U: AsyncUnit> Transfer for Mma<U> {
    type Source<F: Float, N: Size> = U::Source<F, N>;
    type Argument = U::Argument;
    type Compiled = U::Compiled;

    fn argument(tensor: TensorBinding, rows: usize, dtype: ElemType) -> Self::Argument {
        U::argument(tensor, rows, dtype)
    }

    fn compiled() -> Self::Compiled {
        U::compiled()
    }
}

/// What a loop over rings needs to know of its shape.
fn ring_of(shape: TileShape) -> (MatrixTile, RingShape) {
    let matrix = shape.matrix.expect("a matrix tile has operands");
    (matrix, matrix.ring.expect("an asynchronous loop has rings"))
}

/// Bytes of shared memory of one ring.
pub(super) fn ring_memory(width: usize, ring: RingShape, matrix: MatrixTile) -> usize {
    after(ring_chunks(width, ring, matrix) * matrix.chunk * matrix.operand.size())
        + 2 * ring.stages * BARRIER
}

/// Bytes of shared memory before a ring, with those that its alignment leaves unused.
pub(super) fn after(bytes: usize) -> usize {
    bytes.next_multiple_of(STAGE_ALIGNMENT)
}

/// Allocates the stages.
#[cube]
pub(super) fn stages(
    #[comptime] width: usize,
    #[comptime] ring: RingShape,
    #[comptime] matrix: MatrixTile,
) -> Shared<[Chunk]> {
    Shared::<[Chunk]>::new_aligned_slice(
        comptime!(ring_chunks(width, ring, matrix)),
        STAGE_ALIGNMENT,
    )
}

/// Fills the stage of a tile, once it has been released by the tile before it there. The first turn of
/// a stage waits for the turn before the barrier's first, which counts as over.
#[cube]
fn fill<U: AsyncUnit, F: Float, N: Size>(
    barriers: &mut U::Barriers,
    room: &mut [Chunk],
    source: &U::Source<F, N>,
    tile: u32,
    token: usize,
    head: usize,
    #[comptime] width: usize,
    #[comptime] shape: TileShape,
) {
    let (matrix, ring) = comptime!(ring_of(shape));
    let count = comptime!(ring.stages as u32);
    let length = comptime!(stage_chunks(width, ring, matrix));
    let stage = (tile % count) as usize;
    let first = stage * length;
    U::fill::<F, N>(
        barriers,
        stage,
        stage + comptime!(ring.stages),
        (tile / count + 1) % 2,
        source,
        &mut room[first..first + length],
        token,
        head,
        width,
        comptime!(Panels::of(width, ring)),
        shape.units(),
        matrix,
    );
}

/// Waits until the stage of a tile is full; its first chunk.
#[cube]
fn wait<U: AsyncUnit>(
    barriers: &mut U::Barriers,
    room: &mut [Chunk],
    tile: u32,
    #[comptime] width: usize,
    #[comptime] shape: TileShape,
) -> usize {
    let (matrix, ring) = comptime!(ring_of(shape));
    let count = comptime!(ring.stages as u32);
    let length = comptime!(stage_chunks(width, ring, matrix));
    let stage = (tile % count) as usize;
    let first = stage * length;
    U::wait(barriers, stage, tile / count % 2, &mut room[first..first + length], shape.units());
    first
}

#[cube]
fn release<U: AsyncUnit>(barriers: &mut U::Barriers, tile: u32, #[comptime] shape: TileShape) {
    let (_, ring) = comptime!(ring_of(shape));
    U::arrive(barriers, (tile % comptime!(ring.stages as u32)) as usize + comptime!(ring.stages));
}

#[cube]
impl<U: AsyncUnit> RingAlgebra for Mma<U> {
    type Rings = Rings<U>;

    fn rings(#[comptime] shape: TileShape) -> Rings<U> {
        let (_, ring) = comptime!(ring_of(shape));
        Rings::<U> {
            key: U::barriers(ring.stages, shape.units_y),
            value: U::barriers(ring.stages, shape.units_y),
        }
    }

    fn fill<F: Float, N: Size>(
        workspace: &mut MmaWorkspace<U>,
        rings: &mut Rings<U>,
        source: &U::Source<F, N>,
        tile: u32,
        token: usize,
        head: usize,
        #[comptime] streamed: Streamed,
        #[comptime] shape: TileShape,
    ) {
        let width = comptime!(shape.width(streamed));
        if comptime!(streamed == Streamed::Keys) {
            let (barriers, room) = (&mut rings.key, &mut workspace.key);
            fill::<U, F, N>(barriers, room, source, tile, token, head, width, shape);
        } else {
            let (barriers, room) = (&mut rings.value, &mut workspace.value);
            fill::<U, F, N>(barriers, room, source, tile, token, head, width, shape);
        }
    }

    fn wait(
        workspace: &mut MmaWorkspace<U>,
        rings: &mut Rings<U>,
        tile: u32,
        #[comptime] streamed: Streamed,
        #[comptime] shape: TileShape,
    ) {
        let width = comptime!(shape.width(streamed));
        if comptime!(streamed == Streamed::Keys) {
            let first = wait::<U>(&mut rings.key, &mut workspace.key, tile, width, shape);
            workspace.key_at.store(first);
        } else {
            let first = wait::<U>(&mut rings.value, &mut workspace.value, tile, width, shape);
            workspace.value_at.store(first);
        }
    }

    fn release(
        rings: &mut Rings<U>,
        tile: u32,
        #[comptime] streamed: Streamed,
        #[comptime] shape: TileShape,
    ) {
        if comptime!(streamed == Streamed::Keys) {
            release::<U>(&mut rings.key, tile, shape);
        } else {
            release::<U>(&mut rings.value, tile, shape);
        }
    }

    fn clear_value(workspace: &mut MmaWorkspace<U>, valid: u32, #[comptime] shape: TileShape) {
        let (matrix, ring) = comptime!(ring_of(shape));
        let panels = comptime!(Panels::of(shape.value_dim, ring));
        let row_chunks = comptime!(panels.units() * ROW / matrix.chunk);
        let length = comptime!(stage_chunks(shape.value_dim, ring, matrix));
        let first = workspace.value_at.read();
        // Swizzling leaves every unit in its row.
        for i in range_stepped(UNIT_POS as usize, length, shape.units()) {
            if (i / row_chunks % panels.rows) as u32 >= valid {
                workspace.value[first + i] = Chunk::cast_from(0.0f32);
            }
        }
        sync_cube();
    }
}
