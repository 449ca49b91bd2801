//! Every test of the kernels in one program, which can be taken to a machine without cargo: each that can
//! run on CUDA is as large as LLVM.

#[path = "attention_varlen.rs"]
mod attention_varlen;
#[path = "attention_varlen_async.rs"]
mod attention_varlen_async;
#[path = "attention_varlen_grad.rs"]
mod attention_varlen_grad;
#[path = "attention_varlen_matrix.rs"]
mod attention_varlen_matrix;
#[path = "device.rs"]
mod device;
#[path = "rope_qk_norm.rs"]
mod rope_qk_norm;
#[path = "rope_qk_norm_backward.rs"]
mod rope_qk_norm_backward;
