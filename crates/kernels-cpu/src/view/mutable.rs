//! Writable views, and the rows of them that parallel tasks write.

use std::marker::PhantomData;
use std::ops::Range;

use super::check_bounds;
use crate::element::Element;

/// A writable view `[tokens, heads, dim]` of a slice, with `dim` elements side by side and no two
/// elements in the same place.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    pub(crate) out: Out<'a, T>,
}

impl<'a, T: Element> ViewMut<'a, T> {
    /// The view whose element `[t, h, d]` is `data[offset + t * strides[0] + h * strides[1] + d]`.
    ///
    /// # Panics
    ///
    /// When an element lies outside `data`, or when two elements share a place.
    pub fn new(data: &'a mut [T], offset: usize, shape: [usize; 3], strides: [usize; 2]) -> Self {
        let all = [strides[0] as isize, strides[1] as isize, 1];
        check_bounds(data.len(), offset, shape, all);
        let [tokens, heads, dim] = shape;
        let mut axes = [(strides[0], tokens), (strides[1], heads)];
        axes.sort_unstable();
        let mut extent = dim;
        for (stride, size) in axes {
            assert!(
                size <= 1 || stride >= extent,
                "strides: expected at least {extent} between disjoint rows, got {strides:?}"
            );
            extent += size.saturating_sub(1) * stride;
        }
        // SAFETY: `check_bounds` holds for these strides, so the offset lies inside `data` or the view
        // is empty.
        let start = unsafe { data.as_mut_ptr().add(offset.min(data.len())) };
        Self { out: Out { start, shape, strides, data: PhantomData } }
    }

    /// A row-major view of the whole of `data`.
    ///
    /// # Panics
    ///
    /// When `data` does not have as many elements as `shape`.
    pub fn contiguous(data: &'a mut [T], shape: [usize; 3]) -> Self {
        let expected = shape.iter().product::<usize>();
        assert_eq!(data.len(), expected, "data: expected {expected} elements for {shape:?}");
        let [_, heads, dim] = shape;
        Self::new(data, 0, shape, [heads * dim, dim])
    }

    /// `[tokens, heads, dim]`.
    pub fn shape(&self) -> [usize; 3] {
        self.out.shape
    }
}

/// Where parallel tasks write rows that belong to them alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Out<'a, T> {
    start: *mut T,
    shape: [usize; 3],
    strides: [usize; 2],
    data: PhantomData<&'a mut [T]>,
}

// SAFETY: an `Out` is a `&mut [T]` whose rows are handed out by `row`, whose callers promise that no row
// is used twice at the same time.
unsafe impl<T: Send> Send for Out<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Out<'_, T> {}

impl<T: Element> Out<'_, T> {
    pub(crate) fn shape(&self) -> [usize; 3] {
        self.shape
    }

    /// Where the elements of a token and head begin, and the distance to the next token's.
    pub(crate) fn place(&self, token: usize, head: usize) -> (*const T, usize) {
        let at = token * self.strides[0] + head * self.strides[1];
        (self.start.wrapping_add(at), self.strides[0])
    }

    /// Some of the tokens.
    ///
    /// # Panics
    ///
    /// When there are not as many.
    pub(crate) fn tokens(&self, tokens: Range<usize>) -> Self {
        let [all, heads, dim] = self.shape;
        assert!(tokens.start <= tokens.end && tokens.end <= all, "tokens {tokens:?} of {all}");
        // Where no tokens are left, nothing is ever read through the pointer.
        let start = self.start.wrapping_add(tokens.start * self.strides[0]);
        Self { start, shape: [tokens.len(), heads, dim], ..*self }
    }

    /// # Safety
    ///
    /// No other reference to this row may be alive.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn row(&self, token: usize, head: usize) -> &mut [T] {
        // SAFETY: as promised by the caller.
        unsafe { self.row_part(token, head, 0..self.shape[2]) }
    }

    /// Rows `tokens` of one head, if their type is the compute type.
    ///
    /// # Safety
    ///
    /// No other reference to one of these rows may be alive.
    pub(crate) unsafe fn rows_in_place(
        &self,
        tokens: Range<usize>,
        head: usize,
    ) -> Option<RowsMut<'_, T::Compute>> {
        let [all, heads, dim] = self.shape;
        assert!(tokens.start <= tokens.end && tokens.end <= all, "tokens {tokens:?} of {all}");
        assert!(head < heads, "head {head} of {heads}");
        T::as_compute_mut(&mut [])?;
        let at = tokens.start * self.strides[0] + head * self.strides[1];
        let start = self.start.wrapping_add(at).cast::<T::Compute>();
        let shape = [tokens.len(), dim];
        Some(RowsMut { start, stride: self.strides[0], shape, data: PhantomData })
    }

    /// All heads of a token, where they lie side by side.
    ///
    /// # Safety
    ///
    /// No other reference to a row of this token may be alive.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn heads(&self, token: usize) -> Option<&mut [T]> {
        let [tokens, heads, dim] = self.shape;
        assert!(token < tokens, "token {token} of {:?}", self.shape);
        let start = self.start.wrapping_add(token * self.strides[0]);
        // SAFETY: the constructor checked that every row lies inside the slice, and these are rows side
        // by side that the caller has for itself.
        (self.strides[1] == dim)
            .then(|| unsafe { std::slice::from_raw_parts_mut(start, heads * dim) })
    }

    /// Some elements of a row.
    ///
    /// # Safety
    ///
    /// No other reference to one of these elements may be alive.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn row_part(
        &self,
        token: usize,
        head: usize,
        elements: Range<usize>,
    ) -> &mut [T] {
        let [tokens, heads, dim] = self.shape;
        assert!(token < tokens && head < heads, "row {token}, {head} of {:?}", self.shape);
        assert!(elements.end <= dim, "elements {elements:?} of {:?}", self.shape);
        let at = token * self.strides[0] + head * self.strides[1] + elements.start;
        // SAFETY: the constructor checked that every row with elements lies inside the slice, and these
        // are elements of one.
        unsafe { std::slice::from_raw_parts_mut(self.start.wrapping_add(at), elements.len()) }
    }
}

/// Rows to write, between which there is what belongs to others.
#[derive(Debug)]
pub(crate) struct RowsMut<'a, C> {
    start: *mut C,
    stride: usize,
    shape: [usize; 2],
    data: PhantomData<&'a mut [C]>,
}

impl<C> RowsMut<'_, C> {
    /// The number of rows and of elements in each.
    pub(crate) fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Where a row begins.
    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> *mut C {
        self.start.wrapping_add(row * self.stride)
    }
}

/// The views of q, k and v in one buffer `[tokens, 3, heads, dim]`.
///
/// # Panics
///
/// When `data` does not have as many elements as that.
pub(crate) fn packed<T: Element>(
    data: &mut [T],
    [tokens, heads, dim]: [usize; 3],
) -> [Out<'_, T>; 3] {
    let expected = tokens * 3 * heads * dim;
    assert_eq!(
        data.len(),
        expected,
        "gradients: expected {expected} elements for [{tokens}, 3, {heads}, {dim}]"
    );
    let start = data.as_mut_ptr();
    [0, 1, 2].map(|part| Out {
        // SAFETY: `part * heads * dim` is at most the length checked above; with no tokens nothing is
        // ever read through the pointer, and `wrapping_add` may leave the slice.
        start: start.wrapping_add(part * heads * dim),
        shape: [tokens, heads, dim],
        strides: [3 * heads * dim, dim],
        data: PhantomData,
    })
}
