//! Gradient tiles to choose from.

use cubecl::ir::DeviceProperties;

use super::super::{
    AttentionProblem,
    kernel::ScoreOptions,
    tiling::{
        MATRIX_MEMORY_BUDGET, SHARED_MEMORY_BUDGET, fitting, matrix_name, with_as_many_units,
    },
};
use crate::{
    Unsupported,
    device::DeviceKind,
    engine::Engine,
    tile::{GradientShape, LANES, Simt, UnitGrid},
};

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

/// Units that share the row sums of one query, and queries per cube.
pub(super) fn statistics(properties: &DeviceProperties) -> (usize, usize) {
    Tiling::of(properties).statistics
}

/// The first register tile whose shared memory fits.
pub(super) fn simt_shape(
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
        matrix: None,
    };
    let shapes = || tiling.register_tiles.iter().map(shape);
    shapes().find(|&candidate| Simt::gradient_memory(candidate) <= available).ok_or_else(|| {
        Unsupported::SharedMemory {
            required: shapes().map(Simt::gradient_memory).min().unwrap_or(0),
            available,
        }
    })
}

/// Units along columns and along rows, and rows and columns per unit, of the cubes on cooperative
/// matrices, the likeliest to be the fastest first.
const CMMA_TILES: [(usize, usize, usize, usize); 3] = [(16, 8, 4, 2), (8, 8, 4, 4), (8, 8, 2, 2)];

/// Shared memory that a cube on cooperative matrices may use, in bytes.
const CMMA_MEMORY_BUDGET: usize = 64 * 1024;

/// The sensible tiles on cooperative matrices, the likeliest first.
pub(super) fn cmma_shapes(
    properties: &DeviceProperties,
    problem: &AttentionProblem,
    engine: Engine,
) -> Result<Vec<GradientShape>, Unsupported> {
    let available = properties.hardware.max_shared_memory_size.min(CMMA_MEMORY_BUDGET);
    let shape = |(x, y, rows, columns): (usize, usize, usize, usize)| GradientShape {
        grid: UnitGrid { x, y, rows, columns },
        head_dim: problem.head_dim(),
        value_dim: problem.value_dim(),
        one_room: false,
        matrix: Some(engine.matrix_tile(problem.dtype)),
    };
    let runs = |shape: GradientShape| engine.fits(properties, shape.grid.units());
    fitting(&CMMA_TILES.map(shape), available, |shape| engine.gradient_memory(shape), runs)
}

/// Planes and columns of the cubes on matrix units, the likeliest to be the fastest first. Planes have
/// 16 rows: the gradients of keys and values are accumulated side by side and leave no registers
/// for more.
const MATRIX_TILES: [(usize, usize); 4] = [(4, 64), (4, 32), (2, 32), (1, 32)];

/// Registers per unit for two gradients, and for scores and their gradients, that leave room for
/// operands, as the audit found.
const MATRIX_REGISTERS: usize = 192;

/// The same where scores are masked or capped, each of which takes more.
const MASKED_REGISTERS: usize = 224;

/// The sensible tiles on matrix units, the likeliest first: those that fit registers and memory.
pub(super) fn matrix_shapes(
    properties: &DeviceProperties,
    problem: &AttentionProblem,
    engine: Engine,
) -> Result<Vec<GradientShape>, Unsupported> {
    let available = properties.hardware.max_shared_memory_size.min(MATRIX_MEMORY_BUDGET);
    let (head_dim, value_dim) = (problem.head_dim(), problem.value_dim());
    let shape = |(planes, columns): (usize, usize)| GradientShape {
        grid: UnitGrid { x: LANES, y: planes, rows: 16, columns: columns / LANES },
        head_dim,
        value_dim,
        one_room: false,
        matrix: Some(engine.matrix_tile(problem.dtype)),
    };
    let masks = ScoreOptions::of(problem) != ScoreOptions::default();
    let (limit, per_column) = if masks { (MASKED_REGISTERS, 3) } else { (MATRIX_REGISTERS, 2) };
    let registers = |columns: usize| (head_dim + value_dim) / 2 + per_column * columns;
    let fits = |&(_, columns): &(usize, usize)| registers(columns) <= limit;
    let shapes: Vec<_> = MATRIX_TILES.into_iter().filter(fits).map(shape).collect();
    if shapes.is_empty() {
        return Err(Unsupported::Engine {
            engine,
            missing: "head_dims of q and v that together do not pass 256 in the backward pass",
        });
    }
    let runs = |shape: GradientShape| engine.fits(properties, shape.grid.units());
    let shapes = fitting(&shapes, available, |shape| engine.gradient_memory(shape), runs)?;
    Ok(with_as_many_units(shapes, |shape| shape.grid.units()))
}

/// The name of every tiling that is a matter of measurement: [`tiling_name`] of the shapes above.
pub(super) fn tilings() -> Vec<String> {
    let matrix = MATRIX_TILES
        .map(|(planes, columns)| matrix_name("mma", 16 * planes, columns, planes * LANES));
    let cmma =
        CMMA_TILES.map(|(x, y, rows, columns)| matrix_name("cmma", rows * y, columns * x, x * y));
    matrix.into_iter().chain(cmma).collect()
}

/// What tells the candidates for a problem apart.
pub(super) fn tiling_name(engine: Engine, shape: GradientShape) -> String {
    let family = match engine {
        Engine::Simt => return "simt".to_owned(),
        Engine::Cmma(_) => "cmma",
        Engine::Mma | Engine::EmulatedMma | Engine::AsyncMma | Engine::EmulatedAsyncMma => "mma",
    };
    let grid = shape.grid;
    matrix_name(family, grid.tile_rows(), grid.tile_columns(), grid.units())
}
