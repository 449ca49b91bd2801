//! Tiles of 16-bit elements in shared memory, and the way there.
//!
//! Rows are padded to a multiple of 16 elements, with zeros, and lie 16 bytes further apart than
//! that: an odd number of 16-byte units, so that the eight rows of a matrix that `ldmatrix` reads
//! lie in different banks, for every head_dim and without swizzling.

use cubecl::prelude::*;

use super::{
    MatrixTile,
    panel::{self, Panels},
    unit::{K, MatrixUnit, lane},
};

define_scalar!(pub Operand);
define_size!(pub ChunkSize);

/// What moves between memories at once.
pub type Chunk = Vector<Operand, ChunkSize>;

/// What a register of a fragment holds.
pub type Pair = Vector<Operand, Const<2>>;

/// Elements of a row of 16 bytes.
pub(super) const ROW: usize = 8;

/// Tells the compiler what [`Operand`] and [`ChunkSize`] are in this kernel.
#[cube]
pub(in crate::tile) fn register(#[comptime] matrix: MatrixTile) {
    let _ = matrix;
    intrinsic!(|scope| {
        scope.register_type::<Operand>(matrix.operand);
        scope.register_size::<ChunkSize>(matrix.chunk);
    });
}

/// Chunks that a row of `width` elements takes, without the space to the next.
fn row_chunks(width: usize, matrix: MatrixTile) -> usize {
    width.next_multiple_of(K) / matrix.chunk
}

/// Chunks between rows of `width` elements.
pub(in crate::tile) fn pitch(width: usize, matrix: MatrixTile) -> usize {
    (width.next_multiple_of(K) + ROW) / matrix.chunk
}

/// Chunks that each of `units` units moves of a tile.
pub(in crate::tile) fn chunks(
    rows: usize,
    width: usize,
    units: usize,
    matrix: MatrixTile,
) -> usize {
    (rows * row_chunks(width, matrix)).div_ceil(units)
}

/// Allocates room for `rows` rows.
#[cube]
pub(in crate::tile) fn room(
    #[comptime] rows: usize,
    #[comptime] width: usize,
    #[comptime] matrix: MatrixTile,
) -> Shared<[Chunk]> {
    let length = comptime!(rows * pitch(width, matrix));
    Shared::<[Chunk]>::new_aligned_slice(length, 16usize)
}

/// Reads this unit's chunks of a tile into registers. Row 0 starts at element `origin` of the
/// source; rows from `valid` on are zeros and read no memory.
#[cube]
pub(in crate::tile) fn fetch<F: Float, N: Size>(
    source: &Tensor<Vector<F, N>>,
    origin: usize,
    valid: u32,
    fetched: &mut Array<Chunk>,
    #[comptime] rows: usize,
    #[comptime] width: usize,
    #[comptime] units: usize,
    #[comptime] matrix: MatrixTile,
) {
    let row_stride = source.stride(0);
    let vector_size = N::value();
    // Vectors are only read where neighbours lie side by side.
    let stride = if comptime!(vector_size > 1) { 1usize.runtime() } else { source.stride(2) };
    let row_chunks = comptime!(row_chunks(width, matrix));
    #[unroll]
    for i in 0..comptime!(chunks(rows, width, units, matrix)) {
        let at = UNIT_POS as usize + comptime!(i * units);
        let row = at / row_chunks;
        let column = at % row_chunks;
        let mut inside = (row as u32) < valid;
        if comptime!(!width.is_multiple_of(K)) {
            inside = inside && column < comptime!(width / matrix.chunk);
        }
        let mut chunk = Chunk::cast_from(0.0f32);
        if inside {
            let first = origin + row * row_stride + column * matrix.chunk * stride;
            chunk = read_chunk(source, first, stride, matrix);
        }
        fetched[i] = chunk;
    }
}

/// Multiplies what [`fetch`](fn@fetch) has read.
#[cube]
pub(in crate::tile) fn multiply(
    fetched: &mut Array<Chunk>,
    factor: f32,
    #[comptime] length: usize,
) {
    let factor = Vector::<f32, ChunkSize>::new(factor);
    #[unroll]
    for i in 0..length {
        fetched[i] = Chunk::cast_from(Vector::<f32, ChunkSize>::cast_from(fetched[i]) * factor);
    }
}

