//! Operations on plain tensors, for people who bring their own modules: one room each.

pub mod attention_varlen;
#[cfg(all(feature = "kernels", feature = "autodiff"))]
mod autodiff;
#[cfg(feature = "kernels")]
mod backend;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "kernels")]
mod kernels;
pub mod qkv_attention;
pub mod rope_qk_norm;
#[cfg(feature = "flex")]
pub(crate) mod vision_attention;
