//! Tile shapes to choose from.

use cubecl::ir::DeviceProperties;

use super::{kernel::ScoreOptions, problem::AttentionProblem};
use crate::{
    Unsupported,
    device::DeviceKind,
    engine::Engine,
    tile::{LANES, MatrixTile, RingShape, Simt, TileShape},
};

/// Shared memory that a cube of plain tiles may use on any device, in bytes. WebGPU's guaranteed
/// 16 KiB is less, and the device's own limit applies as well; more than this would halve the cubes
/// that reside on one multiprocessor.
pub(super) const SHARED_MEMORY_BUDGET: usize = 32 * 1024;

/// Shared memory that a cube on matrix units may use, in bytes: what devices of compute capability 8.6
/// and 8.9 have. Two cubes of the usual head_dims reside on a multiprocessor of an A100 or H100.
pub(super) const MATRIX_MEMORY_BUDGET: usize = 99 * 1024;

/// Shared memory that a cube with rings may use, in bytes: two of them reside on a multiprocessor of
/// compute capability 9.0.
const ASYNC_MEMORY_BUDGET: usize = 113 * 1024;

/// Tiles of keys, and of values, that are held or under way at once.
const STAGES: usize = 2;

/// Registers per unit for output and scores that leave room for operands, as the audit found.
const REGISTERS: usize = 152;

/// The same where scores are masked or capped, each of which takes more.
const MASKED_REGISTERS: usize = 180;

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

/// The largest register tile whose shared memory fits.
pub(super) fn simt_shape(
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
        matrix: None,
    };
    let shapes = || tiling.register_tiles.iter().map(shape);
    shapes().find(|&candidate| Simt::shared_memory(candidate) <= available).ok_or_else(|| {
        Unsupported::SharedMemory {
            required: shapes().map(Simt::shared_memory).min().unwrap_or(0),
            available,
        }
    })
}

/// Planes, tiles of 16 query rows per plane, and keys of the cubes on matrix units, the likeliest to
/// be the fastest first. A second row tile uses every right operand that was read from shared
/// memory twice, which is what long segments are limited by.
const MATRIX_TILES: [(usize, usize, usize); 7] =
    [(4, 2, 64), (4, 2, 32), (4, 1, 64), (4, 1, 32), (2, 1, 32), (2, 1, 16), (1, 1, 16)];

/// Units along keys and along query rows, and query rows and keys per unit, of the cubes on
/// cooperative matrices, the likeliest to be the fastest first.
const CMMA_TILES: [(usize, usize, usize, usize); 4] =
    [(16, 8, 8, 4), (16, 8, 4, 2), (8, 8, 4, 4), (8, 8, 2, 2)];

/// Shared memory that a cube on cooperative matrices may use, in bytes.
const CMMA_MEMORY_BUDGET: usize = 64 * 1024;

/// The name of every tiling that is a matter of measurement: [`tiling_name`] of the shapes below.
pub(super) fn tilings() -> Vec<String> {
    let matrix = ["mma", "mma-async"].into_iter().flat_map(|family| {
        MATRIX_TILES.map(|(planes, row_tiles, keys)| {
            matrix_name(family, 16 * row_tiles * planes, keys, planes * LANES)
        })
    });
    let cmma = CMMA_TILES.map(|(x, y, rows, keys)| matrix_name("cmma", rows * y, keys * x, x * y));
    matrix.chain(cmma).chain(["simt".to_owned()]).collect()
}

/// What tells the candidates for a problem apart.
pub(super) fn tiling_name(engine: Engine, shape: TileShape) -> String {
    let family = match engine {
        Engine::Simt => return "simt".to_owned(),
        Engine::Cmma(_) => "cmma",
        Engine::Mma | Engine::EmulatedMma => "mma",
        Engine::AsyncMma | Engine::EmulatedAsyncMma => "mma-async",
    };
    matrix_name(family, shape.q_rows, shape.k_rows, shape.units())
}

