//! Where the operations go on CubeCL devices: the kernels of `kernels-cubecl`.

mod attention_varlen;
mod qkv_attention;
mod rope_qk_norm;

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::zspace::metadata::Metadata;
use kernels_cubecl::TensorLayout;

pub(super) use attention_varlen::{describe as describe_attention, supports as supports_attention};
pub(super) use rope_qk_norm::supports as supports_rope_qk_norm;

use super::attention_varlen::{AttentionOptions, FlashKernel};
use super::backend::{
    AttentionGradients, LseGradient, Norm, PackedAttentionBackend, Rotation, Scale, Wanted,
};
use crate::Segments;

impl PackedAttentionBackend for CubeBackend {
    fn packed_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        segments_q: Segments,
        segments_k: Segments,
        options: AttentionOptions,
        kernel: FlashKernel,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        attention_varlen::forward([q, k, v], &segments_q, &segments_k, &options, kernel)
    }

    fn packed_attention_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        d_lse: LseGradient<Self>,
        segments_q: Segments,
        segments_k: Segments,
        options: AttentionOptions,
        wanted: Wanted,
    ) -> AttentionGradients<Self> {
        let upstream = [out, lse, d_out];
        let segments = [&segments_q, &segments_k];
        attention_varlen::backward([q, k, v], upstream, d_lse, segments, &options, wanted)
    }

    fn packed_rope_qk_norm(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        rotation: Rotation<Self>,
        norm: Norm<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        rope_qk_norm::forward(q, k, rotation, norm)
    }

    fn packed_rope_norm(
        x: FloatTensor<Self>,
        rotation: Rotation<Self>,
        scale: Scale<Self>,
    ) -> FloatTensor<Self> {
        rope_qk_norm::forward_one(x, rotation, scale)
    }

    fn packed_rope_norm_backward(
        x: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        rotation: Rotation<Self>,
        scale: Scale<Self>,
    ) -> (FloatTensor<Self>, Scale<Self>) {
        rope_qk_norm::backward_one(x, d_out, rotation, scale)
    }

    fn packed_qkv_attention(
        qkv: FloatTensor<Self>,
        rotation: Rotation<Self>,
        norm: Norm<Self>,
        segments: Segments,
        options: AttentionOptions,
        kernel: FlashKernel,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        qkv_attention::forward(qkv, rotation, norm, &segments, &options, kernel)
    }

    fn packed_qkv_attention_backward(
        qkv: FloatTensor<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        rotation: Rotation<Self>,
        norm: Norm<Self>,
        segments: Segments,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, Norm<Self>) {
        qkv_attention::backward(qkv, out, lse, d_out, rotation, norm, &segments, &options)
    }
}

/// The layout of a rank-3 tensor as it lies in memory.
fn layout(tensor: &CubeTensor) -> TensorLayout {
    let shape = tensor.meta.shape();
    let strides = tensor.meta.strides();
    TensorLayout {
        shape: [shape[0], shape[1], shape[2]],
        strides: [strides[0], strides[1], strides[2]],
    }
}

/// A contiguous tensor of unspecified content where `other` is.
fn empty_like<const D: usize>(other: &CubeTensor, shape: [usize; D], dtype: DType) -> CubeTensor {
    let (client, device) = (other.client.clone(), other.device.clone());
    empty_device_contiguous_dtype(client, device, Shape::new(shape), dtype)
}

/// The tensor's buffer from `offset` elements after its start, seen in another shape.
fn view(tensor: &CubeTensor, offset: usize, shape: [usize; 3], strides: [usize; 3]) -> CubeTensor {
    let bytes = (offset * tensor.dtype.size()) as u64;
    CubeTensor::new(
        tensor.client.clone(),
        tensor.handle.clone().offset_start(bytes),
        Metadata::new(shape, strides),
        tensor.device.clone(),
        tensor.dtype,
    )
}

fn element(dtype: DType) -> cubecl::ir::ElemType {
    dtype_to_storage_type(dtype)
}
