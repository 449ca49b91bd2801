//! Sizes of tiles on matrix units, and the memory that they take.

use cubecl::prelude::*;

use super::{
    MatrixTile, panel,
    product::{fragments, steps},
    ring,
    room::{self, Chunk},
    unit::M,
};
use crate::tile::TileShape;

/// Registers of a unit that left operands of the query may take.
const HELD_REGISTERS: usize = 32;

/// Registers of a unit that these, both accumulators and a tile under way may take together. Of 255,
/// the weights, addresses and statistics of rows need the rest.
const LASTING_REGISTERS: usize = 168;

/// Sizes that follow from a [`TileShape`].
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub matrix: MatrixTile,
    pub units: usize,
    /// Tiles of 16 rows per plane.
    pub row_tiles: usize,
    /// Score fragments per row tile.
    pub scores: usize,
    /// Output fragments per row tile.
    pub outputs: usize,
    /// Pairs of the query's left operands, which stay in registers if they are few.
    pub query_pairs: usize,
    /// Chunks under way at once.
    pub fetched: usize,
    /// Registers that chunks of keys or values under way take, 32 bits each.
    under_way: usize,
}

impl Sizes {
    pub fn of(shape: TileShape) -> Self {
        let matrix = shape.matrix.expect("a matrix tile has operands");
        let units = shape.units();
        let row_tiles = shape.q_rows / (M * shape.units_y);
        let chunks = |rows, width| room::chunks(rows, width, units, matrix);
        let streamed = match matrix.ring {
            None => chunks(shape.k_rows, shape.head_dim.max(shape.value_dim)),
            Some(_) => 0,
        };
        Self {
            matrix,
            units,
            row_tiles,
            scores: fragments(shape.k_rows),
            outputs: fragments(shape.value_dim),
            query_pairs: 4 * row_tiles * steps(shape.head_dim),
            fetched: streamed.max(chunks(shape.q_rows, shape.head_dim)),
            under_way: streamed * matrix.chunk / 2,
        }
    }

    /// Whether left operands of the query stay in registers.
    pub fn holds_query(&self) -> bool {
        let accumulators = 4 * self.row_tiles * (self.scores + self.outputs);
        self.query_pairs <= HELD_REGISTERS
            && self.query_pairs + accumulators + self.under_way <= LASTING_REGISTERS
    }

    /// Rows that a unit has a part of: two in every row tile.
    pub fn rows(&self) -> usize {
        2 * self.row_tiles
    }
}

/// Bytes of shared memory that the rooms take for this shape.
pub(crate) fn shared_memory(shape: TileShape) -> usize {
    let sizes = Sizes::of(shape);
    let chunk = sizes.matrix.chunk * sizes.matrix.operand.size();
    let room = |rows: usize, width: usize| rows * room::pitch(width, sizes.matrix) * chunk;
    let query = room(shape.q_rows, shape.head_dim);
    match sizes.matrix.ring {
        None => query + room(shape.k_rows, shape.head_dim) + room(shape.k_rows, shape.value_dim),
        Some(ring) => {
            let memory = |width| ring::ring_memory(width, ring, sizes.matrix);
            ring::after(query) + memory(shape.head_dim) + memory(shape.value_dim)
        }
    }
}

/// Allocates room for the keys or values that are multiplied, and for those under way.
#[cube]
pub(super) fn operand_room(
    #[comptime] rows: usize,
    #[comptime] width: usize,
    #[comptime] matrix: MatrixTile,
) -> Shared<[Chunk]> {
    let ring = comptime!(matrix.ring);
    if comptime!(ring.is_some()) {
        ring::stages(width, comptime!(ring.expect("there is a ring")), matrix)
    } else {
        room::room(rows, width, matrix)
    }
}

/// Chunks of the tile that is multiplied.
pub(super) fn tile_chunks(rows: usize, width: usize, matrix: MatrixTile) -> usize {
    match matrix.ring {
        None => rows * room::pitch(width, matrix),
        Some(ring) => panel::stage_chunks(width, ring, matrix),
    }
}
