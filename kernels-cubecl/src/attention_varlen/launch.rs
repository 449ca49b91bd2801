//! Launching attention.

use std::{f32::consts::LOG2_E, sync::Arc};

use cubecl::{client::Client, prelude::*};

use super::{
    AttentionBlueprint, AttentionProblem,
    kernel::{Scalars, ScalarsLaunch, attention_varlen},
    launch_async::{async_kernel, run_async},
};
use crate::{
    DeviceWorkList, Engine, LaunchError, TensorLayout,
    device::{buffer_arg, kernel_settings, tensor_arg},
    layout::{VECTOR, check_binding, check_buffer},
    tile::{Cmma, Emulated, LEAST_SCALE, Mma, Simt, TensorCore, TileAlgebra},
    work_list::{MAX_TOKENS, TILE_WORDS, fold_grid},
};

/// The tensors of one attention launch.
#[derive(Clone, Debug)]
pub struct AttentionTensors {
    /// Queries, laid out as the problem says.
    pub q: TensorBinding,
    /// Keys, laid out as the problem says.
    pub k: TensorBinding,
    /// Values, laid out as the problem says.
    pub v: TensorBinding,
    /// Output `[tokens_q, heads, value_dim]`, contiguous, of the problem's element type. Every
    /// element is written.
    pub out: TensorBinding,
    /// Log-sum-exp of the scaled scores `[tokens_q, heads]`, contiguous, f32. Every element is
    /// written; minus infinity where a query sees no key.
    pub lse: TensorBinding,
}

/// Queues one attention launch. Neither waits for the device nor reads anything back.
///
/// `blueprint` comes from [`supports`](super::supports) for this client's device and this problem,
/// and `work` is cut for its [`tile_q`](AttentionBlueprint::tile_q).
///
/// Queries that see no key (empty key segment, everything masked) get output 0 and lse minus
/// infinity. NaN in q, k or v stays inside its segment. Equal inputs give equal bits.
///
/// # Errors
///
/// If `work` was cut for another tile size or other token counts, if the grid is too large, or if a
/// tensor reaches past its buffer or starts at an unusable address.
///
/// # Panics
///
/// If the blueprint was made for another problem, shapes or strides of the tensors differ from the
/// problem's, or outputs are not contiguous.
pub fn launch(
    client: &Client,
    problem: &AttentionProblem,
    blueprint: &AttentionBlueprint,
    work: &DeviceWorkList,
    tensors: AttentionTensors,
) -> Result<(), LaunchError> {
    let grid = check(client, problem, blueprint, work, &tensors)?;
    if work.is_empty() {
        return Ok(());
    }
    match blueprint.engine {
        Engine::Simt => run::<Simt>(client, grid, problem, blueprint, work, tensors),
        Engine::Cmma(_) => run::<Cmma>(client, grid, problem, blueprint, work, tensors),
        Engine::Mma => run::<Mma<TensorCore>>(client, grid, problem, blueprint, work, tensors),
        Engine::EmulatedMma => {
            run::<Mma<Emulated>>(client, grid, problem, blueprint, work, tensors);
        }
        Engine::AsyncMma => {
            run_async::<Mma<TensorCore>>(client, grid, problem, blueprint, work, tensors);
        }
        Engine::EmulatedAsyncMma => {
            run_async::<Mma<Emulated>>(client, grid, problem, blueprint, work, tensors);
        }
    }
    Ok(())
}

/// The grid of a launch, if nothing is wrong with it.
pub(super) fn check(
    client: &Client,
    problem: &AttentionProblem,
    blueprint: &AttentionBlueprint,
    work: &DeviceWorkList,
    tensors: &AttentionTensors,
) -> Result<CubeCount, LaunchError> {
    problem.check();
    assert!(blueprint.serves(problem), "blueprint: made for another problem: {blueprint}");
    check_work(problem, work, blueprint.tile_q())?;
    check_tensors(problem, blueprint.vectors, tensors)?;
    let cubes = (work.tiles as u64).saturating_mul(problem.heads() as u64);
    Ok(fold_grid(cubes, client.properties().hardware.max_cube_count)?)
}

fn run<T: TileAlgebra>(
    client: &Client,
    grid: CubeCount,
    problem: &AttentionProblem,
    blueprint: &AttentionBlueprint,
    work: &DeviceWorkList,
    tensors: AttentionTensors,
) {
    let (scalars, query_factor) = scalars(problem, work);
    let AttentionTensors { q, k, v, out, lse } = tensors;
    // Empty buffers cannot be bound. Without key tokens the kernel never reads k and v.
    let (k, v) = if problem.tokens_k() == 0 { (q.clone(), q.clone()) } else { (k, v) };
    // SAFETY: the work list holds `work.tiles` entries of the token counts that `launch` has
    // checked, as it has that the tensors reach no further than their buffers; the kernel masks
    // every row and key beyond its segment. Its loop advances by a positive constant.
    unsafe {
        attention_varlen::launch_unchecked::<T>(
            client,
            grid,
            CubeDim::new_1d(blueprint.units() as u32),
            blueprint.address_type,
            q.into_tensor_arg(),
            k.into_tensor_arg(),
            v.into_tensor_arg(),
            BufferArg::from_raw_parts(work.handle.clone(), work.tiles * TILE_WORDS),
            out.into_buffer_arg(),
            lse.into_buffer_arg(),
            scalars,
            query_factor,
            f32::NEG_INFINITY,
            *blueprint,
            blueprint.dtype,
            blueprint.vectors[0],
            blueprint.vectors[1],
            blueprint.vectors[2],
        );
    }
}

