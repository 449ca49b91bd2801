//! `qkv_attention` under autodiff.

use burn::backend::AutodiffBackend;
use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;

use super::SavedNorm;
use crate::Segments;
use crate::ops::attention_varlen::{AttentionOptions, FlashKernel};
use crate::ops::backend::{Norm, PackedAttentionBackend, Rotation};

type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// The projection, the output and lse: q and k are normalised and rotated anew.
#[derive(Clone, Debug)]
struct Saved<B: PackedAttentionBackend> {
    qkv: NodeId,
    norm: Option<SavedNorm>,
    rotation: Rotation<B>,
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
    segments: Segments,
    options: AttentionOptions,
}

/// Output, and lse outside the graph.
pub(super) fn record<B: PackedAttentionBackend, C: CheckpointStrategy>(
    qkv: Tracked<B, C>,
    rotation: Rotation<B>,
    norm: Norm<Autodiff<B, C>>,
    segments: Segments,
    options: AttentionOptions,
    kernel: FlashKernel,
) -> (Tracked<B, C>, Tracked<B, C>) {
    match norm {
        Norm::Absent => finish::<B, C, 1>([qkv], None, rotation, segments, options, kernel),
        Norm::Rms { q, k, epsilon } => {
            finish::<B, C, 3>([qkv, q, k], Some(epsilon), rotation, segments, options, kernel)
        }
    }
}

/// Records the step: the projection first among the parents, then both weights where there are some.
fn finish<B: PackedAttentionBackend, C: CheckpointStrategy, const N: usize>(
    parents: [Tracked<B, C>; N],
    epsilon: Option<f64>,
    rotation: Rotation<B>,
    segments: Segments,
    options: AttentionOptions,
    kernel: FlashKernel,
) -> (Tracked<B, C>, Tracked<B, C>) {
    let nodes = parents.each_ref().map(|parent| parent.node());
    let step = QkvStep.prepare::<C>(nodes).compute_bound().stateful();
    let inner = |parent: usize| parents[parent].primitive().clone();
    let inner_norm = match epsilon {
        None => Norm::Absent,
        Some(epsilon) => Norm::Rms { q: inner(1), k: inner(2), epsilon },
    };
    let (out, lse) = B::packed_qkv_attention(
        inner(0),
        rotation.clone(),
        inner_norm,
        segments.clone(),
        options,
        kernel,
    );
    let out = match step {
        OpsKind::Tracked(mut step) => {
            let ids = parents.each_ref().map(|parent| step.checkpoint(parent));
            let weights = [ids[N.saturating_sub(2)], ids[N - 1]];
            let norm = epsilon.map(|epsilon| SavedNorm { weights, epsilon });
            let saved = Saved {
                qkv: ids[0],
                norm,
                rotation,
                out: out.clone(),
                lse: lse.clone(),
                segments,
                options,
            };
            step.finish(saved, out)
        }
        OpsKind::UnTracked(step) => step.finish(out),
    };
    (out, <Autodiff<B, C> as AutodiffBackend>::from_inner(lse))
}

#[derive(Debug)]
struct QkvStep;

impl<B: PackedAttentionBackend, const N: usize> Backward<B, N> for QkvStep {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Saved<B>, N>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let d_out = grads.consume::<B>(&ops.node);
        let saved = ops.state;
        debug_assert_eq!(d_out.shape(), saved.out.shape());
        let norm = SavedNorm::retrieve::<B>(saved.norm.as_ref(), checkpointer);
        let (d_qkv, d_norm) = B::packed_qkv_attention_backward(
            checkpointer.retrieve_node_output(saved.qkv),
            saved.out,
            saved.lse,
            d_out,
            saved.rotation,
            norm,
            saved.segments,
            saved.options,
        );
        let mut gradients = vec![d_qkv];
        if let Norm::Rms { q, k, .. } = d_norm {
            gradients.extend([q, k]);
        }
        for (node, gradient) in ops.parents.into_iter().zip(gradients) {
            if let Some(node) = node {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}
