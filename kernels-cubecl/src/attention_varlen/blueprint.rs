//! Compile-time choices for attention, derived from problem and device.

use core::fmt;

use cubecl::ir::{AddressType, DeviceProperties, ElemType};

use super::{
    kernel::ScoreOptions,
    problem::{AttentionProblem, HEAD_DIMS},
    tiling::{cmma_shapes, matrix_shapes, simt_shape, tiling_name},
};
use crate::{
    TensorLayout, Unsupported,
    device::{MAX_32BIT_ELEMENTS, address_type, check_bindings, check_dtype, check_units},
    engine::Engine,
    layout::VECTOR,
    tile::TileShape,
    work_list::MAX_TOKENS,
};

/// q, k, v, work list, out, lse.
const BINDINGS: u32 = 6;

/// Everything that is decided before an attention kernel is compiled.
///
/// Problems with equal blueprints share one compiled kernel, whatever their lengths, head counts,
/// strides, scale and window sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionBlueprint {
    pub(super) engine: Engine,
    pub(super) shape: TileShape,
    pub(super) dtype: ElemType,
    /// Elements per read of q, k and v.
    pub(super) vectors: [usize; 3],
    pub(super) options: ScoreOptions,
    pub(super) address_type: AddressType,
}

impl AttentionBlueprint {
    /// What multiplies the tiles.
    pub fn engine(&self) -> Engine {
        self.engine
    }

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
        self.engine.shared_memory(self.shape)
    }

    /// What tells it apart from the other candidates for a problem.
    pub(super) fn tiling(&self) -> String {
        tiling_name(self.engine, self.shape)
    }

    /// What it has in common with them.
    pub(super) fn kind(&self) -> String {
        let TileShape { head_dim, value_dim, .. } = self.shape;
        let Self { engine, dtype, options, vectors, address_type, .. } = self;
        format!("{engine} {dtype} {head_dim}/{value_dim}{options} {vectors:?} {address_type:?}")
    }

    /// Elements of the widest vector that q, k and v are read by.
    fn widest_vector(&self) -> usize {
        self.shape.matrix.map_or(VECTOR, |matrix| matrix.chunk)
    }

    /// Whether this blueprint was made for such a problem.
    pub fn serves(&self, problem: &AttentionProblem) -> bool {
        let asked = [problem.head_dim(), problem.value_dim()];
        let own = [self.shape.head_dim, self.shape.value_dim];
        own == asked
            && self.dtype == problem.dtype
            && self.vectors == vectors(problem, self.widest_vector())
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
            "attention_varlen {} {} head_dim {}/{} tile {}x{} units {}x{} vectors {:?} shared {} B {:?}",
            self.engine,
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
        if let Some(ring) = shape.matrix.and_then(|matrix| matrix.ring) {
            write!(f, " stages {}", ring.stages)?;
        }
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

/// The blueprint for a problem on a device, or the property that is missing: the first of the
/// [`candidates`]. Cheap; compiles and allocates nothing.
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
    candidates(properties, problem).map(|blueprints| blueprints[0])
}

/// All blueprints that may be the fastest for a problem on a device, the likeliest first and at least
/// one: those of its matrix units, and of the plain engine unless the former are sure to win.
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
    problem: &AttentionProblem,
) -> Result<Vec<AttentionBlueprint>, Unsupported> {
    let of = |engine| candidates_on(properties, problem, engine);
    let fast = Engine::fast(properties, problem.dtype);
    match fast.and_then(|engine| Some((engine, of(engine).ok()?))) {
        // Through shared memory there and back may cost what the matrix units win.
        Some((Engine::Cmma(_), blueprints)) => Ok([blueprints, of(Engine::Simt)?].concat()),
        Some((_, blueprints)) => Ok(blueprints),
        None => of(Engine::Simt),
    }
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
    problem: &AttentionProblem,
    engine: Engine,
) -> Result<AttentionBlueprint, Unsupported> {
    // There is at least one where there is no error.
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
    problem: &AttentionProblem,
    engine: Engine,
) -> Result<Vec<AttentionBlueprint>, Unsupported> {
    problem.check();
    check_problem(properties, problem)?;
    check_bindings(properties, BINDINGS)?;
    engine.check(properties, problem.dtype)?;
    let shapes = match engine {
        Engine::Simt => vec![simt_shape(properties, problem)?],
        Engine::Cmma(_) => cmma_shapes(properties, problem, engine)?,
        Engine::Mma | Engine::EmulatedMma => matrix_shapes(properties, problem, engine)?,
        Engine::AsyncMma | Engine::EmulatedAsyncMma => {
            check_transfer(problem, engine)?;
            matrix_shapes(properties, problem, engine)?
        }
    };
    let address_type = address_type(properties, &tensors(problem))?;
    let blueprint = |shape: TileShape| {
        let mut blueprint = AttentionBlueprint {
            engine,
            shape,
            dtype: problem.dtype,
            vectors: [1; 3],
            options: ScoreOptions::of(problem),
            address_type,
        };
        blueprint.vectors = vectors(problem, blueprint.widest_vector());
        blueprint
    };
    let blueprints: Vec<_> = shapes.into_iter().map(blueprint).collect();
    check_units(properties, blueprints[0].units() as u32)?;
    Ok(blueprints)
}

/// Whether tiles of keys and values can be copied by TMA.
fn check_transfer(problem: &AttentionProblem, engine: Engine) -> Result<(), Unsupported> {
    if [problem.k, problem.v].iter().all(TensorLayout::copies_by_tma) {
        return Ok(());
    }
    let missing = "k and v with elements side by side and strides of tokens and heads that are whole \
                   multiples of 16 bytes; make them contiguous";
    Err(Unsupported::Engine { engine, missing })
}

fn vectors(problem: &AttentionProblem, widest: usize) -> [usize; 3] {
    [problem.q, problem.k, problem.v].map(|tensor| tensor.vector_size_up_to(widest, widest))
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
