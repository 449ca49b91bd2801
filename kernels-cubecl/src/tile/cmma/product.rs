//! Products of tiles in shared memory, and their results in the hands of the units that own them.

use cubecl::{
    cmma::{self, MatrixIdent, MatrixLayout},
    prelude::*,
};

use super::UnitGrid;
use crate::tile::{
    MatrixTile,
    global::F4,
    mma::room::Operand,
    simt::{first_row, unit_x},
};

/// Shape of the device's fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CmmaShape {
    /// Rows of a left operand and of the result.
    pub m: usize,
    /// Columns of a right operand and of the result.
    pub n: usize,
    /// Elements that one instruction sums over.
    pub k: usize,
}

/// A result in shared memory, and what it is the product of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Target {
    pub rows: usize,
    pub columns: usize,
    /// Elements between rows.
    pub pitch: usize,
    /// Elements that are summed over.
    pub sum: usize,
    /// Whether rows of the right operand are columns of the result.
    pub right_is_transposed: bool,
}

/// Elements between rows of a result of `columns` columns.
pub(super) fn pitch(columns: usize) -> usize {
    columns.next_multiple_of(16) + 4
}

/// Elements between rows of staged weights.
pub(super) fn weights_pitch(columns: usize) -> usize {
    columns + 8
}

/// `result = left * right`. Planes take the fragments of the result in turn. Pitches are in elements;
/// vectors of the left operand have `left_size` elements, those of the right one are chunks.
#[cube]
pub(super) fn multiply<L: CubePrimitive, R: CubePrimitive>(
    left: &[L],
    #[comptime] left_pitch: usize,
    #[comptime] left_size: usize,
    right: &[R],
    #[comptime] right_pitch: usize,
    result: &mut [f32],
    #[comptime] target: Target,
    #[comptime] matrix: MatrixTile,
) {
    let shape = comptime!(matrix.cmma.expect("the device lists a shape"));
    let (m, n, k) = comptime!((shape.m, shape.n, shape.k));
    let across = comptime!(target.columns.div_ceil(n));
    let fragments = comptime!(target.rows / m * across);
    let right_size = comptime!(matrix.chunk);
    let layout = comptime!(match target.right_is_transposed {
        true => MatrixLayout::ColMajor,
        false => MatrixLayout::RowMajor,
    });
    // A cube smaller than a plane still has one.
    let planes = max(1u32, CUBE_DIM / PLANE_DIM);
    let mut fragment = PLANE_POS as usize;
    while fragment < fragments {
        let row = fragment / across * m;
        let column = fragment % across * n;
        let sum = cmma::Matrix::<f32>::from_value(
            MatrixIdent::Accumulator,
            m,
            n,
            k,
            MatrixLayout::Undefined,
            0.0f32,
        );
        #[unroll]
        for step in 0..comptime!(target.sum.div_ceil(k)) {
            let from = comptime!(step * k);
            let left_at = (row * left_pitch + from) / left_size;
            let right_at = if comptime!(target.right_is_transposed) {
                (column * right_pitch + from) / right_size
            } else {
                (comptime!(from * right_pitch) + column) / right_size
            };
            let a = cmma::Matrix::<L>::from_slice(
                MatrixIdent::A,
                m,
                n,
                k,
                MatrixLayout::RowMajor,
                &left[left_at..left.len()],
                comptime!(left_pitch as u32),
            );
            let b = cmma::Matrix::<R>::from_slice(
                MatrixIdent::B,
                m,
                n,
                k,
                layout,
                &right[right_at..right.len()],
                comptime!(right_pitch as u32),
            );
            cmma::execute(&a, &b, &sum, &sum);
        }
        let at = row * target.pitch + column;
        let end = result.len();
        cmma::store(
            &mut result[at..end],
            &sum,
            comptime!(target.pitch as u32),
            MatrixLayout::RowMajor,
        );
        fragment += planes as usize;
    }
}

/// This unit's part of a product.
#[cube]
pub(super) fn read(
    products: &[f32],
    scores: &mut Array<f32>,
    #[comptime] pitch: usize,
    #[comptime] grid: UnitGrid,
) {
    let at = first_row(grid) * pitch + unit_x(grid);
    #[unroll]
    for r in 0..grid.rows {
        #[unroll]
        for c in 0..grid.columns {
            scores[comptime!(r * grid.columns + c)] =
                products[at + comptime!(r * pitch + c * grid.x)];
        }
    }
}

/// Adds this unit's part of a product to its output.
#[cube]
pub(super) fn add(
    products: &[f32],
    output: &mut Array<F4>,
    #[comptime] target: Target,
    #[comptime] grid: UnitGrid,
) {
    let vectors = comptime!(grid.vectors(target.columns));
    let width = comptime!(target.columns / 4);
    let at = first_row(grid) * target.pitch;
    #[unroll]
    for c in 0..vectors {
        let column = unit_x(grid) + comptime!(c * grid.x);
        // Where the units do not divide the row evenly, the last ones add the last column to what
        // storing drops.
        let column = if comptime!((c + 1) * grid.x > width) {
            min(column, comptime!(width - 1))
        } else {
            column
        };
        #[unroll]
        for r in 0..grid.rows {
            let first = at + comptime!(r * target.pitch) + 4 * column;
            let mut value = F4::empty();
            #[unroll]
            for e in 0..4usize {
                value.insert(e, products[first + e]);
            }
            output[comptime!(r * vectors + c)] += value;
        }
    }
}

/// Hands this unit's weights over to [`multiply`](fn@multiply) as a left operand.
#[cube]
pub(super) fn stage_weights(
    staged: &mut [Operand],
    weights: &Array<f32>,
    #[comptime] grid: UnitGrid,
) {
    let pitch = comptime!(weights_pitch(grid.tile_columns()));
    let at = first_row(grid) * pitch + unit_x(grid);
    #[unroll]
    for r in 0..grid.rows {
        #[unroll]
        for c in 0..grid.columns {
            staged[at + comptime!(r * pitch + c * grid.x)] =
                Operand::cast_from(weights[comptime!(r * grid.columns + c)]);
        }
    }
}
