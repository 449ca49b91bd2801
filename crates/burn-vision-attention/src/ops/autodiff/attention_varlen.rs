//! `attention_varlen` under autodiff.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, TensorMetadata};

use crate::Segments;
use crate::ops::attention_varlen::{AttentionOptions, FlashKernel};
use crate::ops::backend::{AttentionGradients, LseGradient, PackedAttentionBackend, Wanted};

type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// What the backward pass needs beside the incoming gradient: nothing of size tokens x tokens.
#[derive(Clone, Debug)]
struct Saved<B: PackedAttentionBackend> {
    /// q, k and v.
    inputs: [NodeId; 3],
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
    segments: [Segments; 2],
    options: AttentionOptions,
}

impl<B: PackedAttentionBackend> Saved<B> {
    /// Computes the gradients of those parents that are tracked, and adds them to theirs.
    fn register(
        self,
        checkpointer: &mut Checkpointer,
        grads: &mut Gradients,
        (d_out, d_lse): (FloatTensor<B>, LseGradient<B>),
        parents: [Option<NodeId>; 3],
    ) {
        let wanted = match &parents {
            [Some(_), None, None] => Wanted::Query,
            [None, _, _] => Wanted::KeyValue,
            _ => Wanted::All,
        };
        let [q, k, v] = self.inputs.map(|id| checkpointer.retrieve_node_output(id));
        let [segments_q, segments_k] = self.segments;
        let computed = B::packed_attention_backward(
            q,
            k,
            v,
            self.out,
            self.lse,
            d_out,
            d_lse,
            segments_q,
            segments_k,
            self.options,
            wanted,
        );
        let gradients = match computed {
            AttentionGradients::All { q, k, v } => [Some(q), Some(k), Some(v)],
            AttentionGradients::Query { q } => [Some(q), None, None],
            AttentionGradients::KeyValue { k, v } => [None, Some(k), Some(v)],
        };
        for (node, gradient) in parents.into_iter().zip(gradients) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<B>(node, gradient);
            }
        }
    }
}

/// Output and lse. Burn's steps have one output each, so that lse is a step of its own; its backward
/// pass runs only where a loss depends on lse. Gradients are those of `flash_attention_2`, whichever
/// kernel has run forward.
pub(super) fn record<B: PackedAttentionBackend, C: CheckpointStrategy>(
    tensors: [Tracked<B, C>; 3],
    segments: [Segments; 2],
    options: AttentionOptions,
    kernel: FlashKernel,
) -> (Tracked<B, C>, Tracked<B, C>) {
    let nodes = || tensors.each_ref().map(|tensor| tensor.node());
    let step = OutStep.prepare::<C>(nodes()).compute_bound().stateful();
    let lse_step = LseStep.prepare::<C>(nodes()).compute_bound().stateful();
    let [q, k, v] = tensors.each_ref().map(|tensor| tensor.primitive().clone());
    let [segments_q, segments_k] = segments.clone();
    let (out, lse) = B::packed_attention(q, k, v, segments_q, segments_k, options, kernel);
    match (step, lse_step) {
        (OpsKind::Tracked(mut step), OpsKind::Tracked(mut lse_step)) => {
            let inputs = tensors.each_ref().map(|tensor| step.checkpoint(tensor));
            for tensor in &tensors {
                lse_step.checkpoint(tensor);
            }
            let saved = Saved { inputs, out: out.clone(), lse: lse.clone(), segments, options };
            (step.finish(saved.clone(), out), lse_step.finish(saved, lse))
        }
        (OpsKind::UnTracked(step), _) => {
            (step.finish(out), <Autodiff<B, C> as AutodiffBackend>::from_inner(lse))
        }
        (OpsKind::Tracked(_), OpsKind::UnTracked(_)) => {
            unreachable!("both steps have the same parents")
        }
    }
}

#[derive(Debug)]
struct OutStep;

impl<B: PackedAttentionBackend> Backward<B, 3> for OutStep {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Saved<B>, 3>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let d_out = grads.consume::<B>(&ops.node);
        ops.state.register(
            checkpointer,
            grads,
            (d_out, LseGradient::Absent),
            ops.parents.map(|node| node.map(|node| node.id)),
        );
    }
}

#[derive(Debug)]
struct LseStep;

impl<B: PackedAttentionBackend> Backward<B, 3> for LseStep {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Saved<B>, 3>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let d_lse = LseGradient::Present { d_lse: grads.consume::<B>(&ops.node) };
        let out = &ops.state.out;
        let d_out = B::float_zeros(out.shape(), &out.device(), out.dtype().into());
        ops.state.register(
            checkpointer,
            grads,
            (d_out, d_lse),
            ops.parents.map(|node| node.map(|node| node.id)),
        );
    }
}
