//! Attention over a packed sequence: every segment attends to itself alone.

mod composed;
mod dense;
mod kernel;
mod options;
mod problem;
mod sdpa;

use burn::tensor::Tensor;

pub use options::{AttentionOptions, Window};
pub(crate) use problem::Attention;
pub use problem::AttentionError;

use crate::Segments;
use crate::implementation::AttentionImplementation;

/// `softmax(softmax_scale q k^T) v` in each segment, over a packed sequence.
///
/// Query segment `i` attends to key segment `i` only; the two may differ in length. Softmax and
/// accumulation run in f32 (f64 for f64 tensors) and the result is cast back once. A query that
/// sees no key, as in an empty segment, gives 0. A NaN makes the queries that see it NaN, may reach
/// others of its segment, and never leaves it.
///
/// It runs the kernel of `flash_attention_2` where the device can, and the tensor operations of
/// `eager_v2` elsewhere.
///
/// # Shapes
///
/// - q: `[tokens_q, heads, head_dim]`
/// - k: `[tokens_k, heads_kv, head_dim]`, `heads` divisible by `heads_kv` (grouped heads)
/// - v: `[tokens_k, heads_kv, value_dim]`
/// - segments_q, segments_k: as many segments, over `tokens_q` and `tokens_k` tokens
/// - output: `[tokens_q, heads, value_dim]`
///
/// # Panics
///
/// When the arguments contradict each other; [`check_attention_varlen`] gives the same answer as an
/// error.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_vision_attention::{AttentionOptions, Segments, attention_varlen};
///
/// let device = Device::flex();
/// let segments = Segments::from_lengths([3, 5])?;
/// let x = Tensor::<3>::random([8, 2, 16], Distribution::Default, &device);
/// let out = attention_varlen(x.clone(), x.clone(), x, &segments, &segments, &AttentionOptions::default());
/// assert_eq!(out.dims(), [8, 2, 16]);
/// # Ok::<(), burn_vision_attention::SegmentsError>(())
/// ```
pub fn attention_varlen(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    segments_q: &Segments,
    segments_k: &Segments,
    options: &AttentionOptions,
) -> Tensor<3> {
    attention_varlen_with_lse(q, k, v, segments_q, segments_k, options).0
}

/// As [`attention_varlen`], with the logarithm of each query's sum of exponentials (lse), f32
/// `[tokens_q, heads]`, natural base; -inf for a query that sees no key. Gradients flow through both.
///
/// # Panics
///
/// As [`attention_varlen`].
pub fn attention_varlen_with_lse(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    segments_q: &Segments,
    segments_k: &Segments,
    options: &AttentionOptions,
) -> (Tensor<3>, Tensor<2>) {
    let attention = checked([q, k, v], segments_q, segments_k, options);
    kernel::kernel(&attention, FlashKernel::V2).unwrap_or_else(|_| composed::composed(&attention))
}

/// As [`attention_varlen`], computed by the given implementation.
///
/// # Panics
///
/// As [`attention_varlen`]; and when the implementation is a kernel that cannot run here, which
/// [`resolve_attn_implementation`](crate::resolve_attn_implementation) tells beforehand.
pub fn attention_varlen_by(
    implementation: AttentionImplementation,
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    segments_q: &Segments,
    segments_k: &Segments,
    options: &AttentionOptions,
) -> Tensor<3> {
    run(implementation, &checked([q, k, v], segments_q, segments_k, options))
}

/// Checks the arguments of [`attention_varlen`] without running it.
///
/// # Errors
///
/// When shapes, heads, dtypes, devices, segments or options contradict each other.
pub fn check_attention_varlen(
    q: &Tensor<3>,
    k: &Tensor<3>,
    v: &Tensor<3>,
    segments_q: &Segments,
    segments_k: &Segments,
    options: &AttentionOptions,
) -> Result<(), AttentionError> {
    let tensors = [q.clone(), k.clone(), v.clone()];
    Attention::new(tensors, segments_q, segments_k, options).map(|_| ())
}

fn checked<'a>(
    tensors: [Tensor<3>; 3],
    segments_q: &'a Segments,
    segments_k: &'a Segments,
    options: &'a AttentionOptions,
) -> Attention<'a> {
    Attention::new(tensors, segments_q, segments_k, options)
        .unwrap_or_else(|error| panic!("attention_varlen: {error}"))
}

/// Runs a checked attention by an implementation that can run.
pub(crate) fn run(implementation: AttentionImplementation, attention: &Attention<'_>) -> Tensor<3> {
    match implementation {
        AttentionImplementation::Eager => dense::dense(attention),
        AttentionImplementation::EagerV2 => composed::composed(attention).0,
        AttentionImplementation::Sdpa => sdpa::sdpa(attention),
        AttentionImplementation::FlashAttention2 => flash(FlashKernel::V2, attention),
        AttentionImplementation::FlashAttention3 => flash(FlashKernel::V3, attention),
    }
}

/// Runs a kernel that can run.
fn flash(kernel: FlashKernel, attention: &Attention<'_>) -> Tensor<3> {
    match kernel::kernel(attention, kernel) {
        Ok((out, _)) => out,
        Err(reason) => {
            panic!("attention_varlen: {} cannot run: {reason}", kernel.implementation())
        }
    }
}

pub(crate) use kernel::FlashKernel;
pub(crate) use kernel::{describe as describe_kernel, support as kernel_support};
