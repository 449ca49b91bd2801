//! Which devices run kernels, and for what.

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device};

use super::attention_varlen::{AttentionOptions, FlashKernel};
use crate::report::device_name;

/// Whether the device has this attention kernel for contiguous tensors of these shapes, with a backward
/// pass where the device records gradients; and if not, which property is missing.
pub(crate) fn supports_attention(
    device: &Device,
    kernel: FlashKernel,
    dtype: DType,
    shapes: [[usize; 3]; 3],
    options: &AttentionOptions,
) -> Result<(), String> {
    let training = device.is_autodiff();
    let device = beneath(device)?;
    #[cfg(not(feature = "cube"))]
    let _ = (shapes, options, training);
    match device.as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(cube) => {
            super::cube::supports_attention(cube, kernel, dtype, shapes, options, training)
        }
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) if kernel == FlashKernel::V2 => {
            super::flex::supports_attention(dtype)
        }
        #[allow(unreachable_patterns)] // where every backend of the build is listed above
        _ => Err(match kernel {
            FlashKernel::V2 => format!("{} has no kernel for it", device_name(&device)),
            FlashKernel::V3 => {
                format!("{} has no asynchronous copies and matrix units", device_name(&device))
            }
        }),
    }
}

/// This kernel for contiguous tensors of these shapes, in words, or which property is missing.
pub(crate) fn describe_attention(
    device: &Device,
    kernel: FlashKernel,
    dtype: DType,
    shapes: [[usize; 3]; 3],
    options: &AttentionOptions,
) -> Result<String, String> {
    supports_attention(device, kernel, dtype, shapes, options)?;
    let device = beneath(device)?;
    match device.as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(cube) => {
            super::cube::describe_attention(cube, kernel, dtype, shapes, options)
        }
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => {
            Ok(format!("attention_varlen on the CPU, {:?}", kernels_cpu::InstructionSet::current()))
        }
        #[allow(unreachable_patterns)] // where every backend of the build is listed above
        _ => Err(format!("{} has no kernel for it", device_name(&device))),
    }
}

/// As [`supports_attention`], for the norm and rotation of q and k.
pub(crate) fn supports_rope_qk_norm(
    device: &Device,
    dtype: DType,
    shapes: [[usize; 3]; 2],
    rotates: bool,
    norm_dtype: Option<DType>,
) -> Result<(), String> {
    let training = device.is_autodiff();
    let device = beneath(device)?;
    #[cfg(not(feature = "cube"))]
    let _ = (shapes, rotates, training);
    #[cfg(not(feature = "flex"))]
    let _ = (dtype, norm_dtype);
    match device.as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(cube) => {
            super::cube::supports_rope_qk_norm(cube, dtype, shapes, rotates, norm_dtype, training)
        }
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => super::flex::supports_rope_qk_norm(dtype, norm_dtype),
        #[allow(unreachable_patterns)] // where every backend of the build is listed above
        _ => Err(format!("{} has no kernel for it", device_name(&device))),
    }
}

/// The device without autodiff.
fn beneath(device: &Device) -> Result<Device, String> {
    if device.is_autodiff() && !cfg!(feature = "autodiff") {
        return Err(
            "the device records gradients, and burn-vision-attention was built without its \
                    feature autodiff"
                .to_owned(),
        );
    }
    Ok(device.clone().without_autodiff())
}
