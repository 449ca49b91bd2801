//! The mixture-of-experts feed-forward layer.

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use rayon::prelude::*;

use crate::config::{DotsVitConfig, RouterScoring, RouterSemantics};
use crate::mlp::DotsSwiGluFfn;

/// Smallest positive f16. The serving reference adds 1e-9 to its last denominator in the tower's
/// dtype, which f16 rounds away; this keeps a token whose weights all underflowed at 0 rather
/// than 0 / 0.
const F16_TINY: f64 = 5.960_464_477_539_063e-8;

/// A router and its experts.
///
/// Every token visits its `k` best experts and no others; there is no capacity limit and no shared
/// expert. The router works in f32 whatever the tower's dtype:
///
/// 1. `p = sigmoid(x gate_weight^T)` (or softmax);
/// 2. the `k` experts with the largest `p + router_bias` are selected. Equal scores go to the
///    lower expert (PyTorch leaves that open), a NaN score loses to every number;
/// 3. their `p`, without the bias, become the weights according to [`RouterSemantics`].
///
/// Selection happens on the host: `tokens x experts` f32 scores are read back, and each expert
/// then computes its own tokens only. `router_bias` decides selections alone, so it has no
/// gradient; `gate_weight` gets its gradient through the weights.
#[derive(Module, Debug)]
pub struct DotsMoeFfn {
    /// Router, `[num_experts, dim]`.
    pub gate_weight: Param<Tensor<2>>,
    /// Added to the probabilities for selection, f32 `[num_experts]`; a constant.
    pub router_bias: Param<Tensor<1>>,
    /// One SwiGLU each.
    pub experts: Vec<DotsSwiGluFfn>,
    experts_per_token: usize,
    router_scale: f64,
    #[module(skip)]
    scoring: RouterScoring,
    #[module(skip)]
    semantics: RouterSemantics,
}

impl DotsMoeFfn {
    /// Fresh weights for a block of `num_experts` experts of a validated `config`.
    pub(crate) fn new(config: &DotsVitConfig, num_experts: usize, device: &Device) -> Self {
        let (dim, hidden) = (config.embed_dim, config.moe_intermediate_size);
        // PyTorch's default for linear weights, which the reference uses for the router too.
        let gate = Initializer::KaimingUniform { gain: 1.0 / 3f64.sqrt(), fan_out_only: false };
        Self {
            gate_weight: gate.init_with([num_experts, dim], Some(dim), Some(num_experts), device),
            router_bias: Param::from_tensor(Tensor::zeros([num_experts], (device, DType::F32)))
                .set_require_grad(false),
            experts: (0..num_experts)
                .map(|_| DotsSwiGluFfn::new(dim, hidden, config.use_bias, device))
                .collect(),
            experts_per_token: config.experts_per_token(num_experts),
            router_scale: config.router_scale,
            scoring: config.router_scoring_func,
            semantics: config.router_semantics,
        }
    }

    /// # Shapes
    ///
    /// - x: `[tokens, dim]`
    /// - output: `[tokens, dim]`, in the dtype of `x`
    ///
    /// # Panics
    ///
    /// When `x` has another width, or the device fails while the scores are read back.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let (tokens, device, dtype) = (x.dims()[0], x.device(), x.dtype());
        let k = self.experts_per_token;
        if tokens == 0 {
            return x;
        }
        let probabilities = self.probabilities(x.clone());
        let selected = self.select(&probabilities);
        let plan = Dispatch::new(&selected, k, self.experts.len());

        let slots = |values: Vec<i32>| -> Tensor<1, Int> {
            let count = values.len();
            Tensor::from_data(TensorData::new(values, [count]), &device)
        };
        let chosen = slots(selected).reshape([tokens, k]);
        let weights = self.weights(probabilities.gather(1, chosen)).cast(dtype);

        let visiting = slots(plan.tokens);
        let mut outputs = Vec::with_capacity(self.experts.len());
        for (expert, range) in self.experts.iter().zip(plan.ranges) {
            if range.is_empty() {
                continue;
            }
            let tokens = visiting.clone().narrow(0, range.start, range.len());
            outputs.push(expert.forward(x.clone().select(0, tokens)));
        }
        let outputs = Tensor::cat(outputs, 0);

