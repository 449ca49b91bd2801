//! `rope_qk_norm` on CubeCL devices.

use burn::backend::CubeDevice;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::TensorBinding;
use kernels_cubecl::rope_qk_norm::backward::{
    self, NormGradients, RopeQkNormBackwardProblem, RopeQkNormBackwardTensors,
};
use kernels_cubecl::rope_qk_norm::{self as kernel, RmsNorm};
use kernels_cubecl::{
    NormWeights, RopeQkNormProblem, RopeQkNormTensors, RotaryTables, TensorLayout,
};

use super::{element, empty_like, layout, view};
use crate::ops::backend::{Norm, Rotation, Scale};

/// Whether the kernel serves contiguous q and k of these shapes on a device, and if not, why.
pub(in crate::ops) fn supports(
    device: &CubeDevice,
    dtype: DType,
    [q, k]: [[usize; 3]; 2],
    rotates: bool,
    norm_dtype: Option<DType>,
    training: bool,
) -> Result<(), String> {
    let client = device.client();
    let [q, k] = [q, k].map(TensorLayout::contiguous);
    let norm = norm_dtype.map(|dtype| RmsNorm { epsilon: 1e-5, weight_dtype: element(dtype) });
    let mut problem = RopeQkNormProblem { norm, ..RopeQkNormProblem::new(q, k, element(dtype)) };
    if !rotates {
        problem.rotary = None;
    }
    kernel::supports(client.properties(), &problem).map_err(|reason| reason.to_string())?;
    if training {
        let single = RopeQkNormBackwardProblem::single(q, q, element(dtype));
        let problem = RopeQkNormBackwardProblem { norm, rotary: problem.rotary, ..single };
        let blueprint = backward::supports(client.properties(), &problem);
        blueprint.map_err(|reason| format!("backward pass: {reason}"))?;
    }
    Ok(())
}

/// q and k, normalised and rotated.
///
/// # Panics
///
/// When the kernel cannot serve the arguments, which [`supports`] tells beforehand.
pub(super) fn forward(
    q: CubeTensor,
    k: CubeTensor,
    rotation: Rotation<CubeBackend>,
    norm: Norm<CubeBackend>,
) -> (CubeTensor, CubeTensor) {
    let (q, k) = (untile(q), untile(k));
    let tables = tables(rotation);
    let (norm, weights) = match norm {
        Norm::Absent => (None, None),
        Norm::Rms { q, k, epsilon } => {
            let norm = RmsNorm { epsilon: epsilon as f32, weight_dtype: element(q.dtype) };
            let [q, k] = [q, k].map(|weight| into_contiguous(weight).binding());
            (Some(norm), Some(NormWeights { q, k }))
        }
    };
    let problem = RopeQkNormProblem {
        rotary: tables.as_ref().map(table_strides),
        norm,
        ..RopeQkNormProblem::new(layout(&q), layout(&k), element(q.dtype))
    };
    let [q_out, k_out] = [&problem.q, &problem.k].map(|x| empty_like(&q, x.shape, q.dtype));
    // A buffer of no elements cannot be bound.
    let k_out = if problem.k.is_empty() { empty_like(&q, [1, 1, 1], q.dtype) } else { k_out };
    let client = q.client.clone();
    let tensors = RopeQkNormTensors {
        q: q.binding(),
        k: k.binding(),
        weights,
        tables,
        q_out: q_out.clone().binding(),
        k_out: TensorBinding { shape: Shape::new(problem.k.shape), ..k_out.clone().binding() },
    };
    kernel::launch(&client, &problem, tensors)
        .unwrap_or_else(|error| panic!("rope_qk_norm: {error}"));
    (q_out, k_out)
}

/// One of q and k, normalised and rotated.
pub(super) fn forward_one(
    x: CubeTensor,
    rotation: Rotation<CubeBackend>,
    scale: Scale<CubeBackend>,
) -> CubeTensor {
    let norm = match scale {
        Scale::Absent => Norm::Absent,
        Scale::Rms { weight, epsilon } => Norm::Rms { q: weight.clone(), k: weight, epsilon },
    };
    let x = untile(x);
    let [tokens, heads, head_dim] = layout(&x).shape;
    let (none, strides) = ([tokens, 0, head_dim], layout(&x).strides);
    debug_assert!(heads > 0);
    let no_keys = view(&x, 0, none, strides);
    forward(x, no_keys, rotation, norm).0
}

