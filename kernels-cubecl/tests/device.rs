//! That tests run where their features say: on the wrong compiler they would pass and prove nothing.

mod common;

use common::{client, required};

#[test]
fn kernels_go_through_the_compiler_of_the_feature() {
    let Some(client) = client() else { return };
    let expected = match () {
        _ if cfg!(feature = "cpu") => "cpu",
        _ if cfg!(feature = "spirv") => "wgpu<spirv>",
        _ => "wgpu<wgsl>",
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
