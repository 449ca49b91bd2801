//! `eager_v2`: segment by segment in plain tensor operations, differentiable, on any Burn backend.

use std::ops::Range;

use burn::tensor::{Bool, DType, Int, Tensor};

use super::options::Band;
use super::problem::Attention;
use crate::norm::to_compute_dtype;

/// Which part of a segment runs at once: `kv_heads` key heads with `rows` queries each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChunkSize {
    pub(super) kv_heads: usize,
    pub(super) rows: usize,
}

impl ChunkSize {
    /// As much as keeps `budget` scores, and at least one row of one key head. Splits the heads only
    /// when that leaves enough rows for an efficient matrix product.
    pub(super) fn new(
        kv_heads: usize,
        group: usize,
        queries: usize,
        keys: usize,
        budget: usize,
    ) -> Self {
        const EFFICIENT_ROWS: usize = 128;
        let budget = budget / (group * keys).max(1);
        let rows = queries.clamp(1, EFFICIENT_ROWS);
        let kv_heads = (budget / rows).clamp(1, kv_heads);
        Self { kv_heads, rows: (budget / kv_heads).clamp(1, queries.max(1)) }
    }
}

/// Output `[tokens, heads, value_dim]` and f32 lse `[tokens, heads]`.
pub(super) fn composed(attention: &Attention<'_>) -> (Tensor<3>, Tensor<2>) {
    let parts = per_segment(attention, |tokens| attention.unseeing(tokens), segment);
    let (outs, lses): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    if outs.is_empty() {
        return attention.unseeing(attention.sizes.tokens);
    }
    (Tensor::cat(outs, 0), Tensor::cat(lses, 0))
}

