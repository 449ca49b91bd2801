//! The forward pass.

mod tile;

use std::ops::Range;

use rayon::prelude::*;

use tile::QueryRows;

use super::blocks::pack;
use super::work::{Plan, Unit};
use super::{Attention, Sizes};
use crate::ahead::{Ahead, SHORT};
use crate::aligned::Aligned;
use crate::element::{Element, Real};
use crate::simd::{InstructionSet, Kernels, Tokens};
use crate::view::{Out, View, ViewMut};

/// Queries that stream past the keys together, so that keys come from a far cache once for all of them.
const TILE_QUERIES: usize = 256;
/// Keys per step of the online softmax: their scores against one block stay in the first cache.
const TILE_KEYS: usize = 128;

/// Up to so many queries that share keys and values, packing those costs more than it saves.
const FEW_QUERIES: usize = 128;

/// The query tiles of one head of one unit, with packed keys and values where they are shared.
struct Task<'a, C> {
    unit: &'a Unit,
    /// Heads and, of each, queries, counted from the start of the segment.
    heads: Range<usize>,
    queries: Range<usize>,
    packed: Option<&'a Packed<C>>,
}

/// Keys and values of a unit in blocks.
struct Packed<C> {
    k: Aligned<C>,
    v: Aligned<C>,
}

/// Keys and values as the products read them.
struct KeyTokens<'a, C> {
    k: Tokens<'a, C>,
    v: Tokens<'a, C>,
}

pub(super) fn forward<T: Element>(
    set: InstructionSet,
    attention: &Attention<'_, T>,
    out: ViewMut<'_, T>,
    lse: &mut [f32],
) {
    let Sizes { tokens_q, heads, .. } = attention.sizes();
    let pass = Pass {
        kernels: T::Compute::kernels(set),
        attention,
        out: out.out,
        lse: ViewMut::contiguous(lse, [tokens_q, heads, 1]).out,
    };
    let plan = Plan::new(attention);
    let shared = pass.pack_shared(&plan);
    let mut tasks = Vec::new();
    for (unit, packed) in plan.units.iter().zip(&shared) {
        let whole = Task {
            unit,
            heads: unit.heads.clone(),
            queries: 0..unit.queries.len(),
            packed: packed.as_ref(),
        };
        if packed.is_none() {
            tasks.push(whole);
            continue;
        }
        let per_head = plan.parts(unit).div_ceil(unit.heads.len());
        let step = unit.queries.len().div_ceil(per_head).next_multiple_of(pass.kernels.block);
        let step = step.min(TILE_QUERIES);
        for head in unit.heads.clone() {
            tasks.extend(whole.queries.clone().step_by(step).map(|start| Task {
                heads: head..head + 1,
                queries: start..(start + step).min(whole.queries.end),
                ..whole
            }));
        }
    }
    if plan.is_serial() {
        let mut scratch = Scratch::new(&pass, &tasks);
        for (index, task) in tasks.iter().enumerate() {
            pass.run(task, tasks.get(index + 1), &mut scratch);
        }
    } else {
        tasks.par_iter().enumerate().for_each_init(
            || Scratch::new(&pass, &tasks),
            |scratch, (index, task)| pass.run(task, tasks.get(index + 1), scratch),
        );
    }
}

struct Pass<'a, T: Element> {
    kernels: &'static Kernels<T::Compute>,
    attention: &'a Attention<'a, T>,
    out: Out<'a, T>,
    lse: Out<'a, f32>,
}

/// What a thread keeps between tasks.
struct Scratch<C> {
    /// Keys and values of the unit at hand, where they are not shared.
    packed: Packed<C>,
    blocks: Vec<QueryBlock<C>>,
    tile: Tile<C>,
    staging: Aligned<C>,
}

/// A tile of keys against a block of queries.
struct Tile<C> {
    /// `[keys][queries of the block]`.
    scores: Aligned<C>,
    correction: Aligned<C>,
    ahead: Ahead,
}

