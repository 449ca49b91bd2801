//! The gradient kernels against plain Rust on the wgpu device: flash-attention's grid, re-done on
//! lengths that a software device runs in seconds.
#![allow(clippy::unwrap_used)]

#[path = "common/attention.rs"]
mod attention;
#[path = "common/attention_grad.rs"]
mod attention_grad;
mod common;

use attention::{Case, Tiles, cumulative, has_dtype, pairs, permuted, segments};
use attention_grad::{
    Inputs, KEYS_VALUES, Pick, QUERIES, check, check_problem, expanded, gather, problem, reference,
    run, run_wanted,
};
use common::{F16, F32, Output, POISON, client, upload};
use cubecl::ir::ElemType;
use kernels_cubecl::{
    AttentionGradProblem, AttentionGradTensors, GradPass, GradPlacements, LaunchError, Placement,
    TensorLayout, Unsupported, WorkList,
    attention_varlen::backward::{launch, supports},
};
use rstest::rstest;

#[rstest]
fn head_dims(
    #[values(32, 40, 64, 72, 80, 96, 128, 160, 192, 256)] head_dim: usize,
    #[values(F32, F16)] dtype: ElemType,
) {
    let Some(client) = client() else { return };
    if !has_dtype(&client, dtype) {
        return;
    }
    for (seed, mode) in ["full", "random", "third"].into_iter().enumerate() {
        let mut case = Case::new(head_dim, &segments(mode, 50, seed as u64));
        case.dtype = dtype;
        check(&client, &case, seed == 0, seed as u64);
    }
}

/// The tiles of other devices: all options at once, on lengths around their sizes.
#[rstest]
#[case::device_40(Tiles::Device, F32, 40, 40)]
#[case::device_72(Tiles::Device, F16, 72, 40)]
#[case::device_128(Tiles::Device, F32, 128, 128)]
#[case::device_256(Tiles::Device, F32, 256, 256)]
#[case::cpu_runtime_16(Tiles::CpuRuntime, F32, 16, 24)]
#[case::cpu_runtime_40(Tiles::CpuRuntime, F16, 40, 16)]
fn tiles_of_devices(
    #[case] tiles: Tiles,
    #[case] dtype: ElemType,
    #[case] head_dim: usize,
    #[case] value_dim: usize,
) {
    let Some(client) = client() else { return };
    if !has_dtype(&client, dtype) {
        return;
    }
    let mut case = pairs();
    (case.tiles, case.dtype) = (tiles, dtype);
    (case.head_dim, case.value_dim) = (head_dim, value_dim);
    case.scale = 1.0 / (head_dim as f32).sqrt();
    (case.heads, case.heads_kv) = (4, 2);
    case.window = (Some(20), Some(30));
    case.softcap = Some(30.0);
    check(&client, &case, true, 17);
}

#[rstest]
#[case(16, 16)]
#[case(64, 32)]
#[case(72, 128)]
#[case(192, 128)]
#[case(24, 256)]
#[case(256, 16)]
fn value_dim_differs(#[case] head_dim: usize, #[case] value_dim: usize) {
    let Some(client) = client() else { return };
    let mut case = Case::new(head_dim, &segments("third", 70, 3));
    case.value_dim = value_dim;
    check(&client, &case, false, 3);
}

#[rstest]
fn masks(
    #[values(false, true)] is_causal: bool,
    #[values((None, None), (Some(7), None), (None, Some(3)), (Some(4), Some(9)), (Some(0), Some(0)), (Some(1025), Some(1025)))]
    window: (Option<usize>, Option<usize>),
) {
    let Some(client) = client() else { return };
    let mut case = pairs();
    case.is_causal = is_causal;
    case.window = window;
    check(&client, &case, true, 5);
}

#[rstest]
fn grouped_heads(#[values(6, 2, 1)] heads_kv: usize, #[values(false, true)] is_causal: bool) {
    let Some(client) = client() else { return };
    let mut case = pairs();
    (case.heads, case.heads_kv) = (6, heads_kv);
    case.is_causal = is_causal;
    check(&client, &case, false, 6);
}

