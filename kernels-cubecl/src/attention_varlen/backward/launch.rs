//! Launching the gradient passes.

use std::sync::Arc;

use cubecl::{client::Client, prelude::*};

use super::{
    super::{
        kernel::Scalars,
        launch::{bounds, scalars_for},
    },
    AttentionGradBlueprint, AttentionGradProblem, GradPass, Placement,
    kernel::{
        TargetCompilationArg, TargetLaunch, attention_varlen_dkdv, attention_varlen_dq,
        attention_varlen_statistics,
    },
};
use crate::{
    DeviceWorkList, LaunchError,
    device::{buffer_arg, kernel_settings, tensor_arg},
    engine::Engine,
    layout::{VECTOR, check_binding, check_buffer},
    tile::{Cmma, Emulated, GradientAlgebra, Mma, Simt, TensorCore},
    work_list::{TILE_WORDS, fold_grid},
};

/// The tensors of one backward pass.
#[derive(Clone, Debug)]
pub struct AttentionGradTensors {
    /// Queries, laid out as the problem says.
    pub q: TensorBinding,
    /// Keys, laid out as the problem says.
    pub k: TensorBinding,
    /// Values, laid out as the problem says.
    pub v: TensorBinding,
    /// Output of the forward pass, laid out as the problem says.
    pub out: TensorBinding,
    /// Gradient of the output, laid out as the problem says.
    pub d_out: TensorBinding,
    /// Log-sum-exp from the forward pass, `[tokens_q, heads]`, contiguous, f32.
    pub lse: TensorBinding,
    /// Gradient of lse, `[tokens_q, heads]`, f32, with the strides that the problem says; present
    /// exactly if the problem has one.
    pub d_lse: Option<TensorBinding>,
    /// Room for `[tokens_q, heads, 2]` f32 that the passes hand each other. Its content before does
    /// not matter.
    pub stats: TensorBinding,
    /// The gradient buffer, of the problem's element type, in any shape with at least
    /// [`grads_len`](AttentionGradProblem::grads_len) elements, contiguous. Every element of a wanted
    /// gradient's placement is written, no other is touched.
    pub grads: TensorBinding,
}

/// The gradients that are wanted, each with the work list that its pass goes through.
#[derive(Clone, Copy, Debug)]
pub enum GradWork<'a> {
    /// Those of queries, keys and values.
    All {
        /// The work list over queries.
        work_q: &'a DeviceWorkList,
        /// The work list over keys.
        work_k: &'a DeviceWorkList,
    },
    /// That of the queries.
    Queries {
        /// The work list over queries.
        work_q: &'a DeviceWorkList,
    },
    /// Those of keys and values, which one pass computes.
    KeysValues {
        /// The work list over keys.
        work_k: &'a DeviceWorkList,
    },
}

impl<'a> GradWork<'a> {
    fn work_q(self) -> Option<&'a DeviceWorkList> {
        match self {
            Self::All { work_q, .. } | Self::Queries { work_q } => Some(work_q),
            Self::KeysValues { .. } => None,
        }
    }

    fn work_k(self) -> Option<&'a DeviceWorkList> {
        match self {
            Self::All { work_k, .. } | Self::KeysValues { work_k } => Some(work_k),
            Self::Queries { .. } => None,
        }
    }

    /// Elements that the gradient buffer needs.
    fn grads_len(self, problem: &AttentionGradProblem) -> usize {
        let AttentionGradProblem { forward, placements, .. } = problem;
        let queries = self.work_q().map(|_| [(placements.dq, forward.q.shape)]);
        let keys_values = self
            .work_k()
            .map(|_| [(placements.dk, forward.k.shape), (placements.dv, forward.v.shape)]);
        let wanted = queries.into_iter().flatten().chain(keys_values.into_iter().flatten());
        let end = |(placement, shape): (Placement, [usize; 3])| match placement.layout(shape) {
            layout if layout.is_empty() => 0,
            layout => placement.offset.saturating_add(layout.span()),
        };
        wanted.map(end).max().unwrap_or(0)
    }
}

