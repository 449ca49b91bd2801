//! A tile of queries against the keys of its segment.

use std::ops::Range;

use super::super::Sizes;
use super::super::blocks::{pack, unpack};
use super::super::work::Unit;
use super::{KeyTokens, Pass, QueryBlock, Tile, in_blocks, rows_by_block, tile_keys};
use crate::element::{Element, Real};
use crate::simd::{Across, Along, Combine, Softcap, Softmax, Tokens};

/// Queries of one head.
pub(super) struct QueryRows<'a> {
    pub(super) unit: &'a Unit,
    pub(super) head: usize,
    /// Counted from the start of the segment.
    pub(super) queries: Range<usize>,
}

impl QueryRows<'_> {
    /// Queries of the segment, counted among all.
    fn tokens(&self, queries: &Range<usize>) -> Range<usize> {
        let start = self.unit.queries.start;
        start + queries.start..start + queries.end
    }
}

impl<T: Element> Pass<'_, T> {
    /// Loads a tile of queries.
    pub(super) fn begin(
        &self,
        rows: &QueryRows<'_>,
        keys: &KeyTokens<'_, T::Compute>,
        blocks: &mut [QueryBlock<T::Compute>],
        staging: &mut [T::Compute],
    ) {
        let factor = Real::from_f64(self.attention.options.score_factor());
        for (queries, block) in in_blocks(&rows.queries, self.kernels.block).zip(blocks) {
            let q = &self.attention.q;
            pack(self.kernels, q, rows.head, rows.tokens(&queries), factor, &mut block.q, staging);
            if let Tokens::Blocks(_) = keys.v {
                block.out.fill(Real::ZERO);
            }
            block.max.fill(Real::NEG_INFINITY);
            block.sum.fill(Real::ZERO);
        }
    }

    /// The attention loop: tiles of keys stream past the query blocks.
    pub(super) fn attend(
        &self,
        rows: &QueryRows<'_>,
        keys: &KeyTokens<'_, T::Compute>,
        blocks: &mut [QueryBlock<T::Compute>],
        tile: &mut Tile<T::Compute>,
    ) {
        let (block, step) = (self.kernels.block, tile_keys(self.kernels));
        let band = &rows.unit.band;
        let seen = band.seen_by_some(&rows.queries);
        for start in (seen.start - seen.start % step..seen.end).step_by(step) {
            for (queries, state) in in_blocks(&rows.queries, block).zip(blocks.iter_mut()) {
                let seen = band.seen_by_some(&queries);
                let here = seen.start.max(start)..seen.end.min(start + step);
                if here.is_empty() {
                    continue;
                }
                let ends = [here.start == seen.start, here.end == seen.end];
                let rows = QueryRows { queries, ..*rows };
                self.weigh(&rows, &here, start, keys, state, tile);
                self.add_values(&rows, &here, start, keys, ends, state, tile);
            }
        }
    }

    /// The weights of the keys `here`, of the tile that begins at `start`, for a block of queries.
    fn weigh(
        &self,
        QueryRows { unit, queries, .. }: &QueryRows<'_>,
        here: &Range<usize>,
        start: usize,
        keys: &KeyTokens<'_, T::Compute>,
        state: &mut QueryBlock<T::Compute>,
        tile: &mut Tile<T::Compute>,
    ) {
        let Tile { scores, correction, ahead } = tile;
        let (kernels, block) = (self.kernels, self.kernels.block);
        let Sizes { head_dim, .. } = self.attention.sizes();
        let rows = here.start - start..here.end - start;
        for (first, rows) in rows_by_block(&rows, block, kernels.panel) {
            (kernels.along)(Along {
                a: keys.k.from(start + first, block, kernels.block_len(head_dim)),
                b: &state.q,
                dim: head_dim,
                out: &mut scores[first * block..],
                rows,
                lanes: queries.len(),
                ahead,
            });
        }
        let visible = &mut scores[rows.start * block..rows.end * block];
        if let Some(cap) = self.attention.options.log2_softcap() {
            (kernels.softcap)(Softcap { scores: visible, cap: Real::from_f64(cap) });
        }
        unit.band.mask(visible, block, here, queries, Real::NEG_INFINITY);
        (kernels.softmax)(Softmax {
            scores: visible,
            max: &mut state.max,
            sum: &mut state.sum,
            correction,
            lanes: queries.len(),
        });
    }

    /// Adds the values of the keys `here`, by their weights, to what has been accumulated for a block of
    /// queries: in the block, or, where values are read in place, in the output. `ends` says whether
    /// these keys are the first and the last of those that the block sees.
    #[allow(clippy::too_many_arguments, reason = "operands of a product, and a place in each")]
    fn add_values(
        &self,
        rows: &QueryRows<'_>,
        here: &Range<usize>,
        start: usize,
        keys: &KeyTokens<'_, T::Compute>,
        [is_first, is_last]: [bool; 2],
        state: &mut QueryBlock<T::Compute>,
        tile: &mut Tile<T::Compute>,
    ) {
        let Tile { scores, correction, ahead } = tile;
        let (kernels, block) = (self.kernels, self.kernels.block);
        let Sizes { value_dim, .. } = self.attention.sizes();
        match keys.v {
            Tokens::Blocks(v) => (kernels.across)(Across {
                out: &mut state.out,
                scale: Some(correction),
                a: &v[start / block * kernels.block_len(value_dim)..],
                b: scores,
                dim: kernels.padded(value_dim),
                rows: here.start - start..here.end - start,
                lanes: rows.queries.len(),
                ahead,
            }),
            Tokens::Rows(v, stride) => {
                if is_last {
                    invert(&state.sum, &mut state.factor);
                }
                // SAFETY: these rows belong to this task alone.
                let out = unsafe { self.out.rows_in_place(rows.tokens(&rows.queries), rows.head) };
                (kernels.combine)(Combine {
                    weights: &scores[(here.start - start) * block..(here.end - start) * block],
                    values: (&v[here.start * stride..], stride),
                    out: out
                        .expect("values in place are of the compute type, and so is the output"),
                    before: (!is_first).then_some(correction),
                    after: is_last.then_some(&state.factor),
                    ahead,
                });
            }
        }
    }

    /// Writes the lse, zeros where no key is seen, and what has been accumulated in blocks of a tile,
    /// divided by the sums.
    pub(super) fn finish(
        &self,
        rows: &QueryRows<'_>,
        keys: &KeyTokens<'_, T::Compute>,
        blocks: &mut [QueryBlock<T::Compute>],
        staging: &mut [T::Compute],
    ) {
        for (queries, block) in in_blocks(&rows.queries, self.kernels.block).zip(blocks) {
            let tokens = rows.tokens(&queries);
            for ((token, max), sum) in tokens.clone().zip(&*block.max).zip(&*block.sum) {
                let [log2_max, log_sum]: [f64; 2] = [(*max).into(), Real::ln(*sum).into()];
                let lse = log2_max * std::f64::consts::LN_2 + log_sum;
                // SAFETY: this row belongs to this task alone.
                let target = unsafe { self.lse.row(token, rows.head) };
                target[0] = if *sum == Real::ZERO { f32::NEG_INFINITY } else { lse as f32 };
            }
            if let Tokens::Blocks(_) = keys.v {
                invert(&block.sum, &mut block.factor);
                let factor = |lane: usize| block.factor[lane];
                // SAFETY: these rows belong to this task alone.
                unsafe {
                    let (tokens, out) = (tokens.clone(), &self.out);
                    unpack(self.kernels, &block.out, out, rows.head, tokens, factor, staging);
                }
            }
            // A row that sees no key has taken part in its neighbours' products, and 0 times NaN is NaN.
            for (token, _) in tokens.zip(&*block.sum).filter(|(_, sum)| **sum == Real::ZERO) {
                // SAFETY: as above.
                unsafe { self.out.row(token, rows.head) }.fill(T::narrow(Real::ZERO));
            }
        }
    }
}

/// The factors that divide by `sums`; 0 for those of rows that see no key.
fn invert<C: Real>(sums: &[C], factors: &mut [C]) {
    for (factor, &sum) in factors.iter_mut().zip(sums) {
        *factor = if sum == C::ZERO { C::ZERO } else { C::ONE / sum };
    }
}
