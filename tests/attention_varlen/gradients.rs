//! Gradients: every kernel against the composed operations in f64.

use burn::tensor::{DType, Device, Distribution, Tensor, TensorData};
use burn_vision_attention::{
    AttentionImplementation, AttentionOptions, KernelRequirements, QkNorm, RotaryPositionEmbedding,
    Segments, VisionRotaryEmbedding, Window, attention_varlen_by, attention_varlen_with_lse,
    qkv_attention, resolve_attn_implementation, rope_qk_norm,
};
use proptest::prelude::*;
use rstest::rstest;
use vision_attention_tests::devices::NamedDevice;
use vision_attention_tests::reference::Heads;

use crate::problem::{Problem, devices, problems};

const KERNEL: AttentionImplementation = AttentionImplementation::FlashAttention2;
const ORACLE: AttentionImplementation = AttentionImplementation::EagerV2;

/// The devices whose kernel has a backward pass, recording gradients.
fn training_devices(dtype: DType) -> Vec<(&'static NamedDevice, Device)> {
    let requirements = KernelRequirements { dtype, head_dim: 16, value_dim: 16 };
    let training = devices().iter().map(|named| (named, named.device.clone().autodiff()));
    let devices: Vec<_> = training
        .filter(|(named, device)| {
            let fallback = AttentionImplementation::Eager;
            let resolution = resolve_attn_implementation(KERNEL, device, &requirements, fallback);
            named.device.supports_dtype(dtype) && resolution.fallbacks.is_empty()
        })
        .collect();
    assert!(devices.iter().any(|(named, _)| named.name == "flex"), "flex trains by its kernel");
    devices
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

/// The largest distance, relative to the largest expected value where that is above one.
fn distance(ours: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(ours.len(), expected.len());
    let scale = expected.iter().fold(1.0f64, |scale, value| scale.max(value.abs()));
    ours.iter().zip(expected).fold(0.0, |worst: f64, (ours, expected)| {
        let distance = (ours - expected).abs() / scale;
        // A NaN counts as infinitely far, which `max` would drop.
        if distance.is_nan() { f64::INFINITY } else { worst.max(distance) }
    })
}

/// Gradients of q, k and v of `sum(out * cotangent) + sum(lse * cotangent)`, the latter where asked for
/// and over the queries that see a key.
fn gradients(
    problem: &Problem,
    device: &Device,
    dtype: DType,
    implementation: AttentionImplementation,
    through_lse: bool,
) -> [Vec<f64>; 3] {
    let tensors = problem.tensors(device, dtype).map(Tensor::require_grad);
    let [q, k, v] = tensors.clone();
    let Problem { segments_q, segments_k, options, .. } = problem;
    let cotangent = Heads::random(91, [problem.q.tokens, problem.q.heads, problem.v.dim]);
    let cotangent = cotangent.to_tensor(device, dtype);
    let loss = if through_lse {
        let (out, lse) = attention_varlen_with_lse(q, k, v, segments_q, segments_k, options);
        let weight = Heads::random(92, [problem.q.tokens, problem.q.heads, 1]);
        let weight = weight.to_tensor(device, lse.dtype()).squeeze_dim::<2>(2);
        let unseeing = lse.clone().detach().equal_elem(f64::NEG_INFINITY);
        (out * cotangent).sum() + (lse * weight).mask_fill(unseeing, 0.0).sum()
    } else {
        let out = attention_varlen_by(implementation, q, k, v, segments_q, segments_k, options);
        (out * cotangent).sum()
    };
    // Where no query sees a key, the composed output is a constant.
    let gradients = loss.is_tracked().then(|| loss.backward());
    tensors.map(|tensor| {
        let gradient = gradients.as_ref().and_then(|gradients| tensor.grad(gradients));
        values(gradient.unwrap_or_else(|| Tensor::zeros(tensor.dims(), device)))
    })
}

fn flex_f64() -> Device {
    Device::flex().autodiff()
}

fn kernel_has_the_gradients_of_the_definition(
    problem: &Problem,
    (named, device): &(&NamedDevice, Device),
) -> Result<(), TestCaseError> {
    let expected = gradients(problem, &flex_f64(), DType::F64, ORACLE, false);
    let ours = gradients(problem, device, DType::F32, KERNEL, false);
    for (name, (ours, expected)) in ["q", "k", "v"].iter().zip(ours.iter().zip(&expected)) {
        let distance = distance(ours, expected);
        prop_assert!(distance < 2e-5, "{named}: gradient of {name} is off by {distance}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_cpu_kernel_has_the_gradients_of_the_definition(problem in problems()) {
        prop_assume!(problem.q.tokens > 0 && problem.k.tokens > 0);
        for device in training_devices(DType::F32).iter().filter(|(named, _)| named.name == "flex") {
            kernel_has_the_gradients_of_the_definition(&problem, device)?;
        }
    }
}

proptest! {
    // A software GPU compiles the three kernels of each new combination of options for seconds.
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn other_kernels_have_the_gradients_of_the_definition(problem in problems()) {
        prop_assume!(problem.q.tokens > 0 && problem.k.tokens > 0);
        for device in training_devices(DType::F32).iter().filter(|(named, _)| named.name != "flex") {
            kernel_has_the_gradients_of_the_definition(&problem, device)?;
        }
    }
}

#[rstest]
#[case::plain(AttentionOptions::default())]
#[case::softcap(AttentionOptions { softcap: Some(1.5), ..Default::default() })]
#[case::causal(AttentionOptions { is_causal: true, ..Default::default() })]
#[case::window(AttentionOptions { window: Window { left: Some(3), right: Some(1) }, ..Default::default() })]
fn gradients_flow_through_lse(#[case] options: AttentionOptions) {
    let problem = Problem::new(3, &[(7, 7), (0, 2), (4, 9), (3, 0)], (4, 2), (16, 24), options);
    let expected = lse_gradients(&problem);
    for (named, device) in training_devices(DType::F32) {
        let ours = gradients(&problem, &device, DType::F32, KERNEL, true);
        for (ours, expected) in ours.iter().zip(&expected) {
            let distance = distance(ours, expected);
            assert!(distance < 2e-5, "{named}: {distance}");
        }
    }
}

/// The gradients of [`gradients`] through lse by central differences of the loss in f64 loops.
fn lse_gradients(problem: &Problem) -> [Vec<f64>; 3] {
    let cotangent = Heads::random(91, [problem.q.tokens, problem.q.heads, problem.v.dim]);
    let weight = Heads::random(92, [problem.q.tokens, problem.q.heads, 1]);
    let loss = |problem: &Problem| -> f64 {
        let (out, lse) = problem.reference();
        let out: f64 = out.values.iter().zip(&cotangent.values).map(|(x, c)| x * c).sum();
        let lse: f64 = (lse.iter().zip(&weight.values))
            .filter(|(lse, _)| lse.is_finite())
            .map(|(lse, weight)| lse * weight)
            .sum();
        out + lse
    };
    const STEP: f64 = 1e-5;
    let tensors: [fn(&mut Problem) -> &mut Vec<f64>; 3] = [
        |problem| &mut problem.q.values,
        |problem| &mut problem.k.values,
        |problem| &mut problem.v.values,
    ];
    tensors.map(|of| {
        let mut moved = problem.clone();
        (0..of(&mut moved).len())
            .map(|index| {
                let mut at = |offset: f64| {
                    of(&mut moved)[index] += offset;
                    let loss = loss(&moved);
                    of(&mut moved)[index] -= offset;
                    loss
                };
                (at(STEP) - at(-STEP)) / (2.0 * STEP)
            })
            .collect()
    })
}

/// A layer's projection with what the layer does to it.
struct Projection {
    qkv: Tensor<4>,
    norms: Option<QkNorm>,
    rope: Option<RotaryPositionEmbedding>,
    segments: Segments,
}

impl Projection {
    fn new(device: &Device, dtype: DType, head_dim: usize, normed: bool, rotated: bool) -> Self {
        let segments = Segments::from_lengths([5, 0, 11, 1]).expect("fits");
        let (tokens, heads) = (segments.total(), 3);
        let qkv = Heads::random(17, [tokens, 3 * heads, head_dim]).to_tensor(device, dtype);
        let weight = |seed| {
            let weight = Heads::random(seed, [1, 1, head_dim]).to_tensor(device, dtype);
            (weight.reshape([head_dim]) + 1.0).require_grad()
        };
        let positions: Vec<_> = (0..tokens as u32).map(|token| [token / 4, token % 4]).collect();
        let rope = VisionRotaryEmbedding::new(head_dim / 2);
        Self {
            qkv: qkv.reshape([tokens, 3, heads, head_dim]).require_grad(),
            norms: normed.then(|| QkNorm {
                q_weight: weight(5),
                k_weight: weight(6),
                epsilon: 1e-5,
            }),
            rope: rotated.then(|| rope.prepare(&positions, &device.clone().without_autodiff())),
            segments,
        }
    }

    /// Gradients of the projection and of both weights.
    fn gradients(&self, implementation: AttentionImplementation) -> Vec<Vec<f64>> {
        let (rope, norms) = (self.rope.as_ref(), self.norms.as_ref());
        let options = AttentionOptions::default();
        let qkv = self.qkv.clone();
        let out = qkv_attention(implementation, qkv, rope, norms, &self.segments, &options);
        let [tokens, heads, head_dim] = out.dims();
        let device = out.device();
        let cotangent = Heads::random(23, [tokens, heads, head_dim]);
        let loss = (out.clone() * cotangent.to_tensor(&device, out.dtype())).sum();
        let gradients = loss.backward();
        let mut found = vec![values(self.qkv.grad(&gradients).expect("qkv learns"))];
        if let Some(norms) = &self.norms {
            for weight in [&norms.q_weight, &norms.k_weight] {
                found.push(values(weight.grad(&gradients).expect("weights learn")));
            }
        }
        found
    }
}

#[rstest]
fn a_projection_has_the_gradients_of_its_parts(
    #[values(24, 72)] head_dim: usize,
    #[values(true, false)] normed: bool,
    #[values(true, false)] rotated: bool,
    #[values(true, false)] balanced: bool,
) {
    let oracle = Projection::new(&flex_f64(), DType::F64, head_dim, normed, rotated);
    let expected = oracle.gradients(ORACLE);
    for (named, device) in training_devices(DType::F32) {
        let device = if balanced { device.gradient_checkpointing() } else { device };
        let projection = Projection::new(&device, DType::F32, head_dim, normed, rotated);
        let ours = projection.gradients(KERNEL);
        assert_eq!(ours.len(), expected.len());
        for (ours, expected) in ours.iter().zip(&expected) {
            let distance = distance(ours, expected);
            assert!(distance < 2e-5, "{named}: {distance}");
        }
    }
}

/// The norm and rotation alone, each output with a gradient of its own.
#[rstest]
fn norm_and_rotation_have_the_gradients_of_the_definition(
    #[values(true, false)] normed: bool,
    #[values(true, false)] rotated: bool,
    #[values(true, false)] balanced: bool,
) {
    if !normed && !rotated {
        return;
    }
    let run = |device: &Device, dtype: DType| -> Vec<Vec<f64>> {
        let inputs = Projection::new(device, dtype, 24, normed, rotated);
        let part = |index| inputs.qkv.clone().narrow(1, index, 1).squeeze_dim::<3>(1);
        let (q, k) = rope_qk_norm(part(0), part(1), inputs.rope.as_ref(), inputs.norms.as_ref());
        let [tokens, heads, head_dim] = q.dims();
        let weight = |seed| Heads::random(seed, [tokens, heads, head_dim]).to_tensor(device, dtype);
        // Twice the output of q: its incoming gradient is a sum of two.
        let loss = (q.clone() * weight(31)).sum() + (q * weight(32)).sum() + (k * weight(33)).sum();
        let gradients = loss.backward();
        let mut found = vec![values(inputs.qkv.grad(&gradients).expect("qkv learns"))];
        if let Some(norms) = &inputs.norms {
            for weight in [&norms.q_weight, &norms.k_weight] {
                found.push(values(weight.grad(&gradients).expect("weights learn")));
            }
        }
        found
    };
    let expected = run(&flex_f64(), DType::F64);
    for (named, device) in training_devices(DType::F32) {
        let device = if balanced { device.gradient_checkpointing() } else { device };
        for (ours, expected) in run(&device, DType::F32).iter().zip(&expected) {
            let distance = distance(ours, expected);
            assert!(distance < 2e-5, "{named}: {distance}");
        }
    }
}

/// A sum hands its gradient down as one number spread over all places.
#[test]
fn spread_gradients_are_read_in_place() {
    let problem = Problem::new(8, &[(6, 6), (3, 3)], (2, 1), (16, 16), Default::default());
    let run = |device: &Device, dtype, implementation| -> Vec<f64> {
        let [q, k, v] = problem.tensors(device, dtype).map(Tensor::require_grad);
        let Problem { segments_q, segments_k, options, .. } = &problem;
        let (query, value) = (q.clone(), v.clone());
        let out =
            attention_varlen_by(implementation, query, k, value, segments_q, segments_k, options);
        let gradients = out.sum().backward();
        let mut found = values(q.grad(&gradients).expect("q learns"));
        found.extend(values(v.grad(&gradients).expect("v learns")));
        found
    };
    let expected = run(&flex_f64(), DType::F64, ORACLE);
    for (named, device) in training_devices(DType::F32) {
        let distance = distance(&run(&device, DType::F32, KERNEL), &expected);
        assert!(distance < 2e-5, "{named}: {distance}");
    }
}

/// Only what is asked for is computed, and it is the same as with the rest.
#[rstest]
#[case::queries([true, false, false])]
#[case::keys([false, true, false])]
#[case::values([false, false, true])]
fn frozen_inputs_change_no_other_gradient(#[case] learns: [bool; 3]) {
    let problem = Problem::new(9, &[(6, 4), (3, 5)], (4, 2), (24, 16), Default::default());
    for (named, device) in training_devices(DType::F32) {
        let run = |learns: [bool; 3]| -> Vec<Option<Vec<f64>>> {
            let mut tensors = problem.tensors(&device, DType::F32);
            for (tensor, learns) in tensors.iter_mut().zip(learns) {
                *tensor = tensor.clone().set_require_grad(learns);
            }
            let [q, k, v] = tensors.clone();
            let Problem { segments_q, segments_k, options, .. } = &problem;
            let out = attention_varlen_by(KERNEL, q, k, v, segments_q, segments_k, options);
            let cotangent = Heads::random(4, [9, 4, 16]).to_tensor(&device, DType::F32);
            let gradients = (out * cotangent).sum().backward();
            tensors.iter().map(|tensor| tensor.grad(&gradients).map(values)).collect()
        };
        for (index, (all, alone)) in run([true; 3]).into_iter().zip(run(learns)).enumerate() {
            assert_eq!(alone, all.filter(|_| learns[index]), "{named}: input {index}");
        }
    }
}

/// Equal inputs give equal bits: no atomics, no order that depends on scheduling.
#[test]
fn gradients_repeat_bit_for_bit() {
    let problem = Problem::new(11, &[(40, 40), (7, 33)], (4, 2), (64, 64), Default::default());
    for (named, device) in training_devices(DType::F32) {
        let first = gradients(&problem, &device, DType::F32, KERNEL, false);
        for _ in 0..4 {
            assert_eq!(gradients(&problem, &device, DType::F32, KERNEL, false), first, "{named}");
        }
    }
}

/// Low precision follows flash-attention's rule: our error against f64 is at most three times that of
/// the composed operations in the same dtype, which round at each step.
#[test]
fn half_precision_gradients_are_as_good_as_composed_ones() {
    let problem = Problem::new(12, &[(33, 33), (20, 50)], (4, 2), (64, 64), Default::default());
    let exact = gradients(&problem, &flex_f64(), DType::F64, ORACLE, false);
    for dtype in [DType::F16, DType::BF16] {
        let composed =
            gradients(&problem, &flex_f64(), dtype, AttentionImplementation::Sdpa, false);
        for (named, device) in training_devices(dtype) {
            let ours = gradients(&problem, &device, dtype, KERNEL, false);
            for ((ours, composed), exact) in ours.iter().zip(&composed).zip(&exact) {
                let (ours, composed) = (distance(ours, exact), distance(composed, exact));
                assert!(ours <= 3.0 * composed + 1e-4, "{named} {dtype:?}: {ours}, {composed}");
            }
        }
    }
}

/// A segment without keys or queries has no gradient, exactly.
#[test]
fn what_nobody_sees_has_no_gradient() {
    let problem = Problem::new(13, &[(4, 0), (0, 5), (3, 3)], (2, 2), (16, 16), Default::default());
    for (named, device) in training_devices(DType::F32) {
        let [d_q, d_k, d_v] = gradients(&problem, &device, DType::F32, KERNEL, false);
        let width = 2 * 16;
        assert!(d_q[..4 * width].iter().all(|&value| value == 0.0), "{named}");
        for gradient in [d_k, d_v] {
            assert!(gradient[..5 * width].iter().all(|&value| value == 0.0), "{named}");
            assert!(gradient[5 * width..].iter().any(|&value| value != 0.0), "{named}");
        }
    }
}

/// The kernels have no gradient for the tables.
#[test]
fn tables_that_learn_take_the_composed_way() {
    let device = Device::flex().autodiff();
    let q = Tensor::<3>::random([4, 2, 16], Distribution::Default, &device);
    let table = |value: f32| {
        Tensor::<2>::from_data(TensorData::new(vec![value; 32], [4, 8]), &device).require_grad()
    };
    let rope = RotaryPositionEmbedding { cos: table(0.8), sin: table(0.6) };
    let (q, _) = rope_qk_norm(q.clone(), q, Some(&rope), None);
    let gradients = q.sum().backward();
    assert!(rope.cos.grad(&gradients).is_some());
}