/// A block of queries and what has been accumulated for it.
struct QueryBlock<C> {
    q: Aligned<C>,
    out: Aligned<C>,
    max: Aligned<C>,
    sum: Aligned<C>,
    /// What divides by the sums.
    factor: Aligned<C>,
}

impl<C: Real> Scratch<C> {
    fn new<T: Element<Compute = C>>(pass: &Pass<'_, T>, tasks: &[Task<'_, C>]) -> Self {
        let (kernels, sizes) = (pass.kernels, pass.attention.sizes());
        let packs = |task: &&Task<'_, C>| {
            task.packed.is_none() && pass.rows_in_place(task).iter().any(Option::is_none)
        };
        let keys = tasks.iter().filter(packs).map(|task| task.unit.keys.len()).max().unwrap_or(0);
        let queries = tasks.iter().map(|task| task.queries.len()).max().unwrap_or(0);
        let queries = queries.min(TILE_QUERIES);
        let block = kernels.block;
        let query_block = || QueryBlock {
            q: Aligned::new(kernels.block_len(sizes.head_dim)),
            out: Aligned::new(kernels.block_len(sizes.value_dim)),
            max: Aligned::new(block),
            sum: Aligned::new(block),
            factor: Aligned::new(block),
        };
        Self {
            packed: Packed::new(kernels, &sizes, keys),
            blocks: (0..queries.div_ceil(block)).map(|_| query_block()).collect(),
            tile: Tile {
                scores: Aligned::new(tile_keys(kernels) * block),
                correction: Aligned::new(block),
                ahead: Ahead::default(),
            },
            staging: Aligned::new(sizes.head_dim.max(sizes.value_dim) * block),
        }
    }
}

impl<C: Real> Packed<C> {
    fn new(kernels: &Kernels<C>, sizes: &Sizes, keys: usize) -> Self {
        let blocks = keys.div_ceil(kernels.block);
        Self {
            k: Aligned::new(blocks * kernels.block_len(sizes.head_dim)),
            v: Aligned::new(blocks * kernels.block_len(sizes.value_dim)),
        }
    }

    fn tokens(&self) -> KeyTokens<'_, C> {
        KeyTokens { k: Tokens::Blocks(&self.k), v: Tokens::Blocks(&self.v) }
    }
}

/// Whole blocks of keys, about [`TILE_KEYS`].
fn tile_keys<C>(kernels: &Kernels<C>) -> usize {
    (TILE_KEYS / kernels.block).max(1) * kernels.block
}

