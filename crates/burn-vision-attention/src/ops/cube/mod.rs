//! Where the operations go on CubeCL devices: the kernels of `kernels-cubecl`.

mod attention_varlen;
mod rope_qk_norm;

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::tensor::FloatTensor;
use burn::backend::{CubeDevice, DispatchDevice, TensorMetadata};
use burn::tensor::{DType, Device};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::TensorLayout;

pub(super) use attention_varlen::supports as supports_attention;
pub(super) use rope_qk_norm::supports as supports_rope_qk_norm;

use super::attention_varlen::AttentionOptions;
use super::backend::{Norm, PackedAttentionBackend, Rotation};
use crate::Segments;
use crate::report::device_name;

impl PackedAttentionBackend for CubeBackend {
    fn packed_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        segments_q: Segments,
        segments_k: Segments,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        attention_varlen::run([q, k, v], &segments_q, &segments_k, &options)
    }

    fn packed_rope_qk_norm(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        rotation: Rotation<Self>,
        norm: Norm<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        rope_qk_norm::run(q, k, rotation, norm)
    }
}

/// The CubeCL device behind a Burn device without autodiff.
fn cube_device(device: &Device) -> Result<&CubeDevice, String> {
    match device.as_dispatch() {
        DispatchDevice::Cube(device) => Ok(device),
        #[allow(unreachable_patterns)] // where CubeCL is the only backend
        _ => Err(format!("{} is not a CubeCL device", device_name(device))),
    }
}

/// What keeps `flash_attention_3` from running on a device.
pub(super) fn missing_for_flash_attention_3(device: &Device) -> String {
    let features = match cube_device(device) {
        Ok(device) => device.client().properties().features.clone(),
        Err(reason) => return reason,
    };
    let missing = match () {
        _ if !features.copy_async => "asynchronous copies",
        _ if features.matmul.mma.is_empty() => "matrix units",
        _ => return "this version has no kernel of its own for it".to_owned(),
    };
    format!("{} reports no {missing}", device_name(device))
}

/// The layout of a rank-3 tensor as it lies in memory.
fn layout(tensor: &CubeTensor) -> TensorLayout {
    let shape = tensor.shape();
    let strides = tensor.meta.strides();
    TensorLayout {
        shape: [shape[0], shape[1], shape[2]],
        strides: [strides[0], strides[1], strides[2]],
    }
}

fn element(dtype: DType) -> cubecl::ir::ElemType {
    dtype_to_storage_type(dtype)
}
