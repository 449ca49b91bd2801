//! Laws of packed attention, for every implementation on every device.

mod gradients;
mod problem;

use burn::tensor::{DType, Tensor};
use burn_vision_attention::{
    AttentionImplementation, AttentionOptions, KernelRequirements, RotaryPositionEmbedding,
    Segments, VisionRotaryEmbedding, Window, attention_varlen_with_lse,
    resolve_attn_implementation, rope_qk_norm,
};
use problem::{Problem, devices, problems, self_attention};
use proptest::prelude::*;
use vision_attention_tests::devices::{NamedDevice, device_or_skip};
use vision_attention_tests::reference::Heads;

/// What runs on a device without a fallback; on GPUs the kernel alone, since the others are the same
/// tensor operations everywhere and a software GPU compiles each of them for seconds.
fn implementations(device: &NamedDevice) -> Vec<AttentionImplementation> {
    let requirements = KernelRequirements { dtype: DType::F32, head_dim: 16, value_dim: 16 };
    let candidates = match device.name {
        "wgpu" => vec![AttentionImplementation::FlashAttention2],
        _ => AttentionImplementation::ALL.to_vec(),
    };
    let runs = |implementation: &AttentionImplementation| {
        let fallback = AttentionImplementation::Eager;
        let device = &device.device;
        resolve_attn_implementation(*implementation, device, &requirements, fallback)
            .fallbacks
            .is_empty()
    };
    let implementations: Vec<_> = candidates.into_iter().filter(runs).collect();
    assert!(!implementations.is_empty(), "nothing runs on {device}");
    implementations
}

