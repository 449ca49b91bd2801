//! Memory that is asked for before it is needed.

use std::ops::Range;

use crate::element::Element;
use crate::view::{Out, View, prefetch_line};

const LINE: usize = 64;

/// Cache lines that the next task will need, asked for one at a time between the products of this one:
/// a processor that is asked for all of them at once can do nothing else meanwhile.
#[derive(Default)]
pub(crate) struct Ahead {
    /// The rows that are being asked for last.
    parts: Vec<Rows>,
    row: *const u8,
    /// Lines of that row which are left.
    lines: usize,
}

/// Rows of as many bytes.
#[derive(Clone, Copy)]
struct Rows {
    start: *const u8,
    stride: isize,
    rows: usize,
    lines: usize,
}

impl Ahead {
    pub(crate) fn clear(&mut self) {
        self.parts.clear();
        self.lines = 0;
    }

    /// Adds the rows of some tokens and a head, if they lie side by side in memory.
    pub(crate) fn read<T: Element>(
        &mut self,
        view: &View<'_, T>,
        tokens: &Range<usize>,
        head: usize,
    ) {
        let [_, _, dim] = view.shape();
        if let Some((start, stride)) = view.place(tokens.start, head) {
            self.add::<T>(start, stride, tokens.len(), dim);
        }
    }

    /// The same for rows to write.
    pub(crate) fn write<T: Element>(
        &mut self,
        out: &Out<'_, T>,
        tokens: &Range<usize>,
        head: usize,
    ) {
        let [_, _, dim] = out.shape();
        let (start, stride) = out.place(tokens.start, head);
        self.add::<T>(start, stride as isize, tokens.len(), dim);
    }

    fn add<T>(&mut self, start: *const T, stride: isize, rows: usize, dim: usize) {
        if rows == 0 || dim == 0 {
            return;
        }
        let skipped = start.addr() % LINE;
        self.parts.push(Rows {
            start: start.cast::<u8>().wrapping_sub(skipped),
            stride: stride * size_of::<T>() as isize,
            rows,
            lines: (skipped + dim * size_of::<T>()).div_ceil(LINE),
        });
        if self.parts.len() == 1 {
            self.turn();
        }
    }

    /// Asks for a line, if there is one left.
    #[inline(always)]
    pub(crate) fn one(&mut self) {
        if self.lines > 0 {
            self.lines -= 1;
            prefetch_line(self.row.wrapping_add(self.lines * LINE));
            if self.lines == 0 {
                self.turn();
            }
        }
    }

    /// Turns to the next row.
    fn turn(&mut self) {
        while let Some(part) = self.parts.last_mut() {
            if part.rows > 0 {
                (self.row, self.lines) = (part.start, part.lines);
                part.start = part.start.wrapping_offset(part.stride);
                part.rows -= 1;
                return;
            }
            self.parts.pop();
        }
    }

    /// Asks for all that is left.
    pub(crate) fn all(&mut self) {
        while self.lines > 0 {
            self.one();
        }
    }
}

// SAFETY: the addresses are never read through.
unsafe impl Send for Ahead {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_asked_for_once() {
        let data = [0.0f32; 4096];
        // Rows of 40 numbers, which touch three or four lines.
        let view = View::new(&data, 8, [12, 2, 40], [128, 40, 1]);
        let mut ahead = Ahead::default();
        ahead.read(&view, &(3..7), 1);
        let mut rows = Vec::new();
        while ahead.lines > 0 {
            let row = (ahead.row.addr() - data.as_ptr().addr() % LINE) / LINE;
            rows.push((row, ahead.lines));
            ahead.one();
        }
        assert_eq!(rows.len(), 4 * rows[0].1);
        assert!((3..=4).contains(&rows[0].1));
        // Nothing is left, and nothing is asked for.
        ahead.one();
        assert!(ahead.parts.is_empty());
    }
}
