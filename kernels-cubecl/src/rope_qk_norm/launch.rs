//! Launching the fused norm and rotation.

use std::sync::Arc;

use cubecl::{client::Client, prelude::*};

use super::{
    RopeQkNormBlueprint, RopeQkNormProblem,
    blueprint::supports,
    kernel::{Tables, TablesCompilationArg, TablesLaunch, rope_norm, rope_qk_norm},
};
use crate::{
    LaunchError, TensorLayout,
    device::{buffer_arg, kernel_settings, tensor_arg},
    layout::{check_binding, check_buffer},
    work_list::fold_grid,
};

/// RMS norm weights `[head_dim]` of queries and keys, contiguous, of the problem's weight type.
#[derive(Clone, Debug)]
pub struct NormWeights {
    /// Weight of queries.
    pub q: TensorBinding,
    /// Weight of keys.
    pub k: TensorBinding,
}

/// Rotary tables `[tokens, head_dim / 2]`, f32, with the strides that the problem says.
#[derive(Clone, Debug)]
pub struct RotaryTables {
    /// Cosines.
    pub cos: TensorBinding,
    /// Sines.
    pub sin: TensorBinding,
}

/// The tensors of one launch.
#[derive(Clone, Debug)]
pub struct RopeQkNormTensors {
    /// Queries, laid out as the problem says.
    pub q: TensorBinding,
    /// Keys, laid out as the problem says.
    pub k: TensorBinding,
    /// Weights; present exactly if the problem has a norm.
    pub weights: Option<NormWeights>,
    /// Tables; present exactly if the problem has a rotation.
    pub tables: Option<RotaryTables>,
    /// Rotated queries `[tokens, heads, head_dim]`, contiguous. Every element is written.
    pub q_out: TensorBinding,
    /// Rotated keys `[tokens, heads_kv, head_dim]`, contiguous. Every element is written.
    pub k_out: TensorBinding,
}

/// Queues the fused norm and rotation: one launch, or two where the device binds too few buffers.
/// Neither waits for the device nor reads anything back.
///
/// # Errors
///
/// If the device cannot serve the problem, or if a tensor reaches past its buffer or starts at an
/// unusable address.
///
/// # Panics
///
/// If tensors differ from the problem in shape, strides or presence, or outputs and weights are not
/// contiguous.
pub fn launch(
    client: &Client,
    problem: &RopeQkNormProblem,
    tensors: RopeQkNormTensors,
) -> Result<(), LaunchError> {
    let properties = client.properties();
    let blueprint = supports(properties, problem)?;
    check_tensors(problem, &blueprint, &tensors)?;
    let cubes = |layout: &TensorLayout| {
        (layout.shape[0] * layout.shape[1]).div_ceil(blueprint.heads_per_cube) as u64
    };
    let (query_cubes, key_cubes) = (cubes(&problem.q), cubes(&problem.k));
    let epsilon = problem.norm.map_or(0.0, |norm| norm.epsilon);
    let (weight_q, weight_k) = match tensors.weights {
        Some(weights) => (Some(weights.q), Some(weights.k)),
        None => (None, None),
    };
    let max_count = properties.hardware.max_cube_count;
    if blueprint.fused && query_cubes > 0 && key_cubes > 0 {
        let grid = fold_grid(query_cubes + key_cubes, max_count)?;
        let [weight, rounded] = norm_types(&blueprint);
        // SAFETY: the tensors reach no further than their buffers, as checked above, and the
        // kernel leaves out rows beyond the last token. Its loops have constant bounds.
        unsafe {
            rope_qk_norm::launch_unchecked(
                client,
                grid,
                CubeDim::new_1d(blueprint.units() as u32),
                blueprint.address_type,
                tensors.q.into_tensor_arg(),
                tensors.k.into_tensor_arg(),
                weight_q.map(TensorBinding::into_buffer_arg).into(),
                weight_k.map(TensorBinding::into_buffer_arg).into(),
                tensors.tables.map(tables_arg).into(),
                tensors.q_out.into_buffer_arg(),
                tensors.k_out.into_buffer_arg(),
                query_cubes as u32,
                epsilon,
                blueprint,
                blueprint.dtype,
                weight,
                rounded,
                blueprint.vector,
            );
        }
        return Ok(());
    }
    let tables = tensors.tables;
    let tables_k = tables
        .as_ref()
        .map(|tables| RotaryTables { cos: tables.cos.clone(), sin: tables.sin.clone() });
    let queries = Single { x: tensors.q, weight: weight_q, tables, out: tensors.q_out };
    let keys = Single { x: tensors.k, weight: weight_k, tables: tables_k, out: tensors.k_out };
    for (single, cubes) in [(queries, query_cubes), (keys, key_cubes)] {
        if cubes > 0 {
            let grid = fold_grid(cubes, max_count)?;
            launch_single(client, grid, &blueprint, epsilon, single);
        }
    }
    Ok(())
}

