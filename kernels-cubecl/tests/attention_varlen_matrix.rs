//! The kernels on matrix units against plain Rust: on cooperative matrices and by `mma.sync` where the
//! device lists them, and everywhere with `mma.sync` emulated.
#![allow(clippy::unwrap_used)]

#[path = "common/attention.rs"]
mod attention;
#[path = "common/attention_grad.rs"]
mod attention_grad;
mod common;

use attention::{Case, pairs, permuted, segments};
use common::{BF16, F16, F32, client};
use cubecl::{client::Client, ir::ElemType};
use kernels_cubecl::{
    AttentionProblem, Engine, TensorLayout, Unsupported,
    attention_varlen::{backward, candidates_on, supports_engine},
};
use rstest::rstest;

/// The engines to test.
#[derive(Clone, Copy, Debug)]
enum Units {
    Emulated,
    Sync,
    Cooperative,
}

/// The case, in f16 unless it says bf16, on one of the engines, if the device has it.
fn on(client: &Client, units: Units, mut case: Case) -> Option<Case> {
    if case.dtype == F32 {
        case.dtype = F16;
    }
    let engine = match units {
        Units::Emulated => Ok(Engine::EmulatedMma),
        Units::Sync => mma(client, case.dtype),
        Units::Cooperative => Engine::cmma(client.properties(), case.dtype),
    };
    match engine {
        Ok(engine) => case.engine = Some(engine),
        Err(reason) => {
            println!("skipped: {reason}");
            return None;
        }
    }
    Some(case)
}

/// `mma.sync`, if the device has it for a problem that no shared memory is too small for.
fn mma(client: &Client, dtype: ElemType) -> Result<Engine, Unsupported> {
    let layout = TensorLayout::contiguous([1, 1, 16]);
    let problem = AttentionProblem::new(layout, layout, layout, dtype);
    supports_engine(client.properties(), &problem, Engine::Mma).map(|_| Engine::Mma)
}

fn check(units: Units, case: Case, seed: u64) {
    let Some(client) = client() else { return };
    let Some(case) = on(&client, units, case) else { return };
    case.check(&client, seed);
}

#[rstest]
fn head_dims(
    #[values(Units::Emulated, Units::Sync, Units::Cooperative)] units: Units,
    #[values(16, 40, 64, 72, 80, 96, 128)] head_dim: usize,
) {
    check(units, Case::new(head_dim, &segments("random", 50, 1)), 1);
}

/// The type of released models, which software devices have no matrices of.
#[rstest]
fn bf16(
    #[values(Units::Sync, Units::Cooperative)] units: Units,
    #[values(64, 72, 80, 128)] head_dim: usize,
) {
    let Some(client) = client() else { return };
    let mut case = Case::new(head_dim, &segments("random", 50, 9));
    case.dtype = BF16;
    let Some(case) = on(&client, units, case) else { return };
    case.check(&client, 9);
    attention_grad::check(&client, &case, false, 9);
}

/// Where the rooms of two tiles fit no longer, one engine after the other refuses.
#[rstest]
#[case(192, 128)]
#[case(128, 192)]
#[case(256, 256)]
fn wide_heads(
    #[values(Units::Emulated, Units::Sync, Units::Cooperative)] units: Units,
    #[case] head_dim: usize,
    #[case] value_dim: usize,
) {
    let Some(client) = client() else { return };
    let mut case = Case::new(head_dim, &[33, 0, 50]);
    case.value_dim = value_dim;
    let Some(case) = on(&client, units, case) else { return };
    let problem = case.problem(case.shapes().map(TensorLayout::contiguous));
    match supports_engine(client.properties(), &problem, case.engine.unwrap()) {
        Ok(_) => case.check(&client, 7),
        Err(reason) => assert!(reason.to_string().contains("shared memory"), "{reason}"),
    }
}

#[rstest]
fn masks(
    #[values(Units::Emulated, Units::Sync, Units::Cooperative)] units: Units,
    #[values(
        (false, None, None),
        (true, None, None),
        (false, Some(7), None),
        (false, Some(20), Some(30)),
        (true, Some(0), None)
    )]
    band: (bool, Option<usize>, Option<usize>),
) {
    let mut case = pairs();
    (case.is_causal, case.window) = (band.0, (band.1, band.2));
    check(units, case, 2);
}

#[rstest]
fn softcap_and_groups(#[values(Units::Emulated, Units::Sync, Units::Cooperative)] units: Units) {
    let mut case = pairs();
    case.window = (Some(20), Some(30));
    case.softcap = Some(30.0);
    case.scale = -0.1;
    (case.heads, case.heads_kv) = (6, 2);
    case.value_dim = 40;
    check(units, case, 3);
}