#[rstest]
fn softcap(#[values(F32, F16)] dtype: ElemType) {
    let Some(client) = client() else { return };
    if !has_dtype(&client, dtype) {
        return;
    }
    let mut case = pairs();
    case.dtype = dtype;
    case.softcap = Some(20.0);
    case.is_causal = true;
    check(&client, &case, true, 7);
}

#[test]
fn scale_is_a_parameter() {
    let Some(client) = client() else { return };
    let mut case = Case::new(64, &[40, 3]);
    case.is_causal = true;
    for scale in [0.1, 1.5, 0.0, 1e-38, -0.5] {
        case.scale = scale;
        check(&client, &case, true, 8);
    }
}

/// Segmentations that broke other implementations.
#[rstest]
#[case(&[76, 34, 146], &[1, 1, 1], 5, 5, 32)]
#[case(&[1, 1, 1], &[76, 34, 146], 5, 5, 32)]
#[case(&[0, 0, 0, 1], &[0, 0, 0, 1], 21, 7, 120)]
#[case(&[0, 1, 0, 1], &[0, 3, 0, 5], 9, 3, 64)]
#[case(&[3, 0, 2], &[0, 4, 0], 2, 2, 64)]
fn regressions(
    #[case] lengths_q: &[usize],
    #[case] lengths_k: &[usize],
    #[case] heads: usize,
    #[case] heads_kv: usize,
    #[case] head_dim: usize,
) {
    let Some(client) = client() else { return };
    let mut case = Case::new(head_dim, lengths_q);
    case.lengths_k = lengths_k.to_vec();
    (case.heads, case.heads_kv) = (heads, heads_kv);
    check(&client, &case, false, 9);
}

#[test]
fn empty_totals() {
    let Some(client) = client() else { return };
    for (lengths_q, lengths_k) in [
        (vec![], vec![]),
        (vec![0, 0], vec![0, 0]),
        (vec![0, 0], vec![3, 4]),
        (vec![3, 4], vec![0, 0]),
    ] {
        let mut case = Case::new(64, &lengths_q);
        case.lengths_k = lengths_k;
        check(&client, &case, true, 10);
    }
}

/// Wanted gradients have the bits of a full run, the others' places are not written.
#[rstest]
fn only_wanted_gradients_are_written(
    #[values((QUERIES, [true, false, false]), (KEYS_VALUES, [false, true, true]))] (pick, wanted): (
        Pick,
        [bool; 3],
    ),
    #[values(false, true)] packed: bool,
) {
    let Some(client) = client() else { return };
    let mut case = Case::new(40, &[50, 0, 30]);
    case.is_causal = true;
    let mut problem = problem(&case, true);
    if packed {
        problem.placements = GradPlacements::packed(&problem.forward);
    }
    let inputs = Inputs::new(&case, true, 19);
    let all = run(&client, &case, &problem, &inputs);
    let some = run_wanted(&client, &case, &problem, &inputs, (pick, problem.grads_len()));
    let GradPlacements { dq, dk, dv } = problem.placements;
    let mut expected = vec![POISON; all.len()];
    for ((placement, shape), wanted) in [dq, dk, dv].into_iter().zip(case.shapes()).zip(wanted) {
        let [tokens, heads, width] = shape;
        for (token, head) in (0..tokens).flat_map(|token| (0..heads).map(move |head| (token, head)))
        {
            let at =
                placement.offset + token * placement.token_stride + head * placement.head_stride;
            let bytes = at * size_of::<f32>()..(at + width) * size_of::<f32>();
            if wanted {
                expected[bytes.clone()].copy_from_slice(&all[bytes]);
            }
        }
    }
    assert!(some == expected, "{wanted:?}");
}

/// Neither room for unwanted gradients nor places for them are asked for.
#[rstest]
fn unwanted_gradients_take_no_room(#[values(false, true)] queries: bool) {
    let Some(client) = client() else { return };
    let case = Case::new(40, &[5, 4]);
    let mut problem = problem(&case, false);
    let inputs = Inputs::new(&case, false, 20);
    let all = run(&client, &case, &problem, &inputs);
    let GradPlacements { dq, dk, dv } = &mut problem.placements;
    let (pick, last, unwanted) = match queries {
        true => (QUERIES, *dq, dk),
        false => (KEYS_VALUES, *dv, dq),
    };
    unwanted.offset = 1 << 20;
    let end = last.offset + last.layout(case.shapes()[0]).span();
    let some = run_wanted(&client, &case, &problem, &inputs, (pick, end));
    let written = last.offset * size_of::<f32>()..end * size_of::<f32>();
    assert!(some[written.clone()] == all[written]);
}

