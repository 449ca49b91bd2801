//! Copies that run by themselves, and barriers that tell when they are done.

use cubecl::{
    ir::ElemType,
    prelude::{barrier::Barrier, *},
};

use super::{
    MatrixTile,
    panel::{Panels, RingShape},
    room::{Chunk, ChunkSize},
    unit::{MatrixUnit, TensorCore, lane},
};
use crate::tile::Transfer;

/// TMA and mbarriers, as the PTX ISA defines them (`cp.async.bulk.tensor`, `mbarrier`).
///
/// A barrier goes through turns, of parity 0, 1, 0, ...: one is over when all arrivals that the barrier
/// was made for have come, and of a full stage all bytes as well.
///
/// All units of a cube call every operation, in uniform control flow.
#[cube]
pub trait AsyncUnit: MatrixUnit + Transfer {
    /// The barriers of one ring.
    type Barriers: CubeType;

    /// Makes barriers for `stages` stages to be full, for which the producer arrives, and as many for
    /// them to be free, for which each of the `planes` planes does. They can be used when it returns.
    fn barriers(#[comptime] stages: usize, #[comptime] planes: usize) -> Self::Barriers;

    /// Each plane arrives at a barrier, once its units have done what they did before.
    fn arrive(barriers: &mut Self::Barriers, index: usize);

    /// Waits until the turn of this parity of barrier `full` is over.
    fn wait(
        barriers: &mut Self::Barriers,
        full: usize,
        parity: u32,
        stage: &mut [Chunk],
        #[comptime] units: usize,
    );

    /// The producer waits until the turn of this parity of barrier `free` is over, arrives at barrier
    /// `full` and has a tile copied into the stage, panel by panel: tokens `token ..` of `head`. What
    /// lies past the end of an axis becomes zeros.
    fn fill<F: Float, N: Size>(
        barriers: &mut Self::Barriers,
        full: usize,
        free: usize,
        parity: u32,
        source: &Self::Source<F, N>,
        stage: &mut [Chunk],
        token: usize,
        head: usize,
        #[comptime] width: usize,
        #[comptime] panels: Panels,
        #[comptime] units: usize,
        #[comptime] matrix: MatrixTile,
    );
}

/// Through tensor maps.
impl Transfer for TensorCore {
    type Source<F: Float, N: Size> = TensorMap<F, Tiled>;
    type Argument = TensorMapArg<Tiled>;
    type Compiled = ();

    fn argument(mut tensor: TensorBinding, rows: usize, dtype: ElemType) -> Self::Argument {
        let width = tensor.shape[2];
        // The stride of an axis with one element is free, but has to be one that is allowed.
        for axis in 0..2 {
            if tensor.shape[axis] == 1 {
                tensor.strides[axis] = width;
            }
        }
        let columns = Panels::of(width, RingShape { stages: 1, rows }).columns;
        let box_of_panel = TiledArgs::new([rows, 1, columns].into());
        TensorMapArg::new(box_of_panel, tensor.into_tensor_arg(), dtype)
            .with_swizzle(match columns {
                64 => TensorMapSwizzle::B128,
                32 => TensorMapSwizzle::B64,
                _ => TensorMapSwizzle::B32,
            })
            .with_prefetch(TensorMapPrefetch::B128)
    }

    fn compiled() -> Self::Compiled {}
}

#[cube]
impl AsyncUnit for TensorCore {
    type Barriers = Shared<[Barrier]>;

    fn barriers(#[comptime] stages: usize, #[comptime] planes: usize) -> Shared<[Barrier]> {
        let barriers = Shared::<[Barrier]>::new_slice(comptime!(2 * stages));
        if UNIT_POS == 0 {
            #[unroll]
            for stage in 0..stages {
                barriers[stage].init_manual(1u32);
                barriers[stages + stage].init_manual(planes as u32);
            }
        }
        sync_async_proxy_shared();
        sync_cube();
        barriers
    }

    fn arrive(barriers: &mut Shared<[Barrier]>, index: usize) {
        sync_plane();
        if lane() == 0 {
            barriers[index].arrive();
        }
    }

    fn wait(
        barriers: &mut Shared<[Barrier]>,
        full: usize,
        parity: u32,
        _stage: &mut [Chunk],
        #[comptime] _units: usize,
    ) {
        barriers[full].wait_parity(parity);
    }

    fn fill<F: Float, N: Size>(
        barriers: &mut Shared<[Barrier]>,
        full: usize,
        free: usize,
        parity: u32,
        source: &TensorMap<F, Tiled>,
        stage: &mut [Chunk],
        token: usize,
        head: usize,
        #[comptime] _width: usize,
        #[comptime] panels: Panels,
        #[comptime] _units: usize,
        #[comptime] matrix: MatrixTile,
    ) {
        if UNIT_POS == 0 {
            barriers[free].wait_parity(parity);
            let bytes = comptime!((panels.stage() * matrix.operand.size()) as u32);
            barriers[full].arrive_and_expect_tx(1u32, bytes);
            let chunks = comptime!(panels.elements() / matrix.chunk);
            #[unroll]
            for panel in 0..panels.count {
                barriers[full].tma_load_3d(
                    source,
                    stage[panel * chunks..(panel + 1) * chunks]
                        .downcast_mut::<Vector<F, ChunkSize>>(),
                    token as i32,
                    head as i32,
                    comptime!((panel * panels.columns) as i32),
                );
            }
        }
        sync_plane();
    }
}