impl<T: Element> Pass<'_, T> {
    /// The keys and values of the units that several tasks will work on.
    fn pack_shared(&self, plan: &Plan) -> Vec<Option<Packed<T::Compute>>> {
        let sizes = self.attention.sizes();
        let mut shared = Vec::new();
        for unit in &plan.units {
            let rows = unit.queries.len() * unit.heads.len();
            let is_shared = plan.parts(unit) > 1 && rows > TILE_QUERIES / 2;
            shared.push(is_shared.then(|| {
                let mut packed = Packed::new(self.kernels, &sizes, unit.keys.len());
                self.pack_in_parallel(&self.attention.k, unit, &mut packed.k);
                self.pack_in_parallel(&self.attention.v, unit, &mut packed.v);
                packed
            }));
        }
        shared
    }

    fn pack_in_parallel(&self, view: &View<'_, T>, unit: &Unit, blocks: &mut [T::Compute]) {
        /// Blocks that a thread packs at a time.
        const BLOCKS: usize = 8;
        let [_, _, dim] = view.shape();
        let tokens = BLOCKS * self.kernels.block;
        blocks
            .par_chunks_mut(BLOCKS * self.kernels.block_len(dim))
            .zip(unit.keys.clone().into_par_iter().step_by(tokens))
            .for_each_init(
                || Aligned::new(dim * self.kernels.block),
                |staging, (blocks, start)| {
                    let keys = start..(start + tokens).min(unit.keys.end);
                    pack(self.kernels, view, unit.kv_head, keys, Real::ONE, blocks, staging);
                },
            );
    }

    /// Asks for what a task reads and writes first, where all of that fits the second cache.
    fn look_ahead(&self, task: &Task<'_, T::Compute>, ahead: &mut Ahead) {
        let Task { unit, heads, queries, packed: None } = task else { return };
        if unit.keys.len() > SHORT || queries.len() > SHORT {
            return;
        }
        let Attention { q, k, v, .. } = self.attention;
        let queries = unit.queries.start + queries.start..unit.queries.start + queries.end;
        ahead.write(&self.out, &queries, heads.start);
        ahead.read(q, &queries, heads.start);
        ahead.read(v, &unit.keys, unit.kv_head);
        ahead.read(k, &unit.keys, unit.kv_head);
    }

    fn run(
        &self,
        task: &Task<'_, T::Compute>,
        next: Option<&Task<'_, T::Compute>>,
        scratch: &mut Scratch<T::Compute>,
    ) {
        let Scratch { packed: own, blocks, tile, staging } = scratch;
        tile.ahead.clear();
        if let Some(next) = next {
            self.look_ahead(next, &mut tile.ahead);
        }
        let unit = task.unit;
        let keys = match task.packed {
            Some(packed) => packed.tokens(),
            None => self.own_keys(task, own, staging),
        };
        for head in task.heads.clone() {
            for start in task.queries.clone().step_by(TILE_QUERIES) {
                let queries = start..(start + TILE_QUERIES).min(task.queries.end);
                let rows = QueryRows { unit, head, queries };
                self.begin(&rows, &keys, blocks, staging);
                self.attend(&rows, &keys, blocks, tile);
                self.finish(&rows, &keys, blocks, staging);
            }
        }
        tile.ahead.all();
    }

    /// Keys and values for a task alone: packed, or where they lie if that pays.
    fn own_keys<'b>(
        &'b self,
        task: &Task<'_, T::Compute>,
        own: &'b mut Packed<T::Compute>,
        staging: &mut [T::Compute],
    ) -> KeyTokens<'b, T::Compute> {
        let unit = task.unit;
        let Packed { k: k_blocks, v: v_blocks } = own;
        let Attention { k, v, .. } = self.attention;
        let [k_rows, v_rows] = self.rows_in_place(task);
        let [k, v] = [(k, k_rows, k_blocks), (v, v_rows, v_blocks)].map(|(view, rows, blocks)| {
            rows.unwrap_or_else(|| {
                let (head, keys, one) = (unit.kv_head, unit.keys.clone(), T::Compute::ONE);
                pack(self.kernels, view, head, keys, one, blocks, staging);
                Tokens::Blocks(blocks)
            })
        });
        KeyTokens { k, v }
    }

    /// Keys and values of a task, those that it reads where they lie.
    fn rows_in_place(
        &self,
        Task { unit, heads, queries, .. }: &Task<'_, T::Compute>,
    ) -> [Option<Tokens<'_, T::Compute>>; 2] {
        let few = heads.len() * queries.len() <= FEW_QUERIES;
        let Attention { k, v, .. } = self.attention;
        [k, v].map(|view| {
            let rows = view.rows_in_place(unit.keys.clone(), unit.kv_head).filter(|_| few);
            rows.map(|(rows, stride)| Tokens::Rows(rows, stride))
        })
    }
}

/// `tokens` in pieces of `block`.
pub(super) fn in_blocks(
    tokens: &Range<usize>,
    block: usize,
) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = tokens.end;
    tokens.clone().step_by(block).map(move |start| start..(start + block).min(end))
}

/// `rows` of a tile block by block: the first row of the block, and the rows within it, from the start
/// of a panel on.
pub(super) fn rows_by_block(
    rows: &Range<usize>,
    block: usize,
    panel: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
    let (start, end) = (rows.start - rows.start % panel, rows.end);
    (start - start % block..end)
        .step_by(block)
        .map(move |first| (first, start.saturating_sub(first)..(end - first).min(block)))
}
