//! The inner loops of attention on packed blocks.
//!
//! A *block* holds [`Kernels::block`] tokens of one head, transposed: element `d` of token `t` lies at
//! `d * block + t`. The tokens of a block are worked on side by side in vector lanes. So scores are
//! kept as `[keys][queries of a block]`, where row maxima, row sums and masks need no exchange between
//! lanes, and the elements of keys are read one number at a time: no head dimension is padded to the
//! width of a vector. So are those of values in blocks; of values in rows, elements lie in lanes.

use std::ops::Range;

use super::combine::Combine;
use super::product::Product;
use super::rows::{NormRotate, NormRotateBackward};
use super::scores::{ScoreGradient, Softcap, Softmax};
use super::vector::Vector;
use crate::ahead::Ahead;
use crate::element::Real;

/// The inner loops for one instruction set and compute type.
#[derive(Debug)]
pub struct Kernels<C> {
    /// Tokens per block.
    pub(crate) block: usize,
    /// Numbers per register.
    pub(crate) lanes: usize,
    /// Rows are computed in groups of this size, which divides `block`: dimensions of blocks are padded
    /// to a multiple of it.
    pub(crate) panel: usize,
    /// Rows of a tile of `product`.
    pub(crate) rows: usize,
    pub(crate) along: fn(Along<'_, C>),
    pub(crate) across: fn(Across<'_, C>),
    pub(crate) combine: fn(Combine<'_, C>),
    pub(crate) product: fn(Product<'_, C>),
    pub(crate) transpose: fn(Transpose<'_, C>),
    pub(crate) softmax: fn(Softmax<'_, C>),
    pub(crate) softcap: fn(Softcap<'_, C>),
    pub(crate) score_gradient: fn(ScoreGradient<'_, C>),
    pub(crate) norm_rotate: fn(NormRotate<'_, C>),
    pub(crate) norm_rotate_backward: fn(NormRotateBackward<'_, C>),
}

impl<C> Kernels<C> {
    /// `dim` rounded up to whole panels.
    pub(crate) fn padded(&self, dim: usize) -> usize {
        dim.next_multiple_of(self.panel)
    }

    /// Numbers in one packed block of tokens with `dim` elements.
    pub(crate) fn block_len(&self, dim: usize) -> usize {
        self.padded(dim) * self.block
    }
}

/// Tokens whose elements are read one number at a time.
#[derive(Clone, Copy)]
pub(crate) enum Tokens<'a, C> {
    /// Block after block.
    Blocks(&'a [C]),
    /// Rows so far apart.
    Rows(&'a [C], usize),
}

impl<C> Tokens<'_, C> {
    /// Those from `token` on, which begins a block of `block` tokens and `block_len` numbers.
    pub(crate) fn from(self, token: usize, block: usize, block_len: usize) -> Self {
        match self {
            Self::Blocks(blocks) => Self::Blocks(&blocks[token / block * block_len..]),
            Self::Rows(rows, stride) => Self::Rows(&rows[token * stride..], stride),
        }
    }
}

/// `out[r][lane] = sum over d of a[r][d] * b[d][lane]`: the first block of tokens `a` against block `b`.
pub(crate) struct Along<'a, C> {
    pub(crate) a: Tokens<'a, C>,
    pub(crate) b: &'a [C],
    pub(crate) dim: usize,
    pub(crate) out: &'a mut [C],
    /// Rows to compute; the start is a multiple of the panel, and rows are filled up to the next
    /// multiple after the end.
    pub(crate) rows: Range<usize>,
    /// Lanes of `b` in use.
    pub(crate) lanes: usize,
    pub(crate) ahead: &'a mut Ahead,
}

/// `out[d][lane] = out[d][lane] * scale[lane] + sum over r in rows of a[r][d] * b[r][lane]`, where `b` has
/// a row of one block for each token `r` of `a`.
pub(crate) struct Across<'a, C> {
    pub(crate) out: &'a mut [C],
    pub(crate) scale: Option<&'a [C]>,
    /// Blocks of tokens.
    pub(crate) a: &'a [C],
    pub(crate) b: &'a [C],
    /// Padded dimension of `out` and of the blocks of `a`.
    pub(crate) dim: usize,
    pub(crate) rows: Range<usize>,
    /// Lanes of `b` in use.
    pub(crate) lanes: usize,
    pub(crate) ahead: &'a mut Ahead,
}

/// `to[c * to_stride + r] = factor * from[r * from_stride + c]`.
pub(crate) struct Transpose<'a, C> {
    pub(crate) from: &'a [C],
    pub(crate) from_stride: usize,
    pub(crate) to: &'a mut [C],
    pub(crate) to_stride: usize,
    /// Of `from`.
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) factor: C,
}

/// Runs `$body` with the constant `$n` set to the number of registers that `$lanes` lanes fill.
macro_rules! with_vectors {
    ($v:ty, $lanes:expr, $n:ident => $body:expr) => {{
        let count = $lanes.div_ceil(<$v>::LANES);
        if <$v>::VECTORS >= 4 && count >= 4 {
            const $n: usize = 4;
            $body
        } else if <$v>::VECTORS >= 3 && count >= 3 {
            const $n: usize = 3;
            $body
        } else if <$v>::VECTORS >= 2 && count >= 2 {
            const $n: usize = 2;
            $body
        } else {
            const $n: usize = 1;
            $body
        }
    }};
}
pub(super) use with_vectors;

/// The micro-kernel: `acc[i][j] += *a(t, i) * b[t][j]` for each step `t`, everything in registers. With
/// `b` come the distance between its rows and, where it is not full, how much of the last register is
/// there.
///
/// # Safety
///
/// Every `a(t, i)` must be readable, and `b` at `steps` rows of `N` registers, of the last of them `last`
/// numbers.
#[inline(always)]
pub(super) unsafe fn accumulate<V: Vector, const PANEL: usize, const N: usize>(
    acc: &mut [[V; N]; PANEL],
    a: impl Fn(usize, usize) -> *const V::Scalar,
    (b, stride, last): (*const V::Scalar, usize, Option<usize>),
    steps: usize,
    ahead: &mut Ahead,
) {
    for t in 0..steps {
        ahead.one();
        let mut row = [V::splat(V::Scalar::ZERO); N];
        for (j, vector) in row.iter_mut().enumerate() {
            // SAFETY: `t < steps` and `j` counts registers of the row.
            *vector = unsafe {
                let from = b.add(t * stride + j * V::LANES);
                match last {
                    Some(last) if j + 1 == N => V::load_first(from, last),
                    _ => V::load(from),
                }
            };
        }
        for (i, acc) in acc.iter_mut().enumerate() {
            // SAFETY: the caller promises that this is readable.
            let factor = V::splat(unsafe { *a(t, i) });
            for (acc, vector) in acc.iter_mut().zip(row) {
                *acc = factor.mul_add(vector, *acc);
            }
        }
    }
}

#[inline(always)]
pub(super) fn along<V: Vector, const PANEL: usize>(args: Along<'_, V::Scalar>) {
    with_vectors!(V, args.lanes, N => along_n::<V, PANEL, N>(args));
}

#[inline(always)]
fn along_n<V: Vector, const PANEL: usize, const N: usize>(args: Along<'_, V::Scalar>) {
    let Along { a, b, dim, out, rows, ahead, .. } = args;
    let end = rows.end.next_multiple_of(PANEL);
    assert!(rows.start.is_multiple_of(PANEL) && end <= V::BLOCK);
    assert!(b.len() >= dim * V::BLOCK && out.len() >= end * V::BLOCK);
    let b = (b.as_ptr(), V::BLOCK, None);
    for row in (rows.start..end).step_by(PANEL) {
        let mut acc = [[V::splat(V::Scalar::ZERO); N]; PANEL];
        match a {
            Tokens::Blocks(a) => {
                assert!(a.len() >= dim * V::BLOCK);
                // SAFETY: `row + i < BLOCK`, so that all offsets stay below the lengths asserted above.
                unsafe {
                    let a = a.as_ptr().add(row);
                    accumulate(&mut acc, |t, i| a.add(t * V::BLOCK + i), b, dim, ahead);
                }
            }
            Tokens::Rows(a, stride) => {
                // Rows that fill a panel up are the last one again.
                let rows: [_; PANEL] = std::array::from_fn(|i| {
                    a[(row + i).min(rows.end - 1) * stride..][..dim].as_ptr()
                });
                // SAFETY: each row has `dim` elements.
                unsafe { accumulate(&mut acc, |t, i| rows[i].add(t), b, dim, ahead) };
            }
        }
        // SAFETY: `row + i < end`, within the length asserted above.
        unsafe { store(&acc, out.as_mut_ptr().add(row * V::BLOCK)) };
    }
}

#[inline(always)]
pub(super) fn across<V: Vector, const PANEL: usize>(args: Across<'_, V::Scalar>) {
    with_vectors!(V, args.lanes, N => across_n::<V, PANEL, N>(args));
}

#[inline(always)]
fn across_n<V: Vector, const PANEL: usize, const N: usize>(args: Across<'_, V::Scalar>) {
    let Across { out, scale, a, b, dim, rows, ahead, .. } = args;
    let block_len = dim * V::BLOCK;
    assert!(dim.is_multiple_of(PANEL) && out.len() >= block_len);
    assert!(rows.is_empty() || b.len() >= rows.end * V::BLOCK);
    assert!(a.len() >= rows.end.div_ceil(V::BLOCK) * block_len);
    assert!(scale.is_none_or(|scale| scale.len() >= V::BLOCK));
    for row in (0..dim).step_by(PANEL) {
        // SAFETY: `row + i < dim`, and `t` counts tokens of a block, so that all offsets stay
        // below the lengths asserted above.
        unsafe {
            let out = out.as_mut_ptr().add(row * V::BLOCK);
            let mut acc = load::<V, PANEL, N>(out);
            if let Some(scale) = scale {
                for j in 0..N {
                    let factor = V::load(scale.as_ptr().add(j * V::LANES));
                    for row in &mut acc {
                        row[j] = row[j].mul(factor);
                    }
                }
            }
            let mut from = rows.start;
            while from < rows.end {
                let (block, first) = (from / V::BLOCK, from % V::BLOCK);
                let steps = (V::BLOCK - first).min(rows.end - from);
                let a = a.as_ptr().add(block * block_len + row * V::BLOCK + first);
                let b = (b.as_ptr().add(from * V::BLOCK), V::BLOCK, None);
                accumulate(&mut acc, |t, i| a.add(i * V::BLOCK + t), b, steps, ahead);
                from += steps;
            }
            store(&acc, out);
        }
    }
}

/// # Safety
///
/// `from` must be readable for `PANEL` rows of `V::BLOCK` numbers.
#[inline(always)]
unsafe fn load<V: Vector, const PANEL: usize, const N: usize>(
    from: *const V::Scalar,
) -> [[V; N]; PANEL] {
    let mut acc = [[V::splat(V::Scalar::ZERO); N]; PANEL];
    for (i, row) in acc.iter_mut().enumerate() {
        for (j, vector) in row.iter_mut().enumerate() {
            // SAFETY: within the rows that the caller promises.
            *vector = unsafe { V::load(from.add(i * V::BLOCK + j * V::LANES)) };
        }
    }
    acc
}

/// # Safety
///
/// `to` must be writable for `PANEL` rows of `V::BLOCK` numbers.
#[inline(always)]
unsafe fn store<V: Vector, const PANEL: usize, const N: usize>(
    acc: &[[V; N]; PANEL],
    to: *mut V::Scalar,
) {
    for (i, row) in acc.iter().enumerate() {
        for (j, vector) in row.iter().enumerate() {
            // SAFETY: within the rows that the caller promises.
            unsafe { vector.store(to.add(i * V::BLOCK + j * V::LANES)) };
        }
    }
}

#[inline(always)]
pub(super) fn transpose<V: Vector>(args: Transpose<'_, V::Scalar>) {
    let Transpose { from, from_stride, to, to_stride, rows, columns, factor } = args;
    if rows == 0 || columns == 0 {
        return;
    }
    assert!(from.len() >= (rows - 1) * from_stride + columns);
    assert!(to.len() >= (columns - 1) * to_stride + rows);
    let (whole_rows, whole_columns) = (rows - rows % V::LANES, columns - columns % V::LANES);
    for row in (0..whole_rows).step_by(V::LANES) {
        for column in (0..whole_columns).step_by(V::LANES) {
            // SAFETY: the square lies inside the rows and columns whose lengths are asserted above.
            unsafe {
                let from = from.as_ptr().add(row * from_stride + column);
                let to = to.as_mut_ptr().add(column * to_stride + row);
                V::transpose(from, from_stride, to, to_stride, V::splat(factor));
            }
        }
        for row in row..row + V::LANES {
            for column in whole_columns..columns {
                to[column * to_stride + row] = factor * from[row * from_stride + column];
            }
        }
    }
    for row in whole_rows..rows {
        for column in 0..columns {
            to[column * to_stride + row] = factor * from[row * from_stride + column];
        }
    }
}
