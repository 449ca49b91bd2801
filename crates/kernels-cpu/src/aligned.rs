//! Scratch memory whose rows do not straddle cache lines.

use std::ops::{Deref, DerefMut};

use crate::element::Real;
use crate::memory::zeros;

const CACHE_LINE: usize = 64;

/// A zeroed buffer that starts on a cache line.
pub(crate) struct Aligned<C> {
    storage: Vec<C>,
    start: usize,
    len: usize,
}

impl<C: Real> Aligned<C> {
    pub(crate) fn zeroed(len: usize) -> Self {
        let storage = zeros::<C>(len + CACHE_LINE / size_of::<C>());
        let start = storage.as_ptr().align_offset(CACHE_LINE);
        Self { storage, start, len }
    }
}

impl<C> Deref for Aligned<C> {
    type Target = [C];

    fn deref(&self) -> &[C] {
        &self.storage[self.start..self.start + self.len]
    }
}

impl<C> DerefMut for Aligned<C> {
    fn deref_mut(&mut self) -> &mut [C] {
        &mut self.storage[self.start..self.start + self.len]
    }
}
