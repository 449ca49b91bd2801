//! The patch grid of one image or clip, and what a batch of them means for the tower.

use core::fmt;

use burn_vision_attention::{
    PositionError, PositionOrder, Segments, SegmentsError, vision_positions,
};
use serde::{Deserialize, Serialize};

/// Extent of one image or clip, in patches: `t` frames of `h` rows by `w` columns.
///
/// One row of the reference's `grid_thw`. A still image has `t == 1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GridThw {
    /// Frames, after the temporal patch size is taken out.
    pub t: usize,
    /// Patch rows.
    pub h: usize,
    /// Patch columns.
    pub w: usize,
}

impl GridThw {
    /// A grid of `t` frames of `h` rows by `w` columns of patches.
    pub fn new(t: usize, h: usize, w: usize) -> Self {
        Self { t, h, w }
    }

    /// Tokens entering the tower: `t * h * w`.
    pub fn tokens(&self) -> usize {
        self.t * self.h * self.w
    }

    /// Tokens leaving an adapter that merges squares of `merge` patches, rounding odd sides up:
    /// `t * ceil(h / merge) * ceil(w / merge)`.
    ///
    /// # Panics
    ///
    /// When `merge` is 0.
    pub fn merged_tokens(&self, merge: usize) -> usize {
        self.t * self.h.div_ceil(merge) * self.w.div_ceil(merge)
    }
}

impl fmt::Display for GridThw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} x {}", self.t, self.h, self.w)
    }
}

/// Grids that a tower cannot encode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GridError {
    /// No image at all.
    #[error("grid_thw is empty; pass one grid per image")]
    Empty,
    /// A side of zero patches.
    #[error("grid_thw[{index}] = {grid} holds no patch; every side must be at least 1")]
    ZeroExtent {
        /// Which image.
        index: usize,
        /// Its grid.
        grid: GridThw,
    },
    /// A grid that does not divide into the squares the tower merges.
    #[error(
        "grid_thw[{index}] = {grid} does not divide into {merge} x {merge} groups of patches; \
         resize the image so that h and w are multiples of {merge}"
    )]
    NotDivisible {
        /// Which image.
        index: usize,
        /// Its grid.
        grid: GridThw,
        /// Side of a group.
        merge: usize,
    },
    /// More patches than the tower can index.
    #[error(
        "grid_thw adds up to more patches than the {} a batch can hold; split the batch",
        i32::MAX
    )]
    TooLarge,
    /// The grids do not describe the pixel rows given.
    #[error(
        "grid_thw describes {expected} patches in {images} images, but pixel_values has {rows} rows; \
         pass the grids that came with these pixel rows"
    )]
    RowCount {
        /// Sum of `t * h * w`.
        expected: usize,
        /// Number of grids.
        images: usize,
        /// Rows of `pixel_values`.
        rows: usize,
    },
}

/// Checks that no grid is empty and that together they describe `rows` pixel rows.
///
/// # Errors
///
/// [`GridError`] naming the first grid at fault.
pub fn check_rows(grids: &[GridThw], rows: usize) -> Result<(), GridError> {
    let expected = total_tokens(grids)?;
    if expected != rows {
        return Err(GridError::RowCount { expected, images: grids.len(), rows });
    }
    Ok(())
}

/// Attention segments of a batch: one per frame, so neither frames nor images see each other.
///
/// # Errors
///
/// [`GridError`] for empty grids and batches beyond 2^31 patches.
pub fn segments(grids: &[GridThw]) -> Result<Segments, GridError> {
    total_tokens(grids)?;
    let lengths = grids.iter().flat_map(|grid| core::iter::repeat_n(grid.h * grid.w, grid.t));
    Segments::from_lengths(lengths).map_err(|_: SegmentsError| GridError::TooLarge)
}

/// Row and column of every token of a batch, in the given order. All frames of a clip repeat the
/// same positions: the rotary embedding has no temporal axis.
///
/// # Errors
///
/// [`GridError::NotDivisible`] for a grid that the order's groups do not tile; otherwise as
/// [`segments`].
pub fn positions(grids: &[GridThw], order: PositionOrder) -> Result<Vec<[u32; 2]>, GridError> {
    let mut all = Vec::with_capacity(total_tokens(grids)?);
    for (index, grid) in grids.iter().enumerate() {
        let frame = vision_positions(grid.h, grid.w, order).map_err(|error| match error {
            PositionError::GridNotDivisible { merge, .. } => {
                GridError::NotDivisible { index, grid: *grid, merge }
            }
            PositionError::ZeroMerge => unreachable!("configs are validated to merge at least 1"),
        })?;
        for _ in 0..grid.t {
            all.extend_from_slice(&frame);
        }
    }
    Ok(all)
}