/// Queries that see no key and keys that no query sees, with whatever gradient of lse.
#[test]
fn unseen_tokens_have_no_gradient() {
    let Some(client) = client() else { return };
    let mut case = Case::new(40, &[50, 30, 4, 0]);
    case.lengths_k = vec![20, 70, 0, 6];
    (case.heads, case.heads_kv) = (4, 2);
    case.is_causal = true;
    case.window = (Some(3), None);
    let mut inputs = Inputs::new(&case, true, 18);
    let d_lse = inputs.d_lse.as_mut().unwrap();
    let unseen: Vec<usize> =
        (0..d_lse.len()).filter(|&i| inputs.lse[i] == f64::NEG_INFINITY).collect();
    // Query `i` of 50 sees key `i - 30` and 3 before it; the 4 queries have no key at all.
    assert_eq!(unseen.len(), (30 + 4) * case.heads);
    for (&i, value) in unseen.iter().zip([f64::NAN, f64::INFINITY, 1.0].into_iter().cycle()) {
        d_lse[i] = value;
    }
    let problem = problem(&case, true);
    let [dq, dk, dv] = gather(&case, &problem, &run(&client, &case, &problem, &inputs));
    let zero = |x: &f64| *x == 0.0;
    for i in unseen {
        assert!(dq[i * 40..][..40].iter().all(zero), "dq of row {i}");
    }
    // 30 queries see the last 33 of 70 keys; nobody sees the 6 keys.
    for token in (20..20 + 70 - 33).chain(90..96) {
        let row = token * case.heads_kv * 40..(token + 1) * case.heads_kv * 40;
        assert!(dk[row.clone()].iter().all(zero), "dk of token {token}");
        assert!(dv[row].iter().all(zero), "dv of token {token}");
    }
    for i in 0..inputs.lse.len() {
        if inputs.lse[i] == f64::NEG_INFINITY {
            inputs.d_lse.as_mut().unwrap()[i] = 0.0;
        }
    }
    check_problem(&client, &case, &problem, &inputs);
}

#[test]
fn nan_stays_in_its_segment() {
    let Some(client) = client() else { return };
    let case = Case::new(64, &[40, 35, 50]);
    let problem = problem(&case, true);
    let clean = Inputs::new(&case, true, 11);
    let expected = gather(&case, &problem, &run(&client, &case, &problem, &clean));
    let width = case.heads * case.head_dim;
    for poisoned in 0..7 {
        let mut inputs = clean.clone();
        // One element of token 60, in the second segment.
        let (wide, narrow) = (60 * width + 5, 60 * case.heads + 1);
        match poisoned {
            0..3 => inputs.qkv[poisoned][wide] = f64::NAN,
            3 => inputs.d_out[wide] = f64::NAN,
            4 => inputs.out[wide] = f64::NAN,
            5 => inputs.lse[narrow] = f64::NAN,
            _ => inputs.d_lse.as_mut().unwrap()[narrow] = f64::NAN,
        }
        let gradients = gather(&case, &problem, &run(&client, &case, &problem, &inputs));
        for (gradient, expected) in gradients.iter().zip(&expected) {
            for range in [0..40 * width, 75 * width..125 * width] {
                assert_eq!(gradient[range.clone()], expected[range], "input {poisoned}");
            }
        }
        let tainted = |gradient: &Vec<f64>| gradient.iter().any(|x| x.is_nan());
        assert!(gradients.iter().any(tainted), "input {poisoned} lost its NaN");
    }
}

