//! Which keys the queries of one segment see.

use std::ops::Range;

use super::AttentionOptions;

/// A band around the diagonal that ends at the last query and the last key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Band {
    queries: usize,
    keys: usize,
    left: Option<usize>,
    right: Option<usize>,
}

impl Band {
    pub(super) fn new(options: &AttentionOptions, queries: usize, keys: usize) -> Self {
        let (left, right) = options.window;
        Self { queries, keys, left, right: if options.is_causal { Some(0) } else { right } }
    }

    /// The keys that query `query` sees.
    fn row(&self, query: usize) -> Range<usize> {
        let diagonal = (query + self.keys) as i128 - self.queries as i128;
        let clamp = |key: i128| key.clamp(0, self.keys as i128) as usize;
        let start = self.left.map_or(0, |left| clamp(diagonal - left as i128));
        let end = self.right.map_or(self.keys, |right| clamp(diagonal + right as i128 + 1));
        start..end.max(start)
    }

    /// The keys that some of `queries` see. Both ends of a row's keys only ever move to the right.
    pub(super) fn seen_by_some(&self, queries: &Range<usize>) -> Range<usize> {
        let (first, last) = (self.row(queries.start), self.row(queries.end - 1));
        first.start..last.end.max(first.start)
    }

    /// The queries of `queries` that see `key`.
    fn column(&self, key: usize, queries: &Range<usize>) -> Range<usize> {
        let shift = self.queries as i128 - self.keys as i128;
        let clamp = |query: i128| query.clamp(queries.start as i128, queries.end as i128) as usize;
        let diagonal = key as i128 + shift;
        let start = self.right.map_or(queries.start, |right| clamp(diagonal - right as i128));
        let end = self.left.map_or(queries.end, |left| clamp(diagonal + left as i128 + 1));
        start..end.max(start)
    }

    /// Fills what `queries` do not see of `keys` in `tile`, which has a row of `block` lanes for each key
    /// and a lane for each query.
    pub(super) fn mask<C: Copy>(
        &self,
        tile: &mut [C],
        block: usize,
        keys: &Range<usize>,
        queries: &Range<usize>,
        value: C,
    ) {
        let (first, last) = (self.row(queries.start), self.row(queries.end - 1));
        if first.start.max(last.start) <= keys.start && first.end.min(last.end) >= keys.end {
            return;
        }
        for (key, row) in keys.clone().zip(tile.chunks_exact_mut(block)) {
            let seeing = self.column(key, queries);
            row[..seeing.start - queries.start].fill(value);
            row[seeing.end - queries.start..].fill(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rows_and_columns_are_what_the_definition_says(
            (queries, keys) in (1usize..12, 0usize..12),
            is_causal: bool,
            window in (proptest::option::of(0usize..6), proptest::option::of(0usize..6)),
        ) {
            let options = AttentionOptions { is_causal, window, ..AttentionOptions::new(1.0) };
            let band = Band::new(&options, queries, keys);
            let sees = |query: usize, key: usize| {
                let distance = key as i64 - (query as i64 + keys as i64 - queries as i64);
                let right = if is_causal { Some(0) } else { window.1 };
                window.0.is_none_or(|left| distance >= -(left as i64))
                    && right.is_none_or(|right| distance <= right as i64)
            };
            for query in 0..queries {
                let seen = (0..keys).filter(|&key| sees(query, key)).collect::<Vec<_>>();
                prop_assert_eq!(band.row(query).collect::<Vec<_>>(), seen);
            }
            let all = 0..keys;
            let mut tile = vec![1; keys * queries];
            band.mask(&mut tile, queries, &all, &(0..queries), 0);
            for key in 0..keys {
                for query in 0..queries {
                    prop_assert_eq!(tile[key * queries + query] == 1, sees(query, key));
                }
            }
        }
    }
}
