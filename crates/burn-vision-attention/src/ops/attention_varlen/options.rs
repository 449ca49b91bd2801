//! What a caller may choose about attention, and what that means for a pair of lengths.

use std::ops::Range;

/// Options of [`attention_varlen`](super::attention_varlen); the default is plain attention.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttentionOptions {
    /// Factor on q k^T; `1 / sqrt(head_dim)` when absent.
    pub softmax_scale: Option<f64>,
    /// Whether a query ignores later keys. With lengths that differ the triangle is aligned at the
    /// bottom right: the last query sees all keys.
    pub is_causal: bool,
    /// How far a query looks to either side.
    pub window: Window,
    /// Scores become `softcap * tanh(scores / softcap)` before the softmax.
    pub softcap: Option<f64>,
}

impl AttentionOptions {
    /// The factor on q k^T for a head dimension.
    pub(crate) fn scale(&self, head_dim: usize) -> f64 {
        self.softmax_scale.unwrap_or_else(|| 1.0 / (head_dim as f64).sqrt())
    }
}

/// A sliding window over keys: query `i` sees keys `i + shift - left ..= i + shift + right`, where
/// `shift` is the number of keys less the number of queries of the segment. No limit when absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Keys before the query's own place.
    pub left: Option<usize>,
    /// Keys after the query's own place.
    pub right: Option<usize>,
}

/// The keys that queries of one segment see, as a band around the shifted diagonal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Band {
    queries: usize,
    keys: usize,
    /// Keys before and after the diagonal.
    left: Option<usize>,
    right: Option<usize>,
}

impl Band {
    pub(super) fn new(options: &AttentionOptions, queries: usize, keys: usize) -> Self {
        let right = if options.is_causal { Some(0) } else { options.window.right };
        Self { queries, keys, left: options.window.left, right }
    }

    /// Column of the diagonal in row `row`; may lie outside the keys.
    pub(super) fn diagonal(&self, row: usize) -> i64 {
        row as i64 + self.keys as i64 - self.queries as i64
    }

    /// The keys seen by at least one of `rows`.
    pub(super) fn keys(&self, rows: &Range<usize>) -> Range<usize> {
        let clamp = |column: i64| column.clamp(0, self.keys as i64) as usize;
        if rows.is_empty() {
            return 0..0;
        }
        let start = self.left.map_or(0, |left| clamp(self.diagonal(rows.start) - offset(left)));
        let end = self
            .right
            .map_or(self.keys, |right| clamp(self.diagonal(rows.end - 1) + offset(right) + 1));
        start..end.max(start)
    }

    /// The rows that see at least one key.
    pub(super) fn seeing_rows(&self) -> Range<usize> {
        if self.keys == 0 {
            return 0..0;
        }
        let shift = self.diagonal(0);
        let clamp = |row: i64| row.clamp(0, self.queries as i64) as usize;
        let start = self.right.map_or(0, |right| clamp(-shift - offset(right)));
        let end =
            self.left.map_or(self.queries, |left| clamp(self.keys as i64 + offset(left) - shift));
        start..end.max(start)
    }

    /// `(lowest, highest)` key of a row relative to its diagonal, where there is a limit.
    pub(super) fn limits(&self) -> (Option<i64>, Option<i64>) {
        (self.left.map(|left| -offset(left)), self.right.map(offset))
    }

    /// Whether only the causal triangle limits the rows.
    pub(super) fn is_triangle(&self) -> bool {
        self.left.is_none() && self.right == Some(0)
    }

    /// Whether some of `rows` sees fewer keys than the others do.
    pub(super) fn is_ragged(&self, rows: &Range<usize>) -> bool {
        let keys = self.keys(rows);
        [rows.start, rows.end - 1].into_iter().any(|row| self.keys(&(row..row + 1)) != keys)
    }
}

/// Distances are capped where they pass every length that fits a device's memory, so that
/// `usize::MAX` means no limit, and masks can compare them as 32-bit integers.
fn offset(distance: usize) -> i64 {
    distance.min(1 << 30) as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sees(
        options: &AttentionOptions,
        queries: usize,
        keys: usize,
        row: usize,
        key: usize,
    ) -> bool {
        let distance = key as i64 - (row as i64 + keys as i64 - queries as i64);
        let right = if options.is_causal { Some(0) } else { options.window.right };
        options.window.left.is_none_or(|left| distance >= -(left as i64))
            && right.is_none_or(|right| distance <= right as i64)
    }

    proptest! {
        #[test]
        fn the_band_is_what_its_definition_says(
            (queries, keys) in (1usize..12, 0usize..12),
            is_causal: bool,
            left in proptest::option::of(0usize..6),
            right in proptest::option::of(0usize..6),
        ) {
            let options = AttentionOptions { is_causal, window: Window { left, right }, ..Default::default() };
            let band = Band::new(&options, queries, keys);
            let seen = |row| (0..keys).filter(|&key| sees(&options, queries, keys, row, key)).collect::<Vec<_>>();
            for row in 0..queries {
                prop_assert_eq!(band.keys(&(row..row + 1)).collect::<Vec<_>>(), seen(row));
                prop_assert_eq!(band.seeing_rows().contains(&row), !seen(row).is_empty());
            }
            for end in 1..=queries {
                let union = band.keys(&(0..end));
                prop_assert!((0..end).flat_map(seen).all(|key| union.contains(&key)));
            }
        }
    }

    #[test]
    fn an_endless_window_is_no_window() {
        let window = Window { left: Some(usize::MAX), right: Some(usize::MAX) };
        let band = Band::new(&AttentionOptions { window, ..Default::default() }, 3, 5);
        assert_eq!((band.keys(&(0..3)), band.seeing_rows()), (0..5, 0..3));
    }
}
