//! `attention_varlen` on CubeCL devices.

use std::sync::{Arc, LazyLock};

use burn::backend::CubeDevice;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use kernels_cubecl::attention_varlen::backward::{
    self, AttentionGradProblem, AttentionGradTensors, CutGradWork, GradPlacements, Placement,
};
use kernels_cubecl::attention_varlen::{
    self as kernel, AttentionProblem, AttentionTensors, CutWork,
};
use kernels_cubecl::{
    AttentionBlueprint, DeviceWorkList, Engine, LaunchError, TensorLayout, Unsupported, WorkList,
};

use super::{element, empty_like, layout, view};
use crate::Segments;
use crate::ops::attention_varlen::{AttentionOptions, FlashKernel};
use crate::ops::backend::{AttentionGradients, LseGradient, Wanted};

/// Whether a kernel serves contiguous tensors of these shapes on a device, and if not, why.
pub(in crate::ops) fn supports(
    device: &CubeDevice,
    kernel: FlashKernel,
    dtype: DType,
    [q, k, v]: [[usize; 3]; 3],
    options: &AttentionOptions,
    training: bool,
) -> Result<(), String> {
    let client = device.client();
    let layouts = [q, k, v].map(TensorLayout::contiguous);
    let problem = problem(layouts, dtype, options);
    candidates(&client, &problem, kernel).map_err(|reason| reason.to_string())?;
    if training {
        let blueprint =
            backward::supports(client.properties(), &AttentionGradProblem::new(problem));
        blueprint.map_err(|reason| format!("backward pass: {reason}"))?;
    }
    Ok(())
}

/// Output and lse.
///
/// # Panics
///
/// When the kernel cannot serve the arguments, which [`supports`] tells beforehand.
pub(super) fn forward(
    tensors: [CubeTensor; 3],
    segments_q: &Segments,
    segments_k: &Segments,
    options: &AttentionOptions,
    kernel: FlashKernel,
) -> (CubeTensor, CubeTensor) {
    let [q, mut k, mut v] = tensors.map(untile);
    if kernel == FlashKernel::V3 {
        [k, v] = [k, v].map(copyable);
    }
    let problem = problem([layout(&q), layout(&k), layout(&v)], q.dtype, options);
    let (client, device) = (q.client.clone(), q.device.clone());
    let out = empty_like(&q, problem.out_shape(), q.dtype);
    let lse = empty_like(&q, problem.lse_shape(), DType::F32);
    let tensors = AttentionTensors {
        q: q.binding(),
        k: k.binding(),
        v: v.binding(),
        out: out.clone().binding(),
        lse: lse.clone().binding(),
    };
    let segments = [segments_q, segments_k];
    launch_forward(&client, device, &problem, segments, tensors, kernel)
        .unwrap_or_else(|error| panic!("attention_varlen: {error}"));
    (out, lse)
}

/// The tilings of a kernel that may be the fastest, the likeliest first.
fn candidates(
    client: &Client,
    problem: &AttentionProblem,
    kernel: FlashKernel,
) -> Result<Vec<AttentionBlueprint>, Unsupported> {
    match kernel {
        FlashKernel::V2 => kernel::candidates(client.properties(), problem),
        FlashKernel::V3 => kernel::candidates_on(client.properties(), problem, Engine::AsyncMma),
    }
}

/// Keys or values where tiles can be copied from by themselves: in place, if their strides allow it.
fn copyable(tensor: CubeTensor) -> CubeTensor {
    if layout(&tensor).copies_by_tma() { tensor } else { into_contiguous(tensor) }
}

fn launch_forward(
    client: &Client,
    device: CubeDevice,
    problem: &AttentionProblem,
    [segments_q, segments_k]: [&Segments; 2],
    tensors: AttentionTensors,
    kernel: FlashKernel,
) -> Result<(), LaunchError> {
    let mut blueprints = candidates(client, problem, kernel)?;
    if !autotunes() {
        blueprints.truncate(1);
    }
    let cut = cut_work(client, &device, segments_q, segments_k);
    kernel::launch_fastest(client, problem, &blueprints, segments_q.len(), cut, tensors)
}