/// Queues the three launches of one backward pass: [`launch_wanted`] for all gradients.
///
/// # Errors
///
/// As [`launch_wanted`].
///
/// # Panics
///
/// As [`launch_wanted`].
pub fn launch(
    client: &Client,
    problem: &AttentionGradProblem,
    blueprint: &AttentionGradBlueprint,
    work_q: &DeviceWorkList,
    work_k: &DeviceWorkList,
    tensors: AttentionGradTensors,
) -> Result<(), LaunchError> {
    launch_wanted(client, problem, blueprint, GradWork::All { work_q, work_k }, tensors)
}

/// Queues the launches of one backward pass that the wanted gradients take: the statistics of the
/// queries, and a pass for each work list. Nothing waits for the device nor reads anything back.
///
/// `blueprint` comes from [`supports`](super::supports) for this client's device and this problem.
/// `work_q` is the work list over queries, cut for its
/// [`tile_q`](AttentionGradBlueprint::tile_q); `work_k` is made with queries and keys swapped,
/// `WorkList::new(offsets_k, offsets_q, tile_k)`.
///
/// Queries that see no key and keys that no query sees get gradient 0, also where d_lse is not
/// finite. NaN stays inside its segment. Equal inputs give equal bits, whatever else is wanted.
///
/// Gradients that are not wanted are not written, and where they are placed does not matter: the
/// gradient buffer need not reach that far.
///
/// # Errors
///
/// If a work list was cut for another tile size or other token counts, if a grid is too large, or if
/// a tensor reaches past its buffer or starts at an unusable address. Nothing has been queued then.
///
/// # Panics
///
/// If the blueprint was made for another problem, tensors differ from the problem in shape, strides
/// or presence, or lse, stats and grads are not contiguous.
pub fn launch_wanted<'w>(
    client: &Client,
    problem: &AttentionGradProblem,
    blueprint: &AttentionGradBlueprint,
    wanted: GradWork<'w>,
    tensors: AttentionGradTensors,
) -> Result<(), LaunchError> {
    check(problem, blueprint, wanted, &tensors)?;
    let forward = &problem.forward;
    let max_count = client.properties().hardware.max_cube_count;
    let grid = |items: usize, heads: usize| {
        fold_grid((items as u64).saturating_mul(heads as u64), max_count)
    };
    let pass = |work: Option<&'w DeviceWorkList>, heads| {
        let work = work.filter(|work| !work.is_empty());
        work.map(|work| grid(work.tiles, heads).map(|grid| (work, grid))).transpose()
    };
    let queries = forward.tokens_q().saturating_mul(forward.heads());
    let grid_statistics = grid(queries.div_ceil(blueprint.statistics.1), 1)?;
    let pass_q = pass(wanted.work_q(), forward.heads())?;
    let pass_k = pass(wanted.work_k(), forward.heads_kv())?;
    if queries > 0 {
        launch_statistics(client, grid_statistics, blueprint, tensors.clone());
    }
    if let Some((work, grid)) = pass_q {
        let launch = match blueprint.engine {
            Engine::Simt => launch_queries::<Simt>,
            Engine::Cmma(_) => launch_queries::<Cmma>,
            Engine::Mma | Engine::AsyncMma => launch_queries::<Mma<TensorCore>>,
            Engine::EmulatedMma | Engine::EmulatedAsyncMma => launch_queries::<Mma<Emulated>>,
        };
        launch(client, grid, problem, blueprint, work, tensors.clone());
    }
    if let Some((work, grid)) = pass_k {
        let launch = match blueprint.engine {
            Engine::Simt => launch_keys_values::<Simt>,
            Engine::Cmma(_) => launch_keys_values::<Cmma>,
            Engine::Mma | Engine::AsyncMma => launch_keys_values::<Mma<TensorCore>>,
            Engine::EmulatedMma | Engine::EmulatedAsyncMma => launch_keys_values::<Mma<Emulated>>,
        };
        launch(client, grid, problem, blueprint, work, tensors);
    }
    Ok(())
}

