//! The backward pass: five products per pair of a query and a key tile, none of them twice.

use std::ops::Range;

use rayon::prelude::*;

use super::blocks::{SHORT, pack, unpack};
use super::forward::{in_blocks, rows_by_block};
use super::work::{Plan, Unit};
use super::{Attention, Gradients, OutputGradient, Sizes};
use crate::aligned::Aligned;
use crate::element::{Element, Real};
use crate::simd::{Across, Along, InstructionSet, Kernels, ScoreGradient, Transpose};
use crate::view::{Out, ViewMut, packed};

/// Queries per tile: the depth of the products that give the gradients of keys and values.
const TILE_QUERIES: usize = 128;
/// Keys per tile: the depth of the product that gives the gradient of the queries.
const TILE_KEYS: usize = 128;

/// Some key tiles of one unit against all its queries.
struct Task<'a, C> {
    unit: &'a Unit,
    /// Counted from the start of the segment.
    keys: Range<usize>,
    /// Where other tasks work on the same queries: the part of their gradients due to these keys, in
    /// blocks, head by head.
    d_q: Option<&'a mut [C]>,
}

/// A unit whose key tiles are spread over tasks.
struct Split<'a, C> {
    unit: &'a Unit,
    parts: usize,
    /// `[parts][heads][blocks]`.
    d_q: Aligned<C>,
}

pub(super) fn backward<T: Element>(
    set: InstructionSet,
    attention: &Attention<'_, T>,
    output: &OutputGradient<'_, T>,
    gradients: Gradients<'_, T>,
) {
    let [d_q, d_k, d_v] = outputs(attention, gradients);
    let kernels = T::Compute::kernels(set);
    let pass = Pass { kernels, attention, output, d_q, d_k, d_v };
    let plan = Plan::new(attention);
    let tile = pass.tile_keys();
    let mut splits = Vec::new();
    let mut tasks = Vec::new();
    for unit in &plan.units {
        let parts = plan.parts(unit).min(unit.keys.len().div_ceil(tile));
        if parts > 1 {
            let len = parts * unit.heads.len() * pass.q_len(unit);
            splits.push(Split { unit, parts, d_q: Aligned::zeroed(len) });
        } else {
            tasks.push(Task { unit, keys: 0..unit.keys.len(), d_q: None });
        }
    }
    for Split { unit, parts, d_q } in &mut splits {
        let tiles = unit.keys.len().div_ceil(tile);
        let len = unit.heads.len() * pass.q_len(unit);
        tasks.extend(d_q.chunks_exact_mut(len).enumerate().map(|(part, d_q)| {
            let [start, end] = [part, part + 1].map(|part| part * tiles / *parts * tile);
            Task { unit, keys: start..end.min(unit.keys.len()), d_q: Some(d_q) }
        }));
    }
    let sizes = ScratchSizes::new(&tasks);
    if plan.is_serial() {
        let mut scratch = Scratch::new(&pass, &sizes);
        tasks.into_iter().for_each(|task| pass.run(task, &mut scratch));
    } else {
        tasks
            .into_par_iter()
            .for_each_init(|| Scratch::new(&pass, &sizes), |scratch, task| pass.run(task, scratch));
    }
    splits.iter_mut().for_each(|split| pass.gather(split));
}

/// Where the gradients go.
fn outputs<'a, T: Element>(
    attention: &Attention<'_, T>,
    gradients: Gradients<'a, T>,
) -> [Out<'a, T>; 3] {
    let shapes = [attention.q, attention.k, attention.v].map(|view| view.shape());
    match gradients {
        Gradients::Separate { q, k, v } => {
            let arguments = [("gradients.q", q), ("gradients.k", k), ("gradients.v", v)];
            let mut views = shapes.into_iter().zip(arguments).map(|(shape, (argument, data))| {
                super::expect_len(argument, shape.iter().product(), data.len());
                ViewMut::contiguous(data, shape).out
            });
            [(); 3].map(|()| views.next().expect("there are three of each"))
        }
        Gradients::Packed(data) => {
            let [shape, k, v] = shapes;
            assert!(
                k == shape && v == shape,
                "gradients: packing needs q, k and v of one shape, got {shapes:?}"
            );
            packed(data, shape)
        }
    }
}