fn close(ours: &[f64], expected: &[f64], tolerance: f64) -> Result<(), TestCaseError> {
    prop_assert_eq!(ours.len(), expected.len());
    for (index, (ours, expected)) in ours.iter().zip(expected).enumerate() {
        let same = ours == expected || (ours - expected).abs() <= tolerance;
        prop_assert!(same, "at {index}: {ours}, expected {expected}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_implementation_is_the_definition(problem in problems()) {
        let (expected, expected_lse) = problem.reference();
        for device in devices() {
            for implementation in implementations(device) {
                close(&problem.run(&device.device, implementation).values, &expected.values, 1e-5)?;
            }
            let [q, k, v] = problem.tensors(&device.device, DType::F32);
            let Problem { segments_q, segments_k, options, .. } = &problem;
            let (out, lse) = attention_varlen_with_lse(q, k, v, segments_q, segments_k, options);
            prop_assert_eq!(lse.dtype(), DType::F32);
            close(&Heads::from_tensor(out).values, &expected.values, 1e-5)?;
            let lse: Vec<f64> = lse.into_data().iter::<f64>().collect();
            close(&lse, &expected_lse, 1e-5)?;
        }
    }

    #[test]
    fn packing_equals_separate_runs(problem in problems()) {
        for device in devices() {
            for implementation in implementations(device) {
                let packed = problem.run(&device.device, implementation);
                let segments = problem.segments_q.len();
                let alone = |index| problem.reordered(&[index]).run(&device.device, implementation);
                let alone: Vec<_> = (0..segments).map(alone).collect();
                close(&packed.values, &Heads::concat(&alone).values, 1e-6)?;
            }
        }
    }

    #[test]
    fn permuting_segments_permutes_outputs(
        (problem, order) in problems().prop_flat_map(|problem| {
            let order: Vec<usize> = (0..problem.segments_q.len()).collect();
            (Just(problem), Just(order).prop_shuffle())
        }),
    ) {
        for device in devices() {
            for implementation in implementations(device) {
                let out = problem.run(&device.device, implementation);
                let ranges: Vec<_> = problem.segments_q.ranges().collect();
                let permuted: Vec<_> = order.iter().map(|&index| out.tokens(ranges[index].clone())).collect();
                let ours = problem.reordered(&order).run(&device.device, implementation);
                close(&ours.values, &Heads::concat(&permuted).values, 1e-6)?;
            }
        }
    }

    #[test]
    fn rows_of_softmax_sum_to_one(problem in problems()) {
        let mut problem = problem;
        problem.v.values.fill(1.0);
        let (_, lse) = problem.reference();
        for device in devices() {
            for implementation in implementations(device) {
                let out = problem.run(&device.device, implementation);
                for (row, lse) in out.values.chunks(problem.v.dim).zip(&lse) {
                    let expected = if lse.is_finite() { 1.0 } else { 0.0 };
                    close(row, &vec![expected; row.len()], 1e-5)?;
                }
            }
        }
    }

    #[test]
    fn causal_rows_ignore_the_future(problem in self_attention(), cut in 0.0f64..1.0) {
        let mut problem = problem;
        problem.options.is_causal = true;
        let mut changed = problem.clone();
        let width = changed.k.heads * changed.k.dim;
        let mut kept = Vec::new();
        for range in problem.segments_q.ranges() {
            let split = range.start + (range.len() as f64 * cut) as usize;
            kept.extend(range.start..split);
            for heads in [&mut changed.k, &mut changed.v] {
                heads.values[split * width..range.end * width].iter_mut().for_each(|value| *value += 0.5);
            }
        }
        for device in devices() {
            for implementation in implementations(device) {
                let before = problem.run(&device.device, implementation);
                let after = changed.run(&device.device, implementation);
                for &token in &kept {
                    for head in 0..before.heads {
                        close(after.row(token, head), before.row(token, head), 1e-6)?;
                    }
                }
            }
        }
    }

    #[test]
    fn an_empty_segment_changes_nothing(problem in problems(), place in any::<prop::sample::Index>()) {
        let place = place.index(problem.segments_q.len() + 1);
        let insert = |segments: &Segments| {
            let mut lengths: Vec<_> = segments.lengths().collect();
            lengths.insert(place, 0);
            Segments::from_lengths(lengths).expect("fits")
        };
        let with_empty = Problem {
            segments_q: insert(&problem.segments_q),
            segments_k: insert(&problem.segments_k),
            ..problem.clone()
        };
        for device in devices() {
            for implementation in implementations(device) {
                let without = problem.run(&device.device, implementation);
                let with = with_empty.run(&device.device, implementation);
                close(&with.values, &without.values, 0.0)?;
            }
        }
    }

    #[test]
    fn nan_stays_in_its_segment(problem in self_attention(), which in 0usize..3, place in any::<prop::sample::Index>()) {
        prop_assume!(problem.q.tokens > 0);
        let token = place.index(problem.q.tokens);
        let mut poisoned = problem.clone();
        let heads = [&mut poisoned.q, &mut poisoned.k, &mut poisoned.v];
        let width = problem.q.heads * problem.q.dim;
        for (index, heads) in heads.into_iter().enumerate() {
            if index == which {
                heads.values[token * width..(token + 1) * width].fill(f64::NAN);
            }
        }
        // Every query of the segment sees its own place, so the poison shows at least there.
        poisoned.options.window = Window::default();
        let mut clean = problem;
        clean.options.window = Window::default();
        let segment = clean.segments_q.ranges().find(|range| range.contains(&token)).expect("covered");
        for device in devices() {
            for implementation in implementations(device) {
                let before = clean.run(&device.device, implementation);
                let after = poisoned.run(&device.device, implementation);
                for row in (0..before.tokens).filter(|row| !segment.contains(row)) {
                    for head in 0..before.heads {
                        close(after.row(row, head), before.row(row, head), 0.0)?;
                    }
                }
                prop_assert!(
                    (0..before.heads).all(|head| after.row(token, head).iter().all(|value| value.is_nan())),
                    "{implementation} on {device} lost the NaN"
                );
            }
        }
    }
}

/// Burn's fusion never compares the shapes it was promised with those that come.
#[test]
fn kernels_give_the_shapes_and_dtypes_they_promise() {
    let Some(device) = device_or_skip("wgpu") else { return };
    let options = AttentionOptions::default();
    let problem = Problem::new(7, &[(5, 3), (0, 2), (2, 0)], (4, 2), (24, 40), options);
    let Problem { segments_q, segments_k, .. } = &problem;
    for dtype in [DType::F32, DType::F16] {
        let [q, k, v] = problem.tensors(&device.device, dtype);
        let rope = VisionRotaryEmbedding::new(12).prepare(&[[1, 2]; 7], &device.device);
        let keys = k.clone().narrow(0, 0, 5);
        let queries = q.clone().narrow(0, 0, 5);
        let first = RotaryPositionEmbedding {
            cos: rope.cos.narrow(0, 0, 5),
            sin: rope.sin.narrow(0, 0, 5),
        };
        let (queries, keys) = rope_qk_norm(queries, keys, Some(&first), None);
        let (out, lse) = attention_varlen_with_lse(q, k, v, segments_q, segments_k, &options);
        promised(out, [7, 4, 40], dtype);
        promised(lse, [7, 4], DType::F32);
        promised(queries, [5, 4, 24], dtype);
        promised(keys, [5, 2, 24], dtype);
    }
}

fn promised<const D: usize>(tensor: Tensor<D>, shape: [usize; D], dtype: DType) {
    assert_eq!((tensor.dims(), tensor.dtype()), (shape, dtype));
    let data = tensor.into_data();
    assert_eq!((&data.shape()[..], data.dtype()), (&shape[..], dtype));
}
