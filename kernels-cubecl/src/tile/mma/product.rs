//! The two matrix products, and the way of the first's result into the second.
//!
//! A plane has `row_tiles` times 16 rows of a result. Element `e` of fragment `c` of row tile `r` is
//! `4 * (r * fragments + c) + e`.

use cubecl::prelude::*;

use super::{
    MatrixTile,
    room::{Chunk, Operand, Pair, left, right, right_transposed},
    unit::{K, M, MatrixUnit, N},
};

/// Fragments side by side that `columns` columns take.
pub(super) fn fragments(columns: usize) -> usize {
    columns.div_ceil(N)
}

/// Steps that a sum over `width` elements takes.
pub(super) fn steps(width: usize) -> usize {
    width.div_ceil(K)
}

/// `result = 0`.
#[cube]
pub(super) fn zero(result: &mut Array<f32>, #[comptime] length: usize) {
    #[unroll]
    for i in 0..length {
        result[i] = 0.0f32;
    }
}

/// `result += rows * columns^T` over `width` elements, with the rows of this plane from `first_row`
/// on.
#[cube]
pub(super) fn mma_ab_t<U: MatrixUnit>(
    exchange: &mut U::Exchange,
    rows: &[Chunk],
    first_row: usize,
    columns: &[Chunk],
    result: &mut Array<f32>,
    #[comptime] row_tiles: usize,
    #[comptime] column_count: usize,
    #[comptime] width: usize,
    #[comptime] matrix: MatrixTile,
) {
    #[unroll(matrix.unroll)]
    for step in 0..comptime!(steps(width)) {
        let mut held = Array::<Pair>::new(comptime!(4 * row_tiles));
        #[unroll(matrix.unroll)]
        for r in 0..row_tiles {
            let loaded = left::<U>(exchange, rows, first_row + r * M, step, width, matrix);
            #[unroll]
            for i in 0..4usize {
                held[4 * r + i] = loaded[i];
            }
        }
        step_ab_t::<U>(
            exchange,
            &held,
            0usize.runtime(),
            columns,
            result,
            step,
            row_tiles,
            column_count,
            width,
            matrix,
        );
    }
}

/// One step of [`mma_ab_t`](fn@mma_ab_t), with the left operands from pair `held_at` of `held` on.
#[cube]
pub(super) fn step_ab_t<U: MatrixUnit>(
    exchange: &mut U::Exchange,
    held: &Array<Pair>,
    held_at: usize,
    columns: &[Chunk],
    result: &mut Array<f32>,
    step: usize,
    #[comptime] row_tiles: usize,
    #[comptime] column_count: usize,
    #[comptime] width: usize,
    #[comptime] matrix: MatrixTile,
) {
    let per_row = comptime!(fragments(column_count));
    #[unroll(matrix.unroll)]
    for pair in 0..comptime!(column_count / 16) {
        let operand = right_transposed::<U>(exchange, columns, 16 * pair, step, width, matrix);
        #[unroll(matrix.unroll)]
        for r in 0..row_tiles {
            let operand_left = four(held, held_at + 4 * r);
            #[unroll(matrix.unroll)]
            for half in 0..2usize {
                let at = 4 * (r * per_row + 2 * pair + half);
                U::mma(exchange, &operand_left, &operand, 2 * half, result, at);
            }
        }
    }
}

/// `result += weights * columns`, with weights from [`operands`](fn@operands) and a result `width`
/// elements wide.
#[cube]
pub(super) fn mma_ab<U: MatrixUnit>(
    exchange: &mut U::Exchange,
    weights: &Array<Pair>,
    columns: &[Chunk],
    result: &mut Array<f32>,
    #[comptime] row_tiles: usize,
    #[comptime] column_count: usize,
    #[comptime] width: usize,
    #[comptime] matrix: MatrixTile,
) {
    let per_row = comptime!(fragments(width));
    #[unroll(matrix.unroll)]
    for step in 0..comptime!(steps(column_count)) {
        #[unroll(matrix.unroll)]
        for pair in 0..comptime!(width.div_ceil(16)) {
            let operand = right::<U>(exchange, columns, step, 16 * pair, width, matrix);
            #[unroll(matrix.unroll)]
            for r in 0..row_tiles {
                let operand_left = four(weights, 4 * (r * comptime!(steps(column_count)) + step));
                #[unroll(matrix.unroll)]
                for half in 0..2usize {
                    // An odd number of fragments leaves the last operand without a second half.
                    if 2 * pair + half < per_row {
                        let at = 4 * (r * per_row + 2 * pair + half);
                        U::mma(exchange, &operand_left, &operand, 2 * half, result, at);
                    }
                }
            }
        }
    }
}

/// Four of the pairs.
#[cube]
fn four(pairs: &Array<Pair>, at: usize) -> Array<Pair> {
    let mut own = Array::<Pair>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        own[i] = pairs[at + i];
    }
    own
}

/// Weights as left operands: two result fragments side by side hold, lane by lane, what a left
/// operand over their 16 columns does. Nothing moves between lanes.
#[cube]
pub(super) fn operands(
    weights: &Array<f32>,
    staged: &mut Array<Pair>,
    #[comptime] row_tiles: usize,
    #[comptime] column_count: usize,
) {
    let per_row = comptime!(fragments(column_count));
    #[unroll]
    for r in 0..row_tiles {
        #[unroll]
        for step in 0..comptime!(steps(column_count)) {
            #[unroll]
            for register in 0..4usize {
                let fragment = comptime!(r * per_row + 2 * step + register / 2);
                let first = comptime!(4 * fragment + 2 * (register % 2));
                let mut pair = Pair::empty();
                pair.insert(0usize, Operand::cast_from(weights[first]));
                pair.insert(1usize, Operand::cast_from(weights[comptime!(first + 1)]));
                staged[comptime!(4 * (r * steps(column_count) + step) + register)] = pair;
            }
        }
    }
}
