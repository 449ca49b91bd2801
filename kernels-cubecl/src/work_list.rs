//! The flat list of query tiles that one launch works through.
//!
//! A grid of `segments x tiles of the longest segment` idles wherever lengths differ and passes
//! the 65,535 limit of a grid axis with many segments. Instead the host lists the tiles that exist,
//! and the grid covers `tiles x heads`, folded over three axes by [`fold_grid`].

use cubecl::{client::Client, prelude::*, server::Handle};
use thiserror::Error;

use crate::{LaunchError, Unsupported};

/// Largest number of cubes on one grid axis that every device accepts. Some drivers report more
/// than they take, so the reported value only ever lowers this.
const MAX_GRID_AXIS: u64 = 65_535;

/// Most tokens in one batch. Keeps every sum of token indices and window sizes inside i32.
pub const MAX_TOKENS: usize = 1 << 28;

/// `i32` words per tile in the uploaded list.
pub(crate) const TILE_WORDS: usize = 5;

/// Why offsets do not describe a packed batch.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum WorkListError {
    /// The offsets are empty or do not start at 0.
    #[error("{argument}: offsets must start with 0, got {first:?}")]
    Start {
        /// The offsets argument.
        argument: &'static str,
        /// The first offset, if any.
        first: Option<usize>,
    },
    /// An offset is smaller than the one before it.
    #[error("{argument}: offset {index} is {value}, less than the {previous} before it")]
    Decreasing {
        /// The offsets argument.
        argument: &'static str,
        /// Index of the offending offset.
        index: usize,
        /// Its value.
        value: usize,
        /// The value before it.
        previous: usize,
    },
    /// Queries and keys have different numbers of segments.
    #[error("offsets_k: {keys} segments, offsets_q has {queries}; both must have the same number")]
    Segments {
        /// Query segments.
        queries: usize,
        /// Key segments.
        keys: usize,
    },
    /// More tokens than token indices can tell apart.
    #[error("{argument}: {tokens} tokens pass the limit of {MAX_TOKENS}; split the batch")]
    Tokens {
        /// The offsets argument.
        argument: &'static str,
        /// Tokens of the batch.
        tokens: usize,
    },
}

/// One query tile: up to `tile_q` consecutive query tokens of one segment and the keys of that
/// segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkTile {
    /// First query token, counted over the whole batch.
    pub q_start: i32,
    /// Query tokens of this tile, at least 1.
    pub q_rows: i32,
    /// First key token of the segment, counted over the whole batch.
    pub k_start: i32,
    /// Key tokens of the segment, possibly 0.
    pub k_len: i32,
    /// Key index, inside the segment, on the bottom-right aligned diagonal of the tile's first
    /// row: `row + k_len - q_len`. Negative where the first rows see no key causally.
    pub diagonal: i32,
}

/// All query tiles of a packed batch, built on the host in one pass over the segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkList {
    tiles: Vec<WorkTile>,
    tile_q: usize,
    tokens_q: usize,
    tokens_k: usize,
}

impl WorkList {
    /// Cuts every segment into tiles of at most `tile_q` query tokens.
    ///
    /// `offsets_q` and `offsets_k` are cumulative lengths (`cu_seqlens`): `segments + 1` values,
    /// starting at 0. Empty segments are legal on either side; a segment with no keys still gets
    /// its tiles, because its outputs have to be written.
    ///
    /// # Errors
    ///
    /// If the offsets do not start at 0, decrease, differ in number, or pass [`MAX_TOKENS`].
    ///
    /// # Panics
    ///
    /// If `tile_q` is 0.
    pub fn new(
        offsets_q: &[usize],
        offsets_k: &[usize],
        tile_q: usize,
    ) -> Result<Self, WorkListError> {
        assert!(tile_q > 0, "tile_q: expected at least 1, got 0");
        let tokens_q = check_offsets("offsets_q", offsets_q)?;
        let tokens_k = check_offsets("offsets_k", offsets_k)?;
        let (queries, keys) = (offsets_q.len() - 1, offsets_k.len() - 1);
        if queries != keys {
            return Err(WorkListError::Segments { queries, keys });
        }
        let mut tiles = Vec::with_capacity(queries + tokens_q / tile_q);
        for (q, k) in offsets_q.windows(2).zip(offsets_k.windows(2)) {
            let (q_len, k_len) = ((q[1] - q[0]) as i32, (k[1] - k[0]) as i32);
            for row in (0..q_len).step_by(tile_q) {
                tiles.push(WorkTile {
                    q_start: q[0] as i32 + row,
                    q_rows: (q_len - row).min(tile_q as i32),
                    k_start: k[0] as i32,
                    k_len,
                    diagonal: row + k_len - q_len,
                });
            }
        }
        Ok(Self { tiles, tile_q, tokens_q, tokens_k })
    }

