#![allow(clippy::unwrap_used)]

use cubecl::features::{Features, MmaConfig, Plane, Tma, TypeUsage};
use cubecl::ir::{
    AddressType, DeviceIdentity, HardwareProperties, MemoryDeviceProperties, OpaqueType, VectorSize,
};
use cubecl::profile::TimingMethod;
use rstest::rstest;

use super::*;

fn properties() -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: 227 * 1024,
        max_cube_count: (i32::MAX as u32, 65_535, 65_535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: None,
        num_tensor_cores: None,
        min_tensor_cores_dim: None,
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity =
        DeviceIdentity { name: "test".into(), fingerprint: "test".into(), physical: None };
    let memory = MemoryDeviceProperties::new(u64::MAX, 512);
    let mut properties = DeviceProperties::new(
        Features::default(),
        memory,
        hardware,
        TimingMethod::Device,
        identity,
    );
    for dtype in DTYPES {
        properties.register_type_usage(dtype, TypeUsage::all());
    }
    for address in [AddressType::U32, AddressType::U64] {
        properties.register_address_type(address);
    }
    properties
}

fn names(selection: Selection) -> Vec<String> {
    variants(&properties(), selection).unwrap().iter().map(Variant::to_string).collect()
}

/// Kernels of an operation with all of these words.
fn count(names: &[String], operation: &str, words: &[&str]) -> usize {
    let of = |name: &&String| {
        name.strip_prefix(operation).is_some_and(|rest| {
            rest.starts_with(' ') && words.iter().all(|word| rest.contains(word))
        })
    };
    names.iter().filter(of).count()
}

/// Counted by hand: two blueprints of the same words would be one too few.
#[test]
fn every_choice_is_listed_once() {
    let names = names(Selection::Full);
    assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len(), "a name twice");
    let count = |operation, words: &[&str]| count(&names, operation, words);
    // 3 dtypes, 8 pairs of head_dims, 4 layouts, 4 masks, with and without softcap.
    assert_eq!(count("attention_varlen simt", &[]), 3 * 8 * 4 * 4 * 2);
    assert_eq!(count("attention_varlen simt", &["U64", "right-bounded"]), 3 * 8 * 2 * 2);
    assert_eq!(count("attention_varlen simt", &["[1, 1, 1]", "softcap"]), 3 * 8 * 4);
    assert_eq!(count("attention_varlen simt", &["[4, 1, 4]"]), 3 * 8 * 4 * 2);
    assert_eq!(count("attention_varlen simt", &["head_dim 72/72", "bf16"]), 4 * 4 * 2);
    for pass in [" dq", " dk dv"] {
        assert_eq!(count("attention_varlen backward", &[pass]), 3 * 8 * 4 * 4 * 2);
    }
    assert_eq!(count("attention_varlen backward", &[" d_lse statistics"]), 3 * 8 * 4);
    // f32 has two norms, the others three; 7 head_dims, with and without rotation. Mixed layouts are
    // read like scalar ones.
    assert_eq!(count("rope_qk_norm", &["launches 1"]), (2 + 3 + 3) * 7 * 3 * 2 - 3 * 7 * 3);
    assert_eq!(count("rope_qk_norm", &["launches 2"]), (2 + 3 + 3) * 7 * 3 * 2 - 3 * 7 * 3);
    assert_eq!(count("rope_qk_norm_backward", &["in-place"]), 5 * 7 * 3 * 2 + 3 * 7 * 3);
    assert_eq!(count("rope_qk_norm_backward", &["groups 1"]), 5 * 7 * 3 * 2 + 3 * 7 * 3);
    assert_eq!(count("rope_qk_norm_weight_gradient", &[]), 3 * 2);
}

/// With what the blueprints ask of a device for `mma.sync`.
fn with_matrix_units() -> DeviceProperties {
    let mut properties = properties();
    for half in [FloatKind::F16, FloatKind::BF16].map(ElemType::Float) {
        let config = MmaConfig { a_type: half, b_type: half, cd_type: F32, m: 16, n: 8, k: 16 };
        properties.features.matmul.mma.insert(config);
        properties.features.matmul.ldmatrix.insert(half);
    }
    properties.features.plane.insert(Plane::Ops);
    properties
}

#[rstest]
fn matrix_kernels_are_listed_beside_the_plain_ones(
    #[values("f16", "bf16")] dtype: &str,
    #[values(64, 72, 80, 128, 192, 256)] head_dim: usize,
) {
    let names: Vec<_> = variants(&with_matrix_units(), Selection::Usual).unwrap();
    let names: Vec<_> = names.iter().map(Variant::to_string).collect();
    let size = format!("head_dim {head_dim}/{head_dim}");
    let count = |operation, words: &[&str]| {
        count(&names, operation, &[words, &[&format!(" {dtype} "), &size]].concat())
    };
    // Plain and masked.
    assert_eq!(count("attention_varlen simt", &[]), 2);
    for masked in ["U32", "softcap"] {
        assert!(count("attention_varlen mma", &[masked]) >= 1, "{masked}");
    }
    // The gradients of keys and values of wider heads have no room in registers.
    let backward = count("attention_varlen backward mma", &[]);
    assert_eq!(backward > 0, head_dim <= 128, "{backward}");
    assert_eq!(count("attention_varlen mma f32", &[]), 0);
}

/// Where tiles can be copied by themselves, kernels that do so are listed beside the others, for the
/// layouts that allow it.
#[test]
fn kernels_with_a_producer_are_listed_where_there_is_one() {
    let listed = |properties: &DeviceProperties, selection| {
        let mut variants = variants(properties, selection).unwrap();
        variants.retain(Variant::needs_cpp);
        variants.iter().map(Variant::to_string).collect::<Vec<_>>()
    };
    let mut properties = with_matrix_units();
    assert_eq!(listed(&properties, Selection::Full), [""; 0]);
    properties.features.tma.insert(Tma::Base);
    properties.register_opaque_type(OpaqueType::TensorMap);
    properties.register_opaque_type(OpaqueType::Barrier);
    let usual = listed(&properties, Selection::Usual);
    for dtype in ["f16", "bf16"] {
        for head_dim in [64, 72, 80, 128, 192, 256] {
            let words = format!(" mma-async {dtype} head_dim {head_dim}/{head_dim} ");
            let of = || usual.iter().filter(|name| name.contains(&words));
            assert!(of().any(|name| name.ends_with("U32 stages 2")), "{words}");
            assert!(of().any(|name| name.ends_with("stages 2 left-bounded right-bounded softcap")));
        }
    }
    let full = listed(&properties, Selection::Full);
    assert!(usual.iter().all(|name| full.contains(name)));
    // Queries may lie anyhow, keys and values not.
    assert!(full.iter().all(|name| name.contains(", 8, 8] ")));
    assert!(full.iter().any(|name| name.contains(" U64 ")));
}

#[rstest]
#[case("attention_varlen simt", 3 * 6 * 2)]
#[case("attention_varlen backward", 3 * 6 * (2 + 2 + 2))]
#[case("rope_qk_norm", 3 * 6 * 3 * 2)]
#[case("rope_qk_norm_backward", 3 * 6 * 3 * 2)]
#[case("rope_qk_norm_weight_gradient", 3 * 2)]
fn the_usual_are_some_of_all(#[case] operation: &str, #[case] expected: usize) {
    let (usual, full) = (names(Selection::Usual), names(Selection::Full));
    assert_eq!(count(&usual, operation, &[]), expected);
    assert!(usual.iter().all(|name| full.contains(name)));
    assert!(usual.iter().all(|name| !name.contains("U64") && !name.contains("[1")));
}
