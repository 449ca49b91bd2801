//! Compile-time choices for the gradient of the fused norm and rotation.

use core::fmt;

use cubecl::ir::{AddressType, DeviceProperties, ElemType};

use super::RopeQkNormBackwardProblem;
use crate::{
    TensorLayout, Unsupported,
    device::{address_type, check_bindings, check_dtype, check_units},
    rope_qk_norm::blueprint::{check_head_dim, check_rows, split_units, table_vector_size},
};

/// Most cubes that sum weight gradients: as many as fill the largest GPUs, and few enough that
/// summing their sums takes no time.
pub(super) const MAX_PARTS: usize = 1024;

/// Everything that is decided before the kernel is compiled.
///
/// Problems with equal blueprints share one compiled kernel, whatever their token and head counts
/// and strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RopeQkNormBackwardBlueprint {
    pub(super) head_dim: usize,
    pub(super) dtype: ElemType,
    /// Groups of heads, each with its own weight.
    pub(super) groups: usize,
    /// Type of the weights.
    pub(super) norm: Option<ElemType>,
    pub(super) rotary: bool,
    /// Whether the gradient is replaced where it lies.
    pub(super) in_place: bool,
    /// Elements per read and write.
    pub(super) vector: usize,
    pub(super) units_per_head: usize,
    pub(super) heads_per_cube: usize,
    pub(super) address_type: AddressType,
}

impl RopeQkNormBackwardBlueprint {
    /// Units of one cube.
    pub fn units(&self) -> usize {
        self.units_per_head * self.heads_per_cube
    }

    /// Bytes of shared memory of one cube.
    pub fn shared_memory(&self) -> usize {
        let per_unit = 2 + 2 * self.vector;
        self.norm.map_or(0, |_| self.units() * per_unit * size_of::<f32>())
    }

    /// The launch that sums what cubes have summed of the weight gradients.
    pub fn weight_gradient(&self) -> Option<WeightGradientBlueprint> {
        self.norm.map(|dtype| WeightGradientBlueprint { dtype, groups: self.groups })
    }

    /// Vectors in half a head.
    pub(super) fn half(&self) -> usize {
        self.head_dim / 2 / self.vector
    }

    /// Vector pairs per unit.
    pub(super) fn pairs_per_unit(&self) -> usize {
        self.half().div_ceil(self.units_per_head)
    }
}

impl fmt::Display for RopeQkNormBackwardBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rope_qk_norm_backward {} head_dim {} vectors {} units {}x{} groups {} {:?}",
            self.dtype,
            self.head_dim,
            self.vector,
            self.heads_per_cube,
            self.units_per_head,
            self.groups,
            self.address_type,
        )?;
        if let Some(weight) = self.norm {
            write!(f, " norm({weight})")?;
        }
        for (set, name) in [(self.rotary, "rotary"), (self.in_place, "in-place")] {
            if set {
                write!(f, " {name}")?;
            }
        }
        Ok(())
    }
}

/// The second launch, of which there are few kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WeightGradientBlueprint {
    pub(super) dtype: ElemType,
    pub(super) groups: usize,
}

impl WeightGradientBlueprint {
    /// Elements of a weight that one cube sums: neighbours in memory.
    pub(super) const COLUMNS: usize = 16;
    /// Units that share the sum of one element.
    pub(super) const UNITS_PER_COLUMN: usize = 16;

    /// Units of one cube.
    pub fn units(&self) -> usize {
        Self::COLUMNS * Self::UNITS_PER_COLUMN
    }

    /// Bytes of shared memory of one cube.
    pub fn shared_memory(&self) -> usize {
        self.units() * size_of::<f32>()
    }
}

impl fmt::Display for WeightGradientBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [columns, units] = [Self::COLUMNS, Self::UNITS_PER_COLUMN];
        write!(
            f,
            "rope_qk_norm_weight_gradient {} units {columns}x{units} groups {}",
            self.dtype, self.groups
        )
    }
}

/// The blueprint for a problem on a device, or the property that is missing. Cheap; compiles and
/// allocates nothing.
///
/// # Errors
///
/// If the device or the kernel cannot serve the problem; see [`Unsupported`].
///
/// # Panics
///
/// If the problem has neither norm nor rotation, or if strides of `dx` are 0.
pub fn supports(
    properties: &DeviceProperties,
    problem: &RopeQkNormBackwardProblem,
) -> Result<RopeQkNormBackwardBlueprint, Unsupported> {
    problem.check();
    check_dtype(properties, "x, d_out", problem.dtype)?;
    check_head_dim("x, d_out", problem.head_dim)?;
    let heads = problem.heads.max(problem.heads_kv.unwrap_or(0));
    check_rows("x, d_out", problem.tokens, heads)?;
    let groups = problem.groups();
    let norm = problem.norm.map(|norm| norm.weight_dtype);
    // dx, perhaps d_out; x, weights and the cubes' sums; two tables.
    let mut bindings = 1 + u32::from(problem.d_out.is_some());
    if let Some(weight_dtype) = norm {
        check_dtype(properties, "weight", weight_dtype)?;
        bindings += 2 + groups as u32;
    }
    bindings += 2 * u32::from(problem.rotary.is_some());
    check_bindings(properties, bindings)?;
    let vector = vector_size(problem);
    let (units_per_head, heads_per_cube) = split_units(properties, problem.head_dim / 2 / vector);
    // Groups may lie apart, so what counts is the room that they take together.
    let room = |strides| TensorLayout::contiguous([problem.span(strides), 1, 1]);
    let mut tensors = vec![("dx", room(problem.dx))];
    tensors.extend(problem.d_out.map(|strides| ("d_out", room(strides))));
    tensors.extend(norm.map(|_| ("x", room(problem.x))));
    let blueprint = RopeQkNormBackwardBlueprint {
        head_dim: problem.head_dim,
        dtype: problem.dtype,
        groups,
        norm,
        rotary: problem.rotary.is_some(),
        in_place: problem.d_out.is_none(),
        vector,
        units_per_head,
        heads_per_cube,
        address_type: address_type(properties, &tensors)?,
    };
    check_units(properties, blueprint.units() as u32)?;
    if let Some(blueprint) = blueprint.weight_gradient() {
        check_units(properties, blueprint.units() as u32)?;
    }
    Ok(blueprint)
}

/// Elements that can be moved at once in every tensor, at every multiple of the vector in either
/// half of a head.
fn vector_size(problem: &RopeQkNormBackwardProblem) -> usize {
    let half = problem.head_dim / 2;
    let x = problem.norm.map(|_| problem.x);
    let tensors = [Some(problem.dx), problem.d_out, x].into_iter().flatten();
    let tensors = tensors.flat_map(|strides| problem.groups_of(strides)).map(|(offset, layout)| {
        let vector = layout.vector_size(half);
        if offset.is_multiple_of(vector) { vector } else { 1 }
    });
    let tables = problem.rotary.into_iter().flatten();
    let tables = tables.map(|strides| table_vector_size(problem.tokens, half, strides));
    tensors.chain(tables).min().unwrap_or(1)
}
