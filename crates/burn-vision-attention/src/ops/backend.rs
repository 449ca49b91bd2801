//! The backend extension through which operations reach a device's kernels.

#[cfg(feature = "cube")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType, backend_extension};
#[cfg(feature = "cube")]
use burn::tensor::{DType, Shape};

use super::attention_varlen::{AttentionOptions, FlashKernel};
use crate::Segments;

/// Kernels of a backend for the operations of this crate, on arguments that have been checked.
///
/// The operations call it where the device runs the kernels, and plain tensor code elsewhere: the
/// other backends need no implementation. [`Autodiff`](burn::backend::Autodiff) records one step for
/// each operation and calls the `_backward` kernels of the backend beneath; it has none of its own,
/// since Burn's gradients are of first order.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "cube")
)]
pub trait PackedAttentionBackend: Backend {
    /// Output `[tokens_q, heads, value_dim]` in the dtype of q, and f32 lse `[tokens_q, heads]`; see
    /// [`attention_varlen`](crate::attention_varlen).
    #[fusion(meta = |q, _k, v, _segments_q, _segments_k, _options, _kernel| attention_specs(q, v))]
    fn packed_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        segments_q: Segments,
        segments_k: Segments,
        options: AttentionOptions,
        kernel: FlashKernel,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Gradients of q, k and v, of which `wanted` are computed, from those of the output and of lse.
    #[fusion(meta = |q, k, v, _out, _lse, _d_out, _d_lse, _segments_q, _segments_k, _options, wanted|
        attention_grad_specs([q, k, v], *wanted))]
    #[allow(clippy::too_many_arguments)] // the extension takes tensors one by one
    fn packed_attention_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        #[extension_type] d_lse: LseGradient<Self>,
        segments_q: Segments,
        segments_k: Segments,
        options: AttentionOptions,
        wanted: Wanted,
    ) -> AttentionGradients<Self>;

    /// q and k, normalised and rotated; see [`rope_qk_norm`](crate::rope_qk_norm).
    #[fusion(meta = |q, k, _rotation, _norm| (q.clone(), k.clone()))]
    fn packed_rope_qk_norm(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        #[extension_type] rotation: Rotation<Self>,
        #[extension_type] norm: Norm<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// One of q and k, normalised and rotated.
    #[fusion(meta = |x, _rotation, _scale| x.clone())]
    fn packed_rope_norm(
        x: FloatTensor<Self>,
        #[extension_type] rotation: Rotation<Self>,
        #[extension_type] scale: Scale<Self>,
    ) -> FloatTensor<Self>;

    /// Gradients of x and of the weight in `scale` (whose epsilon it keeps), from that of the output
    /// of [`packed_rope_norm`](Self::packed_rope_norm).
    #[fusion(meta = |x, _d_out, _rotation, scale| (x.clone(), scale.clone()))]
    fn packed_rope_norm_backward(
        x: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        #[extension_type] rotation: Rotation<Self>,
        #[extension_type] scale: Scale<Self>,
    ) -> (FloatTensor<Self>, Scale<Self>);

    /// [`packed_rope_qk_norm`](Self::packed_rope_qk_norm) of the q and k in `qkv`
    /// `[tokens, 3, heads, head_dim]`, then [`packed_attention`](Self::packed_attention).
    #[fusion(meta = |qkv, _rotation, _norm, _segments, _options, _kernel| qkv_attention_specs(qkv))]
    fn packed_qkv_attention(
        qkv: FloatTensor<Self>,
        #[extension_type] rotation: Rotation<Self>,
        #[extension_type] norm: Norm<Self>,
        segments: Segments,
        options: AttentionOptions,
        kernel: FlashKernel,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Gradients of `qkv` and of the weights in `norm` (whose epsilon it keeps). Norm and rotation
    /// are computed anew, which is cheaper than keeping their results.
    #[fusion(meta = |qkv, _out, _lse, _d_out, _rotation, norm, _segments, _options|
        (qkv.clone(), norm.clone()))]
    #[allow(clippy::too_many_arguments)] // the extension takes tensors one by one
    fn packed_qkv_attention_backward(
        qkv: FloatTensor<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        #[extension_type] rotation: Rotation<Self>,
        #[extension_type] norm: Norm<Self>,
        segments: Segments,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, Norm<Self>);
}

