//! Gradients of packed variable-length attention, recomputed tile by tile in memory linear in
//! tokens.
//!
//! With `s` the scores after scale, softcap and mask, and everything segment by segment:
//!
//! ```text
//! delta = rowsum(out * d_out) - d_lse        p  = exp(s - lse)
//! dp    = d_out v^T                          ds = p * (dp - delta) * (1 - (s / softcap)^2)
//! dq    = softmax_scale * ds k               dv = p^T d_out
//! dk    = softmax_scale * ds^T q
//! ```
//!
//! after Dao, "FlashAttention-2" (2023), algorithm 2, in three passes without atomics, so that equal
//! inputs give equal bits: lse and delta of every query; queries stay and keys stream past for dq;
//! keys stay and the queries of all their heads stream past for dk and dv.

mod blueprint;
mod kernel;
mod launch;
mod problem;
mod tiling;
mod tune;

pub use blueprint::{
    AttentionGradBlueprint, GradPass, candidates, candidates_on, supports, supports_engine,
};
pub use launch::{AttentionGradTensors, GradWork, kernel, launch, launch_wanted};
pub use problem::{AttentionGradProblem, GradPlacements, Placement};
pub use tune::{CutGradWork, launch_fastest};
