//! The gradient of the fused norm and rotation against plain Rust on the wgpu device.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/rope.rs"]
mod rope;

use common::{BF16, F16, F32, POISON, client, max_error};
use cubecl::ir::ElemType;
use kernels_cubecl::{
    LaunchError, Unsupported,
    rope_qk_norm::backward::{RopeQkNormBackwardTensors, launch, supports},
};
use rope::{Case, Place};
use rstest::rstest;

#[rstest]
fn head_dims(
    #[values(2, 30, 32, 64, 72, 80, 96, 128, 192, 256)] head_dim: usize,
    #[values(F32, F16, BF16)] dtype: ElemType,
    #[values(false, true)] packed: bool,
) {
    let Some(client) = client() else { return };
    let mut case = if packed { Case::packed(head_dim) } else { Case::single(head_dim) };
    (case.dtype, case.weight) = (dtype, Some(dtype));
    case.check(&client);
}

#[rstest]
#[case(None, true)]
#[case(Some(F32), false)]
#[case(Some(F32), true)]
#[case(Some(F16), false)]
#[case(Some(F16), true)]
fn options(
    #[case] weight: Option<ElemType>,
    #[case] rotary: bool,
    #[values(F32, F16)] dtype: ElemType,
    #[values(false, true)] packed: bool,
) {
    let Some(client) = client() else { return };
    let mut case = if packed { Case::packed(72) } else { Case::single(72) };
    (case.weight, case.rotary, case.dtype) = (weight, rotary, dtype);
    case.check(&client);
}

/// Rows `[q heads | k heads | v heads]`, which are no tensor with a slot axis.
#[rstest]
fn grouped_heads(
    #[values((6, 6), (6, 2), (6, 1), (6, 0), (2, 6))] (heads, heads_kv): (usize, usize),
    #[values(Some(F32), None)] weight: Option<ElemType>,
) {
    let Some(client) = client() else { return };
    let mut case = Case::packed(64);
    (case.heads, case.heads_kv, case.weight) = (heads, Some(heads_kv), weight);
    let row = (heads + 2 * heads_kv) * 64;
    case.place = Place { x: [row, heads * 64, 64, 1], d_out: None, dx: [row, heads * 64, 64, 1] };
    case.check(&client);
}

#[rstest]
fn token_counts(
    #[values(0, 1, 15, 16, 17, 5000)] tokens: usize,
    #[values(false, true)] packed: bool,
    #[values(F32, F16)] dtype: ElemType,
) {
    let Some(client) = client() else { return };
    let mut case = if packed { Case::packed(32) } else { Case::single(32) };
    // 5000 tokens: more blocks of rows than cubes.
    (case.tokens, case.dtype) = (tokens, dtype);
    if tokens > 1000 {
        case = case.with_heads(8);
    }
    case.check(&client);
}

/// One tensor; 37 tokens, 3 heads of 72.
#[rstest]
#[case::padded_rows([3 * 80, 0, 80, 1], [3 * 72, 0, 72, 1], [3 * 72, 0, 72, 1])]
#[case::odd_padding([3 * 75 + 1, 0, 75, 1], [3 * 72, 0, 72, 1], [3 * 73, 0, 73, 1])]
#[case::heads_first([72, 0, 37 * 72, 1], [72, 0, 37 * 72, 1], [3 * 72, 0, 72, 1])]
#[case::elements_outermost([3, 0, 1, 37 * 3], [3 * 72, 0, 72, 1], [3, 0, 1, 37 * 3])]
#[case::expanded_tokens([3 * 72, 0, 72, 1], [0, 0, 72, 1], [3 * 72, 0, 72, 1])]
#[case::expanded_heads([3 * 72, 0, 72, 1], [72, 0, 0, 1], [3 * 72, 0, 72, 1])]
#[case::expanded_from_one([3 * 72, 0, 72, 1], [0, 0, 0, 0], [3 * 72, 0, 72, 1])]
#[case::slot_of_a_packed_tensor([9 * 72, 0, 72, 1], [3 * 72, 0, 72, 1], [9 * 72, 0, 72, 1])]
fn strided_tensors(
    #[case] x: [usize; 4],
    #[case] d_out: [usize; 4],
    #[case] dx: [usize; 4],
    #[values(F32, F16)] dtype: ElemType,
    #[values([36, 1], [40, 1], [37, 1], [1, 37])] table: [usize; 2],
) {
    let Some(client) = client() else { return };
    let mut case = Case::single(72);
    (case.dtype, case.weight, case.table) = (dtype, Some(dtype), table);
    case.place = Place { x, d_out: Some(d_out), dx };
    case.check(&client);
}