struct Pass<'a, T: Element> {
    kernels: &'static Kernels<T::Compute>,
    attention: &'a Attention<'a, T>,
    output: &'a OutputGradient<'a, T>,
    d_q: Out<'a, T>,
    d_k: Out<'a, T>,
    d_v: Out<'a, T>,
}

/// The largest of all tasks.
struct ScratchSizes {
    queries: usize,
    keys: usize,
}

impl ScratchSizes {
    fn new<C>(tasks: &[Task<'_, C>]) -> Self {
        Self {
            queries: tasks.iter().map(|task| task.unit.queries.len()).max().unwrap_or(0),
            keys: tasks.iter().map(|task| task.keys.len()).max().unwrap_or(0),
        }
    }
}

/// What a thread keeps between tasks. All of it is in blocks.
struct Scratch<C> {
    queries: Queries<C>,
    keys: Keys<C>,
    tile: Tile<C>,
    staging: Aligned<C>,
}

/// One query head of a segment.
struct Queries<C> {
    q: Aligned<C>,
    d_out: Aligned<C>,
    d_q: Aligned<C>,
    /// log2 of the softmax denominators; infinite for rows that see nothing, which makes their weights
    /// zero.
    lse: Aligned<C>,
    delta: Aligned<C>,
}

/// The keys and values of a task.
struct Keys<C> {
    k: Aligned<C>,
    v: Aligned<C>,
    d_k: Aligned<C>,
    d_v: Aligned<C>,
}

/// A query tile against a key tile.
struct Tile<C> {
    /// Scores, then weights: `[keys][queries of one block]`.
    weights: Aligned<C>,
    /// Their gradients, likewise.
    d_scores: Aligned<C>,
    /// The same transposed, for all blocks of the query tile: `[key blocks][queries][block]`.
    weights_by_query: Aligned<C>,
    d_scores_by_query: Aligned<C>,
}

impl<C: Real> Scratch<C> {
    fn new<T: Element<Compute = C>>(pass: &Pass<'_, T>, sizes: &ScratchSizes) -> Self {
        let (kernels, Sizes { head_dim, value_dim, .. }) = (pass.kernels, pass.attention.sizes());
        let block = kernels.block;
        let [queries, keys] = [sizes.queries, sizes.keys].map(|tokens| tokens.div_ceil(block));
        let [q_len, v_len] = [head_dim, value_dim].map(|dim| kernels.block_len(dim));
        let (tile_keys, tile_queries) = (pass.tile_keys(), pass.tile_queries());
        Self {
            queries: Queries {
                q: Aligned::zeroed(queries * q_len),
                d_out: Aligned::zeroed(queries * v_len),
                d_q: Aligned::zeroed(queries * q_len),
                lse: Aligned::zeroed(queries * block),
                delta: Aligned::zeroed(queries * block),
            },
            keys: Keys {
                k: Aligned::zeroed(keys * q_len),
                v: Aligned::zeroed(keys * v_len),
                d_k: Aligned::zeroed(keys * q_len),
                d_v: Aligned::zeroed(keys * v_len),
            },
            tile: Tile {
                weights: Aligned::zeroed(tile_keys * block),
                d_scores: Aligned::zeroed(tile_keys * block),
                weights_by_query: Aligned::zeroed(tile_keys * tile_queries),
                d_scores_by_query: Aligned::zeroed(tile_keys * tile_queries),
            },
            staging: Aligned::zeroed(head_dim.max(value_dim) * block),
        }
    }
}

impl<T: Element> Pass<'_, T> {
    fn tile_keys(&self) -> usize {
        (TILE_KEYS / self.kernels.block).max(1) * self.kernels.block
    }

    fn tile_queries(&self) -> usize {
        (TILE_QUERIES / self.kernels.block).max(1) * self.kernels.block
    }

