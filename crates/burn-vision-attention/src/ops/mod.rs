//! Operations on plain tensors, for people who bring their own modules: one room each.

pub mod attention_varlen;
pub mod rope_qk_norm;
