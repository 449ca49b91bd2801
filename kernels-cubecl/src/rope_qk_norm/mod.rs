//! Per-head RMS norm and rotary position embedding of queries and keys in one pass.
//!
//! For each token and head, with `x` the `head_dim` elements:
//!
//! 1. norm (optional): `x * rsqrt(mean(x^2) + epsilon)` in f32, rounded to the input type, then times
//!    the weight, rounded to the wider of both types;
//! 2. rotation (optional), half-split: `out[i] = x[i] cos[i] - x[i + d/2] sin[i]` and
//!    `out[i + d/2] = x[i + d/2] cos[i] + x[i] sin[i]` for `i < d/2`, in f32, rounded once.

pub mod backward;
mod blueprint;
mod kernel;
mod launch;
mod problem;

pub use blueprint::{RopeQkNormBlueprint, supports};
pub use launch::{NormWeights, RopeQkNormTensors, RotaryTables, kernel, launch};
pub use problem::{RmsNorm, RopeQkNormProblem};
