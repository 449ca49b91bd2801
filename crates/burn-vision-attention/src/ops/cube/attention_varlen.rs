//! `attention_varlen` on CubeCL devices.

use std::sync::Arc;

use burn::backend::CubeDevice;
use burn::tensor::{DType, Device, Shape};
use burn_cubecl::kernel::untile;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use kernels_cubecl::attention_varlen::{self as kernel, AttentionProblem, AttentionTensors};
use kernels_cubecl::{DeviceWorkList, LaunchError, TensorLayout, WorkList};

use super::{cube_device, element, layout};
use crate::Segments;
use crate::ops::attention_varlen::AttentionOptions;

/// Whether the kernel serves contiguous tensors of these shapes on a device, and if not, why.
pub(in crate::ops) fn supports(
    device: &Device,
    dtype: DType,
    [q, k, v]: [[usize; 3]; 3],
    options: &AttentionOptions,
) -> Result<(), String> {
    let device = cube_device(device)?;
    let layouts = [q, k, v].map(TensorLayout::contiguous);
    let problem = problem(layouts, dtype, options);
    let blueprint = kernel::supports(device.client().properties(), &problem);
    blueprint.map(|_| ()).map_err(|reason| reason.to_string())
}

/// Output and lse.
///
/// # Panics
///
/// When the kernel cannot serve the arguments, which [`supports`] tells beforehand.
pub(super) fn run(
    tensors: [CubeTensor; 3],
    segments_q: &Segments,
    segments_k: &Segments,
    options: &AttentionOptions,
) -> (CubeTensor, CubeTensor) {
    let [q, k, v] = tensors.map(untile);
    let problem = problem([layout(&q), layout(&k), layout(&v)], q.dtype, options);
    let (client, device, dtype) = (q.client.clone(), q.device.clone(), q.dtype);
    let new =
        |shape, dtype| empty_device_contiguous_dtype(client.clone(), device.clone(), shape, dtype);
    let out = new(Shape::new(problem.out_shape()), dtype);
    let lse = new(Shape::new(problem.lse_shape()), DType::F32);
    let tensors = AttentionTensors {
        q: q.binding(),
        k: k.binding(),
        v: v.binding(),
        out: out.clone().binding(),
        lse: lse.clone().binding(),
    };
    let launch = || -> Result<(), LaunchError> {
        let blueprint = kernel::supports(client.properties(), &problem)?;
        let work = work_list(&client, &device, segments_q, segments_k, blueprint.tile_q());
        kernel::launch(&client, &problem, &blueprint, &work.list, tensors)
    };
    launch().unwrap_or_else(|error| panic!("attention_varlen: {error}"));
    (out, lse)
}

fn problem(
    [q, k, v]: [TensorLayout; 3],
    dtype: DType,
    options: &AttentionOptions,
) -> AttentionProblem {
    let mut problem = AttentionProblem::new(q, k, v, element(dtype));
    if let Some(softmax_scale) = options.softmax_scale {
        problem.softmax_scale = softmax_scale as f32;
    }
    problem.is_causal = options.is_causal;
    problem.window = (options.window.left, options.window.right);
    problem.softcap = options.softcap.map(|softcap| softcap as f32);
    problem
}

/// A work list on a device, with what it was made for.
struct UploadedWork {
    list: DeviceWorkList,
    device: CubeDevice,
    /// Offsets of the keys; the queries' segments own this value.
    offsets_k: Box<[i32]>,
}

/// The work list of these segments: uploaded once for each device, then shared by all layers.
fn work_list(
    client: &Client,
    device: &CubeDevice,
    segments_q: &Segments,
    segments_k: &Segments,
    tile_q: usize,
) -> Arc<UploadedWork> {
    segments_q.derived(
        |work: &UploadedWork| {
            work.list.tile_q() == tile_q
                && work.device == *device
                && *work.offsets_k == *segments_k.offsets()
        },
        || {
            let offsets = |segments: &Segments| -> Vec<usize> {
                segments.offsets().iter().map(|&offset| offset as usize).collect()
            };
            let list = WorkList::new(&offsets(segments_q), &offsets(segments_k), tile_q)
                .unwrap_or_else(|error| panic!("attention_varlen: {error}"));
            UploadedWork {
                list: list.upload(client),
                device: device.clone(),
                offsets_k: segments_k.offsets().into(),
            }
        },
    )
}