/// What [`launch_wanted`] refuses, but for grids that are too large.
pub(super) fn check(
    problem: &AttentionGradProblem,
    blueprint: &AttentionGradBlueprint,
    wanted: GradWork<'_>,
    tensors: &AttentionGradTensors,
) -> Result<(), LaunchError> {
    problem.check();
    assert!(blueprint.serves(problem), "blueprint: made for another problem: {blueprint}");
    check_work(problem, blueprint, wanted)?;
    check_tensors(problem, blueprint.vectors, wanted.grads_len(problem), tensors)
}

fn launch_statistics(
    client: &Client,
    grid: CubeCount,
    blueprint: &AttentionGradBlueprint,
    tensors: AttentionGradTensors,
) {
    let AttentionGradTensors { out, d_out, lse, d_lse, stats, .. } = tensors;
    // SAFETY: the tensors reach no further than their buffers, as `launch` has checked, and the
    // kernel leaves out rows beyond the last token. Its loop advances by a positive constant.
    unsafe {
        attention_varlen_statistics::launch_unchecked(
            client,
            grid,
            CubeDim::new_1d(blueprint.units(GradPass::Statistics) as u32),
            blueprint.address_type,
            out.into_tensor_arg(),
            d_out.into_tensor_arg(),
            lse.into_buffer_arg(),
            d_lse.map(TensorBinding::into_tensor_arg).into(),
            stats.into_buffer_arg(),
            *blueprint,
            blueprint.dtype,
            blueprint.vectors[3],
            blueprint.vectors[4].min(VECTOR),
        );
    }
}

fn launch_queries<T: GradientAlgebra>(
    client: &Client,
    grid: CubeCount,
    problem: &AttentionGradProblem,
    blueprint: &AttentionGradBlueprint,
    work: &DeviceWorkList,
    tensors: AttentionGradTensors,
) {
    let forward = &problem.forward;
    let AttentionGradTensors { q, k, v, d_out, stats, grads, .. } = tensors;
    // Empty buffers cannot be bound. Without key tokens the kernel never reads k and v.
    let (k, v) = if forward.tokens_k() == 0 { (q.clone(), q.clone()) } else { (k, v) };
    let [vector_q, vector_k, vector_v, _, vector_d_out] = blueprint.vectors;
    // SAFETY: the work list holds `work.tiles` entries of the token counts that `launch` has
    // checked, as it has that the tensors reach no further than their buffers; the kernel masks
    // every row and key beyond its segment. Its loop advances by a positive constant.
    unsafe {
        attention_varlen_dq::launch_unchecked::<T>(
            client,
            grid,
            CubeDim::new_1d(blueprint.units(GradPass::Queries) as u32),
            blueprint.address_type,
            q.into_tensor_arg(),
            k.into_tensor_arg(),
            v.into_tensor_arg(),
            d_out.into_tensor_arg(),
            stats.into_buffer_arg(),
            BufferArg::from_raw_parts(work.handle.clone(), work.tiles * TILE_WORDS),
            grads.into_buffer_arg(),
            target(problem.placements.dq),
            scalars_for(forward, work, forward.heads(), forward.softmax_scale, bounds(forward)),
            forward.softmax_scale,
            blueprint.shape,
            blueprint.options,
            blueprint.dtype,
            vector_q,
            vector_k,
            vector_v,
            vector_d_out,
        );
    }
}

