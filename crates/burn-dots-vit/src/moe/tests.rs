#![allow(clippy::unwrap_used)]

use burn::tensor::{Distribution, Tolerance};
use proptest::prelude::*;
use rstest::rstest;

use super::*;

const NAN: f32 = f32::NAN;

#[rstest]
#[case(&[0.1, 0.9, 0.5, 0.7], &[1, 3])]
#[case(&[0.5, 0.5, 0.5, 0.5], &[0, 1])] // ties: lower index
#[case(&[0.2, 0.5, 0.2, 0.2], &[0, 1])]
#[case(&[NAN, 0.5, NAN, -0.2], &[1, 3])] // NaN loses
#[case(&[NAN, NAN, NAN, 0.1], &[0, 3])]
#[case(&[NAN, NAN, NAN, NAN], &[0, 1])]
#[case(&[f32::NEG_INFINITY, NAN, f32::INFINITY, -1.0], &[2, 3])]
fn selection(#[case] scores: &[f32], #[case] expected: &[i32]) {
    let mut selected = [0; 2];
    top_k(scores, &mut selected);
    assert_eq!(selected, expected);
}

proptest! {
    /// Every slot's row leads back to its token and lies in its expert's range.
    #[test]
    fn dispatch_is_a_permutation(selected in prop::collection::vec(0i32..5, 1..40)) {
        let k = 1;
        let plan = Dispatch::new(&selected, k, 5);
        for (slot, &expert) in selected.iter().enumerate() {
            let row = plan.rows[slot] as usize;
            prop_assert!(plan.ranges[expert as usize].contains(&row));
            prop_assert_eq!(plan.tokens[row] as usize, slot / k);
        }
        prop_assert_eq!(plan.ranges.last().unwrap().end, selected.len());
    }
}

fn config(change: impl FnOnce(&mut DotsVitConfig)) -> DotsVitConfig {
    let mut config = DotsVitConfig::dots_moe_vit();
    config.embed_dim = 16;
    config.moe_intermediate_size = 24;
    change(&mut config);
    config
}

fn layer(change: impl FnOnce(&mut DotsVitConfig), experts: usize) -> DotsMoeFfn {
    DotsMoeFfn::new(&config(change), experts, &Device::flex())
}

fn tokens(count: usize) -> Tensor<2> {
    Tensor::random([count, 16], Distribution::Normal(0.0, 1.0), &Device::flex())
}

/// Every expert on every token, weighted as the definition says.
fn by_definition(layer: &DotsMoeFfn, x: &Tensor<2>, renormalise: bool, scale: f64) -> Tensor<2> {
    let [count, dim] = x.dims();
    let probabilities: Vec<f32> = layer.probabilities(x.clone()).into_data().try_to_vec().unwrap();
    let bias: Vec<f32> = layer.router_bias.val().into_data().try_to_vec().unwrap();
    let outputs: Vec<Vec<f32>> = layer
        .experts
        .iter()
        .map(|expert| expert.forward(x.clone()).into_data().try_to_vec().unwrap())
        .collect();
    let (experts, k) = (layer.experts.len(), layer.experts_per_token);
    let mut out = vec![0f32; count * dim];
    for token in 0..count {
        let p = &probabilities[token * experts..][..experts];
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|&a, &b| (p[b] + bias[b]).total_cmp(&(p[a] + bias[a])));
        let total: f32 = order[..k].iter().map(|&e| p[e]).sum();
        for &expert in &order[..k] {
            let weight = if renormalise { p[expert] / total } else { p[expert] } * scale as f32;
            for column in 0..dim {
                out[token * dim + column] += weight * outputs[expert][token * dim + column];
            }
        }
    }
    Tensor::from_data(TensorData::new(out, [count, dim]), &x.device())
}

fn with_bias(mut layer: DotsMoeFfn) -> DotsMoeFfn {
    let experts = layer.experts.len();
    let bias: Vec<f32> = (0..experts).map(|e| 0.2 * (e as f32 * 2.3).sin()).collect();
    let bias = Tensor::from_data(TensorData::new(bias, [experts]), &Device::flex());
    layer.router_bias = Param::from_tensor(bias).set_require_grad(false);
    layer
}

