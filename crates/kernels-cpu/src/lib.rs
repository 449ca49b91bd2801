//! CPU kernels for packed (variable-length) vision attention on plain strided slices.
//!
//! The CPU twin of `kernels-cubecl`, and like it free of any tensor library:
//!
//! - [`attention_varlen`]: softmax attention segment by segment in memory linear in tokens, forward
//!   and backward;
//! - [`rope_qk_norm`]: per-head RMS norm and rotary embedding in one pass, forward and backward;
//! - [`linear`]: the projections around them;
//! - [`vision_attention`]: all of these as one forward pass, whose intermediate results stay in caches.
//!
//! Elements are f32, f64, f16 or bf16 ([`Element`]); halves are computed in f32. The inner loops
//! exist for AVX-512, for AVX2 with FMA and in portable form; [`InstructionSet`] says which one runs.
//! Work is spread over rayon's current thread pool. The inputs alone decide every result, except that
//! the sums behind the query gradients of a long segment are grouped by the number of threads.

mod ahead;
mod aligned;
pub mod attention_varlen;
mod element;
pub mod linear;
mod memory;
pub mod rope_qk_norm;
mod simd;
mod view;
pub mod vision_attention;

pub use attention_varlen::{Attention, AttentionOptions, Gradients, OutputGradient};
pub use element::Element;
pub use memory::{Buffer, release_memory};
pub use simd::{InstructionSet, UnknownInstructionSet};
pub use view::{View, ViewMut};
