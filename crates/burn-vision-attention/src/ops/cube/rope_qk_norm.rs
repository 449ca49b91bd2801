//! `rope_qk_norm` on CubeCL devices.

use burn::tensor::{DType, Device, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::rope_qk_norm::{self as kernel, RmsNorm};
use kernels_cubecl::{
    NormWeights, RopeQkNormProblem, RopeQkNormTensors, RotaryTables, TensorLayout,
};

use super::{cube_device, element, layout};
use crate::ops::backend::{Norm, Rotation};

/// Whether the kernel serves contiguous q and k of these shapes on a device, and if not, why.
pub(in crate::ops) fn supports(
    device: &Device,
    dtype: DType,
    [q, k]: [[usize; 3]; 2],
    rotates: bool,
    norm_dtype: Option<DType>,
) -> Result<(), String> {
    let device = cube_device(device)?;
    let [q, k] = [q, k].map(TensorLayout::contiguous);
    let mut problem = RopeQkNormProblem::new(q, k, element(dtype));
    if !rotates {
        problem.rotary = None;
    }
    problem.norm = norm_dtype.map(|dtype| RmsNorm { epsilon: 1e-5, weight_dtype: element(dtype) });
    let blueprint = kernel::supports(device.client().properties(), &problem);
    blueprint.map(|_| ()).map_err(|reason| reason.to_string())
}

/// q and k, normalised and rotated.
///
/// # Panics
///
/// When the kernel cannot serve the arguments, which [`supports`] tells beforehand.
pub(super) fn run(
    q: CubeTensor,
    k: CubeTensor,
    rotation: Rotation<CubeBackend>,
    norm: Norm<CubeBackend>,
) -> (CubeTensor, CubeTensor) {
    let (q, k) = (untile(q), untile(k));
    let mut problem = RopeQkNormProblem::new(layout(&q), layout(&k), element(q.dtype));
    let (client, device, dtype) = (q.client.clone(), q.device.clone(), q.dtype);
    let new = |shape: [usize; 3]| {
        empty_device_contiguous_dtype(client.clone(), device.clone(), Shape::new(shape), dtype)
    };
    let (q_out, k_out) = (new(problem.q.shape), new(problem.k.shape));

    let tables = match rotation {
        Rotation::Absent => None,
        Rotation::Tables { cos, sin } => Some([cos, sin].map(|table| {
            debug_assert_eq!(table.dtype, DType::F32);
            untile(table)
        })),
    };
    let strides = |table: &CubeTensor| [table.meta.strides()[0], table.meta.strides()[1]];
    problem.rotary = tables.as_ref().map(|tables| tables.each_ref().map(strides));
    let weights = match norm {
        Norm::Absent => None,
        Norm::Rms { q: q_weight, k: k_weight, epsilon } => {
            let weight_dtype = element(q_weight.dtype);
            problem.norm = Some(RmsNorm { epsilon: epsilon as f32, weight_dtype });
            let [q, k] = [q_weight, k_weight].map(|weight| into_contiguous(weight).binding());
            Some(NormWeights { q, k })
        }
    };
    let tensors = RopeQkNormTensors {
        q: q.binding(),
        k: k.binding(),
        weights,
        tables: tables.map(|tables| {
            let [cos, sin] = tables.map(CubeTensor::binding);
            RotaryTables { cos, sin }
        }),
        q_out: q_out.clone().binding(),
        k_out: k_out.clone().binding(),
    };
    kernel::launch(&client, &problem, tensors)
        .unwrap_or_else(|error| panic!("rope_qk_norm: {error}"));
    (q_out, k_out)
}