/// Which gradients of an attention to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Of q, k and v.
    All,
    /// Of q.
    Query,
    /// Of k and v.
    KeyValue,
}

/// The gradients that were [`Wanted`], each shaped as its tensor.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub enum AttentionGradients<B: Backend> {
    /// For [`Wanted::All`].
    All {
        /// Of q.
        q: FloatTensor<B>,
        /// Of k.
        k: FloatTensor<B>,
        /// Of v.
        v: FloatTensor<B>,
    },
    /// For [`Wanted::Query`].
    Query {
        /// Of q.
        q: FloatTensor<B>,
    },
    /// For [`Wanted::KeyValue`].
    KeyValue {
        /// Of k.
        k: FloatTensor<B>,
        /// Of v.
        v: FloatTensor<B>,
    },
}

/// The gradient of lse, where it takes part.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub enum LseGradient<B: Backend> {
    /// Zero.
    Absent,
    /// f32 `[tokens_q, heads]`.
    Present {
        /// The gradient.
        d_lse: FloatTensor<B>,
    },
}

/// The tables of a rotation, where there is one.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub enum Rotation<B: Backend> {
    /// No rotation.
    Absent,
    /// Rotate by these angles.
    Tables {
        /// Cosines, f32 `[tokens, head_dim / 2]`.
        cos: FloatTensor<B>,
        /// Sines, f32 `[tokens, head_dim / 2]`.
        sin: FloatTensor<B>,
    },
}

/// The weights of the per-head norms, where there are some.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub enum Norm<B: Backend> {
    /// No norm.
    Absent,
    /// Normalise each head.
    Rms {
        /// Weight for q, `[head_dim]`.
        q: FloatTensor<B>,
        /// Weight for k, `[head_dim]`.
        k: FloatTensor<B>,
        /// Added to the mean square.
        epsilon: f64,
    },
}

/// The weight of one per-head norm, where there is one.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub enum Scale<B: Backend> {
    /// No norm.
    Absent,
    /// Normalise each head.
    Rms {
        /// `[head_dim]`.
        weight: FloatTensor<B>,
        /// Added to the mean square.
        epsilon: f64,
    },
}

#[cfg(feature = "cube")]
fn attention_specs(q: &TensorSpec, v: &TensorSpec) -> (TensorSpec, TensorSpec) {
    let [tokens, heads] = [q.shape[0], q.shape[1]];
    (
        TensorSpec::new(Shape::new([tokens, heads, v.shape[2]]), q.dtype),
        TensorSpec::new(Shape::new([tokens, heads]), DType::F32),
    )
}

#[cfg(feature = "cube")]
fn attention_grad_specs([q, k, v]: [&TensorSpec; 3], wanted: Wanted) -> AttentionGradientsMetadata {
    let [q, k, v] = [q, k, v].map(TensorSpec::clone);
    match wanted {
        Wanted::All => AttentionGradientsMetadata::All { q, k, v },
        Wanted::Query => AttentionGradientsMetadata::Query { q },
        Wanted::KeyValue => AttentionGradientsMetadata::KeyValue { k, v },
    }
}

#[cfg(feature = "cube")]
fn qkv_attention_specs(qkv: &TensorSpec) -> (TensorSpec, TensorSpec) {
    let [tokens, heads, head_dim] = [qkv.shape[0], qkv.shape[2], qkv.shape[3]];
    (
        TensorSpec::new(Shape::new([tokens, heads, head_dim]), qkv.dtype),
        TensorSpec::new(Shape::new([tokens, heads]), DType::F32),
    )
}
