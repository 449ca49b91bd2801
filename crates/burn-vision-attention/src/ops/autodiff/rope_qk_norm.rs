//! `rope_qk_norm` under autodiff: a step for q and one for k.

use std::marker::PhantomData;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;

use crate::ops::backend::{Norm, PackedAttentionBackend, Rotation, Scale};

type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// The weight of a norm by its node.
#[derive(Clone, Copy, Debug)]
struct SavedScale {
    weight: NodeId,
    epsilon: f64,
}

impl SavedScale {
    fn scale<B: PackedAttentionBackend>(
        scale: Option<Self>,
        retrieve: impl FnOnce(NodeId) -> FloatTensor<B>,
    ) -> Scale<B> {
        match scale {
            None => Scale::Absent,
            Some(Self { weight, epsilon }) => Scale::Rms { weight: retrieve(weight), epsilon },
        }
    }
}

#[derive(Clone, Debug)]
struct Saved<B: PackedAttentionBackend> {
    x: NodeId,
    rotation: Rotation<B>,
    scale: Option<SavedScale>,
}

/// q and k in one launch, each with a step of its own.
pub(super) fn record_both<B: PackedAttentionBackend, C: CheckpointStrategy>(
    q: Tracked<B, C>,
    k: Tracked<B, C>,
    rotation: Rotation<B>,
    norm: Norm<Autodiff<B, C>>,
) -> (Tracked<B, C>, Tracked<B, C>) {
    let (inner, q_scale, k_scale) = match norm {
        Norm::Absent => (Norm::Absent, Scale::Absent, Scale::Absent),
        Norm::Rms { q, k, epsilon } => {
            let [inner_q, inner_k] = [&q, &k].map(|weight| weight.primitive().clone());
            (
                Norm::Rms { q: inner_q, k: inner_k, epsilon },
                Scale::Rms { weight: q, epsilon },
                Scale::Rms { weight: k, epsilon },
            )
        }
    };
    let [inner_q, inner_k] = [&q, &k].map(|x| x.primitive().clone());
    let (q_out, k_out) = B::packed_rope_qk_norm(inner_q, inner_k, rotation.clone(), inner);
    (
        record_output::<B, C>(q, rotation.clone(), q_scale, q_out),
        record_output::<B, C>(k, rotation, k_scale, k_out),
    )
}

/// One of q and k.
pub(super) fn record<B: PackedAttentionBackend, C: CheckpointStrategy>(
    x: Tracked<B, C>,
    rotation: Rotation<B>,
    scale: Scale<Autodiff<B, C>>,
) -> Tracked<B, C> {
    let inner = match &scale {
        Scale::Absent => Scale::Absent,
        Scale::Rms { weight, epsilon } => {
            Scale::Rms { weight: weight.primitive().clone(), epsilon: *epsilon }
        }
    };
    let out = B::packed_rope_norm(x.primitive().clone(), rotation.clone(), inner);
    record_output::<B, C>(x, rotation, scale, out)
}

fn record_output<B: PackedAttentionBackend, C: CheckpointStrategy>(
    x: Tracked<B, C>,
    rotation: Rotation<B>,
    scale: Scale<Autodiff<B, C>>,
    out: FloatTensor<B>,
) -> Tracked<B, C> {
    match scale {
        Scale::Absent => finish::<B, C, 1>([x], rotation, None, out),
        Scale::Rms { weight, epsilon } => {
            let saved = SavedScale { weight: weight.id(), epsilon };
            finish::<B, C, 2>([x, weight], rotation, Some(saved), out)
        }
    }
}

/// Records the step of an output: x first among the parents, then the weight where there is one.
fn finish<B: PackedAttentionBackend, C: CheckpointStrategy, const N: usize>(
    parents: [Tracked<B, C>; N],
    rotation: Rotation<B>,
    scale: Option<SavedScale>,
    out: FloatTensor<B>,
) -> Tracked<B, C> {
    let saved = Saved::<B> { x: parents[0].id(), rotation, scale };
    let nodes = parents.each_ref().map(|parent| parent.node());
    // Cheap beside attention: with balanced checkpointing the result is computed anew.
    let step = RopeNormStep
        .prepare::<C>(nodes)
        .memory_bound()
        .retro_forward(Recompute::<B> { saved: saved.clone(), backend: PhantomData })
        .parents(&parents)
        .stateful();
    match step {
        OpsKind::Tracked(mut step) => {
            for parent in &parents {
                step.checkpoint(parent);
            }
            step.finish(saved, out)
        }
        OpsKind::UnTracked(step) => step.finish(out),
    }
}

#[derive(Debug)]
struct Recompute<B: PackedAttentionBackend> {
    saved: Saved<B>,
    backend: PhantomData<B>,
}

impl<B: PackedAttentionBackend> RetroForward for Recompute<B> {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let Saved { x, rotation, scale } = self.saved.clone();
        let x = states.get_state::<FloatTensor<B>>(&x);
        let scale = SavedScale::scale::<B>(scale, |weight| states.get_state(&weight));
        states.save(out_node, B::packed_rope_norm(x, rotation, scale));
    }
}

#[derive(Debug)]
struct RopeNormStep;

impl<B: PackedAttentionBackend, const N: usize> Backward<B, N> for RopeNormStep {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Saved<B>, N>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let d_out = grads.consume::<B>(&ops.node);
        let Saved { x, rotation, scale } = ops.state;
        let x = checkpointer.retrieve_node_output(x);
        let scale =
            SavedScale::scale::<B>(scale, |weight| checkpointer.retrieve_node_output(weight));
        let (d_x, d_scale) = B::packed_rope_norm_backward(x, d_out, rotation, scale);
        let mut gradients = vec![d_x];
        if let Scale::Rms { weight, .. } = d_scale {
            gradients.push(weight);
        }
        for (node, gradient) in ops.parents.into_iter().zip(gradients) {
            if let Some(node) = node {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}
