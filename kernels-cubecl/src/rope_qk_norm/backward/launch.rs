//! Launching the gradient of the fused norm and rotation.

use std::sync::Arc;

use cubecl::{client::Client, ir::AddressType, prelude::*};

use super::{
    RopeQkNormBackwardBlueprint, RopeQkNormBackwardProblem, WeightGradientBlueprint,
    blueprint::{MAX_PARTS, supports},
    kernel::{norm_backward, rotation_backward},
    reduce::weight_gradient,
};
use crate::{
    LaunchError, RotaryTables, Unsupported,
    device::{buffer_arg, kernel_settings, tensor_arg},
    layout::check_buffer,
    rope_qk_norm::launch::{
        check_tables, check_weight, optional, tables_arg, tables_compilation_arg,
    },
    work_list::fold_grid,
};

/// What the gradient of the norm reads, and where it writes the gradients of the weights.
///
/// Weights and their gradients are `[head_dim]`, contiguous, of the problem's weight type; one of
/// each per group of heads.
#[derive(Clone, Debug)]
pub struct NormGradients {
    /// Input of the forward pass, before the norm.
    pub x: TensorBinding,
    /// Weight of each group.
    pub weights: Vec<TensorBinding>,
    /// Gradient of each group's weight, every element of which is written; none at all where weights
    /// are not trained, which saves a launch.
    pub d_weights: Vec<TensorBinding>,
}

/// The tensors of one call.
///
/// Of `x`, `d_out` and `dx` a binding tells where element 0 of group 0 lies; shape and strides are
/// those that the problem says.
#[derive(Clone, Debug)]
pub struct RopeQkNormBackwardTensors {
    /// Present exactly if the problem has a norm.
    pub norm: Option<NormGradients>,
    /// Tables; present exactly if the problem has a rotation.
    pub tables: Option<RotaryTables>,
    /// Gradient of the output; present exactly if the problem says how it lies.
    pub d_out: Option<TensorBinding>,
    /// Gradient of the input. Every element of every group is written, nothing else is.
    pub dx: TensorBinding,
}

/// Queues the gradient of the fused norm and rotation: one launch, and a second, tiny one if gradients
/// of weights are wanted. Neither waits for the device nor reads anything back.
///
/// # Errors
///
/// If the device cannot serve the problem, or if a tensor reaches past its buffer or starts at an
/// unusable address.
///
/// # Panics
///
/// If tensors differ from the problem in number or presence, or weights and tables in shape or
/// strides.
pub fn launch(
    client: &Client,
    problem: &RopeQkNormBackwardProblem,
    tensors: RopeQkNormBackwardTensors,
) -> Result<(), LaunchError> {
    let blueprint = supports(client.properties(), problem)?;
    check_tensors(problem, &blueprint, &tensors)?;
    let RopeQkNormBackwardTensors { norm, tables, d_out, dx } = tensors;
    let call = Call {
        client,
        problem,
        blueprint,
        cubes: cubes(problem, &blueprint),
        tables,
        d_out: d_out.zip(problem.d_out).map(|(d_out, strides)| whole(problem, d_out, strides)),
        dx: whole(problem, dx, problem.dx),
    };
    match norm {
        Some(norm) => call.norm(norm),
        None => call.rotation(),
    }
}

/// Cubes that work on each group.
fn cubes(problem: &RopeQkNormBackwardProblem, blueprint: &RopeQkNormBackwardBlueprint) -> [u64; 2] {
    let blocks = [problem.heads, problem.heads_kv.unwrap_or(0)]
        .map(|heads| (problem.tokens * heads).div_ceil(blueprint.heads_per_cube) as u64);
    let (max, total) = (MAX_PARTS as u64, blocks[0] + blocks[1]);
    if blueprint.norm.is_none() || total <= max {
        return blocks;
    }
    // As many each as its share of the work, but some if there is work.
    let [queries, keys] = blocks;
    if keys == 0 {
        return [max, 0];
    }
    let queries = (max * queries / total).max(u64::from(queries > 0)).min(max - 1);
    [queries, max - queries]
}

/// The binding with the shape and strides that the kernel reads.
fn whole(
    problem: &RopeQkNormBackwardProblem,
    binding: TensorBinding,
    strides: [usize; 4],
) -> TensorBinding {
    let heads = problem.heads.max(problem.heads_kv.unwrap_or(0));
    let shape = [problem.tokens, problem.groups(), heads, problem.head_dim];
    TensorBinding { shape: shape.to_vec().into(), strides: strides.to_vec().into(), ..binding }
}

