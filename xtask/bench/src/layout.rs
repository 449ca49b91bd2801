//! Mixes of image sizes.

use std::fmt;
use std::str::FromStr;

use burn_dots_vit::grid::GridThw;
use burn_vision_attention::{PositionOrder, Segments, vision_positions};
use thiserror::Error;

/// The patch grids of the images in a packed batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    name: String,
    /// `(rows, columns)` of each image.
    grids: Vec<[usize; 2]>,
}

/// A layout that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "layout `{0}`: expected `pages` or SEGMENTSxLENGTH such as 4x1024, both at least 1 and together \
     at most 1048576 tokens"
)]
pub struct LayoutError(String);

/// Patches of the images in `pages`, in rows and columns of 14 pixels: an A4 page, a 16:9 slide, a
/// Letter page, a receipt and a cropped line. Together 4096.
const PAGES: [[usize; 2]; 5] = [[46, 32], [26, 46], [36, 28], [40, 10], [2, 10]];

const MOST_TOKENS: usize = 1 << 20;

impl Layout {
    /// `segments` images of `length` patches each, as square as the length allows.
    pub fn uniform(segments: usize, length: usize) -> Self {
        let grids = vec![near_square(length); segments];
        Self { name: format!("{segments}x{length}"), grids }
    }

    /// One page each of several document formats, 4096 patches together.
    pub fn pages() -> Self {
        Self { name: "pages".to_owned(), grids: PAGES.to_vec() }
    }

    /// Patches of each image.
    pub fn lengths(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.grids.iter().map(|[rows, columns]| rows * columns)
    }

    /// Patches of all images.
    pub fn tokens(&self) -> usize {
        self.lengths().sum()
    }

    /// The sum of squared lengths: the scores of one head.
    pub fn scores(&self) -> usize {
        self.lengths().map(|length| length * length).sum()
    }

    /// The number of images.
    pub fn len(&self) -> usize {
        self.grids.len()
    }

    /// Whether there is no image.
    pub fn is_empty(&self) -> bool {
        self.grids.is_empty()
    }

    /// The boundaries of the packed batch.
    pub fn segments(&self) -> Segments {
        Segments::from_lengths(self.lengths()).expect("parsing bounds the tokens")
    }

    /// Row and column of every patch, row by row.
    pub fn positions(&self) -> Vec<[u32; 2]> {
        let positions = |&[rows, columns]: &[usize; 2]| {
            vision_positions(rows, columns, PositionOrder::RowMajor).expect("any grid has rows")
        };
        self.grids.iter().flat_map(positions).collect()
    }

    /// The images as the towers take them.
    pub fn grids(&self) -> Vec<GridThw> {
        self.grids.iter().map(|&[rows, columns]| GridThw::new(1, rows, columns)).collect()
    }

    /// Whether squares of 2 x 2 patches tile every image, as the towers' adapters need it.
    pub fn merges(&self) -> bool {
        self.grids.iter().flatten().all(|side| side.is_multiple_of(2))
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

impl FromStr for Layout {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, LayoutError> {
        if text == "pages" {
            return Ok(Self::pages());
        }
        let parse = || {
            let (segments, length) = text.split_once('x')?;
            let (segments, length) = (segments.parse().ok()?, length.parse().ok()?);
            let tokens = usize::checked_mul(segments, length)?;
            (1..=MOST_TOKENS).contains(&tokens).then(|| Self::uniform(segments, length))
        };
        parse().ok_or_else(|| LayoutError(text.to_owned()))
    }
}

/// Rows and columns of `length` patches, as near as can be, with even sides where those exist.
fn near_square(length: usize) -> [usize; 2] {
    let step = if length.is_multiple_of(4) { 2 } else { 1 };
    let area = length / (step * step);
    let columns = (1..=area.isqrt()).rev().find(|columns| area.is_multiple_of(*columns));
    let columns = columns.unwrap_or(1);
    [step * area / columns, step * columns]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("1x4096", &[4096], [64, 64])]
    #[case("64x64", &[64; 64], [8, 8])]
    #[case("2x18", &[18; 2], [6, 3])]
    #[case("3x24", &[24; 3], [6, 4])]
    #[case("1x7", &[7], [7, 1])]
    fn uniform_layouts_are_parsed(
        #[case] text: &str,
        #[case] lengths: &[usize],
        #[case] grid: [usize; 2],
    ) {
        let layout: Layout = text.parse().unwrap();
        assert_eq!(layout.to_string(), text);
        assert_eq!(layout.lengths().collect::<Vec<_>>(), lengths);
        assert_eq!(layout.grids[0], grid);
        assert_eq!(layout.merges(), grid.iter().all(|side| side % 2 == 0));
        assert_eq!(layout.positions().len(), layout.tokens());
        assert_eq!(layout.segments().total(), layout.tokens());
    }

    #[test]
    fn pages_hold_as_many_tokens_as_the_other_layouts() {
        let pages: Layout = "pages".parse().unwrap();
        assert_eq!(pages.tokens(), 4096);
        assert!(pages.merges());
        assert_eq!(pages.scores(), pages.lengths().map(|length| length * length).sum::<usize>());
    }

    #[rstest]
    #[case("")]
    #[case("4x")]
    #[case("0x64")]
    #[case("4x0")]
    #[case("2x1048576")]
    #[case("18446744073709551615x2")]
    #[case("page")]
    fn other_texts_are_errors(#[case] text: &str) {
        let message = text.parse::<Layout>().unwrap_err().to_string();
        assert!(message.contains(&format!("`{text}`")) && !message.contains('\n'), "{message}");
    }
}
