//! The kernel with a producer against plain Rust: on TMA and mbarriers where the device reports them, and
//! everywhere with copies, barriers and matrix instructions emulated.
#![allow(clippy::unwrap_used)]

#[path = "common/attention.rs"]
mod attention;
mod common;

use attention::{Case, pairs, permuted, segments};
use common::{BF16, F16, F32, client, required};
use cubecl::client::Client;
use cubecl::features::Tma;
use cubecl::ir::{DeviceProperties, OpaqueType};
use kernels_cubecl::{
    AttentionGradProblem, Engine, TensorLayout,
    attention_varlen::{backward, candidates_on, supports_engine},
};
use rstest::rstest;

/// What copies tiles while others are multiplied.
#[derive(Clone, Copy, Debug)]
enum Copies {
    Emulated,
    Tma,
}

/// The case, in f16 unless it says bf16, with tiles copied like this, if the device can.
fn on(client: &Client, copies: Copies, mut case: Case) -> Option<Case> {
    if case.dtype == F32 {
        case.dtype = F16;
    }
    case.engine = Some(match copies {
        Copies::Emulated => Engine::EmulatedAsyncMma,
        Copies::Tma => {
            reports_copies(client)?;
            Engine::AsyncMma
        }
    });
    Some(case)
}

/// Whether the device reports what the kernel is made of; said in words where it does not, which is a
/// failure where `VISION_ATTENTION_REQUIRE_ASYNC_COPIES=1` is set. The engine itself is not asked: one that
/// refuses such a device fails its tests instead of skipping them.
fn reports_copies(client: &Client) -> Option<()> {
    let features = &client.properties().features;
    let parts = [
        (features.tma.contains(Tma::Base), "TMA"),
        (features.supports_type(OpaqueType::TensorMap), "tensor maps"),
        (features.supports_type(OpaqueType::Barrier), "mbarriers"),
        (!features.matmul.mma.is_empty(), "matrix instructions"),
        (!features.matmul.ldmatrix.is_empty(), "ldmatrix"),
    ];
    let missing: Vec<&str> =
        parts.into_iter().filter_map(|(reported, name)| (!reported).then_some(name)).collect();
    if missing.is_empty() {
        return Some(());
    }
    let reason = format!("{} reports no {}", client.name(), missing.join(", no "));
    assert!(!required("ASYNC_COPIES"), "{reason}");
    println!("skipped: {reason}");
    None
}

fn check(copies: Copies, case: Case, seed: u64) {
    let Some(client) = client() else { return };
    let Some(case) = on(&client, copies, case) else { return };
    case.check(&client, seed);
}

/// Rows of panels of 32, 64 and 128 bytes, with and without columns past the row's end, one panel and
/// several; more tiles than stages.
#[rstest]
fn head_dims(
    #[values(Copies::Emulated, Copies::Tma)] copies: Copies,
    #[values(16, 40, 64, 72, 80, 128)] head_dim: usize,
) {
    check(copies, Case::new(head_dim, &segments("random", 100, 1)), 1);
}

/// The type of released models, and heads whose emulated tiles no software device has room for.
#[rstest]
#[case(BF16, 64, 64)]
#[case(BF16, 72, 72)]
#[case(BF16, 128, 128)]
#[case(F16, 192, 128)]
#[case(F16, 128, 192)]
#[case(BF16, 256, 256)]
fn types_and_wide_heads(
    #[case] dtype: cubecl::ir::ElemType,
    #[case] head_dim: usize,
    #[case] value_dim: usize,
) {
    let mut case = Case::new(head_dim, &segments("random", 100, 9));
    (case.dtype, case.value_dim) = (dtype, value_dim);
    check(Copies::Tma, case, 9);
}

#[rstest]
fn masks(
    #[values(Copies::Emulated, Copies::Tma)] copies: Copies,
    #[values((true, None, None), (false, Some(20), Some(30)), (true, Some(0), None))] band: (
        bool,
        Option<usize>,
        Option<usize>,
    ),
) {
    let mut case = pairs();
    (case.is_causal, case.window) = (band.0, (band.1, band.2));
    check(copies, case, 2);
}