/// What cubes have in common, and the factor on queries.
///
/// Scores are compared before they are scaled, for which the scale has to be positive and not too small:
/// queries take its sign, and where it is smaller than [`LEAST_SCALE`] they are multiplied by 0, so that
/// all weights of a row are the same.
pub(super) fn scalars(problem: &AttentionProblem, work: &DeviceWorkList) -> (ScalarsLaunch, f32) {
    let scale = problem.softmax_scale;
    let (query_factor, scale) = match problem.softcap {
        Some(_) => (1.0, scale),
        None if scale.abs() < LEAST_SCALE => (0.0, 1.0),
        None => (scale.signum(), scale.abs()),
    };
    (scalars_for(problem, work, problem.heads(), scale, bounds(problem)), query_factor)
}

/// As [`scalars`], of rows that have this many heads, with this softmax scale.
pub(super) fn scalars_for(
    problem: &AttentionProblem,
    work: &DeviceWorkList,
    heads: usize,
    scale: f32,
    (left, right): (i32, i32),
) -> ScalarsLaunch {
    let (score_scale, cap) = match problem.softcap {
        Some(cap) => (scale / cap, cap * LOG2_E),
        None => (scale * LOG2_E, 1.0),
    };
    ScalarsLaunch::new(
        work.tiles as u32,
        heads as u32,
        (problem.heads() / problem.heads_kv()) as u32,
        score_scale,
        cap,
        left,
        right,
    )
}

/// The window's sides; 0 where unbounded. Beyond the longest segment a window is unbounded; the
/// clamp keeps sums inside i32.
pub(super) fn bounds(problem: &AttentionProblem) -> (i32, i32) {
    let bound = |side: Option<usize>| side.unwrap_or(0).min(2 * MAX_TOKENS) as i32;
    let (left, right) = problem.band();
    (bound(left), bound(right))
}

fn check_work(
    problem: &AttentionProblem,
    work: &DeviceWorkList,
    tile_q: usize,
) -> Result<(), LaunchError> {
    DeviceWorkList::check([
        ("tile_q", tile_q, work.tile_q),
        ("query tokens", problem.tokens_q(), work.tokens_q),
        ("key tokens", problem.tokens_k(), work.tokens_k),
    ])
}

fn check_tensors(
    problem: &AttentionProblem,
    [vector_q, vector_k, vector_v]: [usize; 3],
    tensors: &AttentionTensors,
) -> Result<(), LaunchError> {
    let size = problem.dtype.size();
    check_binding("q", &tensors.q, &problem.q, vector_q, size)?;
    check_binding("k", &tensors.k, &problem.k, vector_k, size)?;
    check_binding("v", &tensors.v, &problem.v, vector_v, size)?;
    let shape = problem.out_shape();
    let out = TensorLayout::of("out", &tensors.out);
    assert_eq!(out.shape, shape, "out: shape differs from the problem's");
    assert!(out.is_contiguous(), "out: expected contiguous strides, got {:?}", out.strides);
    check_buffer("out", &tensors.out, out.span(), VECTOR, size)?;
    let [tokens, heads] = problem.lse_shape();
    assert_eq!(tensors.lse.shape[..], [tokens, heads], "lse: shape differs from the problem's");
    let [token_stride, head_stride] = [tensors.lse.strides[0], tensors.lse.strides[1]];
    assert!(
        (tokens <= 1 || token_stride == heads) && (heads <= 1 || head_stride == 1),
        "lse: expected contiguous strides, got {:?}",
        tensors.lse.strides
    );
    check_buffer("lse", &tensors.lse, tokens * heads, 1, size_of::<f32>())
}

/// The kernel of a blueprint, for compiling it without a device.
pub fn kernel(
    blueprint: AttentionBlueprint,
    properties: Arc<DeviceProperties>,
    target: Arc<TargetProperties>,
) -> Box<dyn CubeKernel> {
    match blueprint.engine {
        Engine::Simt => kernel_on::<Simt>(blueprint, properties, target),
        Engine::Cmma(_) => kernel_on::<Cmma>(blueprint, properties, target),
        Engine::Mma => kernel_on::<Mma<TensorCore>>(blueprint, properties, target),
        Engine::EmulatedMma => kernel_on::<Mma<Emulated>>(blueprint, properties, target),
        Engine::AsyncMma => async_kernel::<Mma<TensorCore>>(blueprint, properties, target),
        Engine::EmulatedAsyncMma => async_kernel::<Mma<Emulated>>(blueprint, properties, target),
    }
}

fn kernel_on<T: TileAlgebra>(
    blueprint: AttentionBlueprint,
    properties: Arc<DeviceProperties>,
    target: Arc<TargetProperties>,
) -> Box<dyn CubeKernel> {
    let settings = kernel_settings(blueprint.units(), blueprint.address_type);
    let [vector_q, vector_k, vector_v] = blueprint.vectors;
    Box::new(attention_varlen::AttentionVarlen::<T>::new(
        settings,
        properties,
        target,
        tensor_arg(),
        tensor_arg(),
        tensor_arg(),
        buffer_arg(),
        buffer_arg(),
        buffer_arg(),
        Scalars::compiled(),
        (),
        (),
        blueprint,
        blueprint.dtype,
        vector_q,
        vector_k,
        vector_v,
    ))
}
