//! The gradient kernels against plain Rust on the wgpu device: flash-attention's grid, re-done on
//! lengths that a software device runs in seconds.
#![allow(clippy::unwrap_used)]

#[path = "common/attention.rs"]
mod attention;
#[path = "common/attention_grad.rs"]
mod attention_grad;
mod common;

use attention::{Case, Tiles, cumulative, has_dtype, pairs, segments};
use attention_grad::{Inputs, check, check_problem, expanded, gather, problem, reference, run};
use common::{F16, F32, Output, client, max_error, upload};
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