/// The tensors of a launch over queries or keys alone.
struct Single {
    x: TensorBinding,
    weight: Option<TensorBinding>,
    tables: Option<RotaryTables>,
    out: TensorBinding,
}

fn launch_single(
    client: &Client,
    grid: CubeCount,
    blueprint: &RopeQkNormBlueprint,
    epsilon: f32,
    single: Single,
) {
    let [weight, rounded] = norm_types(blueprint);
    // SAFETY: as in `launch`, which has checked the tensors.
    unsafe {
        rope_norm::launch_unchecked(
            client,
            grid,
            CubeDim::new_1d(blueprint.units() as u32),
            blueprint.address_type,
            single.x.into_tensor_arg(),
            single.weight.map(TensorBinding::into_buffer_arg).into(),
            single.tables.map(tables_arg).into(),
            single.out.into_buffer_arg(),
            epsilon,
            *blueprint,
            blueprint.dtype,
            weight,
            rounded,
            blueprint.vector,
        );
    }
}

/// Weight and rounding types; without norm the kernel uses neither.
fn norm_types(blueprint: &RopeQkNormBlueprint) -> [ElemType; 2] {
    blueprint.norm.unwrap_or([blueprint.dtype; 2])
}

pub(super) fn tables_arg<N: Size>(tables: RotaryTables) -> TablesLaunch<N> {
    TablesLaunch::new(tables.cos.into_tensor_arg(), tables.sin.into_tensor_arg())
}

fn check_tensors(
    problem: &RopeQkNormProblem,
    blueprint: &RopeQkNormBlueprint,
    tensors: &RopeQkNormTensors,
) -> Result<(), LaunchError> {
    let (size, vector) = (problem.dtype.size(), blueprint.vector);
    check_binding("q", &tensors.q, &problem.q, vector, size)?;
    check_binding("k", &tensors.k, &problem.k, vector, size)?;
    for (argument, binding, input) in
        [("q_out", &tensors.q_out, &problem.q), ("k_out", &tensors.k_out, &problem.k)]
    {
        let out = TensorLayout::of(argument, binding);
        assert_eq!(out.shape, input.shape, "{argument}: shape differs from its input's");
        assert!(
            out.is_contiguous(),
            "{argument}: expected contiguous strides, got {:?}",
            out.strides
        );
        check_buffer(argument, binding, out.span(), vector, size)?;
    }
    assert_eq!(
        tensors.weights.is_some(),
        problem.norm.is_some(),
        "weights: must be present exactly if the problem has a norm"
    );
    if let (Some(weights), Some(norm)) = (&tensors.weights, problem.norm) {
        let (head_dim, size) = (problem.head_dim(), norm.weight_dtype.size());
        check_weight("weights.q", &weights.q, head_dim, vector, size)?;
        check_weight("weights.k", &weights.k, head_dim, vector, size)?;
    }
    let tables = tensors.tables.as_ref();
    check_tables(tables, problem.rotary, problem.tokens(), problem.head_dim(), vector)
}

