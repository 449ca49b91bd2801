//! Attention over a packed projection: [`rope_qk_norm`](super::rope_qk_norm) and
//! [`attention_varlen`](super::attention_varlen) of the q, k and v inside one tensor.

use burn::tensor::{Tensor, assert_shape};

#[cfg(feature = "kernels")]
use super::attention_varlen::FlashKernel;
use super::attention_varlen::{Attention, AttentionError, AttentionOptions, run};
use super::rope_qk_norm::{QkNorm, rope_qk_norm};
use crate::implementation::AttentionImplementation;
use crate::{RotaryPositionEmbedding, Segments};

/// Self-attention of a projection that holds q, k and v side by side, as the layer of a vision block
/// makes it: norm and rotation of q and k, then attention in each segment.
///
/// Nothing is copied out of the projection where a kernel runs. With gradients it is one step that
/// keeps the projection, the output and lse; the backward pass computes norm and rotation anew and
/// writes one gradient, of the shape of `qkv`.
///
/// # Shapes
///
/// - qkv: `[tokens, 3, heads, head_dim]`
/// - rope: for `tokens` and `head_dim`
/// - norms: weights `[head_dim]`
/// - segments: over `tokens` tokens
/// - output: `[tokens, heads, head_dim]`
///
/// # Panics
///
/// When a shape differs from the above or an option is out of range; and when `implementation` is a
/// kernel that cannot run here, which
/// [`resolve_attn_implementation`](crate::resolve_attn_implementation) tells beforehand.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_vision_attention::{AttentionImplementation, AttentionOptions, Segments, qkv_attention};
///
/// let device = Device::flex();
/// let segments = Segments::from_lengths([3, 5])?;
/// let qkv = Tensor::random([8, 3, 2, 16], Distribution::Default, &device);
/// let out = qkv_attention(
///     AttentionImplementation::FlashAttention2,
///     qkv,
///     None,
///     None,
///     &segments,
///     &AttentionOptions::default(),
/// );
/// assert_eq!(out.dims(), [8, 2, 16]);
/// # Ok::<(), burn_vision_attention::SegmentsError>(())
/// ```
pub fn qkv_attention(
    implementation: AttentionImplementation,
    qkv: Tensor<4>,
    rope: Option<&RotaryPositionEmbedding>,
    norms: Option<&QkNorm>,
    segments: &Segments,
    options: &AttentionOptions,
) -> Tensor<3> {
    try_qkv_attention(implementation, qkv, rope, norms, segments, options)
        .unwrap_or_else(|error| panic!("qkv_attention: {error}"))
}

/// As [`qkv_attention`], with an error where segments or options do not fit.
pub(crate) fn try_qkv_attention(
    implementation: AttentionImplementation,
    qkv: Tensor<4>,
    rope: Option<&RotaryPositionEmbedding>,
    norms: Option<&QkNorm>,
    segments: &Segments,
    options: &AttentionOptions,
) -> Result<Tensor<3>, AttentionError> {
    let [tokens, _, heads, head_dim] = qkv.dims();
    assert_shape!(qkv, [tokens, 3, heads, head_dim]);
    #[cfg(feature = "kernels")]
    if let Some(flash) = FlashKernel::of(implementation)
        && let Some(out) = kernel(&qkv, flash, rope, norms, segments, options)?
    {
        return Ok(out);
    }
    let [q, k, v] = [0, 1, 2].map(|part| qkv.clone().narrow(1, part, 1).squeeze_dim(1));
    let (q, k) = rope_qk_norm(q, k, rope, norms);
    let attention = Attention::new([q, k, v], segments, segments, options)?;
    Ok(run(implementation, &attention))
}

/// The output by the device's kernels, where they serve the whole of it.
#[cfg(feature = "kernels")]
fn kernel(
    qkv: &Tensor<4>,
    flash: FlashKernel,
    rope: Option<&RotaryPositionEmbedding>,
    norms: Option<&QkNorm>,
    segments: &Segments,
    options: &AttentionOptions,
) -> Result<Option<Tensor<3>>, AttentionError> {
    use super::backend::PackedAttentionBackend;
    use super::{kernels, rope_qk_norm};
    use burn::backend::Dispatch;

    let [tokens, _, heads, head_dim] = qkv.dims();
    let shape = [tokens, heads, head_dim];
    let (device, dtype) = (qkv.device(), qkv.dtype());
    let plain = rope.is_none() && norms.is_none();
    if shape.contains(&0)
        || segments.total() != tokens
        || kernels::supports_attention(&device, flash, dtype, [shape; 3], options).is_err()
        || !(plain || rope_qk_norm::kernel_serves(&device, dtype, [shape; 2], rope, norms))
    {
        return Ok(None);
    }
    options.check()?;
    rope_qk_norm::check(shape, shape, rope, norms);
    let (out, _lse) = Dispatch::packed_qkv_attention(
        qkv.clone().into_dispatch(),
        rope_qk_norm::rotation(rope),
        rope_qk_norm::norm(norms),
        segments.clone(),
        *options,
        flash,
    );
    Ok(Some(Tensor::from_dispatch(out)))
}