fn launch_keys_values<T: GradientAlgebra>(
    client: &Client,
    grid: CubeCount,
    problem: &AttentionGradProblem,
    blueprint: &AttentionGradBlueprint,
    work: &DeviceWorkList,
    tensors: AttentionGradTensors,
) {
    let forward = &problem.forward;
    let AttentionGradTensors { q, k, v, d_out, stats, grads, .. } = tensors;
    let work_arg =
        // SAFETY: the work list holds that many words.
        || unsafe { BufferArg::from_raw_parts(work.handle.clone(), work.tiles * TILE_WORDS) };
    // Empty buffers cannot be bound. Without query tokens the kernel never reads these.
    let (q, d_out, stats) = match forward.tokens_q() {
        0 => (k.clone(), k.clone(), work_arg()),
        _ => (q, d_out, stats.into_buffer_arg()),
    };
    let (left, right) = bounds(forward);
    let [vector_q, vector_k, vector_v, _, vector_d_out] = blueprint.vectors;
    // SAFETY: as in `launch_queries`, with queries and keys swapped.
    unsafe {
        attention_varlen_dkdv::launch_unchecked::<T>(
            client,
            grid,
            CubeDim::new_1d(blueprint.units(GradPass::KeysValues) as u32),
            blueprint.address_type,
            q.into_tensor_arg(),
            k.into_tensor_arg(),
            v.into_tensor_arg(),
            d_out.into_tensor_arg(),
            stats,
            work_arg(),
            grads.into_buffer_arg(),
            target(problem.placements.dk),
            target(problem.placements.dv),
            scalars_for(forward, work, forward.heads_kv(), forward.softmax_scale, (right, left)),
            forward.softmax_scale,
            blueprint.shape,
            blueprint.options.transposed(),
            blueprint.dtype,
            vector_q,
            vector_k,
            vector_v,
            vector_d_out,
        );
    }
}

fn target(placement: Placement) -> TargetLaunch {
    TargetLaunch::new(placement.offset, placement.token_stride, placement.head_stride)
}

fn check_work(
    problem: &AttentionGradProblem,
    blueprint: &AttentionGradBlueprint,
    wanted: GradWork<'_>,
) -> Result<(), LaunchError> {
    let (queries, keys) = (problem.forward.tokens_q(), problem.forward.tokens_k());
    if let Some(work_q) = wanted.work_q() {
        DeviceWorkList::check([
            ("work_q's tile_q", blueprint.tile_q(), work_q.tile_q),
            ("work_q's number of query tokens", queries, work_q.tokens_q),
            ("work_q's number of key tokens", keys, work_q.tokens_k),
        ])?;
    }
    if let Some(work_k) = wanted.work_k() {
        DeviceWorkList::check([
            ("work_k's tile size", blueprint.tile_k(), work_k.tile_q),
            ("work_k's number of key tokens, its first offsets,", keys, work_k.tokens_q),
            ("work_k's number of query tokens, its second offsets,", queries, work_k.tokens_k),
        ])?;
    }
    Ok(())
}

fn check_tensors(
    problem: &AttentionGradProblem,
    [vector_q, vector_k, vector_v, vector_out, vector_d_out]: [usize; 5],
    required: usize,
    tensors: &AttentionGradTensors,
) -> Result<(), LaunchError> {
    let forward = &problem.forward;
    let size = forward.dtype.size();
    check_binding("q", &tensors.q, &forward.q, vector_q, size)?;
    check_binding("k", &tensors.k, &forward.k, vector_k, size)?;
    check_binding("v", &tensors.v, &forward.v, vector_v, size)?;
    check_binding("out", &tensors.out, &problem.out, vector_out, size)?;
    check_binding("d_out", &tensors.d_out, &problem.d_out, vector_d_out, size)?;
    let [tokens, heads] = forward.lse_shape();
    check_contiguous("lse", &tensors.lse, &[tokens, heads]);
    check_buffer("lse", &tensors.lse, tokens * heads, 1, size_of::<f32>())?;
    let stats = problem.stats_shape();
    check_contiguous("stats", &tensors.stats, &stats);
    check_buffer("stats", &tensors.stats, stats.iter().product(), 2, size_of::<f32>())?;
    assert_eq!(
        tensors.d_lse.is_some(),
        problem.d_lse.is_some(),
        "d_lse: must be present exactly if the problem has one"
    );
    if let (Some(d_lse), Some(layout)) = (&tensors.d_lse, problem.d_lse_layout()) {
        let [token, head, _] = layout.strides;
        assert_eq!(d_lse.shape[..], [tokens, heads], "d_lse: shape differs from lse's");
        assert_eq!(d_lse.strides[..], [token, head], "d_lse: strides differ from the problem's");
        check_buffer("d_lse", d_lse, layout.span(), 1, size_of::<f32>())?;
    }
    let shape = tensors.grads.shape.to_vec();
    check_contiguous("grads", &tensors.grads, &shape);
    let elements = shape.iter().product::<usize>();
    assert!(elements >= required, "grads: expected at least {required} elements, got {elements}");
    check_buffer("grads", &tensors.grads, elements, VECTOR, size)
}

