//! Memory that is asked for before it is needed.

use std::ops::Range;

use crate::element::Element;
use crate::view::{Out, View, prefetch_line};

const LINE: usize = 64;

/// Segments of so many tokens are asked for ahead: they fit the second cache.
pub(crate) const SHORT: usize = 256;

/// Cache lines that the next task will need, asked for one at a time at the steps of this one's products:
/// a processor that is asked for all of them at once can do nothing else meanwhile.
#[derive(Default)]
pub(crate) struct Ahead {
    /// What is left, the last of it first.
    parts: Vec<Rows>,
    /// The row at hand.
    row: *const u8,
    /// Lines of it which are left.
    lines: usize,
}

/// Rows of as many bytes.
#[derive(Clone, Copy)]
struct Rows {
    start: *const u8,
    stride: isize,
    rows: usize,
    bytes: usize,
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
        self.parts.push(Rows {
            start: start.cast::<u8>(),
            stride: stride * size_of::<T>() as isize,
            rows,
            bytes: dim * size_of::<T>(),
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
                let skipped = part.start.addr() % LINE;
                self.row = part.start.wrapping_sub(skipped);
                self.lines = (skipped + part.bytes).div_ceil(LINE);
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
    use crate::view::ViewMut;

    /// The lines that are asked for, counted from the one where `data` begins.
    fn asked(ahead: &mut Ahead, data: &[f32]) -> Vec<usize> {
        let origin = data.as_ptr().addr() / LINE;
        let mut lines = Vec::new();
        while ahead.lines > 0 {
            lines.push(ahead.row.addr() / LINE + ahead.lines - 1 - origin);
            ahead.one();
        }
        lines.sort_unstable();
        lines
    }

    /// The lines that rows of `dim` numbers touch which begin at `starts`.
    fn touched(data: &[f32], starts: impl Iterator<Item = usize>, dim: usize) -> Vec<usize> {
        let origin = data.as_ptr().addr() / LINE;
        let line = |number: usize| data.as_ptr().wrapping_add(number).addr() / LINE - origin;
        let mut lines: Vec<_> =
            starts.flat_map(|start| line(start)..=line(start + dim - 1)).collect();
        lines.sort_unstable();
        lines
    }

    /// Distances are no whole lines, so that rows touch different numbers of them.
    #[test]
    fn every_line_is_asked_for_once() {
        let data = vec![0.0f32; 4096];
        let view = View::new(&data, 8, [12, 2, 40], [100, 50, 1]);
        let starts = |head: usize| (3..7).map(move |token: usize| 8 + token * 100 + head * 50);
        let mut ahead = Ahead::default();
        ahead.read(&view, &(3..7), 1);
        assert_eq!(asked(&mut ahead, &data), touched(&data, starts(1), 40));
        // Several parts, of which the last is asked for first; then nothing is left.
        ahead.read(&view, &(3..7), 1);
        ahead.read(&view, &(3..7), 0);
        let mut expected = [touched(&data, starts(0), 40), touched(&data, starts(1), 40)].concat();
        expected.sort_unstable();
        assert_eq!(asked(&mut ahead, &data), expected);
        ahead.one();
        assert!(ahead.parts.is_empty());
    }

    #[test]
    fn what_is_left_can_be_asked_for_at_once_or_forgotten() {
        let mut data = vec![0.0f32; 4096];
        let out = ViewMut::new(&mut data, 2000, [2, 1, 70], [70, 70]).out;
        let mut ahead = Ahead::default();
        ahead.write(&out, &(0..2), 0);
        ahead.all();
        assert!(ahead.lines == 0 && ahead.parts.is_empty());
        ahead.write(&out, &(0..2), 0);
        ahead.clear();
        assert!(ahead.lines == 0 && ahead.parts.is_empty());
        ahead.write(&out, &(0..2), 0);
        let found = asked(&mut ahead, &data);
        assert_eq!(found, touched(&data, [2000, 2070].into_iter(), 70));
    }
}
