//! Packed ("varlen") vision attention for [Burn](burn).
//!
//! Images of different sizes are cut into patches and packed into one token sequence; [`Segments`]
//! (`cu_seqlens`) marks where each begins, and attention never crosses a boundary.
//!
//! | what | item |
//! |---|---|
//! | the layer | [`VisionAttention`], [`VisionAttentionConfig`], [`build_vision_attention`] |
//! | its implementations | [`AttentionImplementation`], [`resolve_attn_implementation`] |
//! | 2D rotary embedding | [`VisionRotaryEmbedding`], [`RotaryPositionEmbedding`], [`vision_positions`] |
//! | norm | [`VisionRmsNorm`] |
//! | operations on tensors | [`attention_varlen`], [`rope_qk_norm`], [`qkv_attention`] |
//!
//! # Implementations
//!
//! | name | what runs | memory |
//! |---|---|---|
//! | `eager` | one masked score matrix over all tokens | O(tokens^2), for comparison only |
//! | `eager_v2` | per segment in tensor operations | scores under 256 MiB |
//! | `sdpa` | per segment through Burn's own `attention` | scores under 256 MiB |
//! | `flash_attention_2` | one kernel over all segments (Flex and CubeCL devices) | O(tokens) |
//! | `flash_attention_3` | the same with keys and values copied meanwhile (CUDA from 9.0 on, `cuda-cpp`) | O(tokens) |
//!
//! The bound of 256 MiB is for segments of up to 67 million keys (over all query heads that share a key
//! head). With gradients the composed implementations keep every chunk's scores for the backward pass,
//! which is O(length^2) a segment.
//!
//! A request is resolved on the device at each call: `flash_attention_3` falls back to
//! `flash_attention_2`, and that to the configured `eager_fallback`. Each [`Fallback`] is logged once
//! and can be asked for by [`VisionAttention::resolution`].
//!
//! # Rounding
//!
//! Norms, rotation, softmax and sums run in f32 whatever the dtype, and results are cast back once.

mod attention;
mod builder;
mod implementation;
mod norm;
pub mod ops;
mod positions;
mod report;
mod rope;
mod segments;

pub use attention::{
    AttentionConfigError, VisionAttention, VisionAttentionConfig, apply_vision_attention_residual,
};
pub use builder::{AttentionOverrides, build_vision_attention};
pub use implementation::{
    AttentionImplementation, Fallback, KernelRequirements, Resolution, UnknownImplementation,
    attn_uses_seqlens, describe_attn_kernel, prepare_seqlens_for_attention,
    resolve_attn_implementation,
};
#[cfg(feature = "flex")]
pub use kernels_cpu::release_memory;
pub use norm::{VisionRmsNorm, VisionRmsNormConfig};
pub use ops::attention_varlen::{
    AttentionError, AttentionOptions, Window, attention_varlen, attention_varlen_by,
    attention_varlen_with_lse, check_attention_varlen,
};
pub use ops::qkv_attention::qkv_attention;
pub use ops::rope_qk_norm::{QkNorm, rope_qk_norm};
pub use positions::{PositionError, PositionOrder, vision_positions};
pub use rope::{
    RopeHeadDimError, RotaryPositionEmbedding, VisionRotaryEmbedding, apply_rotary_pos_emb_vision,
    rotate_half,
};
pub use segments::{Segments, SegmentsError};