#[rstest]
#[case::padded_head_dim([0, 1, 2], 56)]
#[case::padded_by_an_odd_amount([0, 1, 2], 3)]
#[case::heads_first([1, 0, 2], 0)]
#[case::elements_outermost([2, 1, 0], 0)]
#[case::tokens_innermost([1, 2, 0], 5)]
fn strides(#[case] order: [usize; 3], #[case] padding: usize, #[values(F32, F16)] dtype: ElemType) {
    let Some(client) = client() else { return };
    if !has_dtype(&client, dtype) {
        return;
    }
    let mut case = Case::new(72, &[33, 0, 41]);
    case.dtype = dtype;
    let layouts = case.shapes().map(|shape| permuted(shape, order, padding));
    let mut problem = AttentionGradProblem::new(case.problem(layouts));
    let out = permuted(problem.out.shape, order, padding);
    (problem.out, problem.d_out) = (out, out);
    problem.d_lse = Some([1, case.tokens_q() + 3]);
    check_problem(&client, &case, &problem, &Inputs::new(&case, true, 12));
}

/// Gradients of sums are expanded tensors: nothing is copied.
#[rstest]
#[case::one_value([0, 0, 0], [0, 0])]
#[case::one_row([0, 0, 1], [0, 1])]
#[case::one_token([0, 72, 1], [1, 0])]
#[case::one_head([72, 0, 1], [0, 0])]
#[case::one_element([2, 1, 0], [2, 1])]
fn expanded_gradients(#[case] strides: [usize; 3], #[case] d_lse: [usize; 2]) {
    let Some(client) = client() else { return };
    let case = Case::new(72, &[33, 0, 41]);
    let mut problem = problem(&case, true);
    problem.d_out.strides = strides;
    problem.d_lse = Some(d_lse);
    let mut inputs = Inputs::new(&case, true, 13);
    inputs.d_out = expanded(&case, problem.d_out, 14);
    let shape = [case.tokens_q(), case.heads, 1];
    let layout = TensorLayout { shape, strides: [d_lse[0], d_lse[1], 1] };
    inputs.d_lse = Some(expanded(&case, layout, 15));
    check_problem(&client, &case, &problem, &inputs);
}

/// Forward reads the projection in place, backward writes its gradient in place.
#[rstest]
fn packed_projection(#[values(F32, F16)] dtype: ElemType) {
    let Some(client) = client() else { return };
    if !has_dtype(&client, dtype) {
        return;
    }
    let mut case = Case::new(72, &[33, 0, 41]);
    case.dtype = dtype;
    let packed =
        |shape: [usize; 3]| TensorLayout { shape, strides: [3 * shape[1] * shape[2], shape[2], 1] };
    let mut problem = AttentionGradProblem::new(case.problem(case.shapes().map(packed)));
    problem.placements = GradPlacements::packed(&problem.forward);
    assert_eq!(problem.grads_len(), 74 * 3 * 2 * 72);
    check_problem(&client, &case, &problem, &Inputs::new(&case, false, 16));
}

#[test]
fn placements_are_free() {
    let Some(client) = client() else { return };
    let mut case = Case::new(40, &[33, 0, 41]);
    case.lengths_k = vec![5, 50, 20];
    case.value_dim = 24;
    (case.heads, case.heads_kv) = (4, 2);
    let mut problem = problem(&case, false);
    problem.placements = GradPlacements {
        // Heads first, with padding; values before keys in rows of both.
        dq: Placement { offset: 16, token_stride: 44, head_stride: 74 * 44 + 8 },
        dk: Placement { offset: 20_000 + 24, token_stride: 2 * 68, head_stride: 68 },
        dv: Placement { offset: 20_000, token_stride: 2 * 68, head_stride: 68 },
    };
    check_problem(&client, &case, &problem, &Inputs::new(&case, false, 19));
}

/// What the forward kernel writes is what the gradients need.
#[test]
fn forward_then_backward() {
    let Some(client) = client() else { return };
    let mut case = pairs();
    case.is_causal = true;
    (case.heads, case.heads_kv) = (4, 2);
    let mut inputs = Inputs::new(&case, false, 20);
    let layouts = case.shapes().map(TensorLayout::contiguous);
    let (out, lse) = case.run(&client, &inputs.qkv, layouts);
    (inputs.out, inputs.lse) = (out.read(&client), lse.read(&client));
    check_problem(&client, &case, &problem(&case, false), &inputs);
}

#[test]
fn repeats_are_bitwise_equal() {
    let Some(client) = client() else { return };
    let mut case = pairs();
    case.is_causal = true;
    let problem = problem(&case, true);
    let inputs = Inputs::new(&case, true, 14);
    let first = run(&client, &case, &problem, &inputs);
    for repeat in 1..50 {
        assert!(run(&client, &case, &problem, &inputs) == first, "repeat {repeat} differs");
    }
}

