//! Compile-time choices for attention's gradients, derived from problem and device.

use core::fmt;

use cubecl::ir::{AddressType, DeviceProperties, ElemType};

use super::{
    super::{
        AttentionProblem,
        blueprint::check_problem,
        kernel::ScoreOptions,
        tiling::SHARED_MEMORY_BUDGET,
    },
    problem::AttentionGradProblem,
};
use crate::{
    Unsupported,
    device::{DeviceKind, MAX_32BIT_ELEMENTS, address_type, check_bindings, check_units},
    layout::VECTOR,
    tile::{GradientShape, Simt, UnitGrid},
};

/// q, k, v, d_out, statistics, work list, gradients.
const BINDINGS: u32 = 7;

/// Rows and columns per unit, and whether the columns of both products share one room.
type RegisterTile = (usize, usize, bool);

/// Units of a cube and the register tiles to choose from.
struct Tiling {
    /// Units along columns and along rows.
    units: (usize, usize),
    /// Best first. One room allows more columns, but loads one operand twice and waits more often.
    register_tiles: &'static [RegisterTile],
    /// Units that share the row sums of one query, and queries per cube.
    statistics: (usize, usize),
}

/// As in the forward pass, with less room: two tiles of rows and two of columns have to fit, and the
/// gradients of keys and values are accumulated side by side in registers.
const GPU: Tiling = Tiling {
    units: (8, 8),
    register_tiles: &[
        (4, 4, false),
        (4, 2, false),
        (3, 2, false),
        (2, 2, false),
        (2, 2, true),
        (2, 1, false),
        (2, 1, true),
        (1, 1, false),
        (1, 1, true),
    ],
    statistics: (8, 16),
};

const SOFTWARE: Tiling = Tiling {
    units: (2, 4),
    register_tiles: &[
        (8, 8, false),
        (4, 8, false),
        (4, 4, false),
        (2, 4, false),
        (2, 4, true),
        (1, 1, false),
    ],
    statistics: (1, 8),
};

const CPU: Tiling = Tiling {
    units: (1, 1),
    register_tiles: &[(8, 4, false), (4, 4, false), (1, 1, false)],
    statistics: (1, 8),
};

impl Tiling {
    fn of(properties: &DeviceProperties) -> &'static Self {
        match DeviceKind::of(properties) {
            DeviceKind::Gpu => &GPU,
            DeviceKind::Software => &SOFTWARE,
            DeviceKind::Cpu => &CPU,
        }
    }
}

/// The launches of one backward pass, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GradPass {
    /// lse and delta of every query.
    Statistics,
    /// Gradient of the queries.
    Queries,
    /// Gradients of keys and values.
    KeysValues,
}

impl GradPass {
    /// All passes, in order.
    pub const ALL: [Self; 3] = [Self::Statistics, Self::Queries, Self::KeysValues];
}

impl fmt::Display for GradPass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Statistics => "statistics",
            Self::Queries => "dq",
            Self::KeysValues => "dk dv",
        })
    }
}

/// Everything that is decided before the gradient kernels are compiled.
///
/// Problems with equal blueprints share compiled kernels, whatever their lengths, head counts,
/// strides, scale, window sizes and placements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionGradBlueprint {
    pub(super) shape: GradientShape,
    /// Units per query and queries per cube of the first pass.
    pub(super) statistics: (usize, usize),
    pub(super) dtype: ElemType,
    /// Elements per read of q, k, v, out and d_out.
    pub(super) vectors: [usize; 5],
    pub(super) options: ScoreOptions,
    pub(super) d_lse: bool,
    pub(super) address_type: AddressType,
}

impl AttentionGradBlueprint {
    /// Query rows per tile: what the [`WorkList`](crate::WorkList) over queries has to be cut for.
    pub fn tile_q(&self) -> usize {
        self.shape.grid.tile_rows()
    }

    /// Key rows per tile: what the [`WorkList`](crate::WorkList) over keys has to be cut for.
    pub fn tile_k(&self) -> usize {
        self.shape.grid.tile_rows()
    }

    /// Units of one cube.
    pub fn units(&self, pass: GradPass) -> usize {
        match pass {
            GradPass::Statistics => self.statistics.0 * self.statistics.1,
            GradPass::Queries | GradPass::KeysValues => self.shape.grid.units(),
        }
    }

