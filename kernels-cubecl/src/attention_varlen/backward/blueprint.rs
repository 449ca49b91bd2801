//! Compile-time choices for attention's gradients, derived from problem and device.

use core::fmt;

use cubecl::ir::{AddressType, DeviceProperties, ElemType};

use super::{
    super::{blueprint::check_problem, kernel::ScoreOptions},
    problem::AttentionGradProblem,
    tiling::{cmma_shapes, matrix_shapes, simt_shape, statistics, tiling_name},
};
use crate::{
    Unsupported,
    device::{MAX_32BIT_ELEMENTS, address_type, check_bindings, check_units},
    engine::Engine,
    layout::VECTOR,
    tile::GradientShape,
};

/// q, k, v, d_out, statistics, work list, gradients.
const BINDINGS: u32 = 7;

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
    pub(super) engine: Engine,
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
    /// What multiplies the tiles.
    pub fn engine(&self) -> Engine {
        self.engine
    }

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
            GradPass::Queries | GradPass::KeysValues => self.engine.gradient_memory(self.shape),
        }
    }

    /// What tells it apart from the other candidates for a problem.
    pub(super) fn tiling(&self) -> String {
        tiling_name(self.engine, self.shape)
    }

    /// What it has in common with them.
    pub(super) fn kind(&self) -> String {
        let GradientShape { head_dim, value_dim, .. } = self.shape;
        let Self { engine, dtype, options, vectors, address_type, .. } = self;
        let kernel = format!("{engine} {dtype} {head_dim}/{value_dim}{options}");
        format!("backward {kernel} {vectors:?} {address_type:?}")
    }

    /// Elements of the widest vector that tensors are read by.
    fn widest_vector(&self) -> usize {
        self.shape.matrix.map_or(VECTOR, |matrix| matrix.chunk)
    }

    /// Whether this blueprint was made for such a problem.
    pub fn serves(&self, problem: &AttentionGradProblem) -> bool {
        let forward = &problem.forward;
        let asked = [forward.head_dim(), forward.value_dim()];
        let own = [self.shape.head_dim, self.shape.value_dim];
        own == asked
            && self.dtype == forward.dtype
            && self.vectors == vectors(problem, self.widest_vector())
            && self.options == ScoreOptions::of(forward)
            && self.d_lse == problem.d_lse.is_some()
            && (self.address_type == AddressType::U64
                || problem.tensors().all(|(_, tensor)| tensor.span() <= MAX_32BIT_ELEMENTS))
    }
}

impl fmt::Display for AttentionGradBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GradientShape { grid, head_dim, value_dim, one_room, .. } = self.shape;
        let (lanes, rows) = self.statistics;
        write!(
            f,
            "attention_varlen backward {} {} head_dim {head_dim}/{value_dim} tile {}x{} units {}x{} rooms {} statistics {rows}x{lanes} vectors {:?} shared {} B {:?}",
            self.engine,
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

/// The blueprint for a problem on a device, or the property that is missing: the first of the
/// [`candidates`]. Cheap; compiles and allocates nothing.
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
    candidates(properties, problem).map(|blueprints| blueprints[0])
}

/// All blueprints that may be the fastest for a problem on a device, the likeliest first and at least
/// one: those of its matrix units, or of the plain engine where there are none that serve the
/// problem.
///
/// # Errors
///
/// As [`supports`].
///
/// # Panics
///
/// As [`supports`].
pub fn candidates(
    properties: &DeviceProperties,
    problem: &AttentionGradProblem,
) -> Result<Vec<AttentionGradBlueprint>, Unsupported> {
    let of = |engine| candidates_on(properties, problem, engine);
    let fast = Engine::fast(properties, problem.forward.dtype);
    fast.and_then(|engine| of(engine).ok()).map_or_else(|| of(Engine::Simt), Ok)
}

/// As [`supports`], on this engine alone.
///
/// # Errors
///
/// As [`supports`], and if the engine does not serve the problem or the device.
///
/// # Panics
///
/// As [`supports`].
pub fn supports_engine(
    properties: &DeviceProperties,
    problem: &AttentionGradProblem,
    engine: Engine,
) -> Result<AttentionGradBlueprint, Unsupported> {
    candidates_on(properties, problem, engine).map(|blueprints| blueprints[0])
}

/// As [`candidates`], on this engine alone.
///
/// # Errors
///
/// As [`supports_engine`].
///
/// # Panics
///
/// As [`supports`].
pub fn candidates_on(
    properties: &DeviceProperties,
    problem: &AttentionGradProblem,
    engine: Engine,
) -> Result<Vec<AttentionGradBlueprint>, Unsupported> {
    problem.check();
    let forward = &problem.forward;
    check_problem(properties, forward)?;
    check_bindings(properties, BINDINGS)?;
    engine.check(properties, forward.dtype)?;
    let shapes = match engine {
        Engine::Simt => vec![simt_shape(properties, forward)?],
        Engine::Cmma(_) => cmma_shapes(properties, forward, engine)?,
        Engine::Mma | Engine::EmulatedMma => matrix_shapes(properties, forward, engine)?,
        Engine::AsyncMma | Engine::EmulatedAsyncMma => {
            return Err(Unsupported::Engine {
                engine,
                missing: "a forward pass; gradients run on mma",
            });
        }
    };
    let tensors: Vec<_> = problem.tensors().collect();
    let address_type = address_type(properties, &tensors)?;
    let blueprint = |shape: GradientShape| {
        let mut blueprint = AttentionGradBlueprint {
            engine,
            shape,
            statistics: statistics(properties),
            dtype: forward.dtype,
            vectors: [1; 5],
            options: ScoreOptions::of(forward),
            d_lse: problem.d_lse.is_some(),
            address_type,
        };
        blueprint.vectors = vectors(problem, blueprint.widest_vector());
        blueprint
    };
    let blueprints: Vec<_> = shapes.into_iter().map(blueprint).collect();
    for pass in GradPass::ALL {
        check_units(properties, blueprints[0].units(pass) as u32)?;
    }
    Ok(blueprints)
}

/// Elements per read. The sums over output rows, which come first, read at most [`VECTOR`].
fn vectors(problem: &AttentionGradProblem, widest: usize) -> [usize; 5] {
    let AttentionGradProblem { forward, out, d_out, .. } = problem;
    let [q, k, v, d_out] = [forward.q, forward.k, forward.v, *d_out]
        .map(|tensor| tensor.vector_size_up_to(widest, widest));
    [q, k, v, out.vector_size(VECTOR), d_out]
}