/// The parts of the output in token order: `segment` of the rows that see a key, and `unseeing` of the
/// number of rows before and after them.
pub(super) fn per_segment<T>(
    attention: &Attention<'_>,
    unseeing: impl Fn(usize) -> T,
    segment: impl Fn(&Attention<'_>, &Range<usize>, &Range<usize>, &Band, &Range<usize>) -> T,
) -> Vec<T> {
    let mut parts = Vec::new();
    for (queries, keys) in attention.segments_q.ranges().zip(attention.segments_k.ranges()) {
        let band = Band::new(attention.options, queries.len(), keys.len());
        let seeing = band.seeing_rows();
        if seeing.start > 0 {
            parts.push(unseeing(seeing.start));
        }
        if !seeing.is_empty() {
            parts.push(segment(attention, &queries, &keys, &band, &seeing));
        }
        if seeing.end < queries.len() {
            parts.push(unseeing(queries.len() - seeing.end));
        }
    }
    parts
}

/// The rows of one segment that see a key.
fn segment(
    attention: &Attention<'_>,
    queries: &Range<usize>,
    keys: &Range<usize>,
    band: &Band,
    seeing: &Range<usize>,
) -> (Tensor<3>, Tensor<2>) {
    let sizes = attention.sizes;
    let dtype = attention.q.dtype();
    let group = sizes.heads / sizes.kv_heads;
    let q = per_head(&attention.q, queries, sizes.kv_heads) * attention.softmax_scale();
    let k = per_head(&attention.k, keys, sizes.kv_heads).swap_dims(2, 3);
    let v = per_head(&attention.v, keys, sizes.kv_heads);
    let budget = attention.score_bytes / q.dtype().size();
    let size = ChunkSize::new(sizes.kv_heads, group, seeing.len(), keys.len(), budget);

    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    for start in seeing.clone().step_by(size.rows) {
        let rows = start..(start + size.rows).min(seeing.end);
        let (mut head_outs, mut head_lses) = (Vec::new(), Vec::new());
        for head in (0..sizes.kv_heads).step_by(size.kv_heads) {
            let heads = size.kv_heads.min(sizes.kv_heads - head);
            let narrow = |x: &Tensor<4>| x.clone().narrow(0, head, heads);
            let q = narrow(&q).narrow(2, rows.start, rows.len());
            let (out, lse) = chunk(attention, q, narrow(&k), narrow(&v), band, &rows);
            head_outs.push(out);
            head_lses.push(lse);
        }
        let out = Tensor::cat(head_outs, 0).reshape([sizes.heads, rows.len(), sizes.value_dim]);
        let lse = Tensor::cat(head_lses, 0).reshape([sizes.heads, rows.len()]);
        outs.push(out.swap_dims(0, 1).cast(dtype));
        lses.push(lse.swap_dims(0, 1).cast(DType::F32));
    }
    (Tensor::cat(outs, 0), Tensor::cat(lses, 0))
}

/// One softmax: q `[kv_heads, group, rows, head_dim]` (scaled), k `[kv_heads, 1, head_dim, keys]`,
/// v `[kv_heads, 1, keys, value_dim]`.
fn chunk(
    attention: &Attention<'_>,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    band: &Band,
    rows: &Range<usize>,
) -> (Tensor<4>, Tensor<4>) {
    let keys = band.keys(rows);
    let k = k.narrow(3, keys.start, keys.len());
    let v = v.narrow(2, keys.start, keys.len());
    let mut scores = q.matmul(k);
    if let Some(softcap) = attention.options.softcap {
        scores = (scores / softcap).tanh() * softcap;
    }
    if band.is_ragged(rows) {
        let mask = band_mask(attention, band, rows, &keys).unsqueeze::<4>();
        scores = scores.clone().mask_fill(mask.expand(scores.dims()), f32::NEG_INFINITY);
    }
    // Every row sees a key, so the maximum is finite. It cancels out, so no gradient need pass it.
    let max = scores.clone().max_dim(3).detach();
    let weights = (scores - max.clone()).exp();
    let sum = weights.clone().sum_dim(3);
    (weights.matmul(v) / sum.clone(), max + sum.log())
}

/// `[rows, keys]`, true where a row does not see a key.
pub(super) fn band_mask(
    attention: &Attention<'_>,
    band: &Band,
    rows: &Range<usize>,
    keys: &Range<usize>,
) -> Tensor<2, Bool> {
    let device = attention.q.device();
    let columns = Tensor::<1, Int>::arange(keys.start as i64..keys.end as i64, &device);
    let diagonals = band.diagonal(rows.start)..band.diagonal(rows.end);
    let diagonals = Tensor::<1, Int>::arange(diagonals, &device);
    let distance = columns.unsqueeze_dim::<2>(0) - diagonals.unsqueeze_dim::<2>(1);
    outside(distance, band.limits())
}

/// True where a distance passes a limit.
pub(super) fn outside(
    distance: Tensor<2, Int>,
    (lowest, highest): (Option<i64>, Option<i64>),
) -> Tensor<2, Bool> {
    let below = lowest.map(|lowest| distance.clone().lower_elem(lowest));
    let above = highest.map(|highest| distance.clone().greater_elem(highest));
    match (below, above) {
        (Some(below), Some(above)) => below.bool_or(above),
        (Some(mask), None) | (None, Some(mask)) => mask,
        (None, None) => distance.clone().not_equal(distance),
    }
}

/// The tokens of a segment as `[kv_heads, heads / kv_heads, tokens, dim]`, in the compute dtype.
fn per_head(x: &Tensor<3>, tokens: &Range<usize>, kv_heads: usize) -> Tensor<4> {
    let [_, heads, dim] = x.dims();
    let x = x.clone().narrow(0, tokens.start, tokens.len()).swap_dims(0, 1);
    to_compute_dtype(x).reshape([kv_heads, heads / kv_heads, tokens.len(), dim])
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::ops::attention_varlen::problem::SCORE_BYTES;
    use crate::ops::attention_varlen::sdpa::sdpa;
    use crate::{AttentionOptions, Segments, Window};
    use burn::tensor::{Device, Distribution, Tolerance};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn scores_stay_bounded_and_chunks_are_never_empty(
            kv_heads in 1usize..64, group in 1usize..8, queries in 0usize..200_000, keys in 0usize..2_000_000,
        ) {
            let size = ChunkSize::new(kv_heads, group, queries, keys, SCORE_BYTES / 4);
            prop_assert!(size.rows >= 1 && size.kv_heads >= 1 && size.kv_heads <= kv_heads);
            prop_assert!(size.kv_heads * group * size.rows * keys * 4 <= SCORE_BYTES);
        }

        #[test]
        fn chunks_of_any_size_give_the_same(
            lengths in proptest::collection::vec((0usize..40, 0usize..40), 1..4),
            is_causal: bool,
            left in proptest::option::of(0usize..20),
            right in proptest::option::of(0usize..20),
            scores in 1usize..600,
        ) {
            let device = Device::flex();
            let [segments_q, segments_k] =
                [lengths.iter().map(|pair| pair.0).collect(), lengths.iter().map(|pair| pair.1).collect()]
                    .map(|lengths: Vec<usize>| Segments::from_lengths(lengths).unwrap());
            let random = |tokens, heads| {
                Tensor::<3>::random([tokens, heads, 16], Distribution::Default, &device)
            };
            let (q, k) = (random(segments_q.total(), 4), random(segments_k.total(), 2));
            let v = random(segments_k.total(), 2);
            let options = AttentionOptions { is_causal, window: Window { left, right }, ..Default::default() };
            let attention = |score_bytes| Attention {
                score_bytes,
                ..Attention::new([q.clone(), k.clone(), v.clone()], &segments_q, &segments_k, &options).unwrap()
            };
            let (whole, whole_lse) = composed(&attention(SCORE_BYTES));
            let (chunked, chunked_lse) = composed(&attention(4 * scores));
            let close = Tolerance::<f32>::absolute(1e-5);
            chunked.into_data().assert_approx_eq(&whole.clone().into_data(), close);
            chunked_lse.into_data().assert_approx_eq(&whole_lse.into_data(), close);
            sdpa(&attention(4 * scores)).into_data().assert_approx_eq(&whole.into_data(), close);
        }
    }

    #[test]
    fn a_page_of_57600_patches_runs_some_rows_of_some_heads() {
        let size = ChunkSize::new(12, 1, 57_600, 57_600, SCORE_BYTES / 4);
        assert_eq!(size, ChunkSize { kv_heads: 2, rows: 145 });
    }
}
