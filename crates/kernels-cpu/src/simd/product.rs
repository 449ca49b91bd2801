//! The micro-kernel of matrix products on packed panels.

use super::vector::Vector;
use crate::element::Real;

/// `tile[r][lane] = sum over d of a[d][r] * b[d][lane]`, a whole tile of `ROWS` rows and `BLOCK` lanes.
pub(crate) struct Product<'a, C> {
    /// `[depth][ROWS]`.
    pub(crate) a: &'a [C],
    /// `[depth][BLOCK]`.
    pub(crate) b: &'a [C],
    /// `[ROWS][BLOCK]`.
    pub(crate) tile: &'a mut [C],
    /// What a later call will read: it is brought into the second cache, at most a line for each step
    /// of the depth.
    pub(crate) next: &'a [C],
}

/// Numbers of f32 in a cache line; of f64 every other line is asked for.
const LINE: usize = 16;

#[inline(always)]
pub(super) fn product<V: Vector, const ROWS: usize, const VECTORS: usize>(
    args: Product<'_, V::Scalar>,
) {
    let Product { a, b, tile, next } = args;
    let depth = a.len() / ROWS;
    assert!(VECTORS * V::LANES == V::BLOCK);
    assert!(b.len() >= depth * V::BLOCK && tile.len() >= ROWS * V::BLOCK);
    let mut acc = [[V::splat(V::Scalar::ZERO); VECTORS]; ROWS];
    for step in 0..depth {
        if step * LINE < next.len() {
            crate::view::prefetch_line(next.as_ptr().wrapping_add(step * LINE));
        }
        let mut row = [V::splat(V::Scalar::ZERO); VECTORS];
        for (j, vector) in row.iter_mut().enumerate() {
            // SAFETY: `step < depth` and `j` counts the registers of a block, within the length asserted
            // above.
            *vector = unsafe { V::load(b.as_ptr().add(step * V::BLOCK + j * V::LANES)) };
        }
        for (i, acc) in acc.iter_mut().enumerate() {
            // SAFETY: `step < depth`, which is the number of whole rows of `a`.
            let factor = V::splat(unsafe { *a.get_unchecked(step * ROWS + i) });
            for (acc, vector) in acc.iter_mut().zip(row) {
                *acc = factor.mul_add(vector, *acc);
            }
        }
    }
    for (i, row) in acc.into_iter().enumerate() {
        for (j, vector) in row.into_iter().enumerate() {
            // SAFETY: `i < ROWS`, within the length asserted above.
            unsafe { vector.store(tile.as_mut_ptr().add(i * V::BLOCK + j * V::LANES)) };
        }
    }
}