/// What both kernels are given.
struct Call<'a> {
    client: &'a Client,
    problem: &'a RopeQkNormBackwardProblem,
    blueprint: RopeQkNormBackwardBlueprint,
    cubes: [u64; 2],
    tables: Option<RotaryTables>,
    d_out: Option<TensorBinding>,
    dx: TensorBinding,
}

impl Call<'_> {
    fn grid(&self, cubes: u64) -> Result<CubeCount, Unsupported> {
        fold_grid(cubes, self.client.properties().hardware.max_cube_count)
    }

    fn heads(&self) -> [u32; 2] {
        [self.problem.heads, self.problem.heads_kv.unwrap_or(0)].map(|heads| heads as u32)
    }

    fn rotation(self) -> Result<(), LaunchError> {
        let [queries, keys] = self.cubes;
        if queries + keys == 0 {
            return Ok(());
        }
        let (grid, [heads, heads_kv]) = (self.grid(queries + keys)?, self.heads());
        // SAFETY: the tensors reach no further than their buffers, as checked in `launch`, and the
        // kernel leaves out rows beyond the last one. It has no unbounded loops.
        unsafe {
            rotation_backward::launch_unchecked(
                self.client,
                grid,
                CubeDim::new_1d(self.blueprint.units() as u32),
                self.blueprint.address_type,
                self.tables.map(tables_arg).into(),
                self.d_out.map(TensorBinding::into_tensor_arg).into(),
                self.dx.into_tensor_arg(),
                heads,
                heads_kv,
                queries as u32,
                (queries + keys) as u32,
                self.blueprint,
                self.blueprint.dtype,
                self.blueprint.vector,
            );
        }
        Ok(())
    }

    fn norm(self, norm: NormGradients) -> Result<(), LaunchError> {
        let epsilon = self.problem.norm.map_or(0.0, |norm| norm.epsilon);
        let weight_dtype = self.blueprint.norm.unwrap_or(self.blueprint.dtype);
        let [queries, keys] = self.cubes;
        let (grid, [heads, heads_kv]) = (self.grid(queries + keys)?, self.heads());
        let reduction = self.reduction(norm.d_weights)?;
        let mut weights = norm.weights.into_iter().map(TensorBinding::into_buffer_arg);
        let weight_q = weights.next().expect("as many weights as groups, of which there is one");
        if queries + keys > 0 {
            // SAFETY: the tensors reach no further than their buffers, as checked in `launch`; the
            // kernel leaves out rows beyond the last one, and has one row of sums per cube. Its
            // loops end with the rows.
            unsafe {
                norm_backward::launch_unchecked(
                    self.client,
                    grid,
                    CubeDim::new_1d(self.blueprint.units() as u32),
                    self.blueprint.address_type,
                    whole(self.problem, norm.x, self.problem.x).into_tensor_arg(),
                    weight_q,
                    weights.next().into(),
                    self.tables.map(tables_arg).into(),
                    self.d_out.map(TensorBinding::into_tensor_arg).into(),
                    self.dx.into_tensor_arg(),
                    reduction.partials.clone().into_buffer_arg(),
                    heads,
                    heads_kv,
                    queries as u32,
                    (queries + keys) as u32,
                    epsilon,
                    self.blueprint,
                    self.blueprint.dtype,
                    weight_dtype,
                    self.blueprint.vector,
                );
            }
        }
        if !reduction.d_weights.is_empty() {
            reduction.launch(self.client, self.problem.head_dim, self.cubes);
        }
        Ok(())
    }

    /// Allocates the cubes' sums and plans the launch that sums them.
    fn reduction(&self, d_weights: Vec<TensorBinding>) -> Result<Reduction, LaunchError> {
        let head_dim = self.problem.head_dim;
        let dtype = self.blueprint.norm.unwrap_or(self.blueprint.dtype);
        let blueprint = WeightGradientBlueprint { dtype, groups: self.blueprint.groups };
        let cubes = blueprint.groups * head_dim.div_ceil(WeightGradientBlueprint::COLUMNS);
        let grid = self.grid(cubes as u64)?;
        // Zero-sized buffers cannot be bound; without rows nothing is read.
        let parts = self.cubes.iter().sum::<u64>().max(1) as usize;
        let handle = self.client.empty(parts * head_dim * size_of::<f32>());
        // SAFETY: the buffer was just made for this shape.
        let partials = unsafe {
            let (strides, shape) = (vec![head_dim, 1], vec![parts, head_dim]);
            TensorBinding::from_raw_parts(handle, strides.into(), shape.into())
        };
        Ok(Reduction { blueprint, grid, cubes: cubes as u32, partials, d_weights })
    }
}

