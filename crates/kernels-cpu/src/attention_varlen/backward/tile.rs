//! A query tile against a key tile.

use std::ops::Range;

use super::super::Sizes;
use super::super::forward::{in_blocks, rows_by_block};
use super::super::work::Unit;
use super::scratch::{Keys, Queries, Tile};
use super::{Pass, TILE_KEYS};
use crate::element::{Element, Real};
use crate::simd::{Across, Along, ScoreGradient, Tokens, Transpose};

/// Which tiles meet.
pub(super) struct Pair<'a> {
    pub(super) unit: &'a Unit,
    /// Counted from the start of the segment.
    pub(super) keys: Range<usize>,
    /// Likewise.
    pub(super) queries: Range<usize>,
    /// The first block of the keys among those of the task.
    pub(super) first_key_block: usize,
}

impl<T: Element> Pass<'_, T> {
    /// Adds what a query tile and a key tile mean for each other.
    pub(super) fn tile(
        &self,
        pair: &Pair<'_>,
        queries: &mut Queries<T::Compute>,
        keys: &mut Keys<T::Compute>,
        tile: &mut Tile<T::Compute>,
    ) {
        let (kernels, block) = (self.kernels, self.kernels.block);
        let Sizes { head_dim, .. } = self.attention.sizes();
        let q_len = kernels.block_len(head_dim);
        // For each key block, the query rows of the tile that meet it.
        let mut met = [const { 0..0 }; TILE_KEYS / 4];
        for here in in_blocks(&pair.queries, block) {
            let seen = pair.unit.band.seen_by_some(&here);
            let visible = seen.start.max(pair.keys.start)..seen.end.min(pair.keys.end);
            if visible.is_empty() {
                continue;
            }
            self.score_gradients(pair, &here, &visible, queries, keys, tile);
            let rows = visible.start - pair.keys.start..visible.end - pair.keys.start;
            (kernels.across)(Across {
                out: &mut queries.d_q[here.start / block * q_len..][..q_len],
                scale: None,
                a: &keys.k[pair.first_key_block * q_len..],
                b: &tile.d_scores,
                dim: kernels.padded(head_dim),
                rows: rows.clone(),
                lanes: here.len(),
                ahead: &mut tile.ahead,
            });
            let here = here.start - pair.queries.start..here.end - pair.queries.start;
            self.turn(&rows, here.start, tile);
            for met in &mut met[rows.start / block..rows.end.div_ceil(block)] {
                let start = if met.start == met.end { here.start } else { met.start };
                *met = start..here.end;
            }
        }
        for (index, (here, rows)) in in_blocks(&pair.keys, block).zip(met).enumerate() {
            self.key_gradients(pair, index, here.len(), &rows, queries, keys, tile);
        }
    }

    /// Adds what the query rows `rows` of the tile mean for the keys in block `index` of the tile.
    #[allow(clippy::too_many_arguments, reason = "three buffers and a place in each")]
    fn key_gradients(
        &self,
        pair: &Pair<'_>,
        index: usize,
        lanes: usize,
        rows: &Range<usize>,
        queries: &Queries<T::Compute>,
        keys: &mut Keys<T::Compute>,
        tile: &mut Tile<T::Compute>,
    ) {
        let kernels = self.kernels;
        let Sizes { head_dim, value_dim, .. } = self.attention.sizes();
        let products = [
            (&mut keys.d_v, &queries.d_out, &tile.weights_by_query, value_dim),
            (&mut keys.d_k, &queries.q, &tile.d_scores_by_query, head_dim),
        ];
        for (out, a, b, dim) in products {
            let len = kernels.block_len(dim);
            (kernels.across)(Across {
                out: &mut out[(pair.first_key_block + index) * len..][..len],
                scale: None,
                a: &a[pair.queries.start / kernels.block * len..],
                b: &b[index * self.tile_queries() * kernels.block..],
                dim: kernels.padded(dim),
                rows: rows.clone(),
                lanes,
                ahead: &mut tile.ahead,
            });
        }
    }

    /// The weights of the queries `here` and the gradients of their scores for the keys `visible`, with
    /// zeros where a query does not see one of them.
    fn score_gradients(
        &self,
        pair: &Pair<'_>,
        here: &Range<usize>,
        visible: &Range<usize>,
        queries: &Queries<T::Compute>,
        keys: &Keys<T::Compute>,
        tile: &mut Tile<T::Compute>,
    ) {
        let (kernels, block) = (self.kernels, self.kernels.block);
        let Sizes { head_dim, value_dim, .. } = self.attention.sizes();
        let query_block = here.start / block;
        let rows = visible.start - pair.keys.start..visible.end - pair.keys.start;
        for (first, rows) in rows_by_block(&rows, block, kernels.panel) {
            let operands = [
                (&keys.k, &queries.q, head_dim, &mut tile.weights),
                (&keys.v, &queries.d_out, value_dim, &mut tile.d_scores),
            ];
            for (a, b, dim, out) in operands {
                let len = kernels.block_len(dim);
                (kernels.along)(Along {
                    a: Tokens::Blocks(&a[(pair.first_key_block + first / block) * len..][..len]),
                    b: &b[query_block * len..][..len],
                    dim,
                    out: &mut out[first * block..],
                    rows: rows.clone(),
                    lanes: here.len(),
                    ahead: &mut tile.ahead,
                });
            }
        }
        let cells = rows.start * block..rows.end * block;
        let (weights, d_scores) = (&mut tile.weights[cells.clone()], &mut tile.d_scores[cells]);
        (kernels.score_gradient)(ScoreGradient {
            scores: weights,
            gradients: d_scores,
            lse: &queries.lse[query_block * block..],
            delta: &queries.delta[query_block * block..],
            softcap: self.attention.options.log2_softcap().map(Real::from_f64),
        });
        pair.unit.band.mask(weights, block, visible, here, Real::ZERO);
        pair.unit.band.mask(d_scores, block, visible, here, Real::ZERO);
    }

    /// Transposes `rows` of one query block into rows `first_query..` of the tile, with zeros for the
    /// other keys of their blocks.
    fn turn(&self, rows: &Range<usize>, first_query: usize, tile: &mut Tile<T::Compute>) {
        let block = self.kernels.block;
        let pairs = [
            (&mut tile.weights, &mut tile.weights_by_query),
            (&mut tile.d_scores, &mut tile.d_scores_by_query),
        ];
        for (from, to) in pairs {
            let end = rows.end.next_multiple_of(block);
            from[(rows.start - rows.start % block) * block..rows.start * block].fill(Real::ZERO);
            from[rows.end * block..end * block].fill(Real::ZERO);
            for index in rows.start / block..end / block {
                (self.kernels.transpose)(Transpose {
                    from: &from[index * block * block..],
                    from_stride: block,
                    to: &mut to[(index * self.tile_queries() + first_query) * block..],
                    to_stride: block,
                    rows: block,
                    columns: block,
                    factor: Real::ONE,
                });
            }
        }
    }
}
