//! Gradient of the fused norm and rotation.
//!
//! For each token and head, with `x` the `head_dim` elements before the norm, `r` the factor
//! `rsqrt(mean(x^2) + epsilon)`, `d_out` the gradient of the output, all in f32:
//!
//! 1. rotation (optional), undone: `g[i] = d_out[i] cos[i] + d_out[i + d/2] sin[i]` and
//!    `g[i + d/2] = d_out[i + d/2] cos[i] - d_out[i] sin[i]` for `i < d/2`;
//! 2. norm (optional), with `n = x r`: `dx = r (g w - n mean(g w n))` and
//!    `d_weight = sum over tokens and heads of g n`.
//!
//! `dx` and `d_weight` are rounded once. The weight gradient is summed in an order that depends on
//! the problem alone, so that equal calls give equal bits: each cube sums its heads, a second launch
//! sums the cubes.

mod blueprint;
mod kernel;
mod launch;
mod problem;
mod reduce;

pub use blueprint::{RopeQkNormBackwardBlueprint, WeightGradientBlueprint, supports};
pub use launch::{
    NormGradients, RopeQkNormBackwardTensors, kernel, launch, weight_gradient_kernel,
};
pub use problem::RopeQkNormBackwardProblem;
