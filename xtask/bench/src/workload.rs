//! Cases as functions to call.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor};
use burn_dots_vit::DotsVisionEncoder;
use burn_vision_attention::{
    AttentionImplementation, AttentionOptions, KernelRequirements, QkNorm, RotaryPositionEmbedding,
    Segments, VisionAttention, VisionAttentionConfig, VisionRmsNorm, VisionRmsNormConfig,
    VisionRotaryEmbedding, apply_rotary_pos_emb_vision, attention_varlen_by,
    resolve_attn_implementation, rope_qk_norm,
};

use crate::arguments::{Implementation, Operation, Pass};
use crate::case::{Case, tower_config};
use crate::layout::Layout;
use crate::measure::{Results, Timed, Work, timed};
use crate::results::{InputGradients, Outputs};

/// The most bytes of scores for implementations that hold them all.
pub const MOST_SCORES: usize = 2 << 30;
/// As [`MOST_SCORES`], for the composed implementations, which keep scores for the backward pass alone.
pub const MOST_KEPT_SCORES: usize = 4 << 30;

/// One way to compute a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Candidate {
    /// By an implementation of attention.
    Attention(Implementation),
    /// By the library's norm and rotation.
    RopeQkNorm,
    /// By the library's norm, then its rotation, of one tensor after another.
    Composed,
}

impl Candidate {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Attention(implementation) => implementation.name(),
            Self::RopeQkNorm => "rope_qk_norm",
            Self::Composed => "composed",
        }
    }

    /// Whether it is what a user of the library would call, rather than something to compare with.
    pub fn is_ours(self) -> bool {
        matches!(self, Self::Attention(Implementation::Ours(_)) | Self::RopeQkNorm)
    }
}

/// Why a candidate is left out, where it is.
pub fn obstacle(case: &Case, candidate: Candidate, device: &Device) -> Option<String> {
    if case.operation == Operation::Tower {
        if case.pass.has_backward() {
            return Some("the tower is measured forward only".to_owned());
        }
        if !case.layout.merges() {
            return Some("the tower merges 2x2 patches, and an image has an odd side".to_owned());
        }
    }
    let Candidate::Attention(implementation) = candidate else { return None };
    let scores = case.score_bytes(implementation);
    let most = if implementation.is_dense() { MOST_SCORES } else { MOST_KEPT_SCORES };
    if scores > most {
        let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
        return Some(format!("its scores would take {:.1} GiB", gib(scores)));
    }
    let Implementation::Ours(requested) = implementation else {
        let tower = case.operation == Operation::Tower;
        return tower.then(|| "the tower has no such implementation".to_owned());
    };
    let head_dim = case.heads.head_dim;
    let requirements =
        KernelRequirements { dtype: case.dtype.burn(), head_dim, value_dim: head_dim };
    let device = with_gradients(device, case.pass);
    let fallback = AttentionImplementation::Sdpa;
    let resolution = resolve_attn_implementation(requested, &device, &requirements, fallback);
    resolution.fallbacks.into_iter().next().map(|fallback| fallback.reason)
}

/// The call to measure, with inputs and weights made.
pub fn prepare(case: &Case, candidate: Candidate, device: &Device) -> Work<'static> {
    let device = with_gradients(device, case.pass);
    match (case.operation, candidate) {
        (Operation::Tower, Candidate::Attention(Implementation::Ours(implementation))) => {
            tower(case, implementation, &device)
        }
        (Operation::Layer, Candidate::Attention(implementation)) => {
            layer(case, implementation, &device)
        }
        (Operation::AttentionVarlen, Candidate::Attention(implementation)) => {
            attention_alone(case, implementation, &device)
        }
        (Operation::RopeQkNorm, candidate) => rope_alone(case, candidate, &device),
        (operation, candidate) => unreachable!("{operation} by {}", candidate.name()),
    }
}

fn with_gradients(device: &Device, pass: Pass) -> Device {
    let device = device.clone();
    if pass.has_backward() { device.autodiff() } else { device }
}

/// Inputs of a case; with a backward pass they get gradients.
struct Inputs<'a> {
    case: &'a Case,
    device: &'a Device,
}

impl Inputs<'_> {
    fn random<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        let dtype = (self.device, self.case.dtype.burn());
        let tensor = Tensor::random(shape, Distribution::Normal(0.0, 1.0), dtype);
        if self.case.pass.has_backward() { tensor.require_grad() } else { tensor }
    }

    /// `[tokens, heads, head_dim]`.
    fn heads(&self) -> Tensor<3> {
        let heads = self.case.heads;
        self.random([self.case.layout.tokens(), heads.heads, heads.head_dim])
    }

    fn rope(&self) -> RotaryPositionEmbedding {
        let rotary = VisionRotaryEmbedding::new(self.case.heads.head_dim / 2);
        rotary.prepare(&self.case.layout.positions(), self.device)
    }

    /// What separates the segments, for an implementation that needs telling.
    fn mask(&self, implementation: Implementation) -> Option<Tensor<4, Bool>> {
        (implementation == Implementation::BurnMasked)
            .then(|| block_diagonal_mask(&self.case.layout, self.case.heads.heads, self.device))
    }
}

