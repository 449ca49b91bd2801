//! The backend extension through which operations reach a device's kernels.

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType, backend_extension};
use burn::tensor::{DType, Shape};

use super::attention_varlen::AttentionOptions;
use crate::Segments;

/// Kernels of a backend for the operations of this crate.
///
/// The operations call it on tensors whose device runs the kernels, and plain tensor code elsewhere.
#[backend_extension(Cube, Fusion)]
pub trait PackedAttentionBackend: Backend {
    /// Output `[tokens_q, heads, value_dim]` in the dtype of q, and f32 lse `[tokens_q, heads]`, of
    /// checked arguments; see [`attention_varlen`](crate::attention_varlen).
    #[fusion(meta = |q, _k, v, _segments_q, _segments_k, _options| attention_specs(q, v))]
    fn packed_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        segments_q: Segments,
        segments_k: Segments,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// q and k, normalised and rotated; see [`rope_qk_norm`](crate::rope_qk_norm).
    #[fusion(meta = |q, k, _rotation, _norm| (q.clone(), k.clone()))]
    fn packed_rope_qk_norm(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        #[extension_type] rotation: Rotation<Self>,
        #[extension_type] norm: Norm<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

/// The tables of a rotation, where there is one.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
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
#[extension_type(fusion)]
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

fn attention_specs(q: &TensorSpec, v: &TensorSpec) -> (TensorSpec, TensorSpec) {
    let [tokens, heads] = [q.shape[0], q.shape[1]];
    (
        TensorSpec::new(Shape::new([tokens, heads, v.shape[2]]), q.dtype),
        TensorSpec::new(Shape::new([tokens, heads]), DType::F32),
    )
}
