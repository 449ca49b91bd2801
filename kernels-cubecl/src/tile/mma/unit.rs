//! The matrix instructions, and the plane that runs them.

use cubecl::{cmma::MatrixIdent, cmma::MmaDefinition, prelude::*};

use super::room::{Chunk, Operand, Pair};
use crate::exp2::exp2_nvidia;

/// Rows of a left operand and of the result.
pub(super) const M: usize = 16;
/// Columns of a right operand and of the result.
pub(super) const N: usize = 8;
/// Elements that one instruction sums over.
pub(super) const K: usize = 16;
/// Units that run one instruction together.
pub(crate) const LANES: usize = 32;

/// One multiprocessor's matrix instructions, as the PTX ISA defines them for `mma.m16n8k16` with
/// 16-bit operands.
///
/// Lane `l` of the 32 is in group `g = l / 4`, at place `t = l % 4` of it, and holds:
///
/// | operand | elements, in pairs of neighbours |
/// |---|---|
/// | left `[16, 16]` | rows `g`, `g + 8`, `g`, `g + 8` at columns `2t`, `2t`, `2t + 8`, `2t + 8` |
/// | right `[16, 8]` | column `g` at rows `2t`, `2t + 8` |
/// | result `[16, 8]` | rows `g`, `g + 8` at columns `2t` |
///
/// All units of a cube call every operation, in uniform control flow.
#[cube]
pub trait MatrixUnit: Send + Sync + 'static {
    /// What the lanes exchange data through.
    type Exchange: CubeType;

    /// Allocates the exchange of `planes` planes.
    fn exchange(#[comptime] planes: usize) -> Self::Exchange;

    /// `ldmatrix.x4`: four 8 x 8 matrices. Lane `l` names row `l % 8` of matrix `l / 8`, 16 bytes
    /// from chunk `at` of the room on, and receives from each matrix the pair at row `g`, columns
    /// `2t` and `2t + 1`; of the transposed matrix if `transposed`.
    fn load_matrices(
        exchange: &mut Self::Exchange,
        room: &[Chunk],
        at: usize,
        #[comptime] transposed: bool,
    ) -> Array<Pair>;

    /// `result += left * right`. The right operand is pairs `right_at` and the next of `right`; the
    /// result is four elements of `result` from `result_at` on.
    fn mma(
        exchange: &mut Self::Exchange,
        left: &Array<Pair>,
        right: &Array<Pair>,
        right_at: usize,
        result: &mut Array<f32>,
        result_at: usize,
    );

    /// `2^x`.
    fn exp2(x: f32) -> f32;

    /// The value of lane `l ^ mask`.
    fn shuffle_xor(exchange: &mut Self::Exchange, value: f32, #[comptime] mask: u32) -> f32;
}

/// This unit's lane.
#[cube]
pub(super) fn lane() -> usize {
    UNIT_POS as usize % LANES
}

/// This unit's place among the four of its group.
#[cube]
pub(super) fn group_place() -> usize {
    lane() % 4
}

/// This unit's plane.
#[cube]
pub(super) fn plane() -> usize {
    UNIT_POS as usize / LANES
}

/// The instructions themselves: `ldmatrix`, `mma.sync`, `ex2` and `shfl.sync`.
pub struct TensorCore;

#[cube]
impl MatrixUnit for TensorCore {
    type Exchange = ();

    fn exchange(#[comptime] _planes: usize) -> Self::Exchange {}

    fn load_matrices(
        _exchange: &mut Self::Exchange,
        room: &[Chunk],
        at: usize,
        #[comptime] transposed: bool,
    ) -> Array<Pair> {
        let definition = MmaDefinition::<Operand, Operand, f32>::new(M, N, K);
        let row = &room[at..at + 1];
        // Which operand the matrices become does not matter to the instruction.
        definition.load_matrix::<Chunk, Const<2>>(row, MatrixIdent::A, 4usize, transposed)
    }

    fn mma(
        _exchange: &mut Self::Exchange,
        left: &Array<Pair>,
        right: &Array<Pair>,
        right_at: usize,
        result: &mut Array<f32>,
        result_at: usize,
    ) {
        let definition = MmaDefinition::<Operand, Operand, f32>::new(M, N, K);
        let mut operand = Array::<Pair>::new(2usize);
        let mut sum = Array::<Vector<f32, Const<2>>>::new(2usize);
        #[unroll]
        for i in 0..2usize {
            operand[i] = right[right_at + i];
            let mut pair = Vector::<f32, Const<2>>::empty();
            pair.insert(0usize, result[result_at + 2 * i]);
            pair.insert(1usize, result[result_at + 2 * i + 1]);
            sum[i] = pair;
        }
        definition.execute_inplace(left, &operand, &mut sum);
        #[unroll]
        for i in 0..2usize {
            result[result_at + 2 * i] = sum[i].extract(0usize);
            result[result_at + 2 * i + 1] = sum[i].extract(1usize);
        }
    }

    fn exp2(x: f32) -> f32 {
        exp2_nvidia(x)
    }

    fn shuffle_xor(_exchange: &mut Self::Exchange, value: f32, #[comptime] mask: u32) -> f32 {
        // Lanes that a branch has parted need not have met again, and those that have not are left out.
        sync_plane();
        plane_shuffle_xor(value, mask)
    }
}