/// Packed in place, with rows apart and unequal strides of both tensors.
#[rstest]
#[case::padded_rows([3 * 3 * 72 + 8, 3 * 72, 72, 1], [3 * 3 * 72, 3 * 72, 72, 1])]
#[case::odd_rows([3 * 3 * 72 + 1, 3 * 72, 72, 1], [3 * 3 * 72, 3 * 72, 72, 1])]
#[case::slots_outermost([3 * 72, 37 * 3 * 72, 72, 1], [3 * 72, 37 * 3 * 72, 72, 1])]
#[case::odd_slots([9 * 72, 3 * 72, 72, 1], [9 * 72, 3 * 72 + 1, 72, 1])]
fn strided_packed_tensors(#[case] x: [usize; 4], #[case] dx: [usize; 4]) {
    let Some(client) = client() else { return };
    let mut case = Case::packed(72);
    case.place = Place { x, d_out: None, dx };
    case.check(&client);
}

#[rstest]
#[case::packed(Case::packed(64))]
#[case::single(Case::single(30))]
fn equal_calls_give_equal_bits(#[case] mut case: Case) {
    let Some(client) = client() else { return };
    // More blocks of rows than cubes.
    case.tokens = 3000;
    case = case.with_heads(6);
    let inputs = case.inputs(11);
    let first = case.run(&client, &inputs).unwrap();
    for _ in 0..3 {
        let again = case.run(&client, &inputs).unwrap();
        assert!(first.bytes == again.bytes, "{case:?}");
    }
}

/// Frozen weights: the gradient of the input is the same, theirs are not written.
#[rstest]
#[case::packed(Case::packed(64))]
#[case::single(Case::single(30))]
fn gradients_of_weights_can_be_left_out(#[case] case: Case) {
    let Some(client) = client() else { return };
    let inputs = case.inputs(12);
    let full = case.run(&client, &inputs).unwrap();
    let freeze = |tensors: &mut RopeQkNormBackwardTensors| {
        tensors.norm.as_mut().unwrap().d_weights.clear();
    };
    let frozen = case.run_with(&client, &inputs, freeze).unwrap();
    let [(dx, _), (frozen_dx, d_weights)] =
        [&full, &frozen].map(|gradients| gradients.bytes.split_last().unwrap());
    assert!(dx == frozen_dx, "{case:?}");
    assert_eq!(d_weights.len(), frozen.dx.len());
    assert!(d_weights.iter().flatten().all(|&byte| byte == POISON), "{case:?}");
}

/// The kernel against the slope of the forward pass in f64, not against another formula.
#[rstest]
fn finite_differences(
    #[values((Some(F32), false), (Some(F32), true), (None, true))] (weight, rotary): (
        Option<ElemType>,
        bool,
    ),
) {
    let Some(client) = client() else { return };
    let mut case = Case::single(6);
    (case.tokens, case.heads, case.weight, case.rotary) = (3, 2, weight, rotary);
    case = case.with_heads(2);
    let inputs = case.inputs(5);
    let result = case.run(&client, &inputs).unwrap();
    let loss = |inputs: &rope::Inputs| {
        let out = case.forward(inputs, 0);
        out.iter().zip(&inputs.d_out[0]).map(|(out, d_out)| out * d_out).sum::<f64>()
    };
    let slope = |select: fn(&mut rope::Inputs) -> &mut Vec<f64>, i: usize| {
        let step = 1e-5;
        let [above, below] = [step, -step].map(|step| {
            let mut inputs = inputs.clone();
            select(&mut inputs)[i] += step;
            loss(&inputs)
        });
        (above - below) / (2.0 * step)
    };
    let expected =
        (0..inputs.x[0].len()).map(|i| slope(|inputs| &mut inputs.x[0], i)).collect::<Vec<_>>();
    assert!(max_error(&result.dx[0], &expected) < 1e-5, "dx: {:?} != {expected:?}", result.dx[0]);
    if weight.is_some() {
        let expected =
            (0..6).map(|i| slope(|inputs| &mut inputs.weights[0], i)).collect::<Vec<_>>();
        let error = max_error(&result.d_weights[0], &expected);
        assert!(error < 1e-5, "d_weight: {:?} != {expected:?}", result.d_weights[0]);
    }
}

