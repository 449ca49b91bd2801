//! How the work is spread over threads.

use std::ops::Range;

use super::Attention;
use super::band::Band;
use crate::element::Element;

/// Below this many multiplications a thread pool costs more than it saves.
const SERIAL_WORK: usize = 1 << 19;

/// Tasks per thread below which a unit is split: enough that no thread waits long for the last one.
const TASKS_PER_THREAD: usize = 4;

/// One segment and key head: what a set of packed keys and values serves.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
    pub(super) kv_head: usize,
    /// The query heads that read this key head.
    pub(super) heads: Range<usize>,
    pub(super) band: Band,
    work: usize,
}

/// All units, and how they are to be run.
pub(super) struct Plan {
    pub(super) units: Vec<Unit>,
    work: usize,
    threads: usize,
}

impl Plan {
    pub(super) fn new<T: Element>(attention: &Attention<'_, T>) -> Self {
        let sizes = attention.sizes();
        let group = sizes.heads / sizes.kv_heads.max(1);
        let segments = attention.offsets_q.windows(2).zip(attention.offsets_k.windows(2));
        let mut units = Vec::new();
        for (queries, keys) in segments {
            let [queries, keys] = [queries, keys].map(|ends| ends[0] as usize..ends[1] as usize);
            let dims = sizes.head_dim + sizes.value_dim;
            let work = group * queries.len().max(16) * (keys.len() + 32) * dims;
            let band = Band::new(&attention.options, queries.len(), keys.len());
            units.extend((0..sizes.kv_heads).map(|kv_head| Unit {
                queries: queries.clone(),
                keys: keys.clone(),
                kv_head,
                heads: kv_head * group..(kv_head + 1) * group,
                band,
                work,
            }));
        }
        let work = units.iter().map(|unit| unit.work).sum();
        Self { units, work, threads: rayon::current_num_threads() }
    }

    /// Whether the calling thread had better do everything itself.
    pub(super) fn is_serial(&self) -> bool {
        self.threads <= 1 || self.work <= SERIAL_WORK
    }

    /// The number of tasks that `unit` is to be split into; 1 where others keep the threads busy.
    pub(super) fn parts(&self, unit: &Unit) -> usize {
        if self.is_serial() {
            return 1;
        }
        (unit.work.saturating_mul(TASKS_PER_THREAD * self.threads) / self.work.max(1)).max(1)
    }
}