    /// Numbers in the blocks of one head's queries.
    fn q_len(&self, unit: &Unit) -> usize {
        let Sizes { head_dim, .. } = self.attention.sizes();
        unit.queries.len().div_ceil(self.kernels.block) * self.kernels.block_len(head_dim)
    }

    fn run(&self, task: Task<'_, T::Compute>, scratch: &mut Scratch<T::Compute>) {
        let Task { unit, keys, mut d_q } = task;
        let Scratch { queries, keys: own, tile, staging } = scratch;
        let (kernels, one) = (self.kernels, T::Compute::ONE);
        let tokens = unit.keys.start + keys.start..unit.keys.start + keys.end;
        let (k, v) = (&self.attention.k, &self.attention.v);
        pack(kernels, k, unit.kv_head, tokens.clone(), one, &mut own.k, staging);
        pack(kernels, v, unit.kv_head, tokens.clone(), one, &mut own.v, staging);
        if keys.len() <= SHORT {
            self.d_k.prefetch(tokens.clone(), unit.kv_head);
            self.d_v.prefetch(tokens.clone(), unit.kv_head);
        }
        own.d_k.fill(Real::ZERO);
        own.d_v.fill(Real::ZERO);
        for (head, index) in unit.heads.clone().zip(0..) {
            self.load_queries(unit, head, queries, staging);
            let len = self.q_len(unit);
            queries.d_q[..len].fill(Real::ZERO);
            for tile_start in keys.clone().step_by(self.tile_keys()) {
                let tile_keys = tile_start..(tile_start + self.tile_keys()).min(keys.end);
                for start in (0..unit.queries.len()).step_by(self.tile_queries()) {
                    let rows = start..(start + self.tile_queries()).min(unit.queries.len());
                    self.tile(unit, &keys, &tile_keys, &rows, queries, own, tile);
                }
            }
            match &mut d_q {
                Some(d_q) => d_q[index * len..][..len].copy_from_slice(&queries.d_q[..len]),
                None => self.write_d_q(unit, head, &queries.d_q, staging),
            }
        }
        // q was packed with this factor beyond the softmax scale.
        let factor = self.attention.options.softcap.unwrap_or(std::f64::consts::LN_2);
        let factor = <T::Compute as Real>::from_f64(factor);
        // SAFETY: these keys of this head belong to this task alone.
        unsafe {
            let (d_k, d_v, head) = (&self.d_k, &self.d_v, unit.kv_head);
            unpack(kernels, &own.d_k, d_k, head, tokens.clone(), |_| factor, staging);
            unpack(kernels, &own.d_v, d_v, head, tokens, |_| one, staging);
        }
    }

    /// Packs what the products need of one query head.
    fn load_queries(
        &self,
        unit: &Unit,
        head: usize,
        queries: &mut Queries<T::Compute>,
        staging: &mut [T::Compute],
    ) {
        let kernels = self.kernels;
        let Sizes { heads, value_dim, .. } = self.attention.sizes();
        let OutputGradient { out, lse, d_out, d_lse } = self.output;
        let factor = Real::from_f64(self.attention.options.score_factor());
        let tokens = &unit.queries;
        if tokens.len() <= SHORT {
            self.d_q.prefetch(tokens.clone(), head);
            out.prefetch(tokens.clone(), head + 1);
        }
        let (q, one) = (&self.attention.q, T::Compute::ONE);
        pack(kernels, q, head, tokens.clone(), factor, &mut queries.q, staging);
        pack(kernels, d_out, head, tokens.clone(), one, &mut queries.d_out, staging);
        let (out_row, rest) = staging.split_at_mut(value_dim);
        // A block has at least two tokens, so that there is room for two rows.
        let d_out_row = &mut rest[..value_dim];
        for (i, token) in tokens.clone().enumerate() {
            let row_lse = lse[token * heads + head];
            if row_lse == f32::NEG_INFINITY {
                queries.lse[i] = Real::INFINITY;
                queries.delta[i] = Real::ZERO;
                let v_len = kernels.block_len(value_dim);
                let block = &mut queries.d_out[i / kernels.block * v_len..][..v_len];
                block.iter_mut().skip(i % kernels.block).step_by(kernels.block).for_each(|x| {
                    *x = Real::ZERO;
                });
                continue;
            }
            let out = out.compute_row(token, head, out_row);
            let d_out = d_out.compute_row(token, head, d_out_row);
            let d_lse =
                d_lse.map_or(Real::ZERO, |d_lse| Real::from_f32(d_lse[token * heads + head]));
            queries.lse[i] =
                <T::Compute as Real>::from_f64(f64::from(row_lse) * std::f64::consts::LOG2_E);
            queries.delta[i] = dot(out, d_out) - d_lse;
        }
    }