/// Cuts the first of these segments into tiles.
fn cut_work(
    client: &Client,
    device: &CubeDevice,
    segments: &Segments,
    others: &Segments,
) -> CutWork {
    let (client, device) = (client.clone(), device.clone());
    let (segments, others) = (segments.clone(), others.clone());
    Arc::new(move |tile| work_list(&client, &device, &segments, &others, tile).list.clone())
}

/// Whether tilings are measured where there is a choice: not if `VISION_ATTENTION_AUTOTUNE` is `off`.
fn autotunes() -> bool {
    static AUTOTUNES: LazyLock<bool> =
        LazyLock::new(|| match std::env::var("VISION_ATTENTION_AUTOTUNE").as_deref() {
            Err(_) | Ok("on") => true,
            Ok("off") => false,
            Ok(other) => {
                log::warn!(
                    "VISION_ATTENTION_AUTOTUNE: expected `on` or `off`, got {other:?}; taken as off"
                );
                false
            }
        });
    *AUTOTUNES
}

/// This kernel for contiguous tensors of these shapes, in words, or why it serves none such.
pub(in crate::ops) fn describe(
    device: &CubeDevice,
    kernel: FlashKernel,
    dtype: DType,
    [q, k, v]: [[usize; 3]; 3],
    options: &AttentionOptions,
) -> Result<String, String> {
    let layouts = [q, k, v].map(TensorLayout::contiguous);
    let client = device.client();
    let problem = problem(layouts, dtype, options);
    let blueprints = candidates(&client, &problem, kernel).map_err(|reason| reason.to_string())?;
    let others = blueprints.len() - 1;
    Ok(match others {
        1.. if autotunes() => format!("the fastest of {} and {others} more", blueprints[0]),
        _ => blueprints[0].to_string(),
    })
}

/// The gradients that are wanted, from output, lse and the gradient of the output.
///
/// # Panics
///
/// As [`forward`].
pub(super) fn backward(
    tensors: [CubeTensor; 3],
    upstream: [CubeTensor; 3],
    d_lse: LseGradient<CubeBackend>,
    segments: [&Segments; 2],
    options: &AttentionOptions,
    wanted: Wanted,
) -> AttentionGradients<CubeBackend> {
    let tensors = tensors.map(untile);
    let layouts = tensors.each_ref().map(layout);
    let dtype = tensors[0].dtype;
    let forward = problem(layouts, dtype, options);
    let (placements, elements) = placements(&forward, wanted);
    let grads = empty_like(&tensors[0], [elements], dtype);
    let problem = AttentionGradProblem { placements, ..AttentionGradProblem::new(forward) };
    launch_backward(problem, tensors, upstream, d_lse, segments, (&grads, wanted));
    let part = |placement: Placement, shape: [usize; 3]| {
        if shape.contains(&0) {
            return empty_like(&grads, shape, dtype);
        }
        view(&grads, placement.offset, shape, placement.layout(shape).strides)
    };
    let [q, k, v] = layouts.map(|layout| layout.shape);
    match wanted {
        Wanted::All => AttentionGradients::All {
            q: part(placements.dq, q),
            k: part(placements.dk, k),
            v: part(placements.dv, v),
        },
        Wanted::Query => AttentionGradients::Query { q: part(placements.dq, q) },
        Wanted::KeyValue => {
            AttentionGradients::KeyValue { k: part(placements.dk, k), v: part(placements.dv, v) }
        }
    }
}

/// Where gradients go in a buffer of that many elements, which has no room for unwanted ones.
fn placements(forward: &AttentionProblem, wanted: Wanted) -> (GradPlacements, usize) {
    let mut placements = GradPlacements::separate(forward);
    let all = placements.len(forward);
    match wanted {
        Wanted::All => (placements, all),
        Wanted::Query => (placements, forward.q.shape.iter().product()),
        Wanted::KeyValue => {
            let start = placements.dk.offset;
            placements.dk.offset -= start;
            placements.dv.offset -= start;
            (placements, all.saturating_sub(start))
        }
    }
}

