//! The memory that a thread keeps between tasks.

use super::super::Sizes;
use super::{Pass, Task};
use crate::ahead::Ahead;
use crate::aligned::Aligned;
use crate::element::{Element, Real};

/// The largest of all tasks.
pub(super) struct ScratchSizes {
    pub(super) queries: usize,
    pub(super) keys: usize,
}

impl ScratchSizes {
    pub(super) fn new<C>(tasks: &[Task<'_, C>]) -> Self {
        Self {
            queries: tasks.iter().map(|task| task.unit.queries.len()).max().unwrap_or(0),
            keys: tasks.iter().map(|task| task.keys.len()).max().unwrap_or(0),
        }
    }
}

/// What a thread keeps between tasks. All of it is in blocks.
pub(super) struct Scratch<C> {
    pub(super) queries: Queries<C>,
    pub(super) keys: Keys<C>,
    pub(super) tile: Tile<C>,
    pub(super) staging: Aligned<C>,
}

/// One query head of a segment.
pub(super) struct Queries<C> {
    pub(super) q: Aligned<C>,
    pub(super) d_out: Aligned<C>,
    pub(super) d_q: Aligned<C>,
    /// log2 of the softmax denominators; infinite for rows that see nothing, which makes their weights
    /// zero.
    pub(super) lse: Aligned<C>,
    pub(super) delta: Aligned<C>,
}

/// The keys and values of a task.
pub(super) struct Keys<C> {
    pub(super) k: Aligned<C>,
    pub(super) v: Aligned<C>,
    pub(super) d_k: Aligned<C>,
    pub(super) d_v: Aligned<C>,
}

/// A query tile against a key tile.
pub(super) struct Tile<C> {
    /// Scores, then weights: `[keys][queries of one block]`.
    pub(super) weights: Aligned<C>,
    /// Their gradients, likewise.
    pub(super) d_scores: Aligned<C>,
    /// The same transposed, for all blocks of the query tile: `[key blocks][queries][block]`.
    pub(super) weights_by_query: Aligned<C>,
    pub(super) d_scores_by_query: Aligned<C>,
    pub(super) ahead: Ahead,
}

impl<C: Real> Scratch<C> {
    pub(super) fn new<T: Element<Compute = C>>(pass: &Pass<'_, T>, sizes: &ScratchSizes) -> Self {
        let (kernels, Sizes { head_dim, value_dim, .. }) = (pass.kernels, pass.attention.sizes());
        let block = kernels.block;
        let [queries, keys] = [sizes.queries, sizes.keys].map(|tokens| tokens.div_ceil(block));
        let [q_len, v_len] = [head_dim, value_dim].map(|dim| kernels.block_len(dim));
        let (tile_keys, tile_queries) = (pass.tile_keys(), pass.tile_queries());
        Self {
            queries: Queries {
                q: Aligned::new(queries * q_len),
                d_out: Aligned::new(queries * v_len),
                d_q: Aligned::new(queries * q_len),
                lse: Aligned::new(queries * block),
                delta: Aligned::new(queries * block),
            },
            keys: Keys {
                k: Aligned::new(keys * q_len),
                v: Aligned::new(keys * v_len),
                d_k: Aligned::new(keys * q_len),
                d_v: Aligned::new(keys * v_len),
            },
            tile: Tile {
                weights: Aligned::new(tile_keys * block),
                d_scores: Aligned::new(tile_keys * block),
                weights_by_query: Aligned::new(tile_keys * tile_queries),
                d_scores_by_query: Aligned::new(tile_keys * tile_queries),
                ahead: Ahead::default(),
            },
            staging: Aligned::new(head_dim.max(value_dim) * block),
        }
    }
}