    /// Adds what a query tile and a key tile mean for each other.
    #[allow(clippy::too_many_arguments)]
    fn tile(
        &self,
        unit: &Unit,
        task_keys: &Range<usize>,
        tile_keys: &Range<usize>,
        tile_queries: &Range<usize>,
        queries: &mut Queries<T::Compute>,
        keys: &mut Keys<T::Compute>,
        tile: &mut Tile<T::Compute>,
    ) {
        let (kernels, block) = (self.kernels, self.kernels.block);
        let Sizes { head_dim, value_dim, .. } = self.attention.sizes();
        let [q_len, v_len] = [head_dim, value_dim].map(|dim| kernels.block_len(dim));
        let (first_key, first_query) =
            ((tile_keys.start - task_keys.start) / block, tile_queries.start / block);
        // For each key block, the query rows of the tile that meet it.
        let mut met = [const { 0..0 }; TILE_KEYS / 4];
        for here in in_blocks(tile_queries, block) {
            let seen = unit.band.seen_by_some(&here);
            let visible = seen.start.max(tile_keys.start)..seen.end.min(tile_keys.end);
            if visible.is_empty() {
                continue;
            }
            let rows = visible.start - tile_keys.start..visible.end - tile_keys.start;
            self.score_gradients(unit, &here, &visible, &rows, first_key, queries, keys, tile);
            (kernels.across)(Across {
                out: &mut queries.d_q[here.start / block * q_len..][..q_len],
                scale: None,
                a: &keys.k[first_key * q_len..],
                b: &tile.d_scores,
                dim: kernels.padded(head_dim),
                rows: rows.clone(),
                lanes: here.len(),
            });
            self.turn(&rows, here.start - tile_queries.start, tile);
            let here = here.start - tile_queries.start..here.end - tile_queries.start;
            for met in &mut met[rows.start / block..rows.end.div_ceil(block)] {
                let start = if met.start == met.end { here.start } else { met.start };
                *met = start..here.end;
            }
        }
        for (index, (keys_here, rows)) in in_blocks(tile_keys, block).zip(met).enumerate() {
            let by_query = index * self.tile_queries() * block;
            let lanes = keys_here.len();
            (kernels.across)(Across {
                out: &mut keys.d_v[(first_key + index) * v_len..][..v_len],
                scale: None,
                a: &queries.d_out[first_query * v_len..],
                b: &tile.weights_by_query[by_query..],
                dim: kernels.padded(value_dim),
                rows: rows.clone(),
                lanes,
            });
            (kernels.across)(Across {
                out: &mut keys.d_k[(first_key + index) * q_len..][..q_len],
                scale: None,
                a: &queries.q[first_query * q_len..],
                b: &tile.d_scores_by_query[by_query..],
                dim: kernels.padded(head_dim),
                rows,
                lanes,
            });
        }
    }