        // A token's slots are in ascending order of expert, so this adds in the reference's order,
        // rounding to the tower's dtype at each step.
        let combined = (0..k)
            .map(|slot| {
                let rows = plan.rows.iter().skip(slot).step_by(k).copied().collect();
                outputs.clone().select(0, slots(rows)) * weights.clone().narrow(1, slot, 1)
            })
            .reduce(|sum, contribution| sum + contribution)
            .expect("validated configs select at least one expert");
        match self.semantics {
            RouterSemantics::Serving => {
                let total = weights.sum_dim(1) + 1e-9;
                let total = if dtype == DType::F16 { total.clamp_min(F16_TINY) } else { total };
                combined / total
            }
            RouterSemantics::Transformers => combined,
        }
    }

    /// `[tokens, num_experts]`, f32.
    fn probabilities(&self, x: Tensor<2>) -> Tensor<2> {
        let gate = self.gate_weight.val().cast(DType::F32).transpose();
        let logits = x.cast(DType::F32).matmul(gate);
        match self.scoring {
            RouterScoring::Sigmoid => sigmoid(logits),
            RouterScoring::Softmax => softmax(logits, 1),
        }
    }

    /// The selected experts of every token, `tokens * k`, ascending within a token.
    fn select(&self, probabilities: &Tensor<2>) -> Vec<i32> {
        let bias = self.router_bias.val().cast(DType::F32).detach();
        let scores: Vec<f32> = (probabilities.clone().detach() + bias.unsqueeze())
            .into_data()
            .try_to_vec()
            .expect("router scores are f32");
        let (experts, k) = (self.experts.len(), self.experts_per_token);
        let mut selected = vec![0; scores.len() / experts * k];
        selected
            .par_chunks_exact_mut(k)
            .zip(scores.par_chunks_exact(experts))
            .for_each(|(selected, scores)| top_k(scores, selected));
        selected
    }

    /// Probabilities of the selected experts, f32 `[tokens, k]`, to weights.
    fn weights(&self, probabilities: Tensor<2>) -> Tensor<2> {
        let epsilon = match self.semantics {
            RouterSemantics::Transformers => Some(1e-20),
            RouterSemantics::Serving => (self.scoring == RouterScoring::Sigmoid
                && self.experts_per_token > 1)
                .then_some(1e-9),
        };
        let weights = match epsilon {
            Some(epsilon) => {
                let total = probabilities.clone().sum_dim(1) + epsilon;
                probabilities / total
            }
            None => probabilities,
        };
        weights * self.router_scale
    }
}

/// Writes the indices of the largest `selected.len()` scores in ascending order of index. Ties go
/// to the lower index; NaN counts as less than every number.
fn top_k(scores: &[f32], selected: &mut [i32]) {
    for slot in 0..selected.len() {
        let (taken, rest) = selected.split_at_mut(slot);
        let better = |challenger: f32, best: f32| {
            challenger > best || (best.is_nan() && !challenger.is_nan())
        };
        let best = (0..scores.len())
            .filter(|&index| !taken.contains(&(index as i32)))
            .reduce(|best, index| if better(scores[index], scores[best]) { index } else { best })
            .expect("at most as many experts are selected as there are");
        rest[0] = best as i32;
    }
    selected.sort_unstable();
}

/// Which tokens each expert sees, and where their results land once all experts' results are
/// concatenated.
struct Dispatch {
    /// Visited tokens, expert after expert.
    tokens: Vec<i32>,
    /// Each expert's part of `tokens`.
    ranges: Vec<std::ops::Range<usize>>,
    /// For slot `i` of `tokens x k`, its position in `tokens`.
    rows: Vec<i32>,
}

impl Dispatch {
    fn new(selected: &[i32], k: usize, experts: usize) -> Self {
        let mut counts = vec![0usize; experts];
        for &expert in selected {
            counts[expert as usize] += 1;
        }
        let mut end = 0;
        let ranges: Vec<_> = counts
            .iter()
            .map(|count| {
                let start = end;
                end += count;
                start..end
            })
            .collect();
        let mut next: Vec<usize> = ranges.iter().map(|range| range.start).collect();
        let mut tokens = vec![0; selected.len()];
        let rows = selected
            .iter()
            .enumerate()
            .map(|(slot, &expert)| {
                let row = next[expert as usize];
                next[expert as usize] += 1;
                tokens[row] = (slot / k) as i32;
                row as i32
            })
            .collect();
        Self { tokens, ranges, rows }
    }
}

#[cfg(test)]
mod tests;
