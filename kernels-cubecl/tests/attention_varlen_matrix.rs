//! The kernels on matrix units against plain Rust. Where a device has no matrix instructions, the
//! emulated ones run the same kernel.
#![allow(clippy::unwrap_used)]

#[path = "common/attention.rs"]
mod attention;
#[path = "common/attention_grad.rs"]
mod attention_grad;
mod common;

use attention::{Case, pairs, permuted, segments};
use common::{F16, client};
use cubecl::client::Client;
use kernels_cubecl::{Engine, TensorLayout};
use rstest::rstest;

fn check(client: &Client, mut case: Case, seed: u64) {
    case.dtype = F16;
    case.engine = Some(Engine::EmulatedMma);
    case.check(client, seed);
}

#[rstest]
fn head_dims(#[values(16, 64)] head_dim: usize) {
    let Some(client) = client() else { return };
    check(&client, Case::new(head_dim, &segments("random", 50, 1)), 1);
}

#[test]
fn masks() {
    let Some(client) = client() else { return };
    let mut case = pairs();
    case.window = (Some(20), Some(30));
    case.softcap = Some(30.0);
    (case.heads, case.heads_kv) = (4, 2);
    check(&client, case, 2);
}

#[test]
fn strides() {
    let Some(client) = client() else { return };
    let mut case = Case::new(72, &[33, 0, 41]);
    case.dtype = F16;
    case.engine = Some(Engine::EmulatedMma);
    for (order, padding) in [([0, 1, 2], 56), ([0, 1, 2], 3), ([2, 1, 0], 0)] {
        let layouts = case.shapes().map(|shape| permuted(shape, order, padding));
        case.check_layouts(&client, 3, layouts);
    }
    let packed =
        |shape: [usize; 3]| TensorLayout { shape, strides: [3 * shape[1] * shape[2], shape[2], 1] };
    case.check_layouts(&client, 4, case.shapes().map(packed));
}

#[rstest]
fn gradients(#[values(64, 72)] head_dim: usize) {
    let Some(client) = client() else { return };
    let mut case = Case::new(head_dim, &segments("random", 50, 5));
    case.dtype = F16;
    case.engine = Some(Engine::EmulatedMma);
    attention_grad::check(&client, &case, false, 5);
}

#[test]
fn gradients_with_all_options() {
    let Some(client) = client() else { return };
    let mut case = pairs();
    case.dtype = F16;
    case.engine = Some(Engine::EmulatedMma);
    case.window = (Some(20), Some(30));
    case.softcap = Some(30.0);
    (case.heads, case.heads_kv) = (4, 2);
    case.value_dim = 40;
    attention_grad::check(&client, &case, true, 6);
}
