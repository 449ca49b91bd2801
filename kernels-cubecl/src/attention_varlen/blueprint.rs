//! Compile-time choices for attention, derived from problem and device.

use core::fmt;

use cubecl::ir::{AddressType, DeviceProperties, ElemType};

use super::{
    kernel::ScoreOptions,
    problem::{AttentionProblem, HEAD_DIMS},
};
use crate::{
    TensorLayout, Unsupported,
    device::{
        DeviceKind, MAX_32BIT_ELEMENTS, address_type, check_bindings, check_dtype, check_units,
    },
    layout::VECTOR,
    tile::{Simt, TileShape},
    work_list::MAX_TOKENS,
};

/// Shared memory that a cube may use on any device, in bytes. WebGPU's guaranteed 16 KiB is less,
/// and the device's own limit applies as well; more than this would halve the cubes that reside on
/// one multiprocessor.
pub(super) const SHARED_MEMORY_BUDGET: usize = 32 * 1024;

/// q, k, v, work list, out, lse.
const BINDINGS: u32 = 6;

/// Units of a cube and the register tiles to choose from.
struct Tiling {
    /// Units along keys and along query rows.
    units: (usize, usize),
    /// Query rows and keys per unit, best first.
    register_tiles: &'static [(usize, usize)],
}

/// GPUs: enough units to fill two planes, register tiles small enough to leave room for the output
/// tile in registers.
const GPU: Tiling =
    Tiling { units: (8, 8), register_tiles: &[(4, 4), (4, 2), (2, 2), (2, 1), (1, 1)] };

/// Software rasterisers: every read of shared memory is a loop over the lanes of a plane, hundreds
/// of instructions, while registers are plain stack memory. Few units with large tiles read least.
const SOFTWARE: Tiling =
    Tiling { units: (2, 4), register_tiles: &[(8, 8), (4, 8), (4, 4), (2, 2), (1, 1)] };

/// `CubeCL`'s CPU runtime: units that meet at barriers are threads, so there is one.
const CPU: Tiling = Tiling { units: (1, 1), register_tiles: &[(16, 8), (8, 8), (4, 4), (1, 1)] };

impl Tiling {
    fn of(properties: &DeviceProperties) -> &'static Self {
        match DeviceKind::of(properties) {
            DeviceKind::Gpu => &GPU,
            DeviceKind::Software => &SOFTWARE,
            DeviceKind::Cpu => &CPU,
        }
    }
}

/// Everything that is decided before an attention kernel is compiled.
///
/// Problems with equal blueprints share one compiled kernel, whatever their lengths, head counts,
/// strides, scale and window sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionBlueprint {
    pub(super) shape: TileShape,
    pub(super) dtype: ElemType,
    /// Elements per read of q, k and v.
    pub(super) vectors: [usize; 3],
    pub(super) options: ScoreOptions,
    pub(super) address_type: AddressType,
}

impl AttentionBlueprint {
    /// Query rows per tile: what the [`WorkList`](crate::WorkList) has to be cut for.
    pub fn tile_q(&self) -> usize {
        self.shape.q_rows
    }

    /// Keys per tile.
    pub fn tile_k(&self) -> usize {
        self.shape.k_rows
    }

    /// Units of one cube.
    pub fn units(&self) -> usize {
        self.shape.units()
    }

    /// Bytes of shared memory of one cube.
    pub fn shared_memory(&self) -> usize {
        Simt::shared_memory(self.shape)
    }

    /// Whether this blueprint was made for such a problem.
    pub fn serves(&self, problem: &AttentionProblem) -> bool {
        let asked = [problem.head_dim(), problem.value_dim()];
        let own = [self.shape.head_dim, self.shape.value_dim];
        own == asked
            && self.dtype == problem.dtype
            && self.vectors == vectors(problem)
            && self.options == ScoreOptions::of(problem)
            && (self.address_type == AddressType::U64
                || tensors(problem).iter().all(|(_, tensor)| tensor.span() <= MAX_32BIT_ELEMENTS))
    }
}

