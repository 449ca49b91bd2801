//! Memory for results and for what lies between them, used again.
//!
//! A large buffer comes from the system page by page as it is first written to, and goes back to it when
//! it is freed. That takes longer than norm and rotation do. So large buffers are kept for the next call
//! that wants as much.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

use crate::element::{Element, Real};

/// A buffer is made of these, whatever it holds, so that it can hold something else the next time.
type Word = f64;

/// Smaller buffers are what the allocator is good at.
const LEAST_WORDS: usize = (256 << 10) / size_of::<Word>();
/// Bytes kept at the most: results and intermediate buffers of a layer over some 8,000 tokens.
const MOST_WORDS: usize = (256 << 20) / size_of::<Word>();

static KEPT: Mutex<Kept> = Mutex::new(Kept { buffers: Vec::new(), words: 0 });

/// Buffers that wait for use, the latest last.
struct Kept {
    buffers: Vec<Vec<Word>>,
    words: usize,
}

impl Kept {
    /// The smallest buffer that has room for `words` without wasting a fifth of it.
    fn take(&mut self, words: usize) -> Option<Vec<Word>> {
        let fits = |buffer: &Vec<Word>| (words..=words + words / 4).contains(&buffer.len());
        let found = self.buffers.iter().enumerate().filter(|(_, buffer)| fits(buffer));
        let (index, _) = found.min_by_key(|(_, buffer)| buffer.len())?;
        let buffer = self.buffers.remove(index);
        self.words -= buffer.len();
        Some(buffer)
    }

    /// Keeps a buffer, unless it is larger than all of them may be together, and gives back those that
    /// have waited longest where that is too much.
    fn give(&mut self, buffer: Vec<Word>) -> Vec<Vec<Word>> {
        if buffer.len() > MOST_WORDS {
            return vec![buffer];
        }
        self.words += buffer.len();
        self.buffers.push(buffer);
        let mut surplus = 0;
        while self.words > MOST_WORDS {
            self.words -= self.buffers[surplus].len();
            surplus += 1;
        }
        self.buffers.drain(..surplus).collect()
    }
}

fn kept<R>(change: impl FnOnce(&mut Kept) -> R) -> R {
    // Nothing between the changes of a `Kept` can panic.
    change(&mut KEPT.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Gives the memory that is kept for the next calls back to the system.
pub fn release_memory() {
    drop(kept(|kept| {
        kept.words = 0;
        std::mem::take(&mut kept.buffers)
    }));
}

/// Memory for `len` elements, of which each holds some number until it is written.
///
/// Buffers of 256 KiB and more are kept when they are dropped, 256 MiB in all, and used again by the next
/// call that needs as much; [`release_memory`] gives them back to the system.
pub struct Buffer<T> {
    words: Vec<Word>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    /// Room for `len` elements.
    ///
    /// # Panics
    ///
    /// When no machine has so much memory.
    pub fn new(len: usize) -> Self {
        let bytes = len.checked_mul(size_of::<T>()).expect("len: more than there are addresses");
        let words = bytes.div_ceil(size_of::<Word>());
        let used = if words < LEAST_WORDS { None } else { kept(|kept| kept.take(words)) };
        let mut buffer =
            Self { words: used.unwrap_or_else(|| zeros(words)), len, elements: PhantomData };
        if cfg!(debug_assertions) {
            // Whoever reads what nobody wrote shall find out.
            buffer.fill(T::narrow(T::Compute::from_f64(f64::NAN)));
        }
        buffer
    }
}

impl<T: Element> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&**self).finish()
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.words.len() >= LEAST_WORDS {
            let buffer = std::mem::take(&mut self.words);
            drop(kept(|kept| kept.give(buffer)));
        }
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: there are words for so many elements, aligned for the largest type of element, and any
        // bits are a number of each of the types that implement the sealed `Element`.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.len) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `deref`; and any number leaves words behind that are numbers.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.len) }
    }
}

/// Memory from the system; large pages where it has them for those who ask.
fn zeros(words: usize) -> Vec<Word> {
    let zeros = vec![0.0; words];
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
    use half::bf16;

    fn buffer(words: usize) -> Vec<Word> {
        vec![0.0; words]
    }

    #[test]
    fn a_buffer_serves_whoever_needs_almost_as_much() {
        let mut kept = Kept { buffers: Vec::new(), words: 0 };
        assert!(kept.give(buffer(1000)).is_empty() && kept.give(buffer(900)).is_empty());
        assert_eq!(kept.words, 1900);
        // Too large, too small, and the smaller of two that fit.
        assert!(kept.take(700).is_none() && kept.take(1001).is_none());
        assert_eq!(kept.take(850).map(|buffer| buffer.len()), Some(900));
        assert_eq!(kept.take(850).map(|buffer| buffer.len()), Some(1000));
        assert!(kept.take(850).is_none() && kept.words == 0);
    }

    #[test]
    fn those_that_waited_longest_make_room() {
        let mut kept = Kept { buffers: Vec::new(), words: 0 };
        let half = MOST_WORDS / 2;
        assert!(kept.give(buffer(half)).is_empty() && kept.give(buffer(half - 1)).is_empty());
        let surplus: Vec<_> = kept.give(buffer(half)).iter().map(Vec::len).collect();
        assert_eq!((surplus, kept.words), (vec![half], 2 * half - 1));
        let giant: Vec<_> = kept.give(buffer(MOST_WORDS + 1)).iter().map(Vec::len).collect();
        assert_eq!((giant, kept.words), (vec![MOST_WORDS + 1], 2 * half - 1));
    }

    #[test]
    fn memory_is_used_again_for_other_elements() {
        let len = 2 * LEAST_WORDS + 1;
        let first = Buffer::<f64>::new(len);
        let address = first.as_ptr().addr();
        drop(first);
        let mut second = Buffer::<bf16>::new(4 * len - 1);
        assert_eq!((second.as_ptr().addr(), second.len()), (address, 4 * len - 1));
        second.fill(bf16::ONE);
        assert!(second.iter().all(|&x| x == bf16::ONE));
        // Both in use at once are two.
        assert_ne!(Buffer::<f64>::new(len).as_ptr().addr(), address);
        drop(second);
        let waits = || kept(|kept| kept.buffers.iter().any(|buffer| buffer.len() == len));
        assert!(waits());
        release_memory();
        assert!(!waits(), "no other test has a buffer of this length");
    }

    #[test]
    fn no_two_buffers_in_use_share_memory() {
        std::thread::scope(|scope| {
            for thread in 0..8 {
                scope.spawn(move || {
                    for round in 0..50 {
                        let mark = (thread * 50 + round) as f32;
                        let mut buffers = [7, 8].map(|len| Buffer::<f32>::new(len * LEAST_WORDS));
                        buffers.iter_mut().for_each(|buffer| buffer.fill(mark));
                        std::thread::yield_now();
                        assert!(buffers.iter().all(|buffer| buffer.iter().all(|&x| x == mark)));
                    }
                });
            }
        });
    }

    #[test]
    #[should_panic(expected = "len: more than there are addresses")]
    fn a_length_that_overflows_panics() {
        Buffer::<f64>::new(1 << 61);
    }

    #[test]
    fn any_length_is_served() {
        for len in [0, 1, 3, (5 << 20) + 3] {
            let mut buffer = Buffer::<f32>::new(len);
            buffer.fill(1.0);
            assert!(buffer.len() == len && buffer.iter().all(|&x| x == 1.0));
        }
    }
}
