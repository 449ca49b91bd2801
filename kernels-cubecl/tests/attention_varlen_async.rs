//! The kernel with a producer against plain Rust, its copies, barriers and matrix instructions
//! emulated.
#![allow(clippy::unwrap_used)]

#[path = "common/attention.rs"]
mod attention;
mod common;

use attention::{Case, pairs, permuted, segments};
use common::{F16, client};
use cubecl::ir::{DeviceProperties, OpaqueType};
use kernels_cubecl::{
    AttentionGradProblem, Engine, TensorLayout,
    attention_varlen::{backward, candidates_on, supports_engine},
};
use rstest::rstest;

fn emulated(mut case: Case) -> Case {
    (case.dtype, case.engine) = (F16, Some(Engine::EmulatedAsyncMma));
    case
}

fn check(case: Case, seed: u64) {
    let Some(client) = client() else { return };
    emulated(case).check(&client, seed);
}

/// Rows of panels of 32, 64 and 128 bytes, with and without columns past the row's end, one panel and
/// several; more tiles than stages.
#[rstest]
fn emulated_head_dims(#[values(16, 40, 64, 72, 128)] head_dim: usize) {
    check(Case::new(head_dim, &segments("random", 100, 1)), 1);
}

#[rstest]
#[case::causal(true, None, None)]
#[case::window(false, Some(20), Some(30))]
#[case::diagonal(true, Some(0), None)]
fn emulated_masks(
    #[case] is_causal: bool,
    #[case] left: Option<usize>,
    #[case] right: Option<usize>,
) {
    let mut case = pairs();
    (case.is_causal, case.window) = (is_causal, (left, right));
    check(case, 2);
}

#[test]
fn emulated_softcap_and_groups() {
    let mut case = pairs();
    case.window = (Some(20), Some(30));
    case.softcap = Some(30.0);
    case.scale = -0.1;
    (case.heads, case.heads_kv) = (6, 2);
    case.value_dim = 40;
    check(case, 3);
}

/// Slices of a wider tensor, and heads outside of tokens: all strides are whole units of 16 bytes.
#[rstest]
#[case::packed([0, 1, 2], 24)]
#[case::heads_outermost([1, 0, 2], 0)]
fn emulated_strides(#[case] order: [usize; 3], #[case] padding: usize) {
    let Some(client) = client() else { return };
    let case = emulated(Case::new(72, &[33, 0, 41]));
    let layouts = case.shapes().map(|shape| permuted(shape, order, padding));
    case.check_layouts(&client, 4, layouts);
}

#[test]
fn emulated_empty_segments() {
    for (lengths_q, lengths_k) in [(vec![0, 0], vec![3, 4]), (vec![3, 4], vec![0, 0])] {
        let mut case = Case::new(64, &lengths_q);
        case.lengths_k = lengths_k;
        check(case, 5);
    }
}

/// A tile reaches into the next segment, whose values meet weights of 0.
#[test]
fn emulated_nan_stays_in_its_segment() {
    let Some(client) = client() else { return };
    let case = emulated(Case::new(64, &[40, 35, 50]));
    // The first token after the first segment.
    case.check_nan_containment(&client, 40);
}

#[test]
fn emulated_tilings() {
    let Some(client) = client() else { return };
    let case = emulated(Case::new(32, &[70, 0, 33]));
    let layouts = case.shapes().map(TensorLayout::contiguous);
    let mut properties = client.properties().clone();
    properties.hardware.max_shared_memory_size = 32 * 1024;
    let problem = case.problem(layouts);
    let blueprints = candidates_on(&properties, &problem, Engine::EmulatedAsyncMma).unwrap();
    assert!(blueprints.len() > 1, "{blueprints:?}");
    let inputs = case.inputs(8);
    for blueprint in &blueprints {
        let outputs = case.run_fastest(&client, &inputs, layouts, &[*blueprint]);
        case.compare(&client, &inputs, outputs);
    }
}

/// What TMA cannot copy is refused in words, and so is what the device does not report.
#[test]
fn what_cannot_be_copied_is_refused() {
    let Some(client) = client() else { return };
    let engine = Engine::EmulatedAsyncMma;
    let case = emulated(Case::new(72, &[33, 0, 41]));
    let refusal = |properties: &DeviceProperties, layouts, engine| {
        supports_engine(properties, &case.problem(layouts), engine).unwrap_err().to_string()
    };
    let contiguous = case.shapes().map(TensorLayout::contiguous);
    for (order, padding) in [([0, 1, 2], 4), ([2, 1, 0], 0)] {
        let mut layouts = contiguous;
        layouts[1] = permuted(case.shapes()[1], order, padding);
        let reason = refusal(client.properties(), layouts, engine);
        assert!(reason.starts_with("emulated-mma-async needs k and v with"), "{reason}");
        // Queries are read as they lie.
        layouts.swap(0, 1);
        assert!(supports_engine(client.properties(), &case.problem(layouts), engine).is_ok());
    }
    let mut properties = client.properties().clone();
    properties.features.tma = Default::default();
    let reason = refusal(&properties, contiguous, Engine::AsyncMma);
    assert!(reason.starts_with("mma-async needs TMA") && reason.contains("cuda-cpp"), "{reason}");
    properties.features.tma.insert(cubecl::features::Tma::Base);
    properties.register_opaque_type(OpaqueType::TensorMap);
    let reason = refusal(&properties, contiguous, Engine::AsyncMma);
    assert!(reason.starts_with("mma-async needs mbarrier"), "{reason}");
    properties.register_opaque_type(OpaqueType::Barrier);
    let reason = refusal(&properties, contiguous, Engine::AsyncMma);
    assert!(reason.starts_with("mma-async needs matrix instructions"), "{reason}");
    let gradient = AttentionGradProblem::new(case.problem(contiguous));
    let reason = backward::supports_engine(client.properties(), &gradient, engine).unwrap_err();
    assert!(reason.to_string().contains("gradients run on mma"), "{reason}");
}
