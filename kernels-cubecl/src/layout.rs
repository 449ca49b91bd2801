//! How a rank-3 tensor lies in its buffer.

use cubecl::prelude::TensorBinding;

use crate::LaunchError;

/// Widest vector that the plain kernels read and all of them write, in elements.
pub(crate) const VECTOR: usize = 4;

/// Shape and element strides of a rank-3 tensor `[tokens, heads, head_dim]`.
///
/// Strides are free: slices, permutations and padded rows are read in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorLayout {
    /// Elements per axis.
    pub shape: [usize; 3],
    /// Elements between neighbours on each axis.
    pub strides: [usize; 3],
}

impl TensorLayout {
    /// Row-major layout without gaps.
    pub fn contiguous(shape: [usize; 3]) -> Self {
        Self { shape, strides: [shape[1] * shape[2], shape[2], 1] }
    }

    /// The layout of a rank-3 binding.
    ///
    /// # Panics
    ///
    /// If the binding named `argument` does not have rank 3.
    pub fn of(argument: &str, binding: &TensorBinding) -> Self {
        let rank = binding.shape.len();
        assert_eq!(rank, 3, "{argument}: expected rank 3, got rank {rank}");
        Self {
            shape: core::array::from_fn(|axis| binding.shape[axis]),
            strides: core::array::from_fn(|axis| binding.strides[axis]),
        }
    }

    /// Whether the layout is row-major without gaps. Strides of axes with one element are free.
    pub fn is_contiguous(&self) -> bool {
        let expected = Self::contiguous(self.shape).strides;
        self.is_empty()
            || (0..3).all(|axis| self.shape[axis] == 1 || self.strides[axis] == expected[axis])
    }

    /// Whether the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Elements from the first to the last one addressed, both included.
    pub fn span(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        (0..3)
            .map(|axis| (self.shape[axis] - 1).saturating_mul(self.strides[axis]))
            .fold(1usize, usize::saturating_add)
    }

    /// Whether TMA can copy tiles of 16-bit elements from it: `cuTensorMapEncodeTiled` wants neighbours side
    /// by side, and strides of whole 16 bytes, more than none and less than 2^40. The order of the axes is
    /// free.
    pub fn copies_by_tma(&self) -> bool {
        const UNIT: usize = 8;
        const LIMIT: usize = 1 << 39;
        let strides = self.shape.into_iter().zip(self.strides);
        let mut strides = strides.filter(|&(size, _)| size > 1).map(|(_, stride)| stride);
        self.vector_size_up_to(UNIT, UNIT) == UNIT && strides.all(|s| 0 < s && s < LIMIT)
    }

    /// Widest vector, in elements, that `unit` consecutive elements of the last axis can be moved
    /// by: [`VECTOR`] or 1.
    pub(crate) fn vector_size(&self, unit: usize) -> usize {
        self.vector_size_up_to(VECTOR, unit)
    }

    /// As [`vector_size`](Self::vector_size), with `widest`, [`VECTOR`] and 1 to choose from.
    pub(crate) fn vector_size_up_to(&self, widest: usize, unit: usize) -> usize {
        let [token, head, element] = self.strides;
        let fits = |size: usize| {
            let aligned =
                |axis: usize, stride: usize| self.shape[axis] <= 1 || stride.is_multiple_of(size);
            element == 1 && unit.is_multiple_of(size) && aligned(0, token) && aligned(1, head)
        };
        [widest, VECTOR].into_iter().find(|&size| fits(size)).unwrap_or(1)
    }
}

/// Checks that a binding is what the problem said, lies inside its buffer and starts where vectors
/// of `vector_size` elements can be read.
///
/// # Panics
///
/// If shape or strides differ from `layout`.
pub(crate) fn check_binding(
    argument: &'static str,
    binding: &TensorBinding,
    layout: &TensorLayout,
    vector_size: usize,
    elem_size: usize,
) -> Result<(), LaunchError> {
    let actual = TensorLayout::of(argument, binding);
    assert_eq!(actual, *layout, "{argument}: the binding's layout differs from the problem's");
    check_buffer(argument, binding, layout.span(), vector_size, elem_size)
}

/// Checks that `span` elements lie inside the buffer and start where vectors of `vector_size`
/// elements can be moved.
pub(crate) fn check_buffer(
    argument: &'static str,
    binding: &TensorBinding,
    span: usize,
    vector_size: usize,
    elem_size: usize,
) -> Result<(), LaunchError> {
    let required = (span as u64).saturating_mul(elem_size as u64);
    let available = binding.handle.size_in_used();
    if required > available {
        return Err(LaunchError::OutOfBounds { argument, required, available });
    }
    let alignment = (vector_size * elem_size) as u64;
    let offset = binding.handle.offset_start.unwrap_or(0);
    if !offset.is_multiple_of(alignment) {
        return Err(LaunchError::Misaligned { argument, offset, alignment });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn span_counts_to_the_last_element() {
        assert_eq!(TensorLayout::contiguous([5, 3, 8]).span(), 120);
        let slice = TensorLayout { shape: [5, 3, 8], strides: [72, 8, 1] };
        assert_eq!(slice.span(), 4 * 72 + 2 * 8 + 7 + 1);
        assert!(!slice.is_contiguous());
        assert_eq!(TensorLayout::contiguous([0, 3, 8]).span(), 0);
        let huge = TensorLayout { shape: [usize::MAX, 2, 2], strides: [usize::MAX, 1, 1] };
        assert_eq!(huge.span(), usize::MAX);
    }

    #[test]
    fn tiles_are_copied_in_units_of_16_bytes() {
        let strided = |strides| TensorLayout { shape: [5, 3, 72], strides };
        assert!(strided([216, 72, 1]).copies_by_tma());
        assert!(strided([72, 360, 1]).copies_by_tma());
        assert!(!strided([220, 72, 1]).copies_by_tma());
        assert!(!strided([216, 72, 2]).copies_by_tma());
        assert!(!strided([1 << 39, 72, 1]).copies_by_tma());
        assert!(!strided([216, 0, 1]).copies_by_tma(), "expanded heads");
        assert!(TensorLayout { shape: [1, 3, 72], strides: [3, 72, 1] }.copies_by_tma());
    }

    #[test]
    fn vectors_need_unit_stride_and_aligned_rows() {
        assert_eq!(TensorLayout::contiguous([5, 3, 8]).vector_size(8), 4);
        let strided = |strides| TensorLayout { shape: [5, 3, 8], strides };
        assert_eq!(strided([27, 9, 1]).vector_size(8), 1);
        assert_eq!(strided([48, 16, 2]).vector_size(8), 1);
        assert_eq!(strided([8, 40, 1]).vector_size(8), 4);
        assert_eq!(strided([8, 40, 1]).vector_size(6), 1);
        let one_head = TensorLayout { shape: [5, 1, 8], strides: [8, 9, 1] };
        assert_eq!(one_head.vector_size(8), 4);
    }
}
