//! Rows of results, spread over the four lanes of a group.

use cubecl::prelude::*;

use super::{
    MatrixTile,
    product::fragments,
    unit::{MatrixUnit, lane},
};
use crate::tile::global::F4;

/// Where element `c` that a unit has of its row `r` lies, in a result `fragments` fragments wide.
#[cube]
pub(super) fn element(r: usize, c: usize, #[comptime] fragments: usize) -> usize {
    4 * (r / 2 * fragments + c / 2) + 2 * (r % 2) + c % 2
}

/// Writes row `r` of a result times `factor`, if `inside`, from vector `at` of the target on.
///
/// A lane has two neighbouring elements of each fragment; of two fragments, neighbouring lanes
/// exchange halves, so that each writes four and a group a whole sector of memory.
#[cube]
pub(super) fn store<U: MatrixUnit, F: Float>(
    exchange: &mut U::Exchange,
    result: &Array<f32>,
    r: usize,
    factor: f32,
    target: &mut [Vector<F, Const<4>>],
    at: usize,
    inside: bool,
    #[comptime] width: usize,
    #[comptime] matrix: MatrixTile,
) {
    let count = comptime!(fragments(width));
    let odd = lane() % 2;
    #[unroll(matrix.unroll)]
    for pair in 0..comptime!(count.div_ceil(2)) {
        // Of an odd number of fragments, the last has no second.
        let whole = 2 * pair + 1 < count;
        let next = select(whole, 2 * pair + 1, 2 * pair);
        let mut value = F4::empty();
        #[unroll]
        for e in 0..2usize {
            let first = result[element(r, 4 * pair + e, count)] * factor;
            let second = result[element(r, 2 * next + e, count)] * factor;
            // An even lane keeps the first fragment, an odd one the second.
            let kept = select(odd == 0, first, second);
            let other = U::shuffle_xor(exchange, select(odd == 0, second, first), 1u32);
            value.insert(e, select(odd == 0, kept, other));
            value.insert(comptime!(2 + e), select(odd == 0, other, kept));
        }
        let column = 4 * pair + 2 * odd + lane() % 4 / 2;
        if inside && (whole || odd == 0) {
            target[at + column] = Vector::cast_from(value);
        }
    }
}
