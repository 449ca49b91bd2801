//! The attention kernel against plain Rust on the wgpu device: flash-attention's grid, re-done on
//! lengths that a software device runs in seconds.
#![allow(clippy::unwrap_used)]

#[path = "common/attention.rs"]
mod attention;
mod common;

use attention::{Case, Tiles, cumulative, has_dtype, pairs, permuted, segments};
use common::{F16, F32, Output, client, max_error, upload};
use cubecl::ir::ElemType;
use kernels_cubecl::{
    AttentionProblem, AttentionTensors, LaunchError, TensorLayout, Unsupported, WorkList,
    attention_varlen::{launch, supports},
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
        case.check(&client, seed as u64);
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
    case.check(&client, 17);
}

#[rstest]
#[case(16, 16)]
#[case(64, 32)]
#[case(72, 128)]
#[case(192, 128)]
#[case(64, 256)]
#[case(24, 88)]
fn value_dim_differs(#[case] head_dim: usize, #[case] value_dim: usize) {
    let Some(client) = client() else { return };
    let mut case = Case::new(head_dim, &segments("third", 70, 3));
    case.value_dim = value_dim;
    case.check(&client, 3);
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
    case.check(&client, 5);
}

#[rstest]
fn grouped_heads(#[values(6, 2, 1)] heads_kv: usize, #[values(false, true)] is_causal: bool) {
    let Some(client) = client() else { return };
    let mut case = pairs();
    case.heads = 6;
    case.heads_kv = heads_kv;
    case.is_causal = is_causal;
    case.check(&client, 6);
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
    case.check(&client, 7);
}

#[test]
fn scale_is_a_parameter() {
    let Some(client) = client() else { return };
    let mut case = Case::new(64, &[40, 3]);
    case.is_causal = true;
    for scale in [0.1, 1.5, 0.0, 1e-38, -0.5] {
        case.scale = scale;
        case.check(&client, 8);
    }
}

/// Segmentations that broke other implementations.
#[rstest]
#[case(&[76, 34, 146], &[1, 1, 1], 5, 5, 32)]
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
    case.check(&client, 9);
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
        case.check(&client, 10);
    }
}