/// A forward pass as work, with the backward pass where there is one. The sum's gradient is one
/// everywhere.
fn passes<const D: usize, const I: usize>(
    pass: Pass,
    input: Tensor<I>,
    forward: impl Fn() -> Vec<Tensor<D>> + 'static,
) -> Work<'static> {
    if pass == Pass::Forward {
        return timed(move || Box::new(Outputs(forward())));
    }
    let loss = move || {
        let sums = forward().into_iter().map(Tensor::sum);
        sums.reduce(|a, b| a + b).expect("every operation has an output")
    };
    let backward = |loss: Tensor<1>, input: Tensor<I>| -> Box<dyn Results> {
        Box::new(InputGradients { gradients: loss.backward(), input })
    };
    if pass == Pass::Both {
        return timed(move || backward(loss(), input.clone()));
    }
    Box::new(move || {
        let (loss, input) = (loss(), input.clone());
        Box::new(move || backward(loss, input)) as Timed<'static>
    })
}

fn layer(case: &Case, implementation: Implementation, device: &Device) -> Work<'static> {
    let inputs = Inputs { case, device };
    let mut config = VisionAttentionConfig::new(case.heads.dim(), case.heads.heads)
        .with_bias(false)
        .with_use_qk_norm(case.qk_norm());
    if let Implementation::Ours(implementation) = implementation {
        config = config.with_implementation(implementation);
    }
    let layer = config.init(device).map(&mut Cast(case.dtype.burn()));
    let x = inputs.random([case.layout.tokens(), case.heads.dim()]);
    let (segments, rope) = (case.layout.segments(), inputs.rope());
    let mask = inputs.mask(implementation);
    passes(case.pass, x.clone(), move || {
        vec![match &mask {
            None => layer.forward(x.clone(), &segments, Some(&rope)),
            Some(mask) => layer_by_burn(&layer, x.clone(), &rope, mask),
        }]
    })
}

/// The layer around Burn's own attention.
fn layer_by_burn(
    layer: &VisionAttention,
    x: Tensor<2>,
    rope: &RotaryPositionEmbedding,
    mask: &Tensor<4, Bool>,
) -> Tensor<2> {
    let [tokens, dim] = x.dims();
    let qkv = layer.qkv.forward(x).reshape([tokens, 3, layer.num_heads(), layer.head_dim()]);
    let [q, k, v] = [0, 1, 2].map(|part| qkv.clone().narrow(1, part, 1).squeeze_dim(1));
    let norms = layer.q_norm.as_ref().zip(layer.k_norm.as_ref());
    let norms = norms.map(|(q, k)| QkNorm {
        q_weight: q.weight.val(),
        k_weight: k.weight.val(),
        epsilon: q.epsilon,
    });
    let (q, k) = rope_qk_norm(q, k, Some(rope), norms.as_ref());
    layer.proj.forward(attention_by_burn([q, k, v], mask).reshape([tokens, dim]))
}

fn attention_alone(case: &Case, implementation: Implementation, device: &Device) -> Work<'static> {
    let inputs = Inputs { case, device };
    let tensors = [inputs.heads(), inputs.heads(), inputs.heads()];
    let mask = inputs.mask(implementation);
    let segments: Segments = case.layout.segments();
    passes(case.pass, tensors[0].clone(), move || {
        let [q, k, v] = tensors.clone();
        vec![match (&mask, implementation) {
            (None, Implementation::Ours(name)) => {
                let options = AttentionOptions::default();
                attention_varlen_by(name, q, k, v, &segments, &segments, &options)
            }
            (Some(mask), _) => attention_by_burn([q, k, v], mask),
            (None, Implementation::BurnMasked) => unreachable!("it has a mask"),
        }]
    })
}

/// Burn's attention of the whole batch; each tensor `[tokens, heads, head_dim]`.
fn attention_by_burn(tensors: [Tensor<3>; 3], mask: &Tensor<4, Bool>) -> Tensor<3> {
    let [q, k, v] = tensors.map(|tensor| tensor.swap_dims(0, 1).unsqueeze::<4>());
    let options = AttentionModuleOptions::default();
    attention(q, k, v, Some(mask.clone()), None, options).squeeze_dim::<3>(0).swap_dims(0, 1)
}

/// `[1, heads, tokens, tokens]`, true between tokens of different segments.
fn block_diagonal_mask(layout: &Layout, heads: usize, device: &Device) -> Tensor<4, Bool> {
    let lengths = layout.lengths().enumerate();
    let ids: Vec<i32> =
        lengths.flat_map(|(index, length)| std::iter::repeat_n(index as i32, length)).collect();
    let tokens = ids.len();
    let ids = Tensor::<1, Int>::from_data(ids.as_slice(), device);
    let rows = ids.clone().reshape([tokens, 1]).expand([tokens, tokens]);
    let columns = ids.reshape([1, tokens]).expand([tokens, tokens]);
    let mask: Tensor<2, Bool> = rows.not_equal(columns);
    mask.reshape([1, 1, tokens, tokens]).expand([1, heads, tokens, tokens])
}

