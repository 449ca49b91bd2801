//! Strided views `[tokens, heads, dim]` of plain slices.

use std::ops::Range;

use crate::element::Element;
use crate::simd::HeadRows;

mod mutable;

pub use mutable::ViewMut;
pub(crate) use mutable::{Out, RowsMut, packed};

/// A read-only view `[tokens, heads, dim]` of a slice.
///
/// Strides count elements; they may be 0 (expanded) or negative (flipped). A last stride of 1 is the
/// fast case.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    data: &'a [T],
    offset: usize,
    shape: [usize; 3],
    strides: [isize; 3],
}

impl<'a, T: Element> View<'a, T> {
    /// The view whose element `[t, h, d]` is
    /// `data[offset + t * strides[0] + h * strides[1] + d * strides[2]]`.
    ///
    /// # Panics
    ///
    /// When an element of the view lies outside `data`.
    pub fn new(data: &'a [T], offset: usize, shape: [usize; 3], strides: [isize; 3]) -> Self {
        check_bounds(data.len(), offset, shape, strides);
        Self { data, offset, shape, strides }
    }

    /// A row-major view of the whole of `data`.
    ///
    /// # Panics
    ///
    /// When `data` does not have as many elements as `shape`.
    pub fn contiguous(data: &'a [T], shape: [usize; 3]) -> Self {
        let expected = shape.iter().product::<usize>();
        assert_eq!(data.len(), expected, "data: expected {expected} elements for {shape:?}");
        Self { data, offset: 0, shape, strides: contiguous_strides(shape) }
    }

    /// `[tokens, heads, dim]`.
    pub fn shape(&self) -> [usize; 3] {
        self.shape
    }

    /// Tokens and elements exchanged.
    pub(crate) fn transposed(&self) -> Self {
        let ([tokens, heads, dim], [token, head, element]) = (self.shape, self.strides);
        Self { shape: [dim, heads, tokens], strides: [element, head, token], ..*self }
    }

    /// Some elements of every row.
    ///
    /// # Panics
    ///
    /// When there are not as many.
    pub(crate) fn columns(&self, elements: Range<usize>) -> Self {
        let [tokens, heads, dim] = self.shape;
        assert!(
            elements.start <= elements.end && elements.end <= dim,
            "columns {elements:?} of {dim}"
        );
        let offset = self.offset as isize + elements.start as isize * self.strides[2];
        Self { offset: offset as usize, shape: [tokens, heads, elements.len()], ..*self }
    }

    /// Some tokens.
    ///
    /// # Panics
    ///
    /// When there are not as many.
    pub(crate) fn tokens(&self, tokens: Range<usize>) -> Self {
        let [all, heads, dim] = self.shape;
        assert!(tokens.start <= tokens.end && tokens.end <= all, "tokens {tokens:?} of {all}");
        let offset = self.offset as isize + tokens.start as isize * self.strides[0];
        Self { offset: offset as usize, shape: [tokens.len(), heads, dim], ..*self }
    }

    fn start(&self, token: usize, head: usize) -> isize {
        self.offset as isize + token as isize * self.strides[0] + head as isize * self.strides[1]
    }