/// Gradients of one of q and k, and of its weight.
pub(super) fn backward_one(
    x: CubeTensor,
    d_out: CubeTensor,
    rotation: Rotation<CubeBackend>,
    scale: Scale<CubeBackend>,
) -> (CubeTensor, Scale<CubeBackend>) {
    let (x, d_out) = (untile(x), untile(d_out));
    let problem = RopeQkNormBackwardProblem::single(layout(&x), layout(&d_out), element(x.dtype));
    let dx = empty_like(&x, layout(&x).shape, x.dtype);
    let (weights, epsilon) = match scale {
        Scale::Absent => (vec![], 0.0),
        Scale::Rms { weight, epsilon } => (vec![weight], epsilon),
    };
    let gradients = launch_backward(problem, x, weights, epsilon, rotation, Some(d_out), &dx);
    let scale = match gradients.into_iter().next() {
        None => Scale::Absent,
        Some(weight) => Scale::Rms { weight, epsilon },
    };
    (dx, scale)
}

/// Turns the gradients of the normalised and rotated q and k in `d_qkv` `[tokens, 3, heads, head_dim]`
/// into those of the projection `qkv`, in place, and gives the gradients of the weights.
pub(super) fn backward_packed(
    qkv: CubeTensor,
    d_qkv: &CubeTensor,
    rotation: Rotation<CubeBackend>,
    norm: Norm<CubeBackend>,
) -> Norm<CubeBackend> {
    let shape = qkv.meta.shape();
    let strides = |tensor: &CubeTensor| std::array::from_fn(|axis| tensor.meta.strides()[axis]);
    let problem = RopeQkNormBackwardProblem::packed(
        [shape[0], shape[2], shape[3]],
        strides(&qkv),
        strides(d_qkv),
        element(qkv.dtype),
    );
    let (weights, epsilon) = match norm {
        Norm::Absent => (vec![], 0.0),
        Norm::Rms { q, k, epsilon } => (vec![q, k], epsilon),
    };
    let gradients = launch_backward(problem, qkv, weights, epsilon, rotation, None, d_qkv);
    match <[CubeTensor; 2]>::try_from(gradients) {
        Ok([q, k]) => Norm::Rms { q, k, epsilon },
        Err(_) => Norm::Absent,
    }
}

/// Launches the backward kernel and gives the gradient of each weight.
fn launch_backward(
    mut problem: RopeQkNormBackwardProblem,
    x: CubeTensor,
    weights: Vec<CubeTensor>,
    epsilon: f64,
    rotation: Rotation<CubeBackend>,
    d_out: Option<CubeTensor>,
    dx: &CubeTensor,
) -> Vec<CubeTensor> {
    let tables = tables(rotation);
    problem.rotary = tables.as_ref().map(table_strides);
    problem.norm = weights
        .first()
        .map(|weight| RmsNorm { epsilon: epsilon as f32, weight_dtype: element(weight.dtype) });
    let client = x.client.clone();
    let d_weights: Vec<_> =
        weights.iter().map(|weight| empty_like(weight, [problem.head_dim], weight.dtype)).collect();
    let norm = problem.norm.map(|_| NormGradients {
        x: x.binding(),
        weights: weights.into_iter().map(|weight| into_contiguous(weight).binding()).collect(),
        d_weights: d_weights.iter().map(|gradient| gradient.clone().binding()).collect(),
    });
    let tensors = RopeQkNormBackwardTensors {
        norm,
        tables,
        d_out: d_out.map(CubeTensor::binding),
        dx: dx.clone().binding(),
    };
    backward::launch(&client, &problem, tensors)
        .unwrap_or_else(|error| panic!("rope_qk_norm, backward pass: {error}"));
    d_weights
}

fn tables(rotation: Rotation<CubeBackend>) -> Option<RotaryTables> {
    match rotation {
        Rotation::Absent => None,
        Rotation::Tables { cos, sin } => {
            let [cos, sin] = [cos, sin].map(|table| {
                debug_assert_eq!(table.dtype, DType::F32);
                untile(table).binding()
            });
            Some(RotaryTables { cos, sin })
        }
    }
}

fn table_strides(tables: &RotaryTables) -> [[usize; 2]; 2] {
    [&tables.cos, &tables.sin].map(|table| [table.strides[0], table.strides[1]])
}
