//! Gradient checkpointing of a whole module: its activations are dropped after the forward pass and
//! computed anew in the backward pass.
//!
//! Burn's own [`gradient_checkpointing`](burn::tensor::Device::gradient_checkpointing) works operation
//! by operation and keeps every matrix product; a block keeps its input alone.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{Autodiff, Backend, DispatchKindConversion, DispatchTensor};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

/// The forward pass of a module over `[tokens, dim]`.
type Forward<M> = Arc<dyn Fn(&M, Tensor<2>) -> Tensor<2> + Send + Sync>;

/// `forward(module, x)`, of which the graph keeps x alone.
///
/// Without gradients, and on a backend that cannot (which is logged), it is that very call.
pub(crate) fn recompute<M>(module: &M, x: Tensor<2>, forward: Forward<M>) -> Tensor<2>
where
    M: Module + Sync + 'static,
{
    if !x.device().is_autodiff() {
        return forward(module, x);
    }
    let recorded = None;
    #[cfg(feature = "flex")]
    let recorded = recorded.or_else(|| on::<burn::backend::Flex, M>(module, &x, &forward));
    #[cfg(feature = "cube")]
    let recorded = recorded.or_else(|| on::<burn::backend::Cube, M>(module, &x, &forward));
    #[cfg(feature = "ndarray")]
    #[allow(deprecated)]
    // upstream's word on ndarray; it is supported here as long as it exists
    let recorded = recorded.or_else(|| on::<burn::backend::NdArray, M>(module, &x, &forward));
    recorded.unwrap_or_else(|| {
        log::warn!("gradient checkpointing of blocks: not on {:?}", x.device());
        forward(module, x)
    })
}

/// The recorded call, if x is on `B`.
fn on<B, M>(module: &M, x: &Tensor<2>, forward: &Forward<M>) -> Option<Tensor<2>>
where
    B: Backend,
    DispatchTensor: DispatchKindConversion<B>
        + DispatchKindConversion<Autodiff<B, NoCheckpointing>>
        + DispatchKindConversion<Autodiff<B, BalancedCheckpointing>>,
    M: Module + Sync + 'static,
{
    record::<B, NoCheckpointing, M>(module, x, forward)
        .or_else(|| record::<B, BalancedCheckpointing, M>(module, x, forward))
}

fn record<B, C, M>(module: &M, x: &Tensor<2>, forward: &Forward<M>) -> Option<Tensor<2>>
where
    B: Backend,
    C: CheckpointStrategy,
    DispatchTensor: DispatchKindConversion<B> + DispatchKindConversion<Autodiff<B, C>>,
    M: Module + Sync + 'static,
{
    let primitive = x.clone().try_into_primitive::<Autodiff<B, C>>().ok()?;
    let mut parameters = Parameters::<B, C>(Vec::new());
    module.visit(&mut parameters);
    let mut parents = vec![primitive];
    parents.extend(parameters.0);

    let detached = module.valid();
    let input = x.clone().inner();
    let out = forward(&detached, input.clone());
    let out = out.try_into_primitive::<B>().expect("the module keeps its input's backend");
    let saved = Saved::<B> {
        backward: Arc::new(Recomputation { module: detached, input, forward: forward.clone() }),
        backend: PhantomData,
    };
    // The number of parents is a constant of the step; x fills up the places that are left.
    let out = match parents.len() {
        0..=16 => finish::<B, C, 16>(&parents, saved, out),
        17..=64 => finish::<B, C, 64>(&parents, saved, out),
        65..=256 => finish::<B, C, 256>(&parents, saved, out),
        257..=1024 => finish::<B, C, 1024>(&parents, saved, out),
        _ => return None,
    };
    Some(Tensor::from_primitive::<Autodiff<B, C>>(out))
}

type Tracked<B, C> = <Autodiff<B, C> as burn::backend::BackendTypes>::FloatTensorPrimitive;