    /// The elements of one token and head, where they lie side by side.
    pub(crate) fn row(&self, token: usize, head: usize) -> Option<&'a [T]> {
        let [_, _, dim] = self.shape;
        let start = self.start(token, head) as usize;
        (self.strides[2] == 1 || dim <= 1).then(|| &self.data[start..start + dim])
    }

    /// All heads of a token where they lie, if their type is the compute type and the elements of each lie
    /// side by side.
    pub(crate) fn heads_in_place(&self, token: usize) -> Option<HeadRows<&'a [T::Compute]>> {
        let [_, heads, dim] = self.shape;
        if self.strides[2] != 1 || self.strides[1] < 0 || heads == 0 {
            return None;
        }
        let data = T::as_compute(self.data)?;
        let (start, stride) = (self.start(token, 0) as usize, self.strides[1] as usize);
        let elements = &data[start..start + (heads - 1) * stride + dim];
        Some(HeadRows { elements, stride, ahead: self.strides[0] })
    }

    /// All heads of a token in the compute type: in place where type and strides allow, otherwise through
    /// `staging`, which has room for them.
    pub(crate) fn heads<'b>(
        &self,
        token: usize,
        staging: &'b mut [T::Compute],
    ) -> HeadRows<&'b [T::Compute]>
    where
        'a: 'b,
    {
        if let Some(rows) = self.heads_in_place(token) {
            return rows;
        }
        let [_, heads, dim] = self.shape;
        // Heads that are all the same are read once.
        let (distinct, stride) =
            if self.strides[1] == 0 { (heads.min(1), 0) } else { (heads, dim) };
        for (head, row) in (0..distinct).zip(staging.chunks_exact_mut(dim)) {
            self.read(token, head, row);
        }
        HeadRows { elements: staging, stride, ahead: 0 }
    }

    /// Where the elements of a token and head begin, and the distance to the next token's, where elements
    /// lie side by side.
    pub(crate) fn place(&self, token: usize, head: usize) -> Option<(*const T, isize)> {
        let start = self.data.as_ptr().wrapping_offset(self.start(token, head));
        (self.strides[2] == 1).then_some((start, self.strides[0]))
    }

    /// Copies one token and head into `row`, in the compute type.
    pub(crate) fn read(&self, token: usize, head: usize, row: &mut [T::Compute]) {
        match self.row(token, head) {
            Some(elements) => T::widen_all(elements, row),
            None if self.strides[2] == 0 => {
                let element = self.data[self.start(token, head) as usize].widen();
                row.iter_mut().take(self.shape[2]).for_each(|target| *target = element);
            }
            None => {
                let start = self.start(token, head);
                for (i, target) in row.iter_mut().enumerate().take(self.shape[2]) {
                    *target = self.data[(start + i as isize * self.strides[2]) as usize].widen();
                }
            }
        }
    }

    /// One token and head in the compute type: in place where type and strides allow, otherwise through
    /// `staging`.
    pub(crate) fn compute_row<'b>(
        &self,
        token: usize,
        head: usize,
        staging: &'b mut [T::Compute],
    ) -> &'b [T::Compute]
    where
        'a: 'b,
    {
        match self.row(token, head).and_then(T::as_compute) {
            Some(row) => row,
            None => {
                self.read(token, head, staging);
                &staging[..self.shape[2]]
            }
        }
    }

    /// Rows `tokens` of one head where they lie, and the distance between rows, if their type is the
    /// compute type, there are some, and each lies side by side.
    pub(crate) fn rows_in_place(
        &self,
        tokens: Range<usize>,
        head: usize,
    ) -> Option<(&'a [T::Compute], usize)> {
        let [_, _, dim] = self.shape;
        if self.strides[2] != 1 || self.strides[0] < 0 || tokens.is_empty() {
            return None;
        }
        let data = T::as_compute(self.data)?;
        let stride = self.strides[0] as usize;
        let start = self.start(tokens.start, head) as usize;
        Some((&data[start..start + (tokens.len() - 1) * stride + dim], stride))
    }

    /// Rows `tokens` of one head in the compute type, and the distance between rows: read in place where
    /// their type and strides allow, otherwise through `staging`.
    pub(crate) fn rows<'b>(
        &self,
        tokens: Range<usize>,
        head: usize,
        staging: &'b mut [T::Compute],
    ) -> (&'b [T::Compute], usize)
    where
        'a: 'b,
    {
        let [_, _, dim] = self.shape;
        if tokens.is_empty() || dim == 0 {
            return (&[], dim);
        }
        if let Some(rows) = self.rows_in_place(tokens.clone(), head) {
            return rows;
        }
        for (token, row) in tokens.clone().zip(staging.chunks_exact_mut(dim)) {
            self.read(token, head, row);
        }
        (&staging[..tokens.len() * dim], dim)
    }
}

/// Asks for the cache line at an address, which need not exist, to be brought into the second cache.
#[inline(always)]
pub(crate) fn prefetch_line<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch reads nothing, whatever the address; SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

fn contiguous_strides([_, heads, dim]: [usize; 3]) -> [isize; 3] {
    [(heads * dim) as isize, dim as isize, 1]
}

fn check_bounds(len: usize, offset: usize, shape: [usize; 3], strides: [isize; 3]) {
    if shape.contains(&0) {
        return;
    }
    let (mut low, mut high) = (offset as i128, offset as i128);
    for (size, stride) in shape.into_iter().zip(strides) {
        let reach = (size as i128 - 1) * stride as i128;
        low += reach.min(0);
        high += reach.max(0);
    }
    assert!(
        low >= 0 && high < len as i128,
        "data: shape {shape:?} with strides {strides:?} from {offset} reaches elements {low}..={high} \
         of {len}"
    );
}

/// Writes `row` times `factor`; `row` is overwritten.
pub(crate) fn write_row<T: Element>(target: &mut [T], row: &mut [T::Compute], factor: T::Compute) {
    if let Some(target) = T::as_compute_mut(target) {
        for (target, &value) in target.iter_mut().zip(&*row) {
            *target = value * factor;
        }
        return;
    }
    for value in row.iter_mut() {
        *value = *value * factor;
    }
    T::narrow_all(row, target);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_may_expand_and_flip() {
        let data = [0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0];
        let flipped = View::new(&data, 5, [2, 1, 3], [-3, 0, -1]);
        let mut row = [0.0; 3];
        flipped.read(1, 0, &mut row);
        assert_eq!(row, [2.0, 1.0, 0.0]);
        let expanded = View::new(&data, 1, [9, 2, 2], [0, 0, 1]);
        expanded.read(8, 1, &mut row[..2]);
        assert_eq!(row[..2], [1.0, 2.0]);
    }

    #[test]
    #[should_panic(expected = "reaches elements 0..=6 of 6")]
    fn a_view_past_its_slice_panics() {
        View::new(&[0.0f32; 6], 0, [2, 1, 3], [4, 0, 1]);
    }

    #[test]
    #[should_panic(expected = "expected at least 3 between disjoint rows")]
    fn a_writable_view_that_overlaps_panics() {
        ViewMut::new(&mut [0.0f32; 6], 0, [2, 1, 3], [2, 0]);
    }
}