/// Scores are compared before they are scaled: scales that turn their order round, or leave none.
#[rstest]
fn scales(
    #[values(Units::Emulated, Units::Sync, Units::Cooperative)] units: Units,
    #[values(1.5, 0.0, 1e-38, -0.2)] scale: f32,
) {
    let Some(client) = client() else { return };
    let mut case = pairs();
    (case.scale, case.is_causal) = (scale, true);
    let Some(case) = on(&client, units, case) else { return };
    case.check(&client, 8);
    attention_grad::check(&client, &case, true, 8);
}

#[rstest]
#[case::padded([0, 1, 2], 56)]
#[case::odd([0, 1, 2], 3)]
#[case::elements_outermost([2, 1, 0], 0)]
fn strides(
    #[values(Units::Emulated, Units::Sync, Units::Cooperative)] units: Units,
    #[case] order: [usize; 3],
    #[case] padding: usize,
) {
    let Some(client) = client() else { return };
    let Some(case) = on(&client, units, Case::new(72, &[33, 0, 41])) else { return };
    let layouts = case.shapes().map(|shape| permuted(shape, order, padding));
    case.check_layouts(&client, 4, layouts);
}

#[rstest]
fn empty_segments(#[values(Units::Emulated, Units::Sync, Units::Cooperative)] units: Units) {
    for (lengths_q, lengths_k) in [(vec![0, 0], vec![3, 4]), (vec![3, 4], vec![0, 0])] {
        let mut case = Case::new(64, &lengths_q);
        case.lengths_k = lengths_k;
        check(units, case, 5);
    }
}

#[rstest]
fn nan_stays_in_its_segment(
    #[values(Units::Emulated, Units::Sync, Units::Cooperative)] units: Units,
) {
    let Some(client) = client() else { return };
    let Some(case) = on(&client, units, Case::new(64, &[40, 35, 50])) else { return };
    case.check_nan_containment(&client, 60);
}

#[rstest]
fn gradients(
    #[values(Units::Emulated, Units::Sync, Units::Cooperative)] units: Units,
    #[values(64, 72)] head_dim: usize,
) {
    let Some(client) = client() else { return };
    let case = Case::new(head_dim, &segments("random", 50, 5));
    let Some(case) = on(&client, units, case) else { return };
    attention_grad::check(&client, &case, false, 5);
}

#[rstest]
fn gradients_with_all_options(
    #[values(Units::Emulated, Units::Sync, Units::Cooperative)] units: Units,
) {
    let Some(client) = client() else { return };
    let mut case = pairs();
    case.window = (Some(20), Some(30));
    case.softcap = Some(30.0);
    (case.heads, case.heads_kv) = (4, 2);
    case.value_dim = 40;
    let Some(case) = on(&client, units, case) else { return };
    attention_grad::check(&client, &case, true, 6);
}

/// Every tiling of an engine is right, also while it is measured against the others.
#[rstest]
fn tilings(#[values(Units::Emulated, Units::Sync, Units::Cooperative)] units: Units) {
    let Some(client) = client() else { return };
    let Some(case) = on(&client, units, Case::new(32, &[70, 0, 33])) else { return };
    let layouts = case.shapes().map(TensorLayout::contiguous);
    let mut properties = client.properties().clone();
    properties.hardware.max_shared_memory_size = 32 * 1024;
    let engine = case.engine.unwrap();
    let blueprints = candidates_on(&properties, &case.problem(layouts), engine).unwrap();
    assert!(blueprints.len() > 1, "{blueprints:?}");
    let inputs = case.inputs(8);
    for blueprint in &blueprints {
        let outputs = case.run_fastest(&client, &inputs, layouts, &[*blueprint]);
        case.compare(&client, &inputs, outputs);
    }
    for _ in 0..2 {
        let outputs = case.run_fastest(&client, &inputs, layouts, &blueprints);
        case.compare(&client, &inputs, outputs);
    }
}

/// The same of the backward pass.
#[rstest]
fn gradient_tilings(#[values(Units::Emulated, Units::Sync, Units::Cooperative)] units: Units) {
    let Some(client) = client() else { return };
    let Some(case) = on(&client, units, Case::new(16, &[70, 0, 33])) else { return };
    let problem = attention_grad::problem(&case, true);
    let inputs = attention_grad::Inputs::new(&case, true, 9);
    let engine = case.engine.unwrap();
    let blueprints = backward::candidates_on(client.properties(), &problem, engine).unwrap();
    assert!(blueprints.len() > 1, "{blueprints:?}");
    let run = |blueprints: &[_]| {
        attention_grad::run_fastest(&client, &case, &problem, &inputs, blueprints)
    };
    for blueprint in &blueprints {
        attention_grad::compare(&case, &problem, &inputs, &run(&[*blueprint]));
    }
    for _ in 0..2 {
        attention_grad::compare(&case, &problem, &inputs, &run(&blueprints));
    }
}