fn rope_alone(case: &Case, candidate: Candidate, device: &Device) -> Work<'static> {
    let inputs = Inputs { case, device };
    let (q, k, rope) = (inputs.heads(), inputs.heads(), inputs.rope());
    let norm = || {
        let norm = VisionRmsNormConfig::new(case.heads.head_dim).init(device);
        norm.map(&mut Cast(case.dtype.burn()))
    };
    let norms = case.qk_norm().then(|| [norm(), norm()]);
    passes(case.pass, q.clone(), move || {
        let (q, k) = (q.clone(), k.clone());
        let (q, k) = match candidate {
            Candidate::Composed => {
                let [q_norm, k_norm] = [0, 1].map(|which| norms.as_ref().map(|pair| &pair[which]));
                (normed_and_rotated(q, q_norm, &rope), normed_and_rotated(k, k_norm, &rope))
            }
            _ => {
                let norms = norms.as_ref().map(|[q, k]| QkNorm {
                    q_weight: q.weight.val(),
                    k_weight: k.weight.val(),
                    epsilon: q.epsilon,
                });
                rope_qk_norm(q, k, Some(&rope), norms.as_ref())
            }
        };
        vec![q, k]
    })
}

fn normed_and_rotated(
    x: Tensor<3>,
    norm: Option<&VisionRmsNorm>,
    rope: &RotaryPositionEmbedding,
) -> Tensor<3> {
    let x = norm.map_or_else(|| x.clone(), |norm| norm.forward(x.clone()));
    apply_rotary_pos_emb_vision(x, rope.clone())
}

fn tower(case: &Case, implementation: AttentionImplementation, device: &Device) -> Work<'static> {
    let config = tower_config(implementation);
    let tower = DotsVisionEncoder::new(&config, device).expect("dots.ocr's config is valid");
    let tower = tower.map(&mut Cast(case.dtype.burn()));
    let inputs = Inputs { case, device };
    let pixels: Tensor<2> = inputs.random([case.layout.tokens(), config.pixel_row_len()]);
    let grids = case.layout.grids();
    passes(case.pass, pixels.clone(), move || {
        let features = tower.forward(pixels.clone(), &grids);
        vec![features.expect("the grids are those of the pixels")]
    })
}

/// Casts every weight, which stays one to learn.
struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
        parameter.map(|weight| {
            if weight.dtype() == self.0 {
                return weight;
            }
            let learns = weight.is_require_grad();
            weight.cast(self.0).detach().set_require_grad(learns)
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::arguments::{Dtype, Heads};
    use rstest::rstest;

    const EAGER: Candidate =
        Candidate::Attention(Implementation::Ours(AttentionImplementation::Eager));
    const BURN: Candidate = Candidate::Attention(Implementation::BurnMasked);

    fn case(operation: Operation, pass: Pass) -> Case {
        let (heads, dtype) = (Heads::new(2, 8), Dtype::F32);
        Case { operation, heads, layout: Layout::uniform(3, 4), dtype, pass }
    }

    #[rstest]
    #[case(Operation::Layer, EAGER)]
    #[case(Operation::Layer, BURN)]
    #[case(Operation::AttentionVarlen, EAGER)]
    #[case(Operation::AttentionVarlen, BURN)]
    #[case(Operation::RopeQkNorm, Candidate::RopeQkNorm)]
    #[case(Operation::RopeQkNorm, Candidate::Composed)]
    fn backward_passes_give_gradients(
        #[case] operation: Operation,
        #[case] candidate: Candidate,
        #[values(Pass::Both, Pass::Backward)] pass: Pass,
    ) {
        for dtype in [Dtype::F32, Dtype::F16] {
            let case = Case { dtype, ..case(operation, pass) };
            let work = prepare(&case, candidate, &Device::flex());
            // Twice at once, since every call has to record its own graph.
            let calls = [work(), work()];
            for call in calls {
                assert_eq!(call().check(), Ok(()));
            }
        }
    }

    #[test]
    fn what_cannot_run_is_said() {
        let device = Device::flex();
        let flash = AttentionImplementation::FlashAttention3;
        let flash = Candidate::Attention(Implementation::Ours(flash));
        assert!(obstacle(&case(Operation::Layer, Pass::Forward), flash, &device).is_some());
        let large =
            Case { layout: Layout::uniform(1, 1 << 15), ..case(Operation::Layer, Pass::Forward) };
        let reason = obstacle(&large, BURN, &device).unwrap();
        assert_eq!(reason, "its scores would take 8.0 GiB");
        assert_eq!(obstacle(&case(Operation::Layer, Pass::Both), BURN, &device), None);
        let odd = Case { layout: Layout::uniform(1, 9), ..case(Operation::Tower, Pass::Forward) };
        assert!(obstacle(&odd, EAGER, &device).unwrap().contains("odd side"));
    }
}