    /// The tiles, in the order of the batch.
    pub fn tiles(&self) -> &[WorkTile] {
        &self.tiles
    }

    /// Copies the list to the device. Queued like any other write: nothing waits for it.
    pub fn upload(&self, client: &Client) -> DeviceWorkList {
        let words: Vec<i32> = self
            .tiles
            .iter()
            .flat_map(|t| [t.q_start, t.q_rows, t.k_start, t.k_len, t.diagonal])
            .collect();
        // Zero-sized buffers cannot be bound; an empty list is never read.
        let words = if words.is_empty() { vec![0] } else { words };
        DeviceWorkList {
            handle: client.create_from_slice(i32::as_bytes(&words)),
            tiles: self.tiles.len(),
            tile_q: self.tile_q,
            tokens_q: self.tokens_q,
            tokens_k: self.tokens_k,
        }
    }
}

/// A [`WorkList`] in device memory. Cheap to clone; reusable for every layer of a model.
#[derive(Clone, Debug)]
pub struct DeviceWorkList {
    pub(crate) handle: Handle,
    pub(crate) tiles: usize,
    pub(crate) tile_q: usize,
    pub(crate) tokens_q: usize,
    pub(crate) tokens_k: usize,
}

impl DeviceWorkList {
    /// Query tokens per tile that the list was cut for.
    pub fn tile_q(&self) -> usize {
        self.tile_q
    }

    /// Number of tiles.
    pub fn len(&self) -> usize {
        self.tiles
    }

    /// Whether there is no tile: the batch has no query token.
    pub fn is_empty(&self) -> bool {
        self.tiles == 0
    }

