//! `sdpa`: segment by segment through Burn's own `attention` operation.

use std::ops::Range;

use burn::tensor::module::attention as burn_attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Tensor};

use super::composed::{ChunkSize, band_mask, per_segment};
use super::options::Band;
use super::problem::Attention;
use crate::norm::to_compute_dtype;

/// Output `[tokens, heads, value_dim]`.
///
/// Backends without a fused `attention` materialise the scores of a call, so that long segments are
/// passed on in chunks of queries and heads.
pub(super) fn sdpa(attention: &Attention<'_>) -> Tensor<3> {
    let outs = per_segment(attention, |tokens| attention.unseeing(tokens).0, segment);
    if outs.is_empty() {
        return attention.unseeing(attention.sizes.tokens).0;
    }
    Tensor::cat(outs, 0)
}

fn segment(
    attention: &Attention<'_>,
    queries: &Range<usize>,
    keys: &Range<usize>,
    band: &Band,
    seeing: &Range<usize>,
) -> Tensor<3> {
    let sizes = attention.sizes;
    let group = sizes.heads / sizes.kv_heads;
    let dtype = attention.q.dtype();
    let q = batched(&attention.q, queries);
    // Burn's operation wants as many key heads as query heads on most backends.
    let k = batched(&attention.k, keys).repeat_heads(group);
    let v = batched(&attention.v, keys).repeat_heads(group);
    let budget = attention.score_bytes / q.dtype().size();
    let size = ChunkSize::new(sizes.heads, 1, seeing.len(), keys.len(), budget);

    let mut outs = Vec::new();
    for start in seeing.clone().step_by(size.rows) {
        let rows = start..(start + size.rows).min(seeing.end);
        let columns = band.keys(&rows);
        let mut head_outs = Vec::new();
        for head in (0..sizes.heads).step_by(size.kv_heads) {
            let heads = size.kv_heads.min(sizes.heads - head);
            let part = |x: &Tensor<4>, range: &Range<usize>| {
                x.clone().narrow(1, head, heads).narrow(2, range.start, range.len())
            };
            let (q, k, v) = (part(&q, &rows), part(&k, &columns), part(&v, &columns));
            head_outs.push(chunk(attention, [q, k, v], band, &rows, &columns));
        }
        let out = Tensor::cat(head_outs, 1);
        let out = out.reshape([sizes.heads, rows.len(), sizes.value_dim]).swap_dims(0, 1);
        outs.push(out.cast(dtype));
    }
    Tensor::cat(outs, 0)
}

/// One call; q `[1, heads, rows, head_dim]`, k and v `[1, heads, columns, dim]`.
fn chunk(
    attention: &Attention<'_>,
    [q, k, v]: [Tensor<4>; 3],
    band: &Band,
    rows: &Range<usize>,
    columns: &Range<usize>,
) -> Tensor<4> {
    let [_, heads, ..] = q.dims();
    let ragged = band.is_ragged(rows);
    // The keys end at the last row's diagonal, where Burn aligns its triangle too.
    let is_causal = ragged && band.is_triangle();
    let mask = (ragged && !is_causal).then(|| {
        band_mask(attention, band, rows, columns).unsqueeze::<4>().expand([
            1,
            heads,
            rows.len(),
            columns.len(),
        ])
    });
    let options = AttentionModuleOptions {
        scale: attention.options.softmax_scale,
        softcap: attention.options.softcap,
        is_causal,
    };
    let hidden_nan = hidden_nan(&q, &k, v.dims()[3]);
    burn_attention(q, k, v, mask, None, options).mask_fill(hidden_nan, f32::NAN)
}

/// Where a NaN in q or k must show in the output `[1, heads, rows, value_dim]`: some backends take a
/// row whose scores are all NaN for one that sees no key, and give 0.
fn hidden_nan(q: &Tensor<4>, k: &Tensor<4>, value_dim: usize) -> Tensor<4, Bool> {
    let [_, heads, rows, _] = q.dims();
    let shape = [1, heads, rows, value_dim];
    let in_q = q.clone().detach().is_nan().any_dim(3).expand(shape);
    let in_k = k.clone().detach().is_nan().any_dim(3).any_dim(2).expand(shape);
    in_q.bool_or(in_k)
}

/// The tokens of a segment as `[1, heads, tokens, dim]`, in the compute dtype: where Burn composes its
/// operation, it forms scores before they are scaled, which f16 cannot hold.
fn batched(x: &Tensor<3>, tokens: &Range<usize>) -> Tensor<4> {
    let x = x.clone().narrow(0, tokens.start, tokens.len()).swap_dims(0, 1);
    to_compute_dtype(x).unsqueeze_dim(0)
}

trait RepeatHeads {
    fn repeat_heads(self, group: usize) -> Self;
}

impl RepeatHeads for Tensor<4> {
    /// `[1, heads, tokens, dim]` to `[1, heads * group, tokens, dim]`, each head `group` times.
    fn repeat_heads(self, group: usize) -> Self {
        if group == 1 {
            return self;
        }
        let [batch, heads, tokens, dim] = self.dims();
        self.unsqueeze_dim::<5>(2).expand([batch, heads, group, tokens, dim]).reshape([
            batch,
            heads * group,
            tokens,
            dim,
        ])
    }
}
