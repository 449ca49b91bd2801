//! `qkv_attention` on CubeCL devices.

use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::{slice, untile};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use super::{attention_varlen, rope_qk_norm, view};
use crate::Segments;
use crate::ops::attention_varlen::{AttentionOptions, FlashKernel};
use crate::ops::backend::{Norm, Rotation};

/// Output and lse.
pub(super) fn forward(
    qkv: CubeTensor,
    rotation: Rotation<CubeBackend>,
    norm: Norm<CubeBackend>,
    segments: &Segments,
    options: &AttentionOptions,
    kernel: FlashKernel,
) -> (CubeTensor, CubeTensor) {
    let tensors = rotated(&untile(qkv), rotation, norm);
    attention_varlen::forward(tensors, segments, segments, options, kernel)
}

/// Gradients of the projection and of the weights.
#[allow(clippy::too_many_arguments)] // as many as the extension's method
pub(super) fn backward(
    qkv: CubeTensor,
    out: CubeTensor,
    lse: CubeTensor,
    d_out: CubeTensor,
    rotation: Rotation<CubeBackend>,
    norm: Norm<CubeBackend>,
    segments: &Segments,
    options: &AttentionOptions,
) -> (CubeTensor, Norm<CubeBackend>) {
    let qkv = untile(qkv);
    let tensors = rotated(&qkv, rotation.clone(), norm.clone());
    let d_qkv = empty_device_contiguous_dtype(
        qkv.client.clone(),
        qkv.device.clone(),
        Shape::from(qkv.meta.shape()),
        qkv.dtype,
    );
    attention_varlen::backward_packed(tensors, [out, lse, d_out], segments, options, &d_qkv);
    let norm = match (&rotation, &norm) {
        (Rotation::Absent, Norm::Absent) => Norm::Absent,
        _ => rope_qk_norm::backward_packed(qkv, &d_qkv, rotation, norm),
    };
    (d_qkv, norm)
}

/// q, k and v of a projection, of which q and k are normalised and rotated.
fn rotated(
    qkv: &CubeTensor,
    rotation: Rotation<CubeBackend>,
    norm: Norm<CubeBackend>,
) -> [CubeTensor; 3] {
    let [q, k, v] = [0, 1, 2].map(|index| part(qkv, index));
    match (&rotation, &norm) {
        (Rotation::Absent, Norm::Absent) => [q, k, v],
        _ => {
            let (q, k) = rope_qk_norm::forward(q, k, rotation, norm);
            [q, k, v]
        }
    }
}

/// q, k or v of a projection: in place where the device can bind a buffer there, else a copy.
fn part(qkv: &CubeTensor, index: usize) -> CubeTensor {
    let shape = qkv.meta.shape();
    let ranges = [0..shape[0], index..index + 1, 0..shape[2], 0..shape[3]];
    let part = slice(qkv.clone(), &ranges);
    let strides = part.meta.strides();
    let strides = [strides[0], strides[2], strides[3]];
    view(&part, 0, [shape[0], shape[2], shape[3]], strides)
}
