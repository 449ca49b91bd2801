//! The matrix instructions in plain code, for devices that have none.

use cubecl::prelude::*;

use super::{
    room::{Chunk, Operand, Pair},
    unit::{K, LANES, M, MatrixUnit, N, lane, plane},
};
use crate::exp2::exp2;

/// [`MatrixUnit`] computed through shared memory: the same kernel, with the same rows named by the
/// same lanes and the same elements in the same registers, runs where there is neither `mma.sync`
/// nor a plane of 32. Slow: it is there to test index arithmetic, not to be used.
///
/// Where elements lie is written down here a second time, from the tables of the PTX ISA, so that
/// a kernel which reads or fills a fragment wrongly shows.
pub struct Emulated;

/// What a lane of a plane hands to the others.
#[derive(CubeType)]
pub struct Exchange {
    rows: Shared<[u32]>,
    left: Shared<[f32]>,
    right: Shared<[f32]>,
    values: Shared<[f32]>,
}

impl Emulated {
    /// Bytes of shared memory that the [`Exchange`] of `planes` planes takes.
    pub fn shared_memory(planes: usize) -> usize {
        planes * (2 * LANES + M * K + K * N) * size_of::<f32>()
    }
}

/// Element `index` of the 16-byte row that starts at chunk `at`.
#[cube]
fn element(room: &[Chunk], at: usize, index: usize) -> Operand {
    let size = room[at].vector_size();
    let chunk = room[at + index / size];
    let within = index % size;
    let mut value = chunk.extract(0usize);
    #[unroll]
    for e in 1usize..size {
        value = select(within == e, chunk.extract(e), value);
    }
    value
}

#[cube]
impl MatrixUnit for Emulated {
    type Exchange = Exchange;

    fn exchange(#[comptime] planes: usize) -> Exchange {
        Exchange {
            rows: Shared::<[u32]>::new_slice(comptime!(planes * LANES)),
            left: Shared::<[f32]>::new_slice(comptime!(planes * M * K)),
            right: Shared::<[f32]>::new_slice(comptime!(planes * K * N)),
            values: Shared::<[f32]>::new_slice(comptime!(planes * LANES)),
        }
    }

    fn load_matrices(
        exchange: &mut Exchange,
        room: &[Chunk],
        at: usize,
        #[comptime] transposed: bool,
    ) -> Array<Pair> {
        let first = plane() * LANES;
        exchange.rows[first + lane()] = at as u32;
        sync_cube();
        let group = lane() / 4;
        let place = 2 * (lane() % 4);
        let mut pairs = Array::<Pair>::new(4usize);
        #[unroll]
        for matrix in 0..4usize {
            let rows = first + comptime!(matrix * 8);
            let mut pair = Pair::empty();
            #[unroll]
            for e in 0..2usize {
                let (row, column) =
                    if comptime!(transposed) { (place + e, group) } else { (group, place + e) };
                let start = exchange.rows[rows + row] as usize;
                pair.insert(e, element(room, start, column));
            }
            pairs[matrix] = pair;
        }
        sync_cube();
        pairs
    }

    fn mma(
        exchange: &mut Exchange,
        left: &Array<Pair>,
        right: &Array<Pair>,
        right_at: usize,
        result: &mut Array<f32>,
        result_at: usize,
    ) {
        let group = lane() / 4;
        let place = lane() % 4;
        let left_first = plane() * comptime!(M * K);
        let right_first = plane() * comptime!(K * N);
        #[unroll]
        for e in 0..2usize {
            // Registers a0..a7: row g where i < 2 or 4 <= i < 6, else g + 8; column 2t + (i & 1),
            // plus 8 from a4 on.
            #[unroll]
            for register in 0..4usize {
                let row = group + comptime!(8 * (register % 2));
                let column = 2 * place + comptime!(e + 8 * (register / 2));
                exchange.left[left_first + row * K + column] =
                    f32::cast_from(left[register].extract(e));
            }
            // Registers b0..b3: row 2t + (i & 1), plus 8 from b2 on; column g.
            #[unroll]
            for register in 0..2usize {
                let row = 2 * place + comptime!(e + 8 * register);
                exchange.right[right_first + row * N + group] =
                    f32::cast_from(right[right_at + register].extract(e));
            }
        }
        sync_cube();
        // Registers c0..c3: row g, plus 8 from c2 on; column 2t + (i & 1).
        #[unroll]
        for register in 0..4usize {
            let row = group + comptime!(8 * (register / 2));
            let column = 2 * place + comptime!(register % 2);
            let mut sum = result[result_at + register];
            for k in 0usize..K {
                sum = fma(
                    exchange.left[left_first + row * K + k],
                    exchange.right[right_first + k * N + column],
                    sum,
                );
            }
            result[result_at + register] = sum;
        }
        sync_cube();
    }

    fn exp2(x: f32) -> f32 {
        exp2(x)
    }

    fn shuffle_xor(exchange: &mut Exchange, value: f32, #[comptime] mask: u32) -> f32 {
        let first = plane() * LANES;
        exchange.values[first + lane()] = value;
        sync_cube();
        let other = exchange.values[first + (lane() ^ comptime!(mask as usize))];
        sync_cube();
        other
    }
}