#[test]
fn nan_stays_in_its_segment() {
    let Some(client) = client() else { return };
    let case = Case::new(64, &[40, 35, 50]);
    let layouts = case.shapes().map(TensorLayout::contiguous);
    for poisoned in 0..3 {
        let mut inputs = case.inputs(11);
        let width = case.heads * case.head_dim;
        let (expected, expected_lse) = case.reference(&inputs, false);
        // One element of token 60, in the second segment.
        inputs[poisoned][60 * width + 5] = f64::NAN;
        let (out, lse) = case.run(&client, &inputs, layouts);
        let (out, lse) = (out.read(&client), lse.read(&client));
        for (range, rows) in [(0..40, 40), (75..125, 50)] {
            let at = |t: usize| t * width;
            let (a, b) = (at(range.start), at(range.end));
            assert!(max_error(&out[a..b], &expected[a..b]) < 1e-5, "{rows}");
            let (a, b) = (range.start * case.heads, range.end * case.heads);
            assert!(max_error(&lse[a..b], &expected_lse[a..b]) < 2e-4);
        }
        let (tainted, _) = case.reference(&inputs, false);
        for (i, (out, tainted)) in out.iter().zip(&tainted).enumerate() {
            assert!(out.is_nan() || !tainted.is_nan(), "element {i} lost its NaN");
        }
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
    case.check_layouts(&client, 12, layouts);
}

#[test]
fn slices_of_a_packed_projection() {
    let Some(client) = client() else { return };
    let case = Case::new(72, &[33, 0, 41]);
    let packed =
        |shape: [usize; 3]| TensorLayout { shape, strides: [3 * shape[1] * shape[2], shape[2], 1] };
    case.check_layouts(&client, 13, case.shapes().map(packed));
}

#[test]
fn repeats_are_bitwise_equal() {
    let Some(client) = client() else { return };
    let mut case = pairs();
    case.is_causal = true;
    let layouts = case.shapes().map(TensorLayout::contiguous);
    let inputs = case.inputs(14);
    let bytes = || {
        let (out, lse) = case.run(&client, &inputs, layouts);
        (out.bytes(&client), lse.bytes(&client))
    };
    let first = bytes();
    for repeat in 1..250 {
        assert!(bytes() == first, "repeat {repeat} differs");
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
    case.check(&client, 15);
}

#[test]
fn eighty_thousand_segments_of_sixteen() {
    let Some(client) = client() else { return };
    let mut case = Case::new(16, &vec![16; 80_000]);
    (case.heads, case.heads_kv) = (1, 1);
    case.check(&client, 16);
}

fn problem(head_dim: usize, value_dim: usize) -> AttentionProblem {
    let layout = TensorLayout::contiguous;
    AttentionProblem::new(
        layout([10, 2, head_dim]),
        layout([10, 2, head_dim]),
        layout([10, 2, value_dim]),
        F32,
    )
}

#[test]
#[cfg_attr(feature = "cpu", ignore = "names what other devices choose and lack")]
fn refusals_name_the_property() {
    let Some(client) = client() else { return };
    let refusal = |problem| supports(client.properties(), &problem).unwrap_err();
    for head_dim in [0, 8, 59, 111, 257, 264] {
        let error = refusal(problem(head_dim, 64)).to_string();
        let expected =
            format!("q, k: head_dim {head_dim} is not supported; allowed: 16 to 256 in steps of 8");
        assert_eq!(error, expected);
    }
    let error = refusal(problem(64, 59)).to_string();
    assert!(error.starts_with("v: head_dim 59"), "{error}");

    let mut wide = problem(64, 64);
    wide.k.strides = [1 << 30, 64, 1];
    match refusal(wide) {
        Unsupported::Offsets { argument, .. } => assert_eq!(argument, "k"),
        other => panic!("{other}"),
    }
    let mut long = problem(64, 64);
    long.q = TensorLayout::contiguous([1 << 29, 2, 64]);
    assert!(matches!(refusal(long), Unsupported::Tokens { .. }));
    let mut integer = problem(64, 64);
    integer.dtype = ElemType::Bool;
    assert!(matches!(refusal(integer), Unsupported::Dtype { .. }));

    let mut properties = client.properties().clone();
    properties.hardware.max_shared_memory_size = 1024;
    let error = supports(&properties, &problem(64, 64)).unwrap_err();
    assert!(matches!(error, Unsupported::SharedMemory { available: 1024, .. }), "{error}");
    let mut properties = client.properties().clone();
    properties.hardware.max_bindings = 6;
    let error = supports(&properties, &problem(64, 64)).unwrap_err();
    assert_eq!(error.to_string(), "the kernel needs 7 storage buffers, the device binds 6");
    let mut properties = client.properties().clone();
    properties.hardware.max_units_per_cube = 4;
    let error = supports(&properties, &problem(64, 64)).unwrap_err();
    assert!(matches!(error, Unsupported::UnitsPerCube { available: 4, .. }), "{error}");
}

#[test]
#[cfg_attr(feature = "cpu", ignore = "names what other devices choose and lack")]
fn blueprints_fit_the_smallest_devices_and_print() {
    let Some(client) = client() else { return };
    for tiles in [Tiles::Device, Tiles::Gpu, Tiles::CpuRuntime] {
        let properties = tiles.properties(&client);
        for head_dim in (16..=256).step_by(8) {
            for value_dim in (16..=256).step_by(8) {
                let problem = problem(head_dim, value_dim);
                let blueprint = supports(&properties, &problem).unwrap();
                assert!(blueprint.shared_memory() <= 32 * 1024, "{blueprint}");
                assert!(blueprint.units() <= 256, "{blueprint}");
            }
        }
    }
    let blueprint = supports(&Tiles::Gpu.properties(&client), &problem(72, 72)).unwrap();
    assert_eq!(
        blueprint.to_string(),
        "attention_varlen simt f32 head_dim 72/72 tile 32x32 units 8x8 vectors [4, 4, 4] shared 25088 B U32"
    );
}

#[test]
fn mismatched_tensors_are_refused() {
    let Some(client) = client() else { return };
    let problem = problem(64, 64);
    let blueprint = supports(client.properties(), &problem).unwrap();
    let out = Output::new(&client, F32, &problem.out_shape());
    let lse = Output::new(&client, F32, &problem.lse_shape());
    let tensors = || {
        let x = || upload(&client, F32, &vec![0.0; problem.q.span()], problem.q);
        AttentionTensors { q: x(), k: x(), v: x(), out: out.binding(), lse: lse.binding() }
    };
    let work = |lengths: &[usize], tile_q| {
        let offsets = cumulative(lengths);
        WorkList::new(&offsets, &offsets, tile_q).unwrap().upload(&client)
    };
    let tile_q = blueprint.tile_q();
    for (list, property) in
        [(work(&[4, 6], tile_q + 1), "tile_q"), (work(&[4, 5], tile_q), "query tokens")]
    {
        match launch(&client, &problem, &blueprint, &list, tensors()).unwrap_err() {
            LaunchError::WorkList { property: p, .. } => assert_eq!(p, property),
            other => panic!("{other}"),
        }
    }
    let list = work(&[4, 6], tile_q);
    let mut short = tensors();
    short.k.handle.offset_end = Some(short.k.handle.offset_end.unwrap() + 4);
    let error = launch(&client, &problem, &blueprint, &list, short).unwrap_err();
    assert_eq!(error.to_string(), "k: shape and strides reach 5120 bytes, the buffer holds 5116");
    let mut odd = tensors();
    odd.q.handle.offset_start = Some(odd.q.handle.offset_start.unwrap() - 4);
    let error = launch(&client, &problem, &blueprint, &list, odd).unwrap_err();
    assert!(matches!(error, LaunchError::Misaligned { argument: "q", .. }), "{error}");
    launch(&client, &problem, &blueprint, &list, tensors()).unwrap();
}
