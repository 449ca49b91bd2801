//! Which keys a query row may see.

use cubecl::prelude::*;

/// The visible keys of each row of one query tile, as indices inside the segment.
///
/// Row `r` sees key `c` if `c < k_len`, `c <= r + diagonal + right` and
/// `c >= r + diagonal - left`, where unbounded sides are dropped at compile time. `diagonal` is
/// `q_row + k_len - q_len` of row 0: causal attention (`right = 0`) is aligned bottom-right and
/// windows shift by `k_len - q_len`, as flash-attention has it.
#[derive(CubeType, Clone, Copy, Debug)]
#[expand(derive(Clone, Copy))]
pub struct Band {
    /// Key on the diagonal of row 0.
    pub diagonal: i32,
    /// Keys visible to the left of the diagonal.
    pub left: i32,
    /// Keys visible to the right of the diagonal.
    pub right: i32,
    /// Keys of the segment.
    pub k_len: i32,
    /// Whether `left` applies.
    #[cube(comptime)]
    pub bounded_left: bool,
    /// Whether `right` applies.
    #[cube(comptime)]
    pub bounded_right: bool,
}

#[cube]
impl Band {
    /// Whether row `row` of the tile sees key `key` of the segment.
    pub fn sees(&self, row: i32, key: i32) -> bool {
        let mut visible = key < self.k_len;
        if comptime!(self.bounded_right) {
            visible = visible && key <= row + self.diagonal + self.right;
        }
        if comptime!(self.bounded_left) {
            visible = visible && key >= row + self.diagonal - self.left;
        }
        visible
    }

    /// First key that any row of the tile sees; whole key tiles before it are skipped.
    pub fn first_key(&self) -> i32 {
        let mut first = 0i32.runtime();
        if comptime!(self.bounded_left) {
            first = max(0i32, self.diagonal - self.left);
        }
        first
    }

    /// One past the last key that any of the `rows` rows sees.
    pub fn end_key(&self, rows: i32) -> i32 {
        let mut end = self.k_len;
        if comptime!(self.bounded_right) {
            end = min(end, rows + self.diagonal + self.right);
        }
        end
    }

    /// Keys of the segment from `key` on, at most `limit`, and none past its end.
    pub fn keys_from(&self, key: i32, limit: i32) -> u32 {
        max(0i32, min(limit, self.k_len - key)) as u32
    }

    /// Whether some of the `rows` rows do not see some of the `keys` keys from `first_key` on.
    pub fn cuts(&self, first_key: i32, keys: i32, rows: i32) -> bool {
        let mut cut = first_key + keys > self.k_len;
        if comptime!(self.bounded_right) {
            cut = cut || first_key + keys - 1 > self.diagonal + self.right;
        }
        if comptime!(self.bounded_left) {
            cut = cut || first_key < rows - 1 + self.diagonal - self.left;
        }
        cut
    }
}

#[cfg(test)]
mod tests {
    use super::Band;

    /// Gradients of tiles that are not cut are not masked at all.
    #[test]
    fn tiles_are_cut_exactly_where_a_row_does_not_see_a_key() {
        let sides = [(false, 0), (true, 0), (true, 1), (true, 3)];
        for (bounded_left, left) in sides {
            for (bounded_right, right) in sides {
                for diagonal in -3..4 {
                    let band =
                        Band { diagonal, left, right, k_len: 7, bounded_left, bounded_right };
                    for (first, keys, rows) in grid() {
                        let seen = (0..rows)
                            .all(|row| (first..first + keys).all(|key| band.sees(row, key)));
                        let tile = (first, keys, rows);
                        assert_eq!(band.cuts(first, keys, rows), !seen, "{tile:?} of {band:?}");
                    }
                }
            }
        }
    }

    /// First keys, keys and rows of tiles.
    fn grid() -> impl Iterator<Item = (i32, i32, i32)> {
        (0..8).flat_map(|first| {
            (1..5).flat_map(move |keys| (1..5).map(move |rows| (first, keys, rows)))
        })
    }
}
