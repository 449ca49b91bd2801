//! Scratch memory whose rows do not straddle cache lines.

use std::ops::{Deref, DerefMut};

use crate::element::Element;
use crate::memory::Buffer;

const CACHE_LINE: usize = 64;

/// A buffer that starts on a cache line and holds some numbers until it is written.
pub(crate) struct Aligned<C> {
    storage: Buffer<C>,
    start: usize,
    len: usize,
}

impl<C: Element> Aligned<C> {
    pub(crate) fn new(len: usize) -> Self {
        let storage = Buffer::<C>::new(len + CACHE_LINE / size_of::<C>());
        let start = storage.as_ptr().align_offset(CACHE_LINE);
        Self { storage, start, len }
    }
}

impl<C: Element> Deref for Aligned<C> {
    type Target = [C];

    fn deref(&self) -> &[C] {
        &self.storage[self.start..self.start + self.len]
    }
}

impl<C: Element> DerefMut for Aligned<C> {
    fn deref_mut(&mut self) -> &mut [C] {
        &mut self.storage[self.start..self.start + self.len]
    }
}
