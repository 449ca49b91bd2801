//! Memory for results.

use crate::element::{Element, Real};

/// As many zeros.
///
/// A large buffer comes from the system page by page as it is first written to, which takes longer than
/// much of what the kernels compute; where the system has larger pages for those who ask, this asks.
pub fn zeros<T: Element>(len: usize) -> Vec<T> {
    let zeros = vec![T::narrow(T::Compute::ZERO); len];
    #[cfg(target_os = "linux")]
    large_pages(&zeros);
    zeros
}

/// Asks Linux for large pages behind the whole ones of `buffer` that it has not given out yet.
#[cfg(target_os = "linux")]
fn large_pages<T>(buffer: &[T]) {
    use std::ffi::{c_int, c_void};

    /// Of x86-64 and, with pages of 4 KiB, of 64-bit Arm.
    const LARGE_PAGE: usize = 2 << 20;
    const MADV_HUGEPAGE: c_int = 14;
    unsafe extern "C" {
        fn madvise(start: *mut c_void, len: usize, advice: c_int) -> c_int;
    }
    let start = buffer.as_ptr().cast::<u8>();
    let skipped = start.align_offset(LARGE_PAGE);
    let len = size_of_val(buffer).saturating_sub(skipped) / LARGE_PAGE * LARGE_PAGE;
    if len > 0 {
        // SAFETY: the range lies inside the buffer, and this advice changes no contents. A system that
        // does not take it says so, which changes nothing either.
        unsafe { madvise(start.wrapping_add(skipped).cast_mut().cast(), len, MADV_HUGEPAGE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_buffers_are_zeros_too() {
        for len in [0, 1, 1 << 20, (5 << 20) + 3] {
            let zeros = zeros::<f32>(len);
            assert!(zeros.len() == len && zeros.iter().all(|&x| x == 0.0));
        }
    }
}
