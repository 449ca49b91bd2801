//! The operations under autodiff: one step each, whose backward pass is the device's kernel.

mod attention_varlen;
mod qkv_attention;
mod rope_qk_norm;

use burn::backend::Backend;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;

use super::attention_varlen::{AttentionOptions, FlashKernel};
use super::backend::{
    AttentionGradients, LseGradient, Norm, PackedAttentionBackend, Rotation, Scale, Wanted,
};
use crate::Segments;

impl<B: PackedAttentionBackend, C: CheckpointStrategy> PackedAttentionBackend for Autodiff<B, C> {
    fn packed_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        segments_q: Segments,
        segments_k: Segments,
        options: AttentionOptions,
        kernel: FlashKernel,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        attention_varlen::record::<B, C>([q, k, v], [segments_q, segments_k], options, kernel)
    }

    fn packed_attention_backward(
        _q: FloatTensor<Self>,
        _k: FloatTensor<Self>,
        _v: FloatTensor<Self>,
        _out: FloatTensor<Self>,
        _lse: FloatTensor<Self>,
        _d_out: FloatTensor<Self>,
        _d_lse: LseGradient<Self>,
        _segments_q: Segments,
        _segments_k: Segments,
        _options: AttentionOptions,
        _wanted: Wanted,
    ) -> AttentionGradients<Self> {
        second_order("attention_varlen")
    }

    fn packed_rope_qk_norm(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        rotation: Rotation<Self>,
        norm: Norm<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        rope_qk_norm::record_both::<B, C>(q, k, constant(rotation), norm)
    }

    fn packed_rope_norm(
        x: FloatTensor<Self>,
        rotation: Rotation<Self>,
        scale: Scale<Self>,
    ) -> FloatTensor<Self> {
        rope_qk_norm::record::<B, C>(x, constant(rotation), scale)
    }

    fn packed_rope_norm_backward(
        _x: FloatTensor<Self>,
        _d_out: FloatTensor<Self>,
        _rotation: Rotation<Self>,
        _scale: Scale<Self>,
    ) -> (FloatTensor<Self>, Scale<Self>) {
        second_order("rope_qk_norm")
    }

    fn packed_qkv_attention(
        qkv: FloatTensor<Self>,
        rotation: Rotation<Self>,
        norm: Norm<Self>,
        segments: Segments,
        options: AttentionOptions,
        kernel: FlashKernel,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        qkv_attention::record::<B, C>(qkv, constant(rotation), norm, segments, options, kernel)
    }

    fn packed_qkv_attention_backward(
        _qkv: FloatTensor<Self>,
        _out: FloatTensor<Self>,
        _lse: FloatTensor<Self>,
        _d_out: FloatTensor<Self>,
        _rotation: Rotation<Self>,
        _norm: Norm<Self>,
        _segments: Segments,
        _options: AttentionOptions,
    ) -> (FloatTensor<Self>, Norm<Self>) {
        second_order("qkv_attention")
    }
}

fn second_order(operation: &str) -> ! {
    panic!("{operation}: gradients of gradients are not supported")
}

/// The tables without autodiff: a rotation that learns does not come here.
fn constant<B: Backend, C: CheckpointStrategy>(rotation: Rotation<Autodiff<B, C>>) -> Rotation<B> {
    match rotation {
        Rotation::Absent => Rotation::Absent,
        Rotation::Tables { cos, sin } => {
            Rotation::Tables { cos: cos.into_primitive(), sin: sin.into_primitive() }
        }
    }
}

/// A norm of the backend beneath, whose weights a checkpointer has.
#[derive(Clone, Debug)]
struct SavedNorm {
    weights: [NodeId; 2],
    epsilon: f64,
}

impl SavedNorm {
    fn retrieve<B: Backend>(norm: Option<&Self>, checkpointer: &mut Checkpointer) -> Norm<B> {
        match norm {
            None => Norm::Absent,
            Some(Self { weights, epsilon }) => {
                let [q, k] = weights.map(|id| checkpointer.retrieve_node_output(id));
                Norm::Rms { q, k, epsilon: *epsilon }
            }
        }
    }
}
