//! Where the operations go on Burn's CPU backend: the kernels of `kernels-cpu`.

mod attention_varlen;
mod memory;
mod qkv_attention;
mod rope_qk_norm;

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape, TensorData, bf16, f16};
use kernels_cpu::{Buffer, View};

use super::attention_varlen::{AttentionOptions, FlashKernel};
use super::backend::{
    AttentionGradients, LseGradient, Norm, PackedAttentionBackend, Rotation, Scale, Wanted,
};
use crate::Segments;

/// Runs the expression with `$T` as the type of a dtype.
macro_rules! by_dtype {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            burn::tensor::DType::F64 => {
                type $T = f64;
                $body
            }
            burn::tensor::DType::F32 => {
                type $T = f32;
                $body
            }
            burn::tensor::DType::F16 => {
                type $T = burn::tensor::f16;
                $body
            }
            burn::tensor::DType::BF16 => {
                type $T = burn::tensor::bf16;
                $body
            }
            dtype => panic!("q, k and v: expected a float of 16 to 64 bits, got {dtype:?}"),
        }
    };
}

// After the macro that it uses.
mod vision_attention;

impl PackedAttentionBackend for Flex {
    fn packed_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        segments_q: Segments,
        segments_k: Segments,
        options: AttentionOptions,
        _kernel: FlashKernel,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        by_dtype!(q.dtype(), T => attention_varlen::forward::<T>(
            [&q, &k, &v].map(T::heads),
            [&segments_q, &segments_k],
            &options,
        ))
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
        by_dtype!(q.dtype(), T => attention_varlen::backward::<T>(
            [&q, &k, &v].map(T::heads),
            [&out, &d_out].map(T::heads),
            &lse,
            d_lse,
            [&segments_q, &segments_k],
            &options,
            wanted,
        ))
    }

    fn packed_rope_qk_norm(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        rotation: Rotation<Self>,
        norm: Norm<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        by_dtype!(q.dtype(), T => {
            let [q_scale, k_scale] = rope_qk_norm::scales(norm);
            (
                rope_qk_norm::forward::<T>(T::heads(&q), &rotation, &q_scale),
                rope_qk_norm::forward::<T>(T::heads(&k), &rotation, &k_scale),
            )
        })
    }

    fn packed_rope_norm(
        x: FloatTensor<Self>,
        rotation: Rotation<Self>,
        scale: Scale<Self>,
    ) -> FloatTensor<Self> {
        by_dtype!(x.dtype(), T => rope_qk_norm::forward::<T>(T::heads(&x), &rotation, &scale))
    }

    fn packed_rope_norm_backward(
        x: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        rotation: Rotation<Self>,
        scale: Scale<Self>,
    ) -> (FloatTensor<Self>, Scale<Self>) {
        by_dtype!(x.dtype(), T => {
            rope_qk_norm::backward::<T>([&x, &d_out].map(T::heads), &rotation, scale)
        })
    }

    fn packed_qkv_attention(
        qkv: FloatTensor<Self>,
        rotation: Rotation<Self>,
        norm: Norm<Self>,
        segments: Segments,
        options: AttentionOptions,
        _kernel: FlashKernel,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        by_dtype!(qkv.dtype(), T => {
            qkv_attention::forward::<T>(&qkv, &rotation, norm, &segments, &options)
        })
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
        by_dtype!(qkv.dtype(), T => qkv_attention::backward::<T>(
            &qkv,
            [&out, &d_out].map(T::heads),
            &lse,
            &rotation,
            norm,
            &segments,
            &options,
        ))
    }
}

/// Whether the attention kernel computes in a dtype.
pub(super) fn supports_attention(dtype: DType) -> Result<(), String> {
    match dtype {
        DType::F64 | DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        _ => Err(format!("q, k and v are {dtype:?}, the kernel takes f64, f32, f16 and bf16")),
    }
}

/// Whether the kernel of norm and rotation takes q and k with weights of these dtypes.
pub(super) fn supports_rope_qk_norm(dtype: DType, weight: Option<DType>) -> Result<(), String> {
    supports_attention(dtype)?;
    match weight {
        Some(weight) if weight != dtype && weight != DType::F32 => {
            Err(format!("the weights are {weight:?}, the kernel takes {dtype:?} and f32"))
        }
        _ => Ok(()),
    }
}

/// A type that tensors hold and kernels compute with.
trait Native: kernels_cpu::Element {
    /// The elements of a tensor's buffer.
    fn storage(tensor: &FlexTensor) -> &[Self];

    /// A contiguous tensor.
    fn tensor(elements: Buffer<Self>, shape: Shape) -> FlexTensor;

    /// The gradient of a norm's weight, in the dtype of the weight.
    fn weight_gradient(gradient: Vec<Self::Compute>, dtype: DType) -> FlexTensor;

    /// A tensor `[tokens, heads, dim]` as it lies in memory.
    fn heads(tensor: &FlexTensor) -> View<'_, Self> {
        let (shape, strides) = (tensor.layout().shape(), tensor.layout().strides());
        View::new(
            Self::storage(tensor),
            tensor.layout().start_offset(),
            [shape[0], shape[1], shape[2]],
            [strides[0], strides[1], strides[2]],
        )
    }
}

macro_rules! native {
    ($type:ty, $dtype:expr) => {
        impl Native for $type {
            fn storage(tensor: &FlexTensor) -> &[Self] {
                tensor.storage()
            }

            fn tensor(elements: Buffer<Self>, shape: Shape) -> FlexTensor {
                memory::tensor(elements, shape, $dtype)
            }

            fn weight_gradient(gradient: Vec<Self::Compute>, dtype: DType) -> FlexTensor {
                let elements = gradient.len();
                FlexTensor::from_data(TensorData::new(gradient, [elements]).convert_dtype(dtype))
            }
        }
    };
}

native!(f64, DType::F64);
native!(f32, DType::F32);
native!(f16, DType::F16);
native!(bf16, DType::BF16);
