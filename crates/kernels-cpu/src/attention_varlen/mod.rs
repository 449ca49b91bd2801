//! Packed variable-length attention:
//! `out = softmax(softmax_scale * q k^T + mask) v`, segment by segment, in memory linear in tokens.
//!
//! Online softmax after Dao et al., "FlashAttention" (2022) and "FlashAttention-2" (2023). Queries are
//! worked on in blocks whose tokens fill vector lanes; the keys and values of a segment are packed once
//! and stream past all query tiles, or are read where they lie if there are few queries.

mod backward;
mod band;
pub(crate) mod blocks;
mod forward;
mod work;

use crate::element::Element;
use crate::simd::InstructionSet;
use crate::view::{View, ViewMut};

/// What the caller may choose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Factor on `q k^T`, usually `1 / sqrt(head_dim)`.
    pub softmax_scale: f64,
    /// Whether query `i` of a segment sees only keys `j <= i + k_len - q_len` (bottom-right aligned).
    pub is_causal: bool,
    /// Keys visible to the left and right of `i + k_len - q_len`, both inclusive; `None` is unbounded.
    /// Causality overrides the right side.
    pub window: (Option<usize>, Option<usize>),
    /// `Some(c)` replaces each scaled score `s` by `c * tanh(s / c)`.
    pub softcap: Option<f64>,
}

impl AttentionOptions {
    /// Plain attention with this factor on the scores.
    pub fn new(softmax_scale: f64) -> Self {
        Self { softmax_scale, is_causal: false, window: (None, None), softcap: None }
    }
}

/// The inputs of one attention call over a packed batch.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a, T> {
    /// Queries `[tokens_q, heads, head_dim]`.
    pub q: View<'a, T>,
    /// Keys `[tokens_k, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`, and query head `h`
    /// reads key and value head `h / (heads / kv_heads)`.
    pub k: View<'a, T>,
    /// Values `[tokens_k, kv_heads, value_dim]`.
    pub v: View<'a, T>,
    /// Where the segments of the queries begin and end (`cu_seqlens`): from 0 to `tokens_q`, never
    /// decreasing.
    pub offsets_q: &'a [i32],
    /// The same for keys and values, with as many segments.
    pub offsets_k: &'a [i32],
    /// Scale, mask and softcap.
    pub options: AttentionOptions,
}

/// What the backward pass needs beside the inputs.
#[derive(Clone, Copy, Debug)]
pub struct OutputGradient<'a, T> {
    /// The output of the forward pass, `[tokens_q, heads, value_dim]`.
    pub out: View<'a, T>,
    /// The lse of the forward pass, `[tokens_q, heads]`.
    pub lse: &'a [f32],
    /// Gradient of the output.
    pub d_out: View<'a, T>,
    /// Gradient of the lse, `[tokens_q, heads]`, if anything depends on it.
    pub d_lse: Option<&'a [f32]>,
}

/// Where the backward pass writes; every element is overwritten.
#[derive(Debug)]
pub enum Gradients<'a, T> {
    /// Row-major, each in the shape of its input.
    Separate {
        /// Gradient of q.
        q: &'a mut [T],
        /// Gradient of k.
        k: &'a mut [T],
        /// Gradient of v.
        v: &'a mut [T],
    },
    /// `[tokens, 3, heads, head_dim]`, for q, k and v of one shape.
    Packed(&'a mut [T]),
}

/// Attention by the best instructions available ([`InstructionSet::current`]).
///
/// Writes `out` `[tokens_q, heads, value_dim]` and the natural logarithm of the softmax denominators
/// `lse` `[tokens_q, heads]`, both row-major. A row that sees no key gets 0 and negative infinity. A NaN
/// among the scores of a row makes the row NaN.
///
/// # Panics
///
/// When the shapes or offsets do not fit together, or the softcap is not positive.
pub fn forward<T: Element>(attention: &Attention<'_, T>, out: &mut [T], lse: &mut [f32]) {
    forward_with(InstructionSet::current(), attention, out, lse);
}

/// [`forward`] by the instructions that the caller chooses.
///
/// # Panics
///
/// As for [`forward`], and when the machine does not have `set`.
pub fn forward_with<T: Element>(
    set: InstructionSet,
    attention: &Attention<'_, T>,
    out: &mut [T],
    lse: &mut [f32],
) {
    let sizes = attention.check();
    let shape = [sizes.tokens_q, sizes.heads, sizes.value_dim];
    expect_len("out", shape.iter().product(), out.len());
    forward_into(set, attention, ViewMut::contiguous(out, shape), lse);
}

