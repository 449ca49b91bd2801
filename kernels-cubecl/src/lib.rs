//! `CubeCL` kernels for packed (variable-length) vision attention.
//!
//! The crate depends on `cubecl` alone: it links no runtime and knows no tensor library. Whoever brings
//! `CubeCL`'s CUDA runtime turns the feature `nvidia` on, too, which needs LLVM as that does: softmax then
//! takes the exponential's own instruction instead of eight. A kernel
//! is used in three steps, none of which synchronises with the device:
//!
//! 1. describe the request: [`AttentionProblem`] or [`RopeQkNormProblem`];
//! 2. ask a device for a plan with `supports`, which answers with a printable blueprint or with an
//!    [`Unsupported`] that names the missing property;
//! 3. launch with the tensors (for attention also with an uploaded [`WorkList`]).
//!
//! Each operation has its own folder, split into the problem (what is asked), the blueprint
//! (compile-time choices derived from problem and device), the kernel and the launch. The tile
//! algebra that attention loops are written in lives in `tile`.

pub mod attention_varlen;
mod device;
mod engine;
mod error;
mod exp2;
mod layout;
pub mod rope_qk_norm;
mod tile;
pub mod work_list;

pub use attention_varlen::{
    AttentionBlueprint, AttentionProblem, AttentionTensors,
    backward::{
        AttentionGradBlueprint, AttentionGradProblem, AttentionGradTensors, GradPass,
        GradPlacements, GradWork, Placement,
    },
};
pub use engine::Engine;
pub use error::{LaunchError, Unsupported};
pub use layout::TensorLayout;
pub use rope_qk_norm::{
    NormWeights, RopeQkNormBlueprint, RopeQkNormProblem, RopeQkNormTensors, RotaryTables,
};
pub use tile::CmmaShape;
pub use work_list::{DeviceWorkList, WorkList, WorkListError};
