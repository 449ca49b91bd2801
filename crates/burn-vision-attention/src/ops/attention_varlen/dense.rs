//! `eager`: one masked score matrix over all tokens, for comparison only.

use burn::tensor::{Bool, Int, Tensor, TensorData};

use super::composed::outside;
use super::options::Band;
use super::problem::Attention;
use crate::Segments;
use crate::norm::to_compute_dtype;

/// Output `[tokens, heads, value_dim]`; memory O(queries x keys x heads).
pub(super) fn dense(attention: &Attention<'_>) -> Tensor<3> {
    let sizes = attention.sizes;
    if sizes.tokens == 0 || attention.segments_k.total() == 0 {
        return attention.unseeing(sizes.tokens).0;
    }
    let dtype = attention.q.dtype();
    let group = sizes.heads / sizes.kv_heads;
    let heads_first = |x: &Tensor<3>| {
        let [tokens, heads, dim] = x.dims();
        to_compute_dtype(x.clone().swap_dims(0, 1)).reshape([
            sizes.kv_heads,
            heads / sizes.kv_heads,
            tokens,
            dim,
        ])
    };
    let (q, k, v) =
        (heads_first(&attention.q), heads_first(&attention.k), heads_first(&attention.v));

    let mut scores = (q * attention.softmax_scale()).matmul(k.swap_dims(2, 3));
    if let Some(softcap) = attention.options.softcap {
        scores = (scores / softcap).tanh() * softcap;
    }
    let hidden = hidden_pairs(attention);
    let mask = hidden.clone().unsqueeze::<4>().expand(scores.dims());
    let scores = scores.mask_fill(mask, f32::NEG_INFINITY);
    // Rows without a key have the maximum -inf and the sum 0: both are kept off, which leaves 0.
    let max = scores.clone().max_dim(3).detach().clamp_min(f32::MIN);
    let weights = (scores - max).exp();
    let sum = weights.clone().sum_dim(3).clamp_min(f32::MIN_POSITIVE);
    let out = weighted_values(weights, v, hidden) / sum;

    debug_assert_eq!(out.dims(), [sizes.kv_heads, group, sizes.tokens, sizes.value_dim]);
    out.reshape([sizes.heads, sizes.tokens, sizes.value_dim]).swap_dims(0, 1).cast(dtype)
}

/// `weights @ v` in which a hidden value that is not finite stays hidden: 0 x NaN would be NaN and
/// reach every segment. Rows that see one become NaN.
fn weighted_values(weights: Tensor<4>, v: Tensor<4>, hidden: Tensor<2, Bool>) -> Tensor<4> {
    let bad = v.clone().is_finite().bool_not();
    let clean = weights.matmul(v.clone().mask_fill(bad.clone(), 0.0));
    let seen = hidden.bool_not().float().cast(v.dtype()).unsqueeze::<4>();
    let [kv_heads, ..] = v.dims();
    let [_, _, rows, keys] = seen.dims();
    let bad = bad.float().cast(v.dtype());
    let poisoned = seen.expand([kv_heads, 1, rows, keys]).matmul(bad).greater_elem(0.0);
    let poisoned = poisoned.expand(clean.dims());
    clean.mask_fill(poisoned, f32::NAN)
}

/// `[queries, keys]`, true where a query does not see a key.
fn hidden_pairs(attention: &Attention<'_>) -> Tensor<2, Bool> {
    let device = attention.q.device();
    let int = |values: Vec<i32>| {
        let length = values.len();
        Tensor::<1, Int>::from_data(TensorData::new(values, [length]), &device)
    };
    let owner = |segments: &Segments| {
        let owners = segments.lengths().enumerate();
        int(owners
            .flat_map(|(segment, length)| std::iter::repeat_n(segment as i32, length))
            .collect())
    };
    let queries = owner(attention.segments_q).unsqueeze_dim::<2>(1);
    let keys = owner(attention.segments_k).unsqueeze_dim::<2>(0);
    let other_segment = queries.not_equal(keys);

    let pairs = || attention.segments_q.lengths().zip(attention.segments_k.lengths());
    let limits = Band::new(attention.options, 0, 0).limits();
    if limits == (None, None) {
        return other_segment;
    }
    let diagonals = pairs()
        .flat_map(|(queries, keys)| {
            let band = Band::new(attention.options, queries, keys);
            (0..queries).map(move |row| band.diagonal(row) as i32)
        })
        .collect();
    let columns = pairs().flat_map(|(_, keys)| 0..keys as i32).collect();
    let distance = int(columns).unsqueeze_dim::<2>(0) - int(diagonals).unsqueeze_dim::<2>(1);
    other_segment.bool_or(outside(distance, limits))
}