pub(super) fn matrix_name(family: &str, rows: usize, columns: usize, units: usize) -> String {
    format!("{family} {rows}x{columns} by {units}")
}

/// The sensible tiles on cooperative matrices, the likeliest first.
pub(super) fn cmma_shapes(
    properties: &DeviceProperties,
    problem: &AttentionProblem,
    engine: Engine,
) -> Result<Vec<TileShape>, Unsupported> {
    let available = properties.hardware.max_shared_memory_size.min(CMMA_MEMORY_BUDGET);
    let shape = |(units_x, units_y, rows, keys): (usize, usize, usize, usize)| TileShape {
        q_rows: rows * units_y,
        k_rows: keys * units_x,
        head_dim: problem.head_dim(),
        value_dim: problem.value_dim(),
        units_x,
        units_y,
        matrix: Some(engine.matrix_tile(problem.dtype)),
    };
    let runs = |shape: TileShape| engine.fits(properties, shape.units());
    fitting(&CMMA_TILES.map(shape), available, |shape| engine.shared_memory(shape), runs)
}

/// The sensible tiles on matrix units, the likeliest first: those that fit registers and memory.
pub(super) fn matrix_shapes(
    properties: &DeviceProperties,
    problem: &AttentionProblem,
    engine: Engine,
) -> Result<Vec<TileShape>, Unsupported> {
    let budget = if engine.is_async() { ASYNC_MEMORY_BUDGET } else { MATRIX_MEMORY_BUDGET };
    let available = properties.hardware.max_shared_memory_size.min(budget);
    let shape = |(planes, row_tiles, keys): (usize, usize, usize)| TileShape {
        q_rows: 16 * row_tiles * planes,
        k_rows: keys,
        head_dim: problem.head_dim(),
        value_dim: problem.value_dim(),
        units_x: LANES,
        units_y: planes,
        matrix: Some(MatrixTile {
            ring: engine.is_async().then_some(RingShape { stages: STAGES, rows: keys }),
            ..engine.matrix_tile(problem.dtype)
        }),
    };
    let masks = ScoreOptions::of(problem) != ScoreOptions::default();
    let fits_registers = |&(_, row_tiles, keys): &(usize, usize, usize)| {
        let (output, scores) = (row_tiles * problem.value_dim() / 2, row_tiles * keys / 2);
        output + scores <= REGISTERS && (!masks || output + 3 * scores <= MASKED_REGISTERS)
    };
    let shapes: Vec<_> = MATRIX_TILES.into_iter().filter(fits_registers).map(shape).collect();
    let runs = |shape: TileShape| engine.fits(properties, shape.units());
    let shapes = fitting(&shapes, available, |shape| engine.shared_memory(shape), runs)?;
    Ok(with_as_many_units(shapes, TileShape::units))
}

/// The shapes that a device runs and that take no more memory than is available; at least one.
pub(super) fn fitting<S: Copy>(
    shapes: &[S],
    available: usize,
    memory: impl Fn(S) -> usize,
    runs: impl Fn(S) -> bool,
) -> Result<Vec<S>, Unsupported> {
    let fits = |&shape: &S| memory(shape) <= available && runs(shape);
    let fitting: Vec<_> = shapes.iter().copied().filter(fits).collect();
    if fitting.is_empty() {
        let required = shapes.iter().map(|&shape| memory(shape)).min().unwrap_or(0);
        return Err(Unsupported::SharedMemory { required, available });
    }
    Ok(fitting)
}

/// The shapes of as many units as the first. Fewer leave most of a multiprocessor idle: they are for
/// where nothing else fits.
pub(super) fn with_as_many_units<S>(mut shapes: Vec<S>, units: impl Fn(&S) -> usize) -> Vec<S> {
    let wanted = shapes.first().map(&units);
    shapes.retain(|shape| Some(units(shape)) == wanted);
    shapes
}
