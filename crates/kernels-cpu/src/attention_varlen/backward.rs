//! The backward pass: five products per pair of a query and a key tile, none of them twice.

mod scratch;
mod tile;

use std::ops::Range;

use rayon::prelude::*;
use scratch::{Queries, Scratch, ScratchSizes};
use tile::Pair;

use super::blocks::{pack, unpack};
use super::work::{Plan, Unit};
use super::{Attention, Gradients, OutputGradient, Sizes};
use crate::ahead::{Ahead, SHORT};
use crate::aligned::Aligned;
use crate::element::{Element, Real};
use crate::simd::{InstructionSet, Kernels};
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
        let most = if unit.queries.is_empty() { 1 } else { unit.keys.len().div_ceil(tile) };
        let parts = plan.parts(unit).min(most);
        if parts > 1 {
            let len = parts * unit.heads.len() * pass.q_len(unit);
            splits.push(Split { unit, parts, d_q: Aligned::new(len) });
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
    let order: Vec<_> = tasks.iter().map(|task| (task.unit, task.keys.clone())).collect();
    let run = |scratch: &mut Scratch<_>, (index, task): (usize, _)| {
        scratch.tile.ahead.clear();
        if let Some((unit, keys)) = order.get(index + 1) {
            pass.look_ahead(unit, keys, &mut scratch.tile.ahead);
        }
        pass.run(task, scratch);
        scratch.tile.ahead.all();
    };
    if plan.is_serial() {
        let mut scratch = Scratch::new(&pass, &sizes);
        tasks.into_iter().enumerate().for_each(|task| run(&mut scratch, task));
    } else {
        let tasks = tasks.into_par_iter().enumerate();
        tasks.for_each_init(|| Scratch::new(&pass, &sizes), run);
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

    /// Asks for what a task reads and writes first, where all of that fits the second cache.
    fn look_ahead(&self, unit: &Unit, keys: &Range<usize>, ahead: &mut Ahead) {
        if keys.len() > SHORT || unit.queries.len() > SHORT {
            return;
        }
        let Attention { q, k, v, .. } = self.attention;
        let (queries, head, kv_head) = (&unit.queries, unit.heads.start, unit.kv_head);
        let keys = unit.keys.start + keys.start..unit.keys.start + keys.end;
        ahead.write(&self.d_v, &keys, kv_head);
        ahead.write(&self.d_k, &keys, kv_head);
        ahead.write(&self.d_q, queries, head);
        ahead.read(&self.output.out, queries, head);
        ahead.read(&self.output.d_out, queries, head);
        ahead.read(q, queries, head);
        ahead.read(v, &keys, kv_head);
        ahead.read(k, &keys, kv_head);
    }

    fn run(&self, task: Task<'_, T::Compute>, scratch: &mut Scratch<T::Compute>) {
        let Task { unit, keys, mut d_q } = task;
        let Scratch { queries, keys: own, tile, staging } = scratch;
        let (kernels, one) = (self.kernels, T::Compute::ONE);
        let tokens = unit.keys.start + keys.start..unit.keys.start + keys.end;
        let (k, v) = (&self.attention.k, &self.attention.v);
        pack(kernels, k, unit.kv_head, tokens.clone(), one, &mut own.k, staging);
        pack(kernels, v, unit.kv_head, tokens.clone(), one, &mut own.v, staging);
        let Sizes { head_dim, value_dim, .. } = self.attention.sizes();
        let blocks = keys.len().div_ceil(kernels.block);
        own.d_k[..blocks * kernels.block_len(head_dim)].fill(Real::ZERO);
        own.d_v[..blocks * kernels.block_len(value_dim)].fill(Real::ZERO);
        for (head, index) in unit.heads.clone().zip(0..) {
            self.load_queries(unit, head, queries, staging);
            let len = self.q_len(unit);
            queries.d_q[..len].fill(Real::ZERO);
            for tile_start in keys.clone().step_by(self.tile_keys()) {
                for start in (0..unit.queries.len()).step_by(self.tile_queries()) {
                    let pair = Pair {
                        unit,
                        keys: tile_start..(tile_start + self.tile_keys()).min(keys.end),
                        queries: start..(start + self.tile_queries()).min(unit.queries.len()),
                        first_key_block: (tile_start - keys.start) / kernels.block,
                    };
                    self.tile(&pair, queries, own, tile);
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
        let (q, one) = (&self.attention.q, T::Compute::ONE);
        pack(kernels, q, head, tokens.clone(), factor, &mut queries.q, staging);
        pack(kernels, d_out, head, tokens.clone(), one, &mut queries.d_out, staging);
        let padded = tokens.len().next_multiple_of(kernels.block);
        for row in [&mut queries.lse, &mut queries.delta] {
            row[tokens.len()..padded].fill(Real::ZERO);
        }
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
            let mut staging = Aligned::new(dim * self.kernels.block);
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