pub(super) fn check_weight(
    argument: &'static str,
    binding: &TensorBinding,
    head_dim: usize,
    vector: usize,
    size: usize,
) -> Result<(), LaunchError> {
    assert_eq!(
        binding.shape[..],
        [head_dim],
        "{argument}: expected one weight per element of a head"
    );
    assert_eq!(binding.strides[0], 1, "{argument}: expected contiguous weights");
    check_buffer(argument, binding, head_dim, vector, size)
}

/// Checks that tables are there exactly if the problem has a rotation, and lie as it says.
pub(super) fn check_tables(
    tables: Option<&RotaryTables>,
    rotary: Option<[[usize; 2]; 2]>,
    tokens: usize,
    head_dim: usize,
    vector: usize,
) -> Result<(), LaunchError> {
    assert_eq!(
        tables.is_some(),
        rotary.is_some(),
        "tables: must be present exactly if the problem has a rotation"
    );
    let (Some(tables), Some([cos, sin])) = (tables, rotary) else { return Ok(()) };
    let half = head_dim / 2;
    for (argument, binding, strides) in
        [("tables.cos", &tables.cos, cos), ("tables.sin", &tables.sin, sin)]
    {
        assert_eq!(
            binding.shape[..],
            [tokens, half],
            "{argument}: expected [tokens, head_dim / 2]"
        );
        assert_eq!(binding.strides[..], strides, "{argument}: strides differ from the problem's");
        let layout =
            TensorLayout { shape: [tokens, 1, half], strides: [strides[0], 0, strides[1]] };
        check_buffer(argument, binding, layout.span(), vector, size_of::<f32>())?;
    }
    Ok(())
}

/// The kernel of a blueprint, for compiling it without a device.
pub fn kernel(
    blueprint: RopeQkNormBlueprint,
    properties: Arc<DeviceProperties>,
    target: Arc<TargetProperties>,
) -> Box<dyn CubeKernel> {
    let settings = kernel_settings(blueprint.units(), blueprint.address_type);
    let [weight_dtype, rounded] = norm_types(&blueprint);
    let has_norm = blueprint.norm.is_some();
    if !blueprint.fused {
        return Box::new(rope_norm::RopeNorm::new(
            settings,
            properties,
            target,
            tensor_arg(),
            optional(has_norm, buffer_arg),
            tables_compilation_arg(blueprint.rotary),
            buffer_arg(),
            (),
            blueprint,
            blueprint.dtype,
            weight_dtype,
            rounded,
            blueprint.vector,
        ));
    }
    Box::new(rope_qk_norm::RopeQkNorm::new(
        settings,
        properties,
        target,
        tensor_arg(),
        tensor_arg(),
        optional(has_norm, buffer_arg),
        optional(has_norm, buffer_arg),
        tables_compilation_arg(blueprint.rotary),
        buffer_arg(),
        buffer_arg(),
        (),
        (),
        blueprint,
        blueprint.dtype,
        weight_dtype,
        rounded,
        blueprint.vector,
    ))
}

/// What the compiler is told about the tables.
pub(super) fn tables_compilation_arg<N: Size>(
    rotary: bool,
) -> ComptimeOptionCompilationArg<Tables<N>> {
    optional(rotary, || TablesCompilationArg { cos: tensor_arg(), sin: tensor_arg() })
}

/// What the compiler is told about an argument that a blueprint may leave out.
pub(super) fn optional<T: LaunchArg>(
    present: bool,
    argument: impl FnOnce() -> T::CompilationArg,
) -> ComptimeOptionCompilationArg<T> {
    match present {
        true => ComptimeOptionCompilationArg::Some(argument()),
        false => ComptimeOptionCompilationArg::None,
    }
}