#[rstest]
#[case::sigmoid(RouterScoring::Sigmoid, RouterSemantics::Serving, 2.0, 1.0)]
#[case::scale_cancels(RouterScoring::Sigmoid, RouterSemantics::Serving, 2.0, 3.0)]
#[case::softmax_is_normalised(RouterScoring::Softmax, RouterSemantics::Serving, 2.0, 1.0)]
#[case::one_expert(RouterScoring::Sigmoid, RouterSemantics::Serving, 1.0, 1.0)]
#[case::all_experts(RouterScoring::Sigmoid, RouterSemantics::Serving, 9.0, 1.0)]
#[case::transformers(RouterScoring::Sigmoid, RouterSemantics::Transformers, 2.0, 3.0)]
#[case::transformers_one(RouterScoring::Sigmoid, RouterSemantics::Transformers, 1.0, 3.0)]
fn matches_its_definition(
    #[case] scoring: RouterScoring,
    #[case] semantics: RouterSemantics,
    #[case] capacity: f64,
    #[case] scale: f64,
) {
    let layer = with_bias(layer(
        |config| {
            config.router_scoring_func = scoring;
            config.router_semantics = semantics;
            config.capacity_factor = capacity;
            config.router_scale = scale;
        },
        5,
    ));
    let x = tokens(33);
    // Either way the weights of a token's experts add up to 1, times the scale for transformers.
    let scale = if semantics == RouterSemantics::Transformers { scale } else { 1.0 };
    let expected = by_definition(&layer, &x, true, scale);
    layer
        .forward(x)
        .into_data()
        .assert_approx_eq::<f32>(&expected.into_data(), Tolerance::rel_abs(1e-4, 1e-5));
}

#[test]
fn one_selected_expert_is_returned_bare() {
    let layer = layer(|config| config.capacity_factor = 1.0, 1);
    let x = tokens(7);
    let expected = layer.experts[0].forward(x.clone()).into_data();
    layer.forward(x).into_data().assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-5, 1e-6));
}

/// A NaN token spoils itself only.
#[test]
fn nan_stays_in_its_row() {
    let layer = layer(|_| {}, 4);
    let x = tokens(6);
    let clean: Vec<f32> = layer.forward(x.clone()).into_data().try_to_vec().unwrap();
    let spoilt = x.slice_fill([2..3, 0..16], f32::NAN);
    let out: Vec<f32> = layer.forward(spoilt).into_data().try_to_vec().unwrap();
    for (index, (clean, out)) in clean.iter().zip(&out).enumerate() {
        if index / 16 == 2 {
            assert!(out.is_nan());
        } else {
            assert!((clean - out).abs() <= 1e-5 * clean.abs() + 1e-6);
        }
    }
}

/// In f16 the routing weights can all underflow; the token then gets nothing rather than NaN.
#[test]
fn vanishing_weights_give_zero_in_f16() {
    let mut layer = layer(|config| config.capacity_factor = 1.0, 2);
    let gate = Tensor::full([2, 16], -10.0, &Device::flex());
    layer.gate_weight = Param::from_tensor(gate);
    let half = |layer: DotsMoeFfn| {
        struct Half;
        impl burn::module::ModuleMapper for Half {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                param.map(|tensor| tensor.cast(DType::F16))
            }
        }
        layer.map(&mut Half)
    };
    let x = Tensor::<2>::ones([3, 16], (&Device::flex(), DType::F16));
    let out = half(layer).forward(x).cast(DType::F32).into_data().try_to_vec::<f32>().unwrap();
    assert!(out.iter().all(|value| *value == 0.0), "{out:?}");
}

/// Gradients reach gate and selected experts, not the bias and not experts nobody selected.
#[test]
fn gradients_flow_where_tokens_went() {
    let device = Device::flex().autodiff();
    let mut layer = DotsMoeFfn::new(&config(|_| {}), 4, &device);
    let bias = Tensor::<1>::from_data([9.0, -9.0, 9.0, -9.0], &device);
    layer.router_bias = Param::from_tensor(bias).set_require_grad(false);
    let x = Tensor::<2>::random([5, 16], Distribution::Default, &device).require_grad();
    let grads = layer.forward(x.clone()).sum().backward();
    assert!(x.grad(&grads).is_some());
    let gate = layer.gate_weight.val().grad(&grads).unwrap();
    let rows: Vec<f32> = gate.abs().sum_dim(1).into_data().try_to_vec().unwrap();
    assert!(rows[0] > 0.0 && rows[2] > 0.0 && rows[1] == 0.0 && rows[3] == 0.0, "{rows:?}");
    assert!(layer.router_bias.val().grad(&grads).is_none());
    assert!(layer.experts[0].fc1.weight.val().grad(&grads).is_some());
    assert!(layer.experts[1].fc1.weight.val().grad(&grads).is_none());
}
