//! Memory on the host, counted by the allocator of the program.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static BYTES: Bytes = Bytes::new();

/// Bytes in use now, and the most there ever were.
struct Bytes {
    live: AtomicUsize,
    peak: AtomicUsize,
}

impl Bytes {
    const fn new() -> Self {
        Self { live: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    fn grow(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(live, Relaxed);
    }

    fn shrink(&self, bytes: usize) {
        self.live.fetch_sub(bytes, Relaxed);
    }

    fn peak_during<T>(&self, call: impl FnOnce() -> T) -> (T, Option<usize>) {
        let before = self.live.load(Relaxed);
        self.peak.store(before, Relaxed);
        let result = call();
        let peak = self.peak.load(Relaxed).saturating_sub(before);
        (result, (before > 0).then_some(peak))
    }
}

/// The system's allocator, with a count of the bytes that are in use. A program makes it its global
/// allocator.
pub struct CountingAllocator;

// SAFETY: every method hands its arguments to the system's allocator unchanged, under the same contract.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of this very method.
        let pointer = unsafe { System.alloc(layout) };
        if !pointer.is_null() {
            BYTES.grow(layout.size());
        }
        pointer
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of this very method.
        let pointer = unsafe { System.alloc_zeroed(layout) };
        if !pointer.is_null() {
            BYTES.grow(layout.size());
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of this very method.
        unsafe { System.dealloc(pointer, layout) };
        BYTES.shrink(layout.size());
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller keeps the contract of this very method.
        let moved = unsafe { System.realloc(pointer, layout, size) };
        if !moved.is_null() {
            // A block that moves is there twice for a moment, which the system avoids for large ones.
            BYTES.grow(size);
            BYTES.shrink(layout.size());
        }
        moved
    }
}

/// The most bytes in use during a call, above those in use before it; `None` in programs whose allocator
/// does not count. What other threads allocate meanwhile counts too, and so does memory that earlier calls
/// left to be used again.
pub fn peak_during<T>(call: impl FnOnce() -> T) -> (T, Option<usize>) {
    #[cfg(feature = "flex")]
    burn_vision_attention::release_memory();
    BYTES.peak_during(call)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_above_what_was_there_before() {
        let bytes = Bytes::new();
        bytes.grow(100);
        bytes.shrink(60);
        let ((), peak) = bytes.peak_during(|| {
            bytes.grow(30);
            bytes.grow(20);
            bytes.shrink(50);
        });
        assert_eq!(peak, Some(50));
        assert_eq!(bytes.peak_during(|| bytes.shrink(40)).1, Some(0));
        assert_eq!(bytes.peak_during(|| bytes.grow(1)).1, None, "nothing in use means no counting");
    }

    #[test]
    fn the_allocator_counts_what_it_hands_out() {
        // The tests themselves run on another allocator, so that this one counts only what is here.
        let live = || BYTES.live.load(Relaxed);
        let layout = Layout::from_size_align(1 << 20, 64).expect("a power of two");
        let larger = Layout::from_size_align(1 << 21, 64).expect("a power of two");
        // SAFETY: the layouts are not empty, and each block is freed by the layout that it has by then.
        unsafe {
            let first = CountingAllocator.alloc(layout);
            let second = CountingAllocator.alloc_zeroed(layout);
            assert_eq!(live(), 1 << 21);
            let second = CountingAllocator.realloc(second, layout, larger.size());
            assert_eq!(live(), 3 << 20);
            CountingAllocator.dealloc(first, layout);
            CountingAllocator.dealloc(second, larger);
        }
        assert_eq!(live(), 0);
    }
}