impl fmt::Display for AttentionBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape = &self.shape;
        write!(
            f,
            "attention_varlen simt {} head_dim {}/{} tile {}x{} units {}x{} vectors {:?} shared {} B {:?}",
            self.dtype,
            shape.head_dim,
            shape.value_dim,
            shape.q_rows,
            shape.k_rows,
            shape.units_y,
            shape.units_x,
            self.vectors,
            self.shared_memory(),
            self.address_type,
        )?;
        fmt::Display::fmt(&self.options, f)
    }
}

impl ScoreOptions {
    pub(super) fn of(problem: &AttentionProblem) -> Self {
        let (left, right) = problem.band();
        Self {
            bounded_left: left.is_some(),
            bounded_right: right.is_some(),
            softcap: problem.softcap.is_some(),
        }
    }
}

/// Each option that is set, after a space.
impl fmt::Display for ScoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (set, name) in [
            (self.bounded_left, "left-bounded"),
            (self.bounded_right, "right-bounded"),
            (self.softcap, "softcap"),
        ] {
            if set {
                write!(f, " {name}")?;
            }
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
/// If the shapes of the problem do not fit together.
pub fn supports(
    properties: &DeviceProperties,
    problem: &AttentionProblem,
) -> Result<AttentionBlueprint, Unsupported> {
    problem.check();
    check_problem(properties, problem)?;
    check_bindings(properties, BINDINGS)?;
    let shape = tile_shape(properties, problem)?;
    check_units(properties, shape.units() as u32)?;
    let address_type = address_type(properties, &tensors(problem))?;
    Ok(AttentionBlueprint {
        shape,
        dtype: problem.dtype,
        vectors: vectors(problem),
        options: ScoreOptions::of(problem),
        address_type,
    })
}

fn vectors(problem: &AttentionProblem) -> [usize; 3] {
    [problem.q, problem.k, problem.v].map(|tensor| tensor.vector_size(VECTOR))
}

fn tensors(problem: &AttentionProblem) -> [(&'static str, TensorLayout); 4] {
    [
        ("q", problem.q),
        ("k", problem.k),
        ("v", problem.v),
        ("out", TensorLayout::contiguous(problem.out_shape())),
    ]
}

/// Checks what forward and backward ask for alike.
pub(super) fn check_problem(
    properties: &DeviceProperties,
    problem: &AttentionProblem,
) -> Result<(), Unsupported> {
    check_dtype(properties, "q, k, v", problem.dtype)?;
    check_head_dim("q, k", problem.head_dim())?;
    check_head_dim("v", problem.value_dim())?;
    check_tokens("q", problem.tokens_q())?;
    check_tokens("k, v", problem.tokens_k())
}

fn check_head_dim(argument: &'static str, head_dim: usize) -> Result<(), Unsupported> {
    if (16..=256).contains(&head_dim) && head_dim.is_multiple_of(8) {
        return Ok(());
    }
    Err(Unsupported::HeadDim { argument, head_dim, allowed: HEAD_DIMS })
}

fn check_tokens(argument: &'static str, tokens: usize) -> Result<(), Unsupported> {
    if tokens <= MAX_TOKENS {
        return Ok(());
    }
    Err(Unsupported::Tokens { argument, tokens, limit: MAX_TOKENS })
}

/// The largest register tile whose shared memory fits.
fn tile_shape(
    properties: &DeviceProperties,
    problem: &AttentionProblem,
) -> Result<TileShape, Unsupported> {
    let available = properties.hardware.max_shared_memory_size.min(SHARED_MEMORY_BUDGET);
    let tiling = Tiling::of(properties);
    let (units_x, units_y) = tiling.units;
    let shape = |&(rows, keys): &(usize, usize)| TileShape {
        q_rows: rows * units_y,
        k_rows: keys * units_x,
        head_dim: problem.head_dim(),
        value_dim: problem.value_dim(),
        units_x,
        units_y,
    };
    let shapes = || tiling.register_tiles.iter().map(shape);
    shapes().find(|&candidate| Simt::shared_memory(candidate) <= available).ok_or_else(|| {
        Unsupported::SharedMemory {
            required: shapes().map(Simt::shared_memory).min().unwrap_or(0),
            available,
        }
    })
}
