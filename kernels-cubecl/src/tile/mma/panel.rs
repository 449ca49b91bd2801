//! Tiles as TMA writes them: panels of at most 128 bytes a row, whose 16-byte units are swizzled.
//!
//! A row cannot be padded where hardware writes it. Instead the units of a row trade places: unit `u` of
//! a panel, counted from its first, lies at `u ^ (u / 8 % W)`, `W` units to a row (CUDA Driver API,
//! `CU_TENSOR_MAP_SWIZZLE_32B`, `_64B` and `_128B` for `W` = 2, 4 and 8). The eight rows that one
//! `ldmatrix` reads lie in different banks for every `W`.

use cubecl::prelude::*;

use super::{
    MatrixTile,
    room::{Chunk, Pair, ROW},
    unit::{K, MatrixUnit, lane},
};

/// A ring of stages, each with room for one tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RingShape {
    /// Tiles that are held or under way at once.
    pub stages: usize,
    /// Rows of a tile; a multiple of 16.
    pub rows: usize,
}

/// The least alignment of a stage in bytes: what the widest swizzle repeats after.
pub(super) const STAGE_ALIGNMENT: usize = 1024;

/// How one tile is cut into panels, which lie one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Panels {
    /// Rows of a panel.
    pub rows: usize,
    /// Elements of a row of a panel: 64, 32 or 16.
    pub columns: usize,
    /// Panels of a tile.
    pub count: usize,
}

impl Panels {
    /// The widest panels that take at most a quarter more memory than the rows, of `width` elements
    /// rounded up to 16.
    pub fn of(width: usize, ring: RingShape) -> Self {
        let width = width.next_multiple_of(K);
        let fits = |columns: &usize| 4 * width.next_multiple_of(*columns) <= 5 * width;
        let columns = [64, 32, K].into_iter().find(fits).expect("16 divides every width");
        Self { rows: ring.rows, columns, count: width.div_ceil(columns) }
    }

    /// 16-byte units of a row of a panel.
    pub fn units(&self) -> usize {
        self.columns / ROW
    }

    /// Elements of a panel.
    pub fn elements(&self) -> usize {
        self.rows * self.columns
    }

    /// Elements of a stage.
    pub fn stage(&self) -> usize {
        self.count * self.elements()
    }
}

/// Chunks of all stages of a ring.
pub(super) fn ring_chunks(width: usize, ring: RingShape, matrix: MatrixTile) -> usize {
    ring.stages * stage_chunks(width, ring, matrix)
}

/// Chunks of one stage.
pub(super) fn stage_chunks(width: usize, ring: RingShape, matrix: MatrixTile) -> usize {
    Panels::of(width, ring).stage() / matrix.chunk
}

/// As [`room::right_transposed`](super::room::right_transposed), from a stage.
#[cube]
pub(super) fn right_transposed<U: MatrixUnit>(
    exchange: &mut U::Exchange,
    stage: &[Chunk],
    row: usize,
    step: usize,
    #[comptime] panels: Panels,
    #[comptime] matrix: MatrixTile,
) -> Array<Pair> {
    let own = own_unit(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2, panels);
    load::<U>(exchange, stage, own, row, step, false, panels, matrix)
}

/// As [`room::right`](super::room::right), from a stage.
#[cube]
pub(super) fn right<U: MatrixUnit>(
    exchange: &mut U::Exchange,
    stage: &[Chunk],
    step: usize,
    column: usize,
    #[comptime] panels: Panels,
    #[comptime] matrix: MatrixTile,
) -> Array<Pair> {
    let own = own_unit(lane() % 16, lane() / 16, panels);
    load::<U>(exchange, stage, own, K * step, column / K, true, panels, matrix)
}

/// Where the unit lies that this lane names, of the first 16 rows and 16 columns of a panel. `row` is
/// `lane() % 8`, or 8 more.
#[cube]
fn own_unit(row: usize, unit: usize, #[comptime] panels: Panels) -> usize {
    let units = comptime!(panels.units());
    row * units + (unit ^ (lane() % 8 / comptime!(8 / units)))
}

/// Loads the matrices of rows `row ..`, a multiple of 16, and columns `16 * step ..`. An even number of
/// units further, `own` differs by no other bits: swizzling commutes with stepping.
#[cube]
fn load<U: MatrixUnit>(
    exchange: &mut U::Exchange,
    stage: &[Chunk],
    own: usize,
    row: usize,
    step: usize,
    #[comptime] transposed: bool,
    #[comptime] panels: Panels,
    #[comptime] matrix: MatrixTile,
) -> Array<Pair> {
    let units = comptime!(panels.units());
    let steps = comptime!(panels.columns / K);
    let first = (step / steps * panels.rows + row) * units;
    let unit = first + (own ^ (2 * (step % steps)));
    U::load_matrices(exchange, stage, unit * comptime!(ROW / matrix.chunk), transposed)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(16, 16, 1)]
    #[case(40, 16, 3)]
    #[case(64, 64, 1)]
    #[case(72, 32, 3)]
    #[case(80, 32, 3)]
    #[case(96, 32, 3)]
    #[case(128, 64, 2)]
    #[case(192, 64, 3)]
    #[case(256, 64, 4)]
    fn rows_are_cut_into_wide_panels(
        #[case] width: usize,
        #[case] columns: usize,
        #[case] count: usize,
    ) {
        let ring = RingShape { stages: 2, rows: 32 };
        assert_eq!(Panels::of(width, ring), Panels { rows: 32, columns, count });
    }

    /// Every stage starts where the swizzle's pattern does, and eight rows at one column, of which
    /// `ldmatrix` reads 16 bytes each, fill the 128 bytes that the banks hold.
    #[test]
    fn eight_rows_lie_in_different_banks() {
        for width in (16..=256).step_by(8) {
            let panels = Panels::of(width, RingShape { stages: 2, rows: 16 });
            let units = panels.units();
            assert!((2 * panels.stage()).is_multiple_of(128 * units), "{panels:?}");
            for unit in 0..units {
                let banks = (0..8).map(|row| (row * units + (unit ^ (row / (8 / units)))) % 8);
                let banks: std::collections::HashSet<_> = banks.collect();
                assert_eq!(banks.len(), 8, "{panels:?}");
            }
        }
    }
}
