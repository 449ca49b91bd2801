//! That tests run where their features and `VISION_ATTENTION_TEST_DEVICE` say: on the wrong compiler they would pass and prove nothing.

mod common;

use common::{client, device_name, required};

#[test]
fn kernels_go_through_the_compiler_of_the_feature() {
    let Some(client) = client() else { return };
    let expected = match device_name().as_str() {
        "wgpu" if cfg!(feature = "spirv") => "wgpu<spirv>".to_owned(),
        "wgpu" => "wgpu<wgsl>".to_owned(),
        name => name.to_owned(),
    };
    assert_eq!(client.name(), expected);
}

/// Where `VISION_ATTENTION_REQUIRE_COOPERATIVE_MATRICES=1` is set.
#[test]
fn matrix_units_are_there_where_they_are_asked_for() {
    let Some(client) = client() else { return };
    let matrices = &client.properties().features.matmul.cmma;
    assert!(!required("COOPERATIVE_MATRICES") || !matrices.is_empty(), "{}", client.name());
}
