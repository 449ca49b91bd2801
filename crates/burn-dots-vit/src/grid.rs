//! The patch grid of one image or clip.

use core::fmt;

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
    /// Tokens entering the tower: `t * h * w`.
    pub fn tokens(&self) -> usize {
        self.t * self.h * self.w
    }
}

impl fmt::Display for GridThw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} x {}", self.t, self.h, self.w)
    }
}