    /// Refuses the list if a property (name, expected, actual) differs.
    pub(crate) fn check(properties: [(&'static str, usize, usize); 3]) -> Result<(), LaunchError> {
        for (property, expected, actual) in properties {
            if expected != actual {
                return Err(LaunchError::WorkList { property, expected, actual });
            }
        }
        Ok(())
    }
}

/// Checks cumulative lengths and returns the token count.
fn check_offsets(argument: &'static str, offsets: &[usize]) -> Result<usize, WorkListError> {
    let first = offsets.first().copied();
    if first != Some(0) {
        return Err(WorkListError::Start { argument, first });
    }
    for (index, pair) in offsets.windows(2).enumerate() {
        let (previous, value) = (pair[0], pair[1]);
        if value < previous {
            return Err(WorkListError::Decreasing { argument, index: index + 1, value, previous });
        }
    }
    let tokens = offsets[offsets.len() - 1];
    if tokens > MAX_TOKENS {
        return Err(WorkListError::Tokens { argument, tokens });
    }
    Ok(tokens)
}

/// Folds `cubes` over the three grid axes such that none passes 65,535 nor the device's limit.
///
/// The grid may hold a few more cubes than asked, fewer than one per row: a kernel compares its
/// flat cube index with the number it was given and leaves.
///
/// # Errors
///
/// If `cubes` passes what three axes or a 32-bit flat index hold.
pub fn fold_grid(cubes: u64, max_cube_count: (u32, u32, u32)) -> Result<CubeCount, Unsupported> {
    let (x, y, z) = max_cube_count;
    let axes = [x, y, z].map(|axis| u64::from(axis).min(MAX_GRID_AXIS));
    let limit = axes.iter().product::<u64>().min(u64::from(u32::MAX) / 2);
    if cubes > limit {
        return Err(Unsupported::Grid { cubes, limit });
    }
    let z = cubes.div_ceil(axes[0] * axes[1]).max(1);
    let plane = cubes.div_ceil(z);
    let y = plane.div_ceil(axes[0]).max(1);
    let x = plane.div_ceil(y);
    Ok(CubeCount::Static(x as u32, y as u32, z as u32))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn cumulative(lengths: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let mut total = 0;
        let mut offsets = vec![0];
        offsets.extend(lengths.into_iter().map(|length| {
            total += length;
            total
        }));
        offsets
    }

    #[test]
    fn tiles_cover_every_query_once_and_never_cross_segments() {
        let offsets_q = cumulative([0, 5, 32, 33, 0, 64, 1, 0]);
        let offsets_k = cumulative([3, 0, 7, 33, 2, 100, 1, 0]);
        let list = WorkList::new(&offsets_q, &offsets_k, 32).unwrap();
        let mut next = 0;
        for tile in list.tiles() {
            assert_eq!(tile.q_start, next);
            assert!((1..=32).contains(&tile.q_rows));
            next += tile.q_rows;
            let segment = offsets_q
                .windows(2)
                .position(|q| (q[0]..q[1]).contains(&(tile.q_start as usize)))
                .unwrap();
            assert!((tile.q_start + tile.q_rows) as usize <= offsets_q[segment + 1]);
            assert_eq!(tile.k_start as usize, offsets_k[segment]);
            assert_eq!((tile.k_start + tile.k_len) as usize, offsets_k[segment + 1]);
            let row = tile.q_start - offsets_q[segment] as i32;
            let q_len = (offsets_q[segment + 1] - offsets_q[segment]) as i32;
            assert_eq!(tile.diagonal, row + tile.k_len - q_len);
        }
        assert_eq!(next as usize, offsets_q[offsets_q.len() - 1]);
    }

    #[test]
    fn eighty_thousand_segments() {
        let offsets = cumulative(std::iter::repeat_n(16, 80_000));
        let list = WorkList::new(&offsets, &offsets, 32).unwrap();
        assert_eq!(list.tiles().len(), 80_000);
        assert_eq!(list.tiles()[79_999].q_start, 79_999 * 16);
    }

    #[test]
    fn empty_batches_have_no_tiles() {
        for offsets in [vec![0], vec![0, 0, 0]] {
            assert!(WorkList::new(&offsets, &offsets, 32).unwrap().tiles().is_empty());
        }
    }

    #[test]
    fn bad_offsets_are_named() {
        let error = |q: &[usize], k: &[usize]| WorkList::new(q, k, 32).unwrap_err().to_string();
        assert_eq!(error(&[], &[0]), "offsets_q: offsets must start with 0, got None");
        assert_eq!(error(&[0, 3], &[1, 3]), "offsets_k: offsets must start with 0, got Some(1)");
        assert_eq!(
            error(&[0, 3, 2], &[0, 3, 3]),
            "offsets_q: offset 2 is 2, less than the 3 before it"
        );
        assert_eq!(
            error(&[0, 3], &[0, 3, 4]),
            "offsets_k: 2 segments, offsets_q has 1; both must have the same number"
        );
        assert!(error(&[0, MAX_TOKENS + 1], &[0, 1]).starts_with("offsets_q: 268435457 tokens"));
    }

    #[test]
    fn no_axis_passes_the_limit_and_waste_is_small() {
        let device = (u32::MAX, 65_535, 65_535);
        for cubes in [0, 1, 65_535, 65_536, 70_000, 80_000 * 12, 1 << 30, (1 << 31) - 1] {
            let CubeCount::Static(x, y, z) = fold_grid(cubes, device).unwrap() else {
                panic!("static grid expected")
            };
            assert!(x <= 65_535 && y <= 65_535 && z <= 65_535);
            let held = u64::from(x) * u64::from(y) * u64::from(z);
            assert!(held >= cubes);
            assert!(held - cubes <= u64::from(y * z).max(1) + u64::from(x), "{cubes}: {x} {y} {z}");
        }
        assert!(fold_grid(1 << 31, device).is_err());
        let CubeCount::Static(x, y, z) = fold_grid(1000, (16, 16, 16)).unwrap() else {
            panic!("static grid expected")
        };
        assert!(x <= 16 && y <= 16 && z <= 16 && x * y * z >= 1000);
        assert!(fold_grid(4097, (16, 16, 16)).is_err());
    }
}