    /// The weights of one query block and the gradients of its scores, with zeros where it sees nothing.
    #[allow(clippy::too_many_arguments)]
    fn score_gradients(
        &self,
        unit: &Unit,
        here: &Range<usize>,
        visible: &Range<usize>,
        rows: &Range<usize>,
        first_key: usize,
        queries: &Queries<T::Compute>,
        keys: &Keys<T::Compute>,
        tile: &mut Tile<T::Compute>,
    ) {
        let (kernels, block) = (self.kernels, self.kernels.block);
        let Sizes { head_dim, value_dim, .. } = self.attention.sizes();
        let query_block = here.start / block;
        for (first, rows) in rows_by_block(rows, block, kernels.panel) {
            let operands = [
                (&keys.k, &queries.q, head_dim, &mut tile.weights),
                (&keys.v, &queries.d_out, value_dim, &mut tile.d_scores),
            ];
            for (a, b, dim, out) in operands {
                let len = kernels.block_len(dim);
                (kernels.along)(Along {
                    a: &a[(first_key + first / block) * len..][..len],
                    b: &b[query_block * len..][..len],
                    dim,
                    out: &mut out[first * block..],
                    rows: rows.clone(),
                    lanes: here.len(),
                });
            }
        }
        let cells = rows.start * block..rows.end * block;
        let (weights, d_scores) = (&mut tile.weights[cells.clone()], &mut tile.d_scores[cells]);
        (kernels.score_gradient)(ScoreGradient {
            scores: weights,
            gradients: d_scores,
            lse: &queries.lse[query_block * block..],
            delta: &queries.delta[query_block * block..],
            softcap: self.attention.options.log2_softcap().map(Real::from_f64),
        });
        unit.band.mask(weights, block, visible, here, Real::ZERO);
        unit.band.mask(d_scores, block, visible, here, Real::ZERO);
    }

    /// Transposes `rows` of one query block into rows `first_query..` of the tile, with zeros for the
    /// other keys of their blocks.
    fn turn(&self, rows: &Range<usize>, first_query: usize, tile: &mut Tile<T::Compute>) {
        let block = self.kernels.block;
        let pairs = [
            (&mut tile.weights, &mut tile.weights_by_query),
            (&mut tile.d_scores, &mut tile.d_scores_by_query),
        ];
        for (from, to) in pairs {
            let end = rows.end.next_multiple_of(block);
            from[(rows.start - rows.start % block) * block..rows.start * block].fill(Real::ZERO);
            from[rows.end * block..end * block].fill(Real::ZERO);
            for index in rows.start / block..end / block {
                (self.kernels.transpose)(Transpose {
                    from: &from[index * block * block..],
                    from_stride: block,
                    to: &mut to[(index * self.tile_queries() + first_query) * block..],
                    to_stride: block,
                    rows: block,
                    columns: block,
                });
            }
        }
    }

    fn write_d_q(
        &self,
        unit: &Unit,
        head: usize,
        blocks: &[T::Compute],
        staging: &mut [T::Compute],
    ) {
        let factor = <T::Compute as Real>::from_f64(self.attention.options.softmax_scale);
        // SAFETY: these queries of this head belong to one task, or to the one gathering of a split unit.
        unsafe {
            let tokens = unit.queries.clone();
            unpack(self.kernels, blocks, &self.d_q, head, tokens, |_| factor, staging);
        }
    }

    /// Adds up, in the order of keys, what the tasks of a split unit found for its queries.
    fn gather(&self, split: &mut Split<'_, T::Compute>) {
        let Split { unit, parts, d_q } = split;
        let len = self.q_len(unit);
        let (sum, others) = d_q.split_at_mut(unit.heads.len() * len);
        sum.par_chunks_exact_mut(len).enumerate().for_each(|(index, sum)| {
            for part in 0..*parts - 1 {
                let other = &others[(part * unit.heads.len() + index) * len..][..len];
                for (sum, other) in sum.iter_mut().zip(other) {
                    *sum = *sum + *other;
                }
            }
            let [_, _, dim] = self.d_q.shape();
            let mut staging = Aligned::zeroed(dim * self.kernels.block);
            self.write_d_q(unit, unit.heads.start + index, sum, &mut staging);
        });
    }
}

/// Sum of products, in eight independent sums so that they need not wait for each other.
fn dot<C: Real>(a: &[C], b: &[C]) -> C {
    let mut sums = [C::ZERO; 8];
    let (a, b) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest = a.remainder().iter().zip(b.remainder());
    let rest = rest.fold(C::ZERO, |sum, (&a, &b)| sum + a * b);
    for (a, b) in a.zip(b) {
        for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
            *sum = *sum + a * b;
        }
    }
    sums.into_iter().fold(rest, |total, sum| total + sum)
}
