//! Between strided rows and packed blocks.

use std::ops::Range;

use crate::element::{Element, Real};
use crate::simd::{Kernels, Transpose};
use crate::view::{Out, View, write_row};

/// Packs `tokens` of one head into blocks, times `factor`. Tokens and elements that pad the blocks are
/// zero. `staging` has room for the rows of a block.
pub(crate) fn pack<T: Element>(
    kernels: &Kernels<T::Compute>,
    view: &View<'_, T>,
    head: usize,
    tokens: Range<usize>,
    factor: T::Compute,
    blocks: &mut [T::Compute],
    staging: &mut [T::Compute],
) {
    let [_, _, dim] = view.shape();
    let block_len = kernels.block_len(dim);
    for (start, block) in
        tokens.clone().step_by(kernels.block).zip(blocks.chunks_exact_mut(block_len))
    {
        let tokens = start..(start + kernels.block).min(tokens.end);
        let (rows, stride) = view.rows(tokens.clone(), head, staging);
        if tokens.len() < kernels.block {
            block.fill(T::Compute::ZERO);
        } else {
            block[dim * kernels.block..].fill(T::Compute::ZERO);
        }
        (kernels.transpose)(Transpose {
            from: rows,
            from_stride: stride,
            to: block,
            to_stride: kernels.block,
            rows: tokens.len(),
            columns: dim,
            factor,
        });
    }
}

/// Writes blocks to `tokens` of one head of `out`, each token times its factor.
///
/// # Safety
///
/// No other reference to these rows may be alive.
pub(super) unsafe fn unpack<T: Element>(
    kernels: &Kernels<T::Compute>,
    blocks: &[T::Compute],
    out: &Out<'_, T>,
    head: usize,
    tokens: Range<usize>,
    factor: impl Fn(usize) -> T::Compute,
    staging: &mut [T::Compute],
) {
    let [_, _, dim] = out.shape();
    let block_len = kernels.block_len(dim);
    for (start, block) in tokens.clone().step_by(kernels.block).zip(blocks.chunks_exact(block_len))
    {
        let here = start..(start + kernels.block).min(tokens.end);
        (kernels.transpose)(Transpose {
            from: block,
            from_stride: kernels.block,
            to: staging,
            to_stride: dim,
            rows: dim,
            columns: here.len(),
            factor: T::Compute::ONE,
        });
        for (token, row) in here.zip(staging.chunks_exact_mut(dim)) {
            // SAFETY: as promised by the caller.
            let target = unsafe { out.row(token, head) };
            write_row(target, row, factor(token - tokens.start));
        }
    }
}
