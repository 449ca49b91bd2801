//! `qkv_attention` on the CPU.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use kernels_cpu::attention_varlen as kernel;
use kernels_cpu::rope_qk_norm::GradientBuffers;
use kernels_cpu::{Buffer, Gradients, OutputGradient, View, ViewMut};

use super::attention_varlen::{attention, rows};
use super::{Native, attention_varlen, rope_qk_norm};
use crate::Segments;
use crate::ops::attention_varlen::AttentionOptions;
use crate::ops::backend::{Norm, Rotation, Scale};

/// Output and lse.
pub(super) fn forward<T: Native>(
    qkv: &FlexTensor,
    rotation: &Rotation<Flex>,
    norm: Norm<Flex>,
    segments: &Segments,
    options: &AttentionOptions,
) -> (FlexTensor, FlexTensor) {
    let rotated = Rotated::new::<T>(qkv, rotation, &rope_qk_norm::scales(norm));
    attention_varlen::forward(rotated.views::<T>(), [segments, segments], options)
}

/// Gradients of the projection and of the weights.
pub(super) fn backward<T: Native>(
    qkv: &FlexTensor,
    [out, d_out]: [View<'_, T>; 2],
    lse: &FlexTensor,
    rotation: &Rotation<Flex>,
    norm: Norm<Flex>,
    segments: &Segments,
    options: &AttentionOptions,
) -> (FlexTensor, Norm<Flex>) {
    let scales = rope_qk_norm::scales(norm);
    let rotated = Rotated::new::<T>(qkv, rotation, &scales);
    let shape = qkv.layout().shape().clone();
    let mut d_qkv = Buffer::<T>::new(shape.num_elements());
    let attention = attention(rotated.views::<T>(), [segments, segments], options);
    let lse = rows(lse);
    let output = OutputGradient { out, lse: &lse, d_out, d_lse: None };
    kernel::backward(&attention, &output, Gradients::Packed(&mut d_qkv));

    let [tokens, heads, head_dim] = [shape[0], shape[2], shape[3]];
    let width = heads * head_dim;
    let [q_scale, k_scale] = scales;
    let d_scales = [(0, q_scale), (1, k_scale)].map(|(index, scale)| {
        if rotated.is_plain {
            return Scale::Absent;
        }
        let shape = [tokens, heads, head_dim];
        let gradient = ViewMut::new(&mut d_qkv, index * width, shape, [3 * width, head_dim]);
        let gradients = GradientBuffers::InPlace(gradient);
        rope_qk_norm::backward_into(&projected::<T>(qkv, index), rotation, scale, gradients)
    });
    let norm = match d_scales {
        [Scale::Rms { weight: q, epsilon }, Scale::Rms { weight: k, .. }] => {
            Norm::Rms { q, k, epsilon }
        }
        _ => Norm::Absent,
    };
    (T::tensor(d_qkv, shape), norm)
}

/// The projection, and its q and k after norm and rotation where there is one.
struct Rotated<'a> {
    qkv: &'a FlexTensor,
    rotated: [Option<FlexTensor>; 2],
    is_plain: bool,
}

impl<'a> Rotated<'a> {
    fn new<T: Native>(
        qkv: &'a FlexTensor,
        rotation: &Rotation<Flex>,
        scales: &[Scale<Flex>; 2],
    ) -> Self {
        let is_plain = matches!((rotation, &scales[0]), (Rotation::Absent, Scale::Absent));
        let rotate = |index: usize| {
            let x = projected::<T>(qkv, index);
            (!is_plain).then(|| rope_qk_norm::forward::<T>(x, rotation, &scales[index]))
        };
        Self { qkv, rotated: [rotate(0), rotate(1)], is_plain }
    }

    /// q, k and v.
    fn views<T: Native>(&self) -> [View<'_, T>; 3] {
        let [q, k] = &self.rotated;
        [
            q.as_ref().map_or_else(|| projected::<T>(self.qkv, 0), T::heads),
            k.as_ref().map_or_else(|| projected::<T>(self.qkv, 1), T::heads),
            projected::<T>(self.qkv, 2),
        ]
    }
}

/// q, k or v of a projection, in place.
fn projected<T: Native>(qkv: &FlexTensor, index: usize) -> View<'_, T> {
    let (shape, strides) = (qkv.layout().shape(), qkv.layout().strides());
    let offset = qkv.layout().start_offset() as isize + index as isize * strides[1];
    View::new(
        T::storage(qkv),
        offset as usize,
        [shape[0], shape[2], shape[3]],
        [strides[0], strides[2], strides[3]],
    )
}
