//! Compile-time choices for the fused norm and rotation.

use core::fmt;

use cubecl::ir::{AddressType, DeviceProperties, ElemType, FloatKind};

use super::RopeQkNormProblem;
use crate::{
    TensorLayout, Unsupported,
    device::{DeviceKind, address_type, check_bindings, check_dtype, check_units},
};

/// Most units that work on one head. More would leave too few elements for each.
const MAX_UNITS_PER_HEAD: usize = 16;

/// Units that a cube should have: enough to hide memory latency, allowed everywhere.
const UNITS: usize = 256;

const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Everything that is decided before the kernel is compiled.
///
/// Problems with equal blueprints share one compiled kernel, whatever their token and head counts
/// and strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RopeQkNormBlueprint {
    pub(super) head_dim: usize,
    pub(super) dtype: ElemType,
    /// Type of the weights and type that the weighted norm is rounded to.
    pub(super) norm: Option<[ElemType; 2]>,
    pub(super) rotary: bool,
    /// Elements per read and write.
    pub(super) vector: usize,
    pub(super) units_per_head: usize,
    pub(super) heads_per_cube: usize,
    /// Whether q and k go in one launch; else the device binds too few buffers and each has its own.
    pub(super) fused: bool,
    pub(super) address_type: AddressType,
}

impl RopeQkNormBlueprint {
    /// Units of one cube.
    pub fn units(&self) -> usize {
        self.units_per_head * self.heads_per_cube
    }

    /// Bytes of shared memory of one cube.
    pub fn shared_memory(&self) -> usize {
        self.norm.map_or(0, |_| self.units() * size_of::<f32>())
    }

    /// Launches per call: 1, or 2 where the device binds too few buffers.
    pub fn launches(&self) -> usize {
        if self.fused { 1 } else { 2 }
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

impl fmt::Display for RopeQkNormBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rope_qk_norm {} head_dim {} vectors {} units {}x{} launches {} {:?}",
            self.dtype,
            self.head_dim,
            self.vector,
            self.heads_per_cube,
            self.units_per_head,
            self.launches(),
            self.address_type,
        )?;
        if let Some([weight, rounded]) = self.norm {
            write!(f, " norm({weight} -> {rounded})")?;
        }
        if self.rotary {
            write!(f, " rotary")?;
        }
        Ok(())
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
/// If the shapes of q and k do not fit together.
pub fn supports(
    properties: &DeviceProperties,
    problem: &RopeQkNormProblem,
) -> Result<RopeQkNormBlueprint, Unsupported> {
    problem.check();
    check_dtype(properties, "q, k", problem.dtype)?;
    let head_dim = problem.head_dim();
    check_head_dim("q, k", head_dim)?;
    check_rows("q, k", problem.tokens(), problem.q.shape[1].max(problem.k.shape[1]))?;
    let norm = match problem.norm {
        Some(norm) => {
            check_dtype(properties, "weight", norm.weight_dtype)?;
            Some([norm.weight_dtype, promote(problem.dtype, norm.weight_dtype)])
        }
        None => None,
    };
    // One tensor: input, output, weight, two tables. Both share the tables.
    let single = 2 + u32::from(norm.is_some());
    let tables = 2 * u32::from(problem.rotary.is_some());
    let fused = check_bindings(properties, 2 * single + tables).is_ok();
    if !fused {
        check_bindings(properties, single + tables)?;
    }
    let vector = vector_size(problem);
    let (units_per_head, heads_per_cube) = split_units(properties, head_dim / 2 / vector);
    let blueprint = RopeQkNormBlueprint {
        head_dim,
        dtype: problem.dtype,
        norm,
        rotary: problem.rotary.is_some(),
        vector,
        units_per_head,
        heads_per_cube,
        fused,
        address_type: address_type(
            properties,
            &[
                ("q", problem.q),
                ("k", problem.k),
                ("q_out", TensorLayout::contiguous(problem.q.shape)),
                ("k_out", TensorLayout::contiguous(problem.k.shape)),
            ],
        )?,
    };
    check_units(properties, blueprint.units() as u32)?;
    Ok(blueprint)
}

pub(super) fn check_head_dim(argument: &'static str, head_dim: usize) -> Result<(), Unsupported> {
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        return Err(Unsupported::HeadDim { argument, head_dim, allowed: "even numbers from 2" });
    }
    Ok(())
}

/// Rows, one for each head of a token, are counted in 32 bits.
pub(super) fn check_rows(
    argument: &'static str,
    tokens: usize,
    heads: usize,
) -> Result<(), Unsupported> {
    let limit = i32::MAX as usize / heads.max(1);
    if tokens > limit {
        return Err(Unsupported::Tokens { argument, tokens, limit });
    }
    Ok(())
}

/// Units per head and heads per cube, for heads of `half` vector pairs.
pub(super) fn split_units(properties: &DeviceProperties, half: usize) -> (usize, usize) {
    if DeviceKind::of(properties) == DeviceKind::Cpu {
        // Units that meet at barriers are threads: one has nobody to wait for.
        return (1, 1);
    }
    let units_per_head = half.div_ceil(half.div_ceil(MAX_UNITS_PER_HEAD));
    (units_per_head, UNITS / units_per_head)
}

/// The type of a product of both types, as tensor libraries promote.
fn promote(a: ElemType, b: ElemType) -> ElemType {
    if a == b { a } else { F32 }
}

/// Elements that can be moved at once in every tensor, at every multiple of the vector in either
/// half of a head.
fn vector_size(problem: &RopeQkNormProblem) -> usize {
    let half = problem.head_dim() / 2;
    let tables = problem.rotary.into_iter().flatten();
    let tables = tables.map(|strides| table_vector_size(problem.tokens(), half, strides));
    let tensors = [problem.q, problem.k].map(|tensor| tensor.vector_size(half));
    tensors.into_iter().chain(tables).min().unwrap_or(1)
}

/// Elements of a table `[tokens, half]` that can be moved at once.
pub(super) fn table_vector_size(tokens: usize, half: usize, [row, column]: [usize; 2]) -> usize {
    TensorLayout { shape: [tokens, 1, half], strides: [row, 0, column] }.vector_size(half)
}