#[cube]
pub(super) fn read_chunk<F: Float, N: Size>(
    source: &Tensor<Vector<F, N>>,
    at: usize,
    stride: usize,
    #[comptime] matrix: MatrixTile,
) -> Chunk {
    let size = N::value();
    if comptime!(size == matrix.chunk) {
        Chunk::cast_from(source[at / size])
    } else {
        let mut chunk = Chunk::empty();
        #[unroll]
        for part in 0..comptime!(matrix.chunk / size) {
            let vector = source[(at + part * size * stride) / size];
            #[unroll]
            for e in 0..size {
                chunk.insert(comptime!(part * size + e), Operand::cast_from(vector.extract(e)));
            }
        }
        chunk
    }
}

/// Writes what [`fetch`](fn@fetch) has read.
#[cube]
pub(in crate::tile) fn stage(
    fetched: &Array<Chunk>,
    room: &mut [Chunk],
    #[comptime] rows: usize,
    #[comptime] width: usize,
    #[comptime] units: usize,
    #[comptime] matrix: MatrixTile,
) {
    stage_wide(fetched, room, rows, width, width, units, matrix);
}

/// As [`stage`](fn@stage), into a room for rows of `room_width` elements.
#[cube]
pub(in crate::tile) fn stage_wide(
    fetched: &Array<Chunk>,
    room: &mut [Chunk],
    #[comptime] rows: usize,
    #[comptime] width: usize,
    #[comptime] room_width: usize,
    #[comptime] units: usize,
    #[comptime] matrix: MatrixTile,
) {
    let row_chunks = comptime!(row_chunks(width, matrix));
    let pitch = comptime!(pitch(room_width, matrix));
    let total = comptime!(rows * row_chunks);
    #[unroll]
    for i in 0..comptime!(chunks(rows, width, units, matrix)) {
        let at = UNIT_POS as usize + comptime!(i * units);
        let slot = at / row_chunks * pitch + at % row_chunks;
        // The last units have no chunk of a tile that they do not divide.
        if comptime!((i + 1) * units <= total) || at < total {
            room[slot] = fetched[i];
        }
    }
}

/// A left operand: rows `row ..` and elements `16 * step ..` of the room.
#[cube]
pub(in crate::tile) fn left<U: MatrixUnit>(
    exchange: &mut U::Exchange,
    room: &[Chunk],
    row: usize,
    step: usize,
    #[comptime] width: usize,
    #[comptime] matrix: MatrixTile,
) -> Array<Pair> {
    let pitch = comptime!(pitch(width, matrix));
    let own = lane() % 16 * pitch + lane() / 16 * comptime!(ROW / matrix.chunk);
    let first = row * pitch + step * comptime!(K / matrix.chunk);
    U::load_matrices(exchange, room, own + first, false)
}

/// Two right operands side by side, of rows taken as columns: rows `row ..` and elements
/// `16 * step ..` of the room.
#[cube]
pub(in crate::tile) fn right_transposed<U: MatrixUnit>(
    exchange: &mut U::Exchange,
    room: &[Chunk],
    row: usize,
    step: usize,
    #[comptime] width: usize,
    #[comptime] matrix: MatrixTile,
) -> Array<Pair> {
    let ring = comptime!(matrix.ring);
    if comptime!(ring.is_some()) {
        let panels = comptime!(Panels::of(width, ring.expect("there is a ring")));
        panel::right_transposed::<U>(exchange, room, row, step, panels, matrix)
    } else {
        let pitch = comptime!(pitch(width, matrix));
        let own =
            (lane() / 16 * 8 + lane() % 8) * pitch + lane() / 8 % 2 * comptime!(ROW / matrix.chunk);
        let first = row * pitch + step * comptime!(K / matrix.chunk);
        U::load_matrices(exchange, room, own + first, false)
    }
}

/// Two right operands side by side: rows `16 * step ..` and elements `column ..` of the room.
#[cube]
pub(in crate::tile) fn right<U: MatrixUnit>(
    exchange: &mut U::Exchange,
    room: &[Chunk],
    step: usize,
    column: usize,
    #[comptime] width: usize,
    #[comptime] matrix: MatrixTile,
) -> Array<Pair> {
    let ring = comptime!(matrix.ring);
    if comptime!(ring.is_some()) {
        let panels = comptime!(Panels::of(width, ring.expect("there is a ring")));
        panel::right::<U>(exchange, room, step, column, panels, matrix)
    } else {
        let pitch = comptime!(pitch(width, matrix));
        let own = lane() % 16 * pitch + lane() / 16 * comptime!(ROW / matrix.chunk);
        let first = step * comptime!(K * pitch) + column / matrix.chunk;
        U::load_matrices(exchange, room, own + first, true)
    }
}
