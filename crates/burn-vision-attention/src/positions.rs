//! Where the patches of a frame stand in the token sequence.

use thiserror::Error;

/// The order in which the patches of an image stand in the token sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PositionOrder {
    /// Row after row, left to right.
    RowMajor,
    /// Blocks of `m x m` patches, row-major inside a block and over the blocks, so that the patches
    /// which an adapter merges are neighbours.
    MergeGrouped(usize),
}

/// Why positions cannot be computed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PositionError {
    /// A grid that blocks of the merge size do not tile.
    #[error(
        "a grid of {h} x {w} patches is not divisible by the merge size {merge}: resize the image to a \
         multiple of the merge size, or use row-major order"
    )]
    GridNotDivisible {
        /// Rows of patches.
        h: usize,
        /// Columns of patches.
        w: usize,
        /// Side of a block.
        merge: usize,
    },
    /// The merge size is 0.
    #[error("the merge size is 0: expected at least 1")]
    ZeroMerge,
}

/// The `(row, column)` of each patch of one frame of `h x w` patches, in token order.
///
/// # Errors
///
/// When the order is grouped and its merge size does not divide `h` and `w`, or is 0.
pub fn vision_positions(
    h: usize,
    w: usize,
    order: PositionOrder,
) -> Result<Vec<[u32; 2]>, PositionError> {
    let merge = match order {
        PositionOrder::RowMajor => 1,
        PositionOrder::MergeGrouped(merge) => merge,
    };
    if merge == 0 {
        return Err(PositionError::ZeroMerge);
    }
    if !h.is_multiple_of(merge) || !w.is_multiple_of(merge) {
        return Err(PositionError::GridNotDivisible { h, w, merge });
    }
    let mut positions = Vec::with_capacity(h * w);
    let (rows, columns) = match order {
        PositionOrder::RowMajor => (h, w),
        PositionOrder::MergeGrouped(_) => (h / merge, w / merge),
    };
    for block_row in 0..rows {
        for block_column in 0..columns {
            for row in 0..merge {
                for column in 0..merge {
                    let position = [block_row * merge + row, block_column * merge + column];
                    positions.push(position.map(|index| index as u32));
                }
            }
        }
    }
    Ok(positions)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::row_major(PositionOrder::RowMajor, &[[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]])]
    #[case::grouped(PositionOrder::MergeGrouped(2), &[[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3]])]
    fn positions_follow_the_order(#[case] order: PositionOrder, #[case] first: &[[u32; 2]]) {
        let positions = vision_positions(4, 4, order).unwrap();
        assert_eq!(positions.len(), 16);
        assert_eq!(&positions[..6], first);
    }

    #[test]
    fn grouped_positions_of_a_4_by_6_grid() {
        let positions = vision_positions(4, 6, PositionOrder::MergeGrouped(2)).unwrap();
        let rows: Vec<u32> = positions.iter().map(|position| position[0]).collect();
        let columns: Vec<u32> = positions.iter().map(|position| position[1]).collect();
        assert_eq!(rows[..16], [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3]);
        assert_eq!(columns[..16], [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 0, 1, 0, 1]);
    }

    #[rstest]
    #[case(3, 4)]
    #[case(4, 3)]
    fn odd_grids_cannot_be_grouped(#[case] h: usize, #[case] w: usize) {
        let error = vision_positions(h, w, PositionOrder::MergeGrouped(2)).unwrap_err();
        assert_eq!(error, PositionError::GridNotDivisible { h, w, merge: 2 });
        assert!(vision_positions(h, w, PositionOrder::RowMajor).is_ok());
        assert_eq!(
            vision_positions(4, 4, PositionOrder::MergeGrouped(0)),
            Err(PositionError::ZeroMerge)
        );
    }
}
