//! Packed variable-length attention:
//! `out = softmax(softmax_scale * q k^T + mask) v`, segment by segment, in memory linear in tokens.
//!
//! Online softmax after Dao et al., "FlashAttention" (2022) and "FlashAttention-2" (2023): query
//! tiles stay, key and value tiles stream past, and the running row maximum and row sum rescale
//! what has been accumulated. Gradients are in [`backward`].

pub mod backward;
mod blueprint;
mod kernel;
mod kernel_async;
mod launch;
mod launch_async;
mod problem;
mod tiling;
mod tune;

pub use blueprint::{AttentionBlueprint, candidates, candidates_on, supports, supports_engine};
pub use launch::{AttentionTensors, kernel, launch};
pub use problem::{AttentionProblem, HEAD_DIMS};
pub use tune::{CutWork, launch_fastest};