/// Writes the gradients of q, k and v, which have one shape, to `d_qkv` `[tokens, 3, heads, head_dim]`.
///
/// # Panics
///
/// As [`forward`].
pub(super) fn backward_packed(
    tensors: [CubeTensor; 3],
    upstream: [CubeTensor; 3],
    segments: &Segments,
    options: &AttentionOptions,
    d_qkv: &CubeTensor,
) {
    let tensors = tensors.map(untile);
    let forward = problem(tensors.each_ref().map(layout), tensors[0].dtype, options);
    let placements = GradPlacements::packed(&forward);
    let problem = AttentionGradProblem { placements, ..AttentionGradProblem::new(forward) };
    let segments = [segments, segments];
    let target = (d_qkv, Wanted::All);
    launch_backward(problem, tensors, upstream, LseGradient::Absent, segments, target);
}

fn launch_backward(
    mut problem: AttentionGradProblem,
    tensors: [CubeTensor; 3],
    [out, lse, d_out]: [CubeTensor; 3],
    d_lse: LseGradient<CubeBackend>,
    [segments_q, segments_k]: [&Segments; 2],
    (grads, wanted): (&CubeTensor, Wanted),
) {
    let [q, k, v] = tensors;
    let (out, d_out) = (untile(out), untile(d_out));
    let d_lse = match d_lse {
        LseGradient::Absent => None,
        LseGradient::Present { d_lse } => Some(untile(d_lse)),
    };
    (problem.out, problem.d_out) = (layout(&out), layout(&d_out));
    problem.d_lse = d_lse.as_ref().map(|d_lse| [d_lse.meta.strides()[0], d_lse.meta.strides()[1]]);
    let (client, device) = (q.client.clone(), q.device.clone());
    let stats = empty_like(&q, problem.stats_shape(), DType::F32);
    let tensors = AttentionGradTensors {
        q: q.binding(),
        k: k.binding(),
        v: v.binding(),
        out: out.binding(),
        d_out: d_out.binding(),
        lse: into_contiguous(lse).binding(),
        d_lse: d_lse.map(CubeTensor::binding),
        stats: stats.binding(),
        grads: grads.clone().binding(),
    };
    let cut_q = || cut_work(&client, &device, segments_q, segments_k);
    let cut_k = || cut_work(&client, &device, segments_k, segments_q);
    let work = match wanted {
        Wanted::All => CutGradWork::All { cut_q: cut_q(), cut_k: cut_k() },
        Wanted::Query => CutGradWork::Queries { cut_q: cut_q() },
        Wanted::KeyValue => CutGradWork::KeysValues { cut_k: cut_k() },
    };
    let launch = || -> Result<(), LaunchError> {
        let mut blueprints = backward::candidates(client.properties(), &problem)?;
        if !autotunes() {
            blueprints.truncate(1);
        }
        let segments = segments_q.len();
        backward::launch_fastest(&client, &problem, &blueprints, segments, work, tensors)
    };
    launch().unwrap_or_else(|error| panic!("attention_varlen, backward pass: {error}"));
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

/// The work list of these segments, the first of which is cut into tiles of `tile` tokens: uploaded once
/// for each device, then shared by all layers.
fn work_list(
    client: &Client,
    device: &CubeDevice,
    segments_q: &Segments,
    segments_k: &Segments,
    tile: usize,
) -> Arc<UploadedWork> {
    segments_q.derived(
        |work: &UploadedWork| {
            work.list.tile_q() == tile
                && work.device == *device
                && *work.offsets_k == *segments_k.offsets()
        },
        || {
            let offsets = |segments: &Segments| -> Vec<usize> {
                segments.offsets().iter().map(|&offset| offset as usize).collect()
            };
            let list = WorkList::new(&offsets(segments_q), &offsets(segments_k), tile)
                .unwrap_or_else(|error| panic!("attention_varlen: {error}"));
            UploadedWork {
                list: list.upload(client),
                device: device.clone(),
                offsets_k: segments_k.offsets().into(),
            }
        },
    )
}