#[rstest]
fn softcap_and_groups(#[values(Copies::Emulated, Copies::Tma)] copies: Copies) {
    let mut case = pairs();
    case.window = (Some(20), Some(30));
    case.softcap = Some(30.0);
    case.scale = -0.1;
    (case.heads, case.heads_kv) = (6, 2);
    case.value_dim = 40;
    check(copies, case, 3);
}

#[rstest]
fn scales(
    #[values(Copies::Emulated, Copies::Tma)] copies: Copies,
    #[values(1.5, 0.0, 1e-38, -0.2)] scale: f32,
) {
    let mut case = pairs();
    (case.scale, case.is_causal) = (scale, true);
    check(copies, case, 8);
}

/// Slices of a wider tensor, and heads outside of tokens: all strides are whole units of 16 bytes.
#[rstest]
#[case::packed([0, 1, 2], 24)]
#[case::heads_outermost([1, 0, 2], 0)]
fn strides(
    #[values(Copies::Emulated, Copies::Tma)] copies: Copies,
    #[case] order: [usize; 3],
    #[case] padding: usize,
) {
    let Some(client) = client() else { return };
    let Some(case) = on(&client, copies, Case::new(72, &[33, 0, 41])) else { return };
    let layouts = case.shapes().map(|shape| permuted(shape, order, padding));
    case.check_layouts(&client, 4, layouts);
}

#[rstest]
fn empty_segments(#[values(Copies::Emulated, Copies::Tma)] copies: Copies) {
    for (lengths_q, lengths_k) in [(vec![0, 0], vec![3, 4]), (vec![3, 4], vec![0, 0])] {
        let mut case = Case::new(64, &lengths_q);
        case.lengths_k = lengths_k;
        check(copies, case, 5);
    }
}

/// A tile reaches into the next segment, whose values meet weights of 0.
#[rstest]
fn nan_stays_in_its_segment(#[values(Copies::Emulated, Copies::Tma)] copies: Copies) {
    let Some(client) = client() else { return };
    let Some(case) = on(&client, copies, Case::new(64, &[40, 35, 50])) else { return };
    // The first token after the first segment.
    case.check_nan_containment(&client, 40);
}

/// Every tiling is right, also while it is measured against the others.
#[rstest]
fn tilings(#[values(Copies::Emulated, Copies::Tma)] copies: Copies) {
    let Some(client) = client() else { return };
    let Some(case) = on(&client, copies, Case::new(32, &[70, 0, 33])) else { return };
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
    let outputs = case.run_fastest(&client, &inputs, layouts, &blueprints);
    case.compare(&client, &inputs, outputs);
}

/// Copies and products race for the same memory: what is overwritten too early differs from run to run.
#[rstest]
fn repeats_are_bitwise_equal(#[values(Copies::Emulated, Copies::Tma)] copies: Copies) {
    let (lengths, repeats) = match copies {
        // There is nothing to race in plain code.
        Copies::Emulated => ([70, 0, 33], 2),
        Copies::Tma => ([300, 0, 257], 100),
    };
    let Some(client) = client() else { return };
    let Some(case) = on(&client, copies, Case::new(64, &lengths)) else { return };
    let layouts = case.shapes().map(TensorLayout::contiguous);
    let inputs = case.inputs(10);
    let bytes = || {
        let (out, lse) = case.run(&client, &inputs, layouts);
        (out.bytes(&client), lse.bytes(&client))
    };
    let first = bytes();
    for repeat in 1..repeats {
        assert!(bytes() == first, "repeat {repeat} differs");
    }
}

/// What TMA cannot copy is refused in words, and so is what the device does not report.
#[test]
fn what_cannot_be_copied_is_refused() {
    let Some(client) = client() else { return };
    let engine = Engine::EmulatedAsyncMma;
    let case = on(&client, Copies::Emulated, Case::new(72, &[33, 0, 41])).unwrap();
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
    properties.features.types.opaque = Default::default();
    properties.features.matmul.mma = Default::default();
    let reason = refusal(&properties, contiguous, Engine::AsyncMma);
    assert!(reason.starts_with("mma-async needs TMA") && reason.contains("cuda-cpp"), "{reason}");
    properties.features.tma.insert(Tma::Base);
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