/// # Panics
///
/// If the shape differs, or the strides are not those of a contiguous tensor.
fn check_contiguous(argument: &str, binding: &TensorBinding, shape: &[usize]) {
    assert_eq!(binding.shape[..], *shape, "{argument}: unexpected shape");
    let mut expected = 1;
    for axis in (0..shape.len()).rev() {
        let stride = binding.strides[axis];
        assert!(
            shape.contains(&0) || shape[axis] == 1 || stride == expected,
            "{argument}: expected contiguous strides, got {:?}",
            binding.strides
        );
        expected *= shape[axis];
    }
}

/// The kernel of a pass, for compiling it without a device.
pub fn kernel(
    blueprint: AttentionGradBlueprint,
    pass: GradPass,
    properties: Arc<DeviceProperties>,
    target: Arc<TargetProperties>,
) -> Box<dyn CubeKernel> {
    let kernel = match blueprint.engine {
        Engine::Simt => kernel_on::<Simt>,
        Engine::Cmma(_) => kernel_on::<Cmma>,
        Engine::Mma | Engine::AsyncMma => kernel_on::<Mma<TensorCore>>,
        Engine::EmulatedMma | Engine::EmulatedAsyncMma => kernel_on::<Mma<Emulated>>,
    };
    kernel(blueprint, pass, properties, target)
}

fn kernel_on<T: GradientAlgebra>(
    blueprint: AttentionGradBlueprint,
    pass: GradPass,
    properties: Arc<DeviceProperties>,
    target: Arc<TargetProperties>,
) -> Box<dyn CubeKernel> {
    let settings = kernel_settings(blueprint.units(pass), blueprint.address_type);
    let AttentionGradBlueprint { shape, options, dtype, .. } = blueprint;
    let [vector_q, vector_k, vector_v, vector_out, vector_d_out] = blueprint.vectors;
    let placement = || TargetCompilationArg { offset: (), token_stride: (), head_stride: () };
    match pass {
        GradPass::Statistics => {
            Box::new(attention_varlen_statistics::AttentionVarlenStatistics::new(
                settings,
                properties,
                target,
                tensor_arg(),
                tensor_arg(),
                buffer_arg(),
                match blueprint.d_lse {
                    true => ComptimeOptionCompilationArg::Some(tensor_arg()),
                    false => ComptimeOptionCompilationArg::None,
                },
                buffer_arg(),
                blueprint,
                dtype,
                vector_out,
                vector_d_out.min(VECTOR),
            ))
        }
        GradPass::Queries => Box::new(attention_varlen_dq::AttentionVarlenDq::<T>::new(
            settings,
            properties,
            target,
            tensor_arg(),
            tensor_arg(),
            tensor_arg(),
            tensor_arg(),
            buffer_arg(),
            buffer_arg(),
            buffer_arg(),
            placement(),
            Scalars::compiled(),
            (),
            shape,
            options,
            dtype,
            vector_q,
            vector_k,
            vector_v,
            vector_d_out,
        )),
        GradPass::KeysValues => Box::new(attention_varlen_dkdv::AttentionVarlenDkdv::<T>::new(
            settings,
            properties,
            target,
            tensor_arg(),
            tensor_arg(),
            tensor_arg(),
            tensor_arg(),
            buffer_arg(),
            buffer_arg(),
            buffer_arg(),
            placement(),
            placement(),
            Scalars::compiled(),
            (),
            shape,
            options.transposed(),
            dtype,
            vector_q,
            vector_k,
            vector_v,
            vector_d_out,
        )),
    }
}