    /// Bytes of shared memory of one cube.
    pub fn shared_memory(&self, pass: GradPass) -> usize {
        match pass {
            GradPass::Statistics if self.statistics.0 == 1 => 0,
            GradPass::Statistics => self.units(pass) * size_of::<f32>(),
            GradPass::Queries | GradPass::KeysValues => Simt::gradient_memory(self.shape),
        }
    }

    /// Whether this blueprint was made for such a problem.
    pub fn serves(&self, problem: &AttentionGradProblem) -> bool {
        let forward = &problem.forward;
        let asked = [forward.head_dim(), forward.value_dim()];
        let own = [self.shape.head_dim, self.shape.value_dim];
        own == asked
            && self.dtype == forward.dtype
            && self.vectors == vectors(problem)
            && self.options == ScoreOptions::of(forward)
            && self.d_lse == problem.d_lse.is_some()
            && (self.address_type == AddressType::U64
                || problem.tensors().all(|(_, tensor)| tensor.span() <= MAX_32BIT_ELEMENTS))
    }
}

impl fmt::Display for AttentionGradBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GradientShape { grid, head_dim, value_dim, one_room } = self.shape;
        let (lanes, rows) = self.statistics;
        write!(
            f,
            "attention_varlen backward simt {} head_dim {head_dim}/{value_dim} tile {}x{} units {}x{} rooms {} statistics {rows}x{lanes} vectors {:?} shared {} B {:?}",
            self.dtype,
            grid.tile_rows(),
            grid.tile_columns(),
            grid.y,
            grid.x,
            if one_room { 1 } else { 2 },
            self.vectors,
            self.shared_memory(GradPass::Queries),
            self.address_type,
        )?;
        self.options.fmt(f)?;
        f.write_str(if self.d_lse { " d_lse" } else { "" })
    }
}

/// The blueprint for a problem on a device, or the property that is missing. Cheap; compiles and
/// allocates nothing.
///
/// # Errors
///
/// If the device or the kernels cannot serve the problem; see [`Unsupported`].
///
/// # Panics
///
/// If the shapes of the problem do not fit together, or elements of a gradient overlap.
pub fn supports(
    properties: &DeviceProperties,
    problem: &AttentionGradProblem,
) -> Result<AttentionGradBlueprint, Unsupported> {
    problem.check();
    let forward = &problem.forward;
    check_problem(properties, forward)?;
    check_bindings(properties, BINDINGS)?;
    let shape = gradient_shape(properties, forward)?;
    let tensors: Vec<_> = problem.tensors().collect();
    let blueprint = AttentionGradBlueprint {
        shape,
        statistics: Tiling::of(properties).statistics,
        dtype: forward.dtype,
        vectors: vectors(problem),
        options: ScoreOptions::of(forward),
        d_lse: problem.d_lse.is_some(),
        address_type: address_type(properties, &tensors)?,
    };
    for pass in GradPass::ALL {
        check_units(properties, blueprint.units(pass) as u32)?;
    }
    Ok(blueprint)
}

fn vectors(problem: &AttentionGradProblem) -> [usize; 5] {
    let AttentionGradProblem { forward, out, d_out, .. } = problem;
    [forward.q, forward.k, forward.v, *out, *d_out].map(|tensor| tensor.vector_size(VECTOR))
}

/// The first register tile whose shared memory fits.
fn gradient_shape(
    properties: &DeviceProperties,
    problem: &AttentionProblem,
) -> Result<GradientShape, Unsupported> {
    let available = properties.hardware.max_shared_memory_size.min(SHARED_MEMORY_BUDGET);
    let tiling = Tiling::of(properties);
    let (x, y) = tiling.units;
    let shape = |&(rows, columns, one_room): &RegisterTile| GradientShape {
        grid: UnitGrid { x, y, rows, columns },
        head_dim: problem.head_dim(),
        value_dim: problem.value_dim(),
        one_room,
    };
    let shapes = || tiling.register_tiles.iter().map(shape);
    shapes().find(|&candidate| Simt::gradient_memory(candidate) <= available).ok_or_else(|| {
        Unsupported::SharedMemory {
            required: shapes().map(Simt::gradient_memory).min().unwrap_or(0),
            available,
        }
    })
}
