//! `attention_varlen` on the CPU.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::Shape;
use kernels_cpu::attention_varlen as kernel;
use kernels_cpu::{Attention, Buffer, Gradients, OutputGradient, View};

use super::Native;
use crate::Segments;
use crate::ops::attention_varlen::AttentionOptions;
use crate::ops::backend::{AttentionGradients, LseGradient, Wanted};

/// Output and lse.
pub(super) fn forward<T: Native>(
    tensors: [View<'_, T>; 3],
    segments: [&Segments; 2],
    options: &AttentionOptions,
) -> (FlexTensor, FlexTensor) {
    let attention = attention(tensors, segments, options);
    let [tokens, heads, _] = attention.q.shape();
    let [_, _, value_dim] = attention.v.shape();
    let mut out = Buffer::<T>::new(tokens * heads * value_dim);
    let mut lse = Buffer::<f32>::new(tokens * heads);
    kernel::forward(&attention, &mut out, &mut lse);
    (
        T::tensor(out, Shape::new([tokens, heads, value_dim])),
        f32::tensor(lse, Shape::new([tokens, heads])),
    )
}

/// The gradients that are wanted.
pub(super) fn backward<T: Native>(
    tensors: [View<'_, T>; 3],
    [out, d_out]: [View<'_, T>; 2],
    lse: &FlexTensor,
    d_lse: LseGradient<Flex>,
    segments: [&Segments; 2],
    options: &AttentionOptions,
    wanted: Wanted,
) -> AttentionGradients<Flex> {
    let attention = attention(tensors, segments, options);
    let lse = rows(lse);
    let d_lse = match &d_lse {
        LseGradient::Absent => None,
        LseGradient::Present { d_lse } => Some(rows(d_lse)),
    };
    let shapes = tensors.map(|tensor| tensor.shape());
    let [mut q, mut k, mut v] = shapes.map(|shape| Buffer::<T>::new(shape.iter().product()));
    let output = OutputGradient { out, lse: &lse, d_out, d_lse: d_lse.as_deref() };
    let gradients = Gradients::Separate { q: &mut q, k: &mut k, v: &mut v };
    kernel::backward(&attention, &output, gradients);
    let [q_shape, k_shape, v_shape] = shapes.map(Shape::new);
    let tensors = (T::tensor(q, q_shape), T::tensor(k, k_shape), T::tensor(v, v_shape));
    match (wanted, tensors) {
        (Wanted::All, (q, k, v)) => AttentionGradients::All { q, k, v },
        (Wanted::Query, (q, _, _)) => AttentionGradients::Query { q },
        (Wanted::KeyValue, (_, k, v)) => AttentionGradients::KeyValue { k, v },
    }
}

pub(super) fn attention<'a, T: Native>(
    [q, k, v]: [View<'a, T>; 3],
    [segments_q, segments_k]: [&'a Segments; 2],
    options: &AttentionOptions,
) -> Attention<'a, T> {
    let [_, _, head_dim] = q.shape();
    Attention {
        q,
        k,
        v,
        offsets_q: segments_q.offsets(),
        offsets_k: segments_k.offsets(),
        options: kernel_options(options, head_dim),
    }
}

pub(super) fn kernel_options(
    options: &AttentionOptions,
    head_dim: usize,
) -> kernel::AttentionOptions {
    kernel::AttentionOptions {
        softmax_scale: options.scale(head_dim),
        is_causal: options.is_causal,
        window: (options.window.left, options.window.right),
        softcap: options.softcap,
    }
}

/// The elements of a f32 tensor in row-major order.
pub(super) fn rows(tensor: &FlexTensor) -> Vec<f32> {
    let tensor = tensor.to_contiguous();
    tensor.as_slice::<f32>().expect("lse is f32 and was made contiguous").to_vec()
}
