//! A whole attention layer on the CPU.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;
use kernels_cpu::linear::Linear;
use kernels_cpu::rope_qk_norm::RmsNorm;
use kernels_cpu::vision_attention as kernel;
use kernels_cpu::{Buffer, View, ViewMut};

use super::Native;
use super::attention_varlen::kernel_options;
use super::rope_qk_norm::{Call, scales};
use crate::Segments;
use crate::ops::attention_varlen::AttentionOptions;
use crate::ops::backend::{Norm, Rotation};
use crate::ops::vision_attention::{Biases, VisionAttentionBackend};

impl VisionAttentionBackend for Flex {
    fn vision_attention(
        x: FloatTensor<Self>,
        qkv: FloatTensor<Self>,
        proj: FloatTensor<Self>,
        biases: Biases<Self>,
        rotation: Rotation<Self>,
        norm: Norm<Self>,
        heads: usize,
        segments: Segments,
        options: AttentionOptions,
    ) -> FloatTensor<Self> {
        by_dtype!(x.dtype(), T => {
            let weights = Weights { qkv, proj, biases, heads };
            forward::<T>(&x, &weights, &rotation, norm, &segments, &options)
        })
    }
}

struct Weights {
    qkv: FlexTensor,
    proj: FlexTensor,
    biases: Biases<Flex>,
    heads: usize,
}

fn forward<T: Native>(
    x: &FlexTensor,
    weights: &Weights,
    rotation: &Rotation<Flex>,
    norm: Norm<Flex>,
    segments: &Segments,
    options: &AttentionOptions,
) -> FlexTensor {
    let biases = match &weights.biases {
        Biases::Absent => [None, None],
        Biases::Present { qkv, proj } => [qkv, proj].map(|bias| Some(bias.to_contiguous())),
    };
    let [qkv_bias, proj_bias] = biases.each_ref().map(|bias| {
        let bias = bias.as_ref()?;
        Some(&T::storage(bias)[..bias.layout().num_elements()])
    });
    let calls = scales(norm).map(|scale| Call::new(rotation, &scale));
    let norms: [Option<RmsNorm<'_, T>>; 2] = calls.each_ref().map(Call::norm);
    let (qkv, proj) = (matrix::<T>(&weights.qkv), matrix::<T>(&weights.proj));
    let ([tokens, ..], [.., outputs]) = (matrix::<T>(x).shape(), proj.shape());
    let head_dim = qkv.shape()[2] / (3 * weights.heads);
    let layer = kernel::VisionAttention {
        x: matrix(x),
        qkv: Linear { weight: qkv, bias: qkv_bias },
        proj: Linear { weight: proj, bias: proj_bias },
        heads: weights.heads,
        norms: norms[0].zip(norms[1]).map(|(q, k)| [q, k]),
        tables: calls[0].tables(),
        offsets: segments.offsets(),
        options: kernel_options(options, head_dim),
    };
    let mut out = Buffer::<T>::new(tokens * outputs);
    kernel::forward(&layer, ViewMut::contiguous(&mut out, [tokens, 1, outputs]));
    T::tensor(out, Shape::new([tokens, outputs]))
}

/// A matrix as it lies in memory, with rows of one head.
fn matrix<T: Native>(tensor: &FlexTensor) -> View<'_, T> {
    let (shape, strides) = (tensor.layout().shape(), tensor.layout().strides());
    let (shape, strides) = ([shape[0], 1, shape[1]], [strides[0], 0, strides[1]]);
    View::new(T::storage(tensor), tensor.layout().start_offset(), shape, strides)
}
