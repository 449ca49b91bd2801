//! Operations on plain tensors, for people who bring their own modules: one room each.

pub mod attention_varlen;
#[cfg(feature = "cube")]
mod backend;
#[cfg(feature = "cube")]
mod cube;
pub mod rope_qk_norm;