/// The launch that sums the cubes' sums.
struct Reduction {
    blueprint: WeightGradientBlueprint,
    grid: CubeCount,
    cubes: u32,
    partials: TensorBinding,
    d_weights: Vec<TensorBinding>,
}

impl Reduction {
    fn launch(self, client: &Client, head_dim: usize, [parts_q, parts_k]: [u64; 2]) {
        let mut d_weights = self.d_weights.into_iter().map(TensorBinding::into_buffer_arg);
        let d_weight_q = d_weights.next().expect("not launched without gradients");
        // SAFETY: there is a row of sums for each part, and the kernel leaves out columns beyond
        // the last one.
        unsafe {
            weight_gradient::launch_unchecked(
                client,
                self.grid,
                CubeDim::new_1d(self.blueprint.units() as u32),
                self.partials.into_buffer_arg(),
                d_weight_q,
                d_weights.next().into(),
                head_dim as u32,
                parts_q as u32,
                parts_k as u32,
                self.cubes,
                self.blueprint,
                self.blueprint.dtype,
            );
        }
    }
}

fn check_tensors(
    problem: &RopeQkNormBackwardProblem,
    blueprint: &RopeQkNormBackwardBlueprint,
    tensors: &RopeQkNormBackwardTensors,
) -> Result<(), LaunchError> {
    let vector = blueprint.vector;
    let check = |argument, binding: &TensorBinding, strides| {
        check_buffer(argument, binding, problem.span(strides), vector, problem.dtype.size())
    };
    check("dx", &tensors.dx, problem.dx)?;
    assert_eq!(
        tensors.d_out.is_some(),
        problem.d_out.is_some(),
        "d_out: must be present exactly if the problem says how it lies"
    );
    if let (Some(d_out), Some(strides)) = (&tensors.d_out, problem.d_out) {
        check("d_out", d_out, strides)?;
    }
    assert_eq!(
        tensors.norm.is_some(),
        problem.norm.is_some(),
        "norm: must be present exactly if the problem has a norm"
    );
    if let (Some(tensors), Some(norm)) = (&tensors.norm, problem.norm) {
        check("norm.x", &tensors.x, problem.x)?;
        let size = norm.weight_dtype.size();
        for (argument, list, vector, optional) in [
            ("norm.weights", &tensors.weights, vector, false),
            ("norm.d_weights", &tensors.d_weights, 1, true),
        ] {
            let none = optional && list.is_empty();
            assert!(
                none || list.len() == problem.groups(),
                "{argument}: expected one per group of heads, of which there are {}, got {}",
                problem.groups(),
                list.len()
            );
            for binding in list {
                check_weight(argument, binding, problem.head_dim, vector, size)?;
            }
        }
    }
    check_tables(tensors.tables.as_ref(), problem.rotary, problem.tokens, problem.head_dim, vector)
}

/// The kernel of a blueprint, for compiling it without a device.
pub fn kernel(
    blueprint: RopeQkNormBackwardBlueprint,
    properties: Arc<DeviceProperties>,
    target: Arc<TargetProperties>,
) -> Box<dyn CubeKernel> {
    let settings = kernel_settings(blueprint.units(), blueprint.address_type);
    let Some(weight_dtype) = blueprint.norm else {
        return Box::new(rotation_backward::RotationBackward::new(
            settings,
            properties,
            target,
            tables_compilation_arg(blueprint.rotary),
            optional(!blueprint.in_place, tensor_arg),
            tensor_arg(),
            (),
            (),
            (),
            (),
            blueprint,
            blueprint.dtype,
            blueprint.vector,
        ));
    };
    Box::new(norm_backward::NormBackward::new(
        settings,
        properties,
        target,
        tensor_arg(),
        buffer_arg(),
        optional(blueprint.groups > 1, buffer_arg),
        tables_compilation_arg(blueprint.rotary),
        optional(!blueprint.in_place, tensor_arg),
        tensor_arg(),
        buffer_arg(),
        (),
        (),
        (),
        (),
        (),
        blueprint,
        blueprint.dtype,
        weight_dtype,
        blueprint.vector,
    ))
}

/// The kernel that sums weight gradients, for compiling it without a device.
pub fn weight_gradient_kernel(
    blueprint: WeightGradientBlueprint,
    properties: Arc<DeviceProperties>,
    target: Arc<TargetProperties>,
) -> Box<dyn CubeKernel> {
    Box::new(weight_gradient::WeightGradient::new(
        kernel_settings(blueprint.units(), AddressType::U32),
        properties,
        target,
        buffer_arg(),
        buffer_arg(),
        optional(blueprint.groups > 1, buffer_arg),
        (),
        (),
        (),
        (),
        blueprint,
        blueprint.dtype,
    ))
}
