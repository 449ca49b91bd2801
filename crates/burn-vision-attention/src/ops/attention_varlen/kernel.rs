//! The way to a device's kernel, where it has one.

use burn::tensor::{Device, Tensor};

use super::problem::Attention;
use crate::implementation::{AttentionImplementation, KernelRequirements};

/// A kernel of the forward pass. The backward pass has one for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlashKernel {
    /// `flash_attention_2`.
    V2,
    /// `flash_attention_3`.
    V3,
}

impl FlashKernel {
    /// The kernel that an implementation asks for, if it does.
    pub(crate) fn of(implementation: AttentionImplementation) -> Option<Self> {
        [Self::V2, Self::V3].into_iter().find(|kernel| kernel.implementation() == implementation)
    }

    /// The implementation that runs it.
    pub(crate) fn implementation(self) -> AttentionImplementation {
        match self {
            Self::V2 => AttentionImplementation::FlashAttention2,
            Self::V3 => AttentionImplementation::FlashAttention3,
        }
    }
}

/// Whether an implementation can run on a device, and if not, which property is missing.
pub(crate) fn support(
    implementation: AttentionImplementation,
    device: &Device,
    requirements: &KernelRequirements,
) -> Result<(), String> {
    FlashKernel::of(implementation).map_or(Ok(()), |kernel| flash(kernel, device, requirements))
}

#[cfg(feature = "kernels")]
fn flash(
    kernel: FlashKernel,
    device: &Device,
    requirements: &KernelRequirements,
) -> Result<(), String> {
    crate::ops::kernels::supports_attention(
        device,
        kernel,
        requirements.dtype,
        shapes(requirements),
        &Default::default(),
    )
}

/// The smallest q, k and v with these dimensions.
#[cfg(feature = "kernels")]
fn shapes(requirements: &KernelRequirements) -> [[usize; 3]; 3] {
    let KernelRequirements { head_dim, value_dim, .. } = *requirements;
    [[1, 1, head_dim], [1, 1, head_dim], [1, 1, value_dim]]
}

/// The kernel that an implementation runs on a device, in words: its engine, tiles and memory. Or why
/// there is none.
pub(crate) fn describe(
    implementation: AttentionImplementation,
    device: &Device,
    requirements: &KernelRequirements,
) -> Result<String, String> {
    let kernel = FlashKernel::of(implementation).ok_or_else(|| {
        format!("{implementation} is made of tensor operations and has no kernel")
    })?;
    description(kernel, device, requirements)
}

#[cfg(feature = "kernels")]
fn description(
    kernel: FlashKernel,
    device: &Device,
    requirements: &KernelRequirements,
) -> Result<String, String> {
    crate::ops::kernels::describe_attention(
        device,
        kernel,
        requirements.dtype,
        shapes(requirements),
        &Default::default(),
    )
}

#[cfg(not(feature = "kernels"))]
fn description(_: FlashKernel, device: &Device, _: &KernelRequirements) -> Result<String, String> {
    Err(no_kernel(device))
}

/// Output and lse by the kernel, or why it cannot run.
#[cfg(feature = "kernels")]
pub(super) fn kernel(
    attention: &Attention<'_>,
    kernel: FlashKernel,
) -> Result<(Tensor<3>, Tensor<2>), String> {
    use crate::ops::backend::PackedAttentionBackend;
    use burn::backend::Dispatch;

    let Attention { q, k, v, segments_q, segments_k, options, .. } = attention;
    let shapes = [q.dims(), k.dims(), v.dims()];
    crate::ops::kernels::supports_attention(&q.device(), kernel, q.dtype(), shapes, options)?;
    if attention.sizes.tokens == 0 {
        return Ok(attention.unseeing(0));
    }
    let [q, k, v] = [q, k, v].map(|tensor| tensor.clone().into_dispatch());
    let (segments_q, segments_k) = ((*segments_q).clone(), (*segments_k).clone());
    let (out, lse) = Dispatch::packed_attention(q, k, v, segments_q, segments_k, **options, kernel);
    Ok((Tensor::from_dispatch(out), Tensor::from_dispatch(lse)))
}

#[cfg(not(feature = "kernels"))]
fn flash(_: FlashKernel, device: &Device, _: &KernelRequirements) -> Result<(), String> {
    Err(no_kernel(device))
}

#[cfg(not(feature = "kernels"))]
pub(super) fn kernel(
    attention: &Attention<'_>,
    _: FlashKernel,
) -> Result<(Tensor<3>, Tensor<2>), String> {
    Err(no_kernel(&attention.q.device()))
}

#[cfg(not(feature = "kernels"))]
fn no_kernel(device: &Device) -> String {
    format!("{} has no kernel in this build", crate::report::device_name(device))
}
