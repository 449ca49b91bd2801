//! Copies and barriers in plain code, for devices that have none that run by themselves.

use cubecl::{ir::ElemType, prelude::*};

use super::{
    MatrixTile,
    copy::AsyncUnit,
    emulated::Emulated,
    panel::Panels,
    room::{Chunk, ROW, read_chunk},
    unit::{lane, plane},
};
use crate::{
    device::tensor_arg,
    tile::{TileShape, Transfer},
};

/// What a stage is filled with whose barrier would let nobody pass, or let pass too early: a number
/// that no test overlooks.
const WRONG: f32 = 6.0e4;

/// Counts of arrivals. A turn of a barrier is over when all have arrived once more.
///
/// Nobody waits here: units meet at each operation, and a tile is copied at the earliest moment that the
/// producer may. That tells a tile overwritten too early, a tile read from where it is not, and a turn
/// of the wrong parity, which on hardware would wait forever or not at all. What it cannot tell is
/// whether the memory model of the hardware has a copy seen by who waited for it.
#[derive(CubeType)]
pub struct Arrivals {
    /// One for each plane and barrier.
    counts: Shared<[u32]>,
    #[cube(comptime)]
    planes: usize,
}

impl Emulated {
    /// Bytes of shared memory of the counts of both rings.
    pub(crate) fn counts_memory(shape: TileShape) -> usize {
        let stages = shape.matrix.and_then(|matrix| matrix.ring).map_or(0, |ring| ring.stages);
        2 * 2 * stages * shape.units_y * size_of::<u32>()
    }
}

/// Turns that are over of the barrier whose counts are the `slots` from `first` on.
#[cube]
fn turns(counts: &[u32], first: usize, #[comptime] slots: usize) -> u32 {
    let mut turns = counts[first];
    #[unroll]
    for slot in 1..slots {
        turns = min(turns, counts[first + slot]);
    }
    turns
}

/// Plain tensors.
impl Transfer for Emulated {
    type Source<F: Float, N: Size> = Tensor<Vector<F, N>>;
    type Argument = TensorArg;
    type Compiled = TensorCompilationArg;

    fn argument(tensor: TensorBinding, _rows: usize, _dtype: ElemType) -> Self::Argument {
        tensor.into_tensor_arg()
    }

    fn compiled() -> Self::Compiled {
        tensor_arg()
    }
}

#[cube]
impl AsyncUnit for Emulated {
    type Barriers = Arrivals;

    fn barriers(#[comptime] stages: usize, #[comptime] planes: usize) -> Arrivals {
        let mut counts = Shared::<[u32]>::new_slice(comptime!(2 * stages * planes));
        if UNIT_POS == 0 {
            for i in 0..comptime!(2 * stages * planes) {
                counts[i] = 0u32;
            }
        }
        sync_cube();
        Arrivals { counts, planes }
    }

    fn arrive(barriers: &mut Arrivals, index: usize) {
        if lane() == 0 {
            barriers.counts[index * barriers.planes + plane()] += 1u32;
        }
    }

    fn wait(
        barriers: &mut Arrivals,
        full: usize,
        parity: u32,
        stage: &mut [Chunk],
        #[comptime] units: usize,
    ) {
        sync_cube();
        if turns(&barriers.counts, full * barriers.planes, 1usize) % 2 == parity {
            for i in range_stepped(UNIT_POS as usize, stage.len(), units) {
                stage[i] = Chunk::cast_from(f32::new(WRONG));
            }
        }
        sync_cube();
    }

    fn fill<F: Float, N: Size>(
        barriers: &mut Arrivals,
        full: usize,
        free: usize,
        parity: u32,
        source: &Tensor<Vector<F, N>>,
        stage: &mut [Chunk],
        token: usize,
        head: usize,
        #[comptime] width: usize,
        #[comptime] panels: Panels,
        #[comptime] units: usize,
        #[comptime] matrix: MatrixTile,
    ) {
        sync_cube();
        let blocked =
            turns(&barriers.counts, free * barriers.planes, barriers.planes) % 2 == parity;
        let row_units = comptime!(panels.units());
        let row_chunks = comptime!(panels.count * panels.columns / matrix.chunk);
        let unit_chunks = comptime!(ROW / matrix.chunk);
        for i in range_stepped(UNIT_POS as usize, comptime!(panels.rows * row_chunks), units) {
            let row = i / row_chunks;
            let column = i % row_chunks * matrix.chunk;
            let mut chunk = Chunk::cast_from(0.0f32);
            if token + row < source.shape(0) && column < width {
                let at = (token + row) * source.stride(0) + head * source.stride(1) + column;
                chunk = read_chunk(source, at, 1usize.runtime(), matrix);
            }
            if blocked {
                chunk = Chunk::cast_from(f32::new(WRONG));
            }
            // Bits 4 to 6 of the address are changed by bits 7 to 9, as far as a row of a panel goes:
            // what cuTensorMapEncodeTiled's swizzles do.
            let unit = column / ROW;
            let linear = (unit / row_units * panels.rows + row) * row_units + unit % row_units;
            let swizzled = linear ^ (linear / 8 % row_units);
            stage[swizzled * unit_chunks + column % ROW / matrix.chunk] = chunk;
        }
        if UNIT_POS == 0 {
            barriers.counts[full * barriers.planes] += 1u32;
        }
    }
}