/// Checks that squares of `merge` patches tile every grid.
///
/// # Errors
///
/// [`GridError::NotDivisible`] naming the first that they do not.
pub fn check_divisible(grids: &[GridThw], merge: usize) -> Result<(), GridError> {
    match grids
        .iter()
        .position(|grid| !grid.h.is_multiple_of(merge) || !grid.w.is_multiple_of(merge))
    {
        Some(index) => Err(GridError::NotDivisible { index, grid: grids[index], merge }),
        None => Ok(()),
    }
}

fn total_tokens(grids: &[GridThw]) -> Result<usize, GridError> {
    if grids.is_empty() {
        return Err(GridError::Empty);
    }
    let mut total = 0usize;
    for (index, grid) in grids.iter().enumerate() {
        if grid.t == 0 || grid.h == 0 || grid.w == 0 {
            return Err(GridError::ZeroExtent { index, grid: *grid });
        }
        total = grid
            .h
            .checked_mul(grid.w)
            .and_then(|frame| frame.checked_mul(grid.t))
            .and_then(|tokens| tokens.checked_add(total))
            .filter(|&total| total <= i32::MAX as usize)
            .ok_or(GridError::TooLarge)?;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[test]
    fn one_segment_per_frame() {
        let grids = [GridThw::new(1, 4, 6), GridThw::new(2, 2, 4), GridThw::new(1, 2, 2)];
        assert_eq!(segments(&grids).unwrap().offsets(), [0, 24, 32, 40, 44]);
        check_rows(&grids, 44).unwrap();
        let merged: Vec<_> = grids.iter().map(|grid| grid.merged_tokens(2)).collect();
        assert_eq!(merged, [6, 4, 1]);
    }

    #[test]
    fn frames_repeat_positions_in_groups() {
        let grids = [GridThw::new(2, 2, 4)];
        let frame = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]];
        let expected = [frame, frame].concat();
        assert_eq!(positions(&grids, PositionOrder::MergeGrouped(2)).unwrap(), expected);
    }

    #[rstest]
    #[case(&[], GridError::Empty)]
    #[case(&[GridThw::new(1, 2, 2), GridThw::new(1, 0, 2)],
        GridError::ZeroExtent { index: 1, grid: GridThw::new(1, 0, 2) })]
    #[case(&[GridThw::new(usize::MAX, 2, 2)], GridError::TooLarge)]
    #[case(&[GridThw::new(1, 1 << 16, 1 << 15)], GridError::TooLarge)]
    #[case(&[GridThw::new(1, 2, 3)], GridError::RowCount { expected: 6, images: 1, rows: 8 })]
    fn impossible_batches(#[case] grids: &[GridThw], #[case] error: GridError) {
        assert_eq!(check_rows(grids, 8).unwrap_err(), error);
        assert!(!error.to_string().contains('\n'));
    }

    #[test]
    fn groups_must_tile() {
        let grids = [GridThw::new(1, 2, 2), GridThw::new(1, 3, 2)];
        let error = GridError::NotDivisible { index: 1, grid: grids[1], merge: 2 };
        assert_eq!(positions(&grids, PositionOrder::MergeGrouped(2)).unwrap_err(), error);
        assert_eq!(check_divisible(&grids, 2).unwrap_err(), error);
        assert_eq!(positions(&grids, PositionOrder::RowMajor).unwrap().len(), 10);
    }

    proptest! {
        /// Segments, positions and the row check describe the same batch.
        #[test]
        fn one_position_per_token(sides in prop::collection::vec((1usize..3, 1usize..5, 1usize..5), 1..4)) {
            let grids: Vec<_> = sides.iter().map(|&(t, h, w)| GridThw::new(t, 2 * h, 2 * w)).collect();
            let tokens: usize = grids.iter().map(GridThw::tokens).sum();
            prop_assert_eq!(segments(&grids).unwrap().total(), tokens);
            for order in [PositionOrder::RowMajor, PositionOrder::MergeGrouped(2)] {
                prop_assert_eq!(positions(&grids, order).unwrap().len(), tokens);
            }
            let merged: usize = grids.iter().map(|grid| grid.merged_tokens(2)).sum();
            prop_assert_eq!(4 * merged, tokens);
        }
    }
}