/// [`forward_with`] to rows that need not lie side by side.
pub(crate) fn forward_into<T: Element>(
    set: InstructionSet,
    attention: &Attention<'_, T>,
    out: ViewMut<'_, T>,
    lse: &mut [f32],
) {
    let sizes = attention.check();
    let shape = [sizes.tokens_q, sizes.heads, sizes.value_dim];
    assert_eq!(out.shape(), shape, "out: expected the shape {shape:?}");
    expect_len("lse", sizes.tokens_q * sizes.heads, lse.len());
    forward::forward(set, attention, out, lse);
}

/// The gradients of q, k and v, by the best instructions available ([`InstructionSet::current`]).
///
/// With `p = exp(s - lse)` and `ds = p * (d_out v^T - delta)`, where
/// `delta = rowsum(out * d_out) - d_lse`: `d_q = softmax_scale * ds k`, `d_k = softmax_scale * ds^T q`,
/// `d_v = p^T d_out`. Rows whose lse is negative infinity contribute nothing.
///
/// # Panics
///
/// When the shapes or offsets do not fit together, or the softcap is not positive.
pub fn backward<T: Element>(
    attention: &Attention<'_, T>,
    output: &OutputGradient<'_, T>,
    gradients: Gradients<'_, T>,
) {
    backward_with(InstructionSet::current(), attention, output, gradients);
}

/// [`backward`] by the instructions that the caller chooses.
///
/// # Panics
///
/// As for [`backward`], and when the machine does not have `set`.
pub fn backward_with<T: Element>(
    set: InstructionSet,
    attention: &Attention<'_, T>,
    output: &OutputGradient<'_, T>,
    gradients: Gradients<'_, T>,
) {
    let sizes = attention.check();
    let out_shape = [sizes.tokens_q, sizes.heads, sizes.value_dim];
    assert_eq!(output.out.shape(), out_shape, "out: expected the shape {out_shape:?}");
    assert_eq!(output.d_out.shape(), out_shape, "d_out: expected the shape {out_shape:?}");
    expect_len("lse", sizes.tokens_q * sizes.heads, output.lse.len());
    if let Some(d_lse) = output.d_lse {
        expect_len("d_lse", sizes.tokens_q * sizes.heads, d_lse.len());
    }
    backward::backward(set, attention, output, gradients);
}

/// The sizes that the inputs agree on.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    tokens_q: usize,
    tokens_k: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
}

impl<T: Element> Attention<'_, T> {
    fn sizes(&self) -> Sizes {
        let [tokens_q, heads, head_dim] = self.q.shape();
        let [tokens_k, kv_heads, value_dim] = self.v.shape();
        Sizes { tokens_q, tokens_k, heads, kv_heads, head_dim, value_dim }
    }

    fn check(&self) -> Sizes {
        let sizes = self.sizes();
        let Sizes { tokens_q, tokens_k, heads, kv_heads, head_dim, value_dim } = sizes;
        let k_shape = [tokens_k, kv_heads, head_dim];
        assert_eq!(self.k.shape(), k_shape, "k: expected the shape {k_shape:?} by q and v");
        assert!(head_dim > 0 && value_dim > 0, "q, v: expected elements, got {sizes:?}");
        assert!(
            heads > 0 && kv_heads > 0 && heads.is_multiple_of(kv_heads),
            "q: expected a positive multiple of the {kv_heads} heads of k, got {heads}"
        );
        expect_offsets("offsets_q", tokens_q, self.offsets_q);
        expect_offsets("offsets_k", tokens_k, self.offsets_k);
        let segments = self.offsets_q.len() - 1;
        assert_eq!(
            self.offsets_k.len() - 1,
            segments,
            "offsets_k: expected the {segments} segments of offsets_q"
        );
        let softcap = self.options.softcap;
        assert!(
            softcap.is_none_or(|cap| cap > 0.0),
            "softcap: expected a positive number, got {softcap:?}"
        );
        sizes
    }
}

impl AttentionOptions {
    /// The factor on `q k^T` that gives scores in units of log2, or the argument of the tanh.
    fn score_factor(&self) -> f64 {
        match self.softcap {
            Some(cap) => self.softmax_scale / cap,
            None => self.softmax_scale * std::f64::consts::LOG2_E,
        }
    }

    /// The softcap in units of log2.
    fn log2_softcap(&self) -> Option<f64> {
        self.softcap.map(|cap| cap * std::f64::consts::LOG2_E)
    }
}

fn expect_len(argument: &str, expected: usize, len: usize) {
    assert_eq!(len, expected, "{argument}: expected {expected} elements, got {len}");
}

pub(crate) fn expect_offsets(argument: &str, tokens: usize, offsets: &[i32]) {
    let valid = offsets.first() == Some(&0)
        && offsets.is_sorted()
        && offsets.last().is_some_and(|&last| last as usize == tokens);
    assert!(
        valid,
        "{argument}: expected offsets from 0 to the {tokens} tokens, never decreasing, got {} from {:?} \
         to {:?}",
        offsets.len(),
        offsets.first(),
        offsets.last()
    );
}