fn finish<B: Backend, C: CheckpointStrategy, const N: usize>(
    parents: &[Tracked<B, C>],
    saved: Saved<B>,
    out: B::FloatTensorPrimitive,
) -> Tracked<B, C> {
    let nodes =
        std::array::from_fn::<_, N, _>(|place| parents.get(place).unwrap_or(&parents[0]).node());
    match RecomputeStep.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(step) => step.finish(saved, out),
        OpsKind::UnTracked(step) => step.finish(out),
    }
}

/// The trainable parameters of a module, in its order.
struct Parameters<B: Backend, C: CheckpointStrategy>(Vec<Tracked<B, C>>);

impl<B, C> ModuleVisitor for Parameters<B, C>
where
    B: Backend,
    C: CheckpointStrategy,
    DispatchTensor: DispatchKindConversion<Autodiff<B, C>>,
{
    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
        let value = parameter.val();
        if value.is_require_grad() {
            let primitive = value.try_into_primitive::<Autodiff<B, C>>();
            self.0.push(primitive.expect("a module lies on one device"));
        }
    }
}

/// What the backward pass does, without the types of module and backend.
trait RunBackward<B: Backend>: Send + Sync {
    /// Gradients of the input and of each trainable parameter, in the module's order.
    fn run(&self, d_out: B::FloatTensorPrimitive) -> Vec<Option<B::FloatTensorPrimitive>>;
}

struct Recomputation<M> {
    module: M,
    input: Tensor<2>,
    forward: Forward<M>,
}

impl<B, M> RunBackward<B> for Recomputation<M>
where
    B: Backend,
    DispatchTensor: DispatchKindConversion<B>,
    M: Module + Sync,
{
    fn run(&self, d_out: B::FloatTensorPrimitive) -> Vec<Option<B::FloatTensorPrimitive>> {
        let d_out = Tensor::<2>::from_primitive::<B>(d_out);
        // Leaves of their own: this graph shares no node with the one that is being walked, which
        // Burn allows inside a backward step.
        let module = self.module.clone().train();
        let input = self.input.clone().autodiff().require_grad();
        let out = (self.forward)(&module, input.clone());
        let gradients = (out * d_out.autodiff()).sum().backward();
        let mut collected = CollectGradients::<B> { gradients, found: Vec::new() };
        collected.push(&input);
        module.visit(&mut collected);
        collected.found
    }
}

struct CollectGradients<B: Backend> {
    gradients: burn::tensor::Gradients,
    found: Vec<Option<B::FloatTensorPrimitive>>,
}

impl<B> CollectGradients<B>
where
    B: Backend,
    DispatchTensor: DispatchKindConversion<B>,
{
    fn push<const D: usize>(&mut self, leaf: &Tensor<D>) {
        let gradient = leaf.grad_remove(&mut self.gradients);
        self.found.push(gradient.map(|gradient| {
            gradient.try_into_primitive::<B>().expect("gradients lie beneath autodiff")
        }));
    }
}

impl<B> ModuleVisitor for CollectGradients<B>
where
    B: Backend,
    DispatchTensor: DispatchKindConversion<B>,
{
    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
        let value = parameter.val();
        if value.is_require_grad() {
            self.push(&value);
        }
    }
}

struct Saved<B: Backend> {
    backward: Arc<dyn RunBackward<B>>,
    backend: PhantomData<B>,
}

impl<B: Backend> Clone for Saved<B> {
    fn clone(&self) -> Self {
        Self { backward: self.backward.clone(), backend: PhantomData }
    }
}

impl<B: Backend> fmt::Debug for Saved<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Saved(..)")
    }
}

#[derive(Debug)]
struct RecomputeStep;

impl<B: Backend, const N: usize> Backward<B, N> for RecomputeStep {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Saved<B>, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_out = grads.consume::<B>(&ops.node);
        let gradients = ops.state.backward.run(d_out);
        for (node, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}