#[rstest]
#[case::segments(70_000, 1)]
#[case::heads(2, 35_000)]
#[case::both(500, 150)]
fn grids_past_one_axis(#[case] segments: usize, #[case] heads: usize) {
    let Some(client) = client() else { return };
    let mut case = Case::new(16, &vec![1; segments]);
    (case.heads, case.heads_kv) = (heads, heads);
    case.tiles = Tiles::Device;
    check(&client, &case, false, 15);
}

#[test]
fn eighty_thousand_segments() {
    let Some(client) = client() else { return };
    let mut case = Case::new(16, &vec![4; 80_000]);
    (case.heads, case.heads_kv) = (1, 1);
    case.tiles = Tiles::Device;
    check(&client, &case, false, 16);
}

/// The reference itself, against differences of its own forward pass.
#[test]
fn finite_differences() {
    let mut case = Case::new(16, &[3, 5]);
    case.lengths_k = vec![4, 6];
    case.value_dim = 24;
    (case.heads, case.heads_kv) = (4, 2);
    (case.is_causal, case.window, case.softcap) = (true, (Some(3), None), Some(2.0));
    let inputs = Inputs::new(&case, true, 21);
    let gradients = reference(&case, &inputs, false);
    let loss = |qkv: &[Vec<f64>; 3]| -> f64 {
        let (out, lse) = case.forward(qkv, false);
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        dot(&out, &inputs.d_out) + dot(&lse, inputs.d_lse.as_ref().unwrap())
    };
    let step = 1e-5;
    for (tensor, gradient) in gradients.iter().enumerate() {
        for (i, gradient) in gradient.iter().enumerate().step_by(7) {
            let shifted = |by: f64| {
                let mut qkv = inputs.qkv.clone();
                qkv[tensor][i] += by;
                loss(&qkv)
            };
            let difference = (shifted(step) - shifted(-step)) / (2.0 * step);
            let error = (difference - gradient).abs();
            assert!(error < 1e-6, "input {tensor}, element {i}: {gradient} and {difference}");
        }
    }
}

fn refused(change: impl FnOnce(&mut AttentionGradProblem)) -> Option<Unsupported> {
    let client = client()?;
    let mut problem = problem(&Case::new(64, &[10]), false);
    change(&mut problem);
    Some(supports(client.properties(), &problem).unwrap_err())
}

#[test]
fn refusals_name_the_property() {
    let Some(client) = client() else { return };
    let refusal = |change: fn(&mut AttentionGradProblem)| refused(change).unwrap();
    let error = refusal(|problem| {
        problem.forward.q.shape[2] = 12;
        problem.forward.k.shape[2] = 12;
    });
    assert!(error.to_string().starts_with("q, k: head_dim 12 is not supported"), "{error}");
    for (argument, error) in [
        ("d_out", refusal(|problem| problem.d_out.strides[0] = 1 << 30)),
        ("grads", refusal(|problem| problem.placements.dk.offset = 1 << 33)),
    ] {
        match error {
            Unsupported::Offsets { argument: actual, .. } => assert_eq!(actual, argument),
            other => panic!("{other}"),
        }
    }
    let error = refusal(|problem| problem.forward.dtype = ElemType::Bool);
    assert!(matches!(error, Unsupported::Dtype { .. }), "{error}");

    let problem = problem(&Case::new(64, &[10]), false);
    let mut properties = client.properties().clone();
    properties.hardware.max_shared_memory_size = 1024;
    let error = supports(&properties, &problem).unwrap_err();
    assert!(matches!(error, Unsupported::SharedMemory { available: 1024, .. }), "{error}");
    let mut properties = client.properties().clone();
    properties.hardware.max_bindings = 7;
    let error = supports(&properties, &problem).unwrap_err();
    assert_eq!(error.to_string(), "the kernel needs 8 storage buffers, the device binds 7");
    let mut properties = client.properties().clone();
    properties.hardware.max_units_per_cube = 4;
    let error = supports(&properties, &problem).unwrap_err();
    assert!(matches!(error, Unsupported::UnitsPerCube { available: 4, .. }), "{error}");
}

