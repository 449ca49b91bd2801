//! `rope_qk_norm` on the CPU.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape};
use kernels_cpu::rope_qk_norm as kernel;
use kernels_cpu::rope_qk_norm::{GradientBuffers, NormWeight, RmsNorm, RotaryTables};
use kernels_cpu::{Buffer, View, ViewMut};

use super::Native;
use crate::ops::backend::{Norm, Rotation, Scale};

/// The norm of q and that of k.
pub(super) fn scales(norm: Norm<Flex>) -> [Scale<Flex>; 2] {
    match norm {
        Norm::Absent => [Scale::Absent, Scale::Absent],
        Norm::Rms { q, k, epsilon } => [q, k].map(|weight| Scale::Rms { weight, epsilon }),
    }
}

/// One of q and k, normalised and rotated.
pub(super) fn forward<T: Native>(
    x: View<'_, T>,
    rotation: &Rotation<Flex>,
    scale: &Scale<Flex>,
) -> FlexTensor {
    let shape = x.shape();
    let mut out = Buffer::<T>::new(shape.iter().product());
    let call = Call::new(rotation, scale);
    let (norm, tables) = (call.norm::<T>(), call.tables());
    kernel::forward(&x, norm.as_ref(), tables.as_ref(), ViewMut::contiguous(&mut out, shape));
    T::tensor(out, Shape::new(shape))
}

/// Gradients of one of q and k, and of its weight.
pub(super) fn backward<T: Native>(
    [x, d_out]: [View<'_, T>; 2],
    rotation: &Rotation<Flex>,
    scale: Scale<Flex>,
) -> (FlexTensor, Scale<Flex>) {
    let shape = x.shape();
    let mut d_x = Buffer::<T>::new(shape.iter().product());
    let d_input = ViewMut::contiguous(&mut d_x, shape);
    let gradients = GradientBuffers::Separate { d_out, d_input };
    let d_scale = backward_into(&x, rotation, scale, gradients);
    (T::tensor(d_x, Shape::new(shape)), d_scale)
}

/// Writes the gradient of the input where `gradients` says, and gives that of the weight.
pub(super) fn backward_into<T: Native>(
    x: &View<'_, T>,
    rotation: &Rotation<Flex>,
    scale: Scale<Flex>,
    gradients: GradientBuffers<'_, T>,
) -> Scale<Flex> {
    let call = Call::new(rotation, &scale);
    let (norm, tables) = (call.norm::<T>(), call.tables());
    let d_weight = kernel::backward(x, norm.as_ref(), tables.as_ref(), gradients);
    match scale {
        Scale::Absent => Scale::Absent,
        Scale::Rms { weight, epsilon } => {
            Scale::Rms { weight: T::weight_gradient(d_weight, weight.dtype()), epsilon }
        }
    }
}

/// The arguments of a call, with tables and weight side by side in memory.
pub(super) struct Call {
    tables: Option<[FlexTensor; 2]>,
    norm: Option<(FlexTensor, f64)>,
}

impl Call {
    pub(super) fn new(rotation: &Rotation<Flex>, scale: &Scale<Flex>) -> Self {
        let tables = match rotation {
            Rotation::Absent => None,
            Rotation::Tables { cos, sin } => Some([cos.to_contiguous(), sin.to_contiguous()]),
        };
        let norm = match scale {
            Scale::Absent => None,
            Scale::Rms { weight, epsilon } => Some((weight.to_contiguous(), *epsilon)),
        };
        Self { tables, norm }
    }

    pub(super) fn tables(&self) -> Option<RotaryTables<'_>> {
        self.tables.as_ref().map(|tables| {
            let [cos, sin] = tables
                .each_ref()
                .map(|table| table.as_slice::<f32>().expect("tables are f32 and contiguous"));
            RotaryTables { cos, sin }
        })
    }

    pub(super) fn norm<T: Native>(&self) -> Option<RmsNorm<'_, T>> {
        self.norm.as_ref().map(|(weight, epsilon)| {
            let elements = weight.layout().num_elements();
            let weight = match weight.dtype() {
                DType::F32 => NormWeight::F32(&f32::storage(weight)[..elements]),
                _ => NormWeight::Input(&T::storage(weight)[..elements]),
            };
            RmsNorm { weight, epsilon: *epsilon }
        })
    }
}