#[rstest]
fn nan_stays_in_its_head(#[values(false, true)] in_gradient: bool) {
    let Some(client) = client() else { return };
    let case = Case::packed(64);
    let mut inputs = case.inputs(3);
    let input = if in_gradient { &mut inputs.d_out[0] } else { &mut inputs.x[0] };
    input[5 * 64 + 7] = f64::NAN;
    let result = case.run(&client, &inputs).unwrap();
    for (i, dx) in result.dx[0].iter().enumerate() {
        assert_eq!(dx.is_nan(), i / 64 == 5, "element {i}");
    }
    // A gradient reaches the weights of the pair it was rotated with; an input scales its head.
    for (i, d_weight) in result.d_weights[0].iter().enumerate() {
        assert_eq!(d_weight.is_nan(), !in_gradient || i % 32 == 7, "weight {i}");
    }
    assert!(result.dx[1].iter().chain(&result.d_weights[1]).all(|dx| !dx.is_nan()));
}

/// Heads past the last one are zeros, whose factor is infinite without an epsilon.
#[test]
fn no_epsilon_is_needed() {
    let Some(client) = client() else { return };
    let mut case = Case::single(64);
    case.epsilon = 0.0;
    case.check(&client);
}

#[test]
fn plans_and_refusals() {
    let Some(client) = client() else { return };
    let mut properties = client.properties().clone();
    properties.hardware.max_bindings = 8;
    let plan = |case: &Case| supports(&properties, &case.problem()).map(|plan| plan.to_string());
    assert_eq!(
        plan(&Case::packed(72)).unwrap(),
        "rope_qk_norm_backward f32 head_dim 72 vectors 4 units 28x9 groups 2 U32 norm(f32) rotary in-place"
    );
    let mut case = Case::single(90);
    case.weight = None;
    assert_eq!(
        plan(&case).unwrap(),
        "rope_qk_norm_backward f32 head_dim 90 vectors 1 units 17x15 groups 1 U32 rotary"
    );
    assert!(plan(&Case::single(72)).is_ok());

    let mut both = Case::packed(72);
    both.place.d_out = Some(both.place.dx);
    let expected = Unsupported::Bindings { required: 9, available: 8 };
    assert_eq!(supports(&properties, &both.problem()), Err(expected));
    let error = plan(&Case::single(59)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "x, d_out: head_dim 59 is not supported; allowed: even numbers from 2"
    );
}

#[test]
#[should_panic = "expected at least one, got neither"]
fn nothing_to_do_is_a_mistake() {
    let Some(client) = client() else { panic!("expected at least one, got neither") };
    let mut case = Case::single(64);
    (case.weight, case.rotary) = (None, false);
    let _ = supports(client.properties(), &case.problem());
}

#[test]
#[should_panic = "dx: expected strides above 0"]
fn gradients_that_share_memory_are_a_mistake() {
    let Some(client) = client() else { panic!("dx: expected strides above 0") };
    let mut case = Case::single(64);
    case.place.dx[0] = 0;
    let _ = supports(client.properties(), &case.problem());
}

#[rstest]
#[case::x("norm.x")]
#[case::weight("norm.weights")]
#[case::d_weight("norm.d_weights")]
#[case::d_out("d_out")]
#[case::dx("dx")]
#[case::table("tables.sin")]
fn short_buffers_are_refused(#[case] short: &str) {
    let Some(client) = client() else { return };
    let case = Case::single(64);
    let mut tensors = case.tensors(&client, &case.inputs(4)).0;
    let norm = tensors.norm.as_mut().unwrap();
    let handle = match short {
        "norm.x" => &mut norm.x.handle,
        "norm.weights" => &mut norm.weights[0].handle,
        "norm.d_weights" => &mut norm.d_weights[0].handle,
        "d_out" => &mut tensors.d_out.as_mut().unwrap().handle,
        "dx" => &mut tensors.dx.handle,
        _ => &mut tensors.tables.as_mut().unwrap().sin.handle,
    };
    handle.offset_end = Some(handle.offset_end.unwrap() + 4);
    let error = launch(&client, &case.problem(), tensors).unwrap_err();
    let LaunchError::OutOfBounds { argument, .. } = error else { panic!("{error}") };
    assert_eq!(argument, short);
}