#[test]
fn blueprints_fit_the_smallest_devices_and_print() {
    let Some(client) = client() else { return };
    for tiles in [Tiles::Device, Tiles::Gpu, Tiles::CpuRuntime] {
        let properties = tiles.properties(&client);
        for head_dim in (16..=256).step_by(8) {
            for value_dim in (16..=256).step_by(8) {
                let mut case = Case::new(head_dim, &[10]);
                case.value_dim = value_dim;
                let blueprint = supports(&properties, &problem(&case, false)).unwrap();
                for pass in GradPass::ALL {
                    assert!(blueprint.shared_memory(pass) <= 32 * 1024, "{blueprint}");
                    assert!(blueprint.units(pass) <= 256, "{blueprint}");
                }
            }
        }
    }
    let properties = Tiles::Gpu.properties(&client);
    for (head_dim, expected) in [
        (
            72,
            "attention_varlen backward simt f32 head_dim 72/72 tile 32x16 units 8x8 rooms 2 statistics 16x8 vectors [4, 4, 4, 4, 4] shared 31488 B U32 d_lse",
        ),
        (
            256,
            "attention_varlen backward simt f32 head_dim 256/256 tile 8x8 units 8x8 rooms 1 statistics 16x8 vectors [4, 4, 4, 4, 4] shared 26128 B U32 d_lse",
        ),
    ] {
        let blueprint = supports(&properties, &problem(&Case::new(head_dim, &[10]), true)).unwrap();
        assert_eq!(blueprint.to_string(), expected);
    }
}

#[test]
fn mismatched_tensors_are_refused() {
    let Some(client) = client() else { return };
    let case = Case::new(64, &[4, 6]);
    let problem = problem(&case, false);
    let blueprint = supports(client.properties(), &problem).unwrap();
    let stats = Output::new(&client, F32, &problem.stats_shape());
    let grads = Output::new(&client, F32, &[problem.grads_len()]);
    let lse = Output::new(&client, F32, &problem.forward.lse_shape());
    let tensors = || {
        let x = || upload(&client, F32, &vec![0.0; problem.out.span()], problem.out);
        AttentionGradTensors {
            q: x(),
            k: x(),
            v: x(),
            out: x(),
            d_out: x(),
            lse: lse.binding(),
            d_lse: None,
            stats: stats.binding(),
            grads: grads.binding(),
        }
    };
    let work = |lengths: &[usize], tile| {
        let offsets = cumulative(lengths);
        WorkList::new(&offsets, &offsets, tile).unwrap().upload(&client)
    };
    let (tile_q, tile_k) = (blueprint.tile_q(), blueprint.tile_k());
    let (work_q, work_k) = (work(&[4, 6], tile_q), work(&[4, 6], tile_k));
    for (work_q, work_k, expected) in [
        (&work(&[4, 6], tile_q + 1), &work_k, "work_q's tile_q"),
        (&work(&[4, 5], tile_q), &work_k, "work_q's number of query tokens"),
        (&work_q, &work(&[4, 6], tile_k + 1), "work_k's tile size"),
        (&work_q, &work(&[4, 5], tile_k), "work_k's number of key tokens, its first offsets,"),
    ] {
        match launch(&client, &problem, &blueprint, work_q, work_k, tensors()).unwrap_err() {
            LaunchError::WorkList { property, .. } => assert_eq!(property, expected),
            other => panic!("{other}"),
        }
    }
    let refusal = |tensors| {
        launch(&client, &problem, &blueprint, &work_q, &work_k, tensors).unwrap_err().to_string()
    };
    let mut short = tensors();
    short.d_out.handle.offset_end = Some(short.d_out.handle.offset_end.unwrap() + 4);
    assert_eq!(refusal(short), "d_out: shape and strides reach 5120 bytes, the buffer holds 5116");
    let mut odd = tensors();
    odd.grads.handle.offset_start = Some(odd.grads.handle.offset_start.unwrap() - 4);
    assert!(refusal(odd).starts_with("grads: buffer offset of 4092 bytes"));
    launch(&client, &problem, &blueprint, &work_q, &work_k, tensors()).unwrap();
}
