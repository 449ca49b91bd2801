//! Linear projections of packed tokens: `out = x weight + bias`.
//!
//! A weight is packed once into panels of as many columns as a row of the micro-kernel has lanes. Blocks
//! of rows that fit the second cache then meet one panel after another, each product running over the
//! whole depth in registers. So every output is written once, when it is final, and what follows a
//! projection can be done to it while it is still in a cache: norm and rotation of q and k are.

mod pack;

use std::ops::Range;

use rayon::prelude::*;

use crate::aligned::Aligned;
use crate::element::{Element, Real};
use crate::rope_qk_norm::NormRotation;
use crate::simd::{InstructionSet, Kernels, Product};
use crate::view::{Out, View, ViewMut};

/// Tiles of rows that meet a panel of the weight together: for usual widths they fit the second cache.
const TILES: usize = 4;
/// Tasks per thread that there should be: enough that no thread waits long for the last one.
const TASKS_PER_THREAD: usize = 8;
/// Below this many multiplications a thread pool costs more than it saves.
const SERIAL_WORK: usize = 1 << 19;

/// The weight and bias of a projection.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a, T> {
    /// `[inputs, 1, outputs]`, in any order in memory.
    pub weight: View<'a, T>,
    /// `[outputs]`.
    pub bias: Option<&'a [T]>,
}

/// `out = x weight + bias`, by the best instructions available ([`InstructionSet::current`]).
///
/// `x` is `[tokens, 1, inputs]`, `out` `[tokens, 1, outputs]`.
///
/// # Panics
///
/// When the shapes do not fit together.
pub fn forward<T: Element>(x: &View<'_, T>, linear: &Linear<'_, T>, out: ViewMut<'_, T>) {
    forward_with(InstructionSet::current(), x, linear, out);
}

/// [`forward`] by the instructions that the caller chooses.
///
/// # Panics
///
/// As for [`forward`], and when the machine does not have `set`.
pub fn forward_with<T: Element>(
    set: InstructionSet,
    x: &View<'_, T>,
    linear: &Linear<'_, T>,
    out: ViewMut<'_, T>,
) {
    let weight = Packed::new(set, linear);
    project(set, x, &[Part { weight: &weight, out: out.out, heads: None }]);
}

impl<T: Element> Linear<'_, T> {
    /// `[inputs, outputs]`.
    pub(crate) fn shape(&self) -> [usize; 2] {
        let [inputs, _, outputs] = self.weight.shape();
        [inputs, outputs]
    }

    /// The projection to some of the outputs.
    pub(crate) fn columns(&self, columns: Range<usize>) -> Self {
        let bias = self.bias.map(|bias| &bias[columns.clone()]);
        Self { weight: self.weight.columns(columns), bias }
    }
}

/// A weight in panels, and the bias.
pub(crate) struct Packed<C> {
    /// `[panels][inputs][block]`.
    panels: Aligned<C>,
    /// Padded to whole panels.
    bias: Option<Vec<C>>,
    inputs: usize,
    outputs: usize,
}

impl<C: Real> Packed<C> {
    pub(crate) fn new<T: Element<Compute = C>>(
        set: InstructionSet,
        linear: &Linear<'_, T>,
    ) -> Self {
        let kernels = C::kernels(set);
        let [inputs, one, outputs] = linear.weight.shape();
        assert_eq!(one, 1, "weight: expected the shape [inputs, 1, outputs]");
        let bias = linear.bias.map(|bias| {
            assert_eq!(bias.len(), outputs, "bias: expected {outputs} elements");
            let mut padded = vec![C::ZERO; outputs.next_multiple_of(kernels.block)];
            T::widen_all(bias, &mut padded);
            padded
        });
        Self { panels: pack::weight(kernels, &linear.weight), bias, inputs, outputs }
    }
}

/// One of several projections of the same rows.
pub(crate) struct Part<'a, T: Element> {
    pub(crate) weight: &'a Packed<T::Compute>,
    /// `[tokens, 1, outputs]`.
    pub(crate) out: Out<'a, T>,
    /// What is done to each head of the result, of so many elements.
    pub(crate) heads: Option<(usize, &'a NormRotation<'a, T>)>,
}

/// All `parts` of `x` `[tokens, 1, inputs]`.
///
/// # Panics
///
/// When the shapes do not fit together.
pub(crate) fn project<T: Element>(set: InstructionSet, x: &View<'_, T>, parts: &[Part<'_, T>]) {
    let [tokens, one, inputs] = x.shape();
    assert_eq!(one, 1, "x: expected the shape [tokens, 1, inputs]");
    let mut work = 0;
    for Part { weight, out, .. } in parts {
        assert_eq!(inputs, weight.inputs, "x: expected {} inputs, got {inputs}", weight.inputs);
        let expected = [tokens, 1, weight.outputs];
        assert_eq!(out.shape(), expected, "out: expected the shape {expected:?}");
        work += tokens * inputs.max(1) * weight.outputs;
    }
    if tokens == 0 {
        return;
    }
    let projection = Projection { kernels: T::Compute::kernels(set), x, parts };
    projection.run(if work <= SERIAL_WORK { 1 } else { rayon::current_num_threads() });
}

struct Projection<'a, T: Element> {
    kernels: &'static Kernels<T::Compute>,
    x: &'a View<'a, T>,
    parts: &'a [Part<'a, T>],
}

/// Panels of one part that end where a head ends.
struct Unit {
    part: usize,
    panels: Range<usize>,
}

/// Rows and columns that one thread computes.
struct Task<'a> {
    rows: Range<usize>,
    units: &'a [Unit],
}

/// What a thread keeps between tasks.
struct Scratch<C> {
    /// Rows in tiles, `[tiles][inputs][rows of a tile]`.
    rows: Aligned<C>,
    tile: Aligned<C>,
    staging: Aligned<C>,
}

impl<T: Element> Projection<'_, T> {
    fn run(&self, threads: usize) {
        let units = self.units();
        let tasks = self.tasks(&units, threads);
        let longest = tasks.iter().map(|task| task.rows.len()).max().unwrap_or(0);
        let scratch = || self.scratch(longest);
        if threads == 1 {
            let mut scratch = scratch();
            tasks.iter().for_each(|task| self.task(task, &mut scratch));
        } else {
            tasks.par_iter().for_each_init(scratch, |scratch, task| self.task(task, scratch));
        }
    }

    fn units(&self) -> Vec<Unit> {
        let block = self.kernels.block;
        let units = self.parts.iter().enumerate().flat_map(|(part, Part { weight, heads, .. })| {
            let panels = weight.outputs.div_ceil(block);
            let step = heads.map_or(1, |(head_dim, _)| panels_of_whole_heads(head_dim, block));
            let starts = (0..panels).step_by(step);
            starts.map(move |start| Unit { part, panels: start..(start + step).min(panels) })
        });
        units.collect()
    }

    /// Blocks of rows, and where those are few, their columns in parts.
    fn tasks<'a>(&self, units: &'a [Unit], threads: usize) -> Vec<Task<'a>> {
        let height = self.kernels.rows;
        let [tokens, _, _] = self.x.shape();
        let tiles = tokens.div_ceil(height);
        let wanted = if threads > 1 { TASKS_PER_THREAD * threads } else { 1 };
        // A panel comes from far away for each block, which should be worth it.
        let blocks = tiles.div_ceil(TILES).max(wanted.min(tiles.div_ceil(TILES / 2)));
        let columns = wanted.div_ceil(blocks).min(units.len());
        let cut = |index: usize, pieces: usize, all: usize| index * all / pieces;
        let tasks = (0..blocks).flat_map(|index| {
            let [start, end] =
                [index, index + 1].map(|i| (cut(i, blocks, tiles) * height).min(tokens));
            (0..columns).map(move |index| Task {
                rows: start..end,
                units: &units
                    [cut(index, columns, units.len())..cut(index + 1, columns, units.len())],
            })
        });
        tasks.collect()
    }

    fn scratch(&self, rows: usize) -> Scratch<T::Compute> {
        let kernels = self.kernels;
        let [_, _, inputs] = self.x.shape();
        let heads = self.parts.iter().filter_map(|part| part.heads);
        let head_dim = heads.map(|(head_dim, _)| head_dim).max().unwrap_or(0);
        let head = (1 + NormRotation::<T>::STAGING) * head_dim;
        Scratch {
            rows: Aligned::new(rows.next_multiple_of(kernels.rows) * inputs),
            tile: Aligned::new(kernels.rows * kernels.block),
            staging: Aligned::new(pack::staging_len(kernels, inputs).max(head)),
        }
    }

    fn task(&self, task: &Task<'_>, scratch: &mut Scratch<T::Compute>) {
        pack::rows(self.kernels, self.x, &task.rows, &mut scratch.rows, &mut scratch.staging);
        for Unit { part, panels } in task.units {
            let part = &self.parts[*part];
            for panel in panels.clone() {
                self.panel(part, panel, &task.rows, scratch);
            }
            let Some((head_dim, rotation)) = part.heads else { continue };
            let block = self.kernels.block;
            let end = (panels.end * block).min(part.weight.outputs);
            for start in (panels.start * block..end).step_by(head_dim) {
                let head = start..start + head_dim;
                follow(part.out, head, rotation, &task.rows, &mut scratch.staging);
            }
        }
    }

    /// The product of `rows` with one panel.
    fn panel(
        &self,
        part: &Part<'_, T>,
        panel: usize,
        rows: &Range<usize>,
        scratch: &mut Scratch<T::Compute>,
    ) {
        let Packed { panels, inputs, .. } = part.weight;
        let (height, block) = (self.kernels.rows, self.kernels.block);
        let (tile_len, panel_len) = (height * inputs, self.kernels.block_len(*inputs));
        let next = panels.get((panel + 1) * panel_len..(panel + 2) * panel_len).unwrap_or(&[]);
        let share = panel_len.div_ceil(rows.len().div_ceil(height)).next_multiple_of(block);
        for (index, start) in rows.clone().step_by(height).enumerate() {
            let [from, to] = [index, index + 1].map(|i| (i * share).min(next.len()));
            (self.kernels.product)(Product {
                a: &scratch.rows[index * tile_len..][..tile_len],
                b: &panels[panel * panel_len..][..panel_len],
                tile: &mut scratch.tile,
                next: &next[from..to],
            });
            let rows = start..(start + height).min(rows.end);
            store(part, panel * block, rows, &scratch.tile, block);
        }
    }
}

/// Adds the bias and writes the rows of a tile to the columns from `start` on.
fn store<T: Element>(
    part: &Part<'_, T>,
    start: usize,
    rows: Range<usize>,
    tile: &[T::Compute],
    block: usize,
) {
    let columns = start..(start + block).min(part.weight.outputs);
    let bias = part.weight.bias.as_ref().map(|bias| &bias[start..][..block]);
    for (token, row) in rows.zip(tile.chunks_exact(block)) {
        // SAFETY: no other task has these rows and columns.
        let target = unsafe { part.out.row_part(token, 0, columns.clone()) };
        match (bias, T::as_compute_mut(target)) {
            (None, Some(target)) => target.copy_from_slice(&row[..columns.len()]),
            (Some(bias), Some(target)) => {
                for ((target, &value), &bias) in target.iter_mut().zip(row).zip(bias) {
                    *target = value + bias;
                }
            }
            (bias, None) => {
                for (index, (target, &value)) in target.iter_mut().zip(row).enumerate() {
                    let bias = bias.map_or(T::Compute::ZERO, |bias| bias[index]);
                    *target = T::narrow(value + bias);
                }
            }
        }
    }
}

/// Normalises and rotates one head of some rows, in place.
fn follow<T: Element>(
    out: Out<'_, T>,
    head: Range<usize>,
    rotation: &NormRotation<'_, T>,
    rows: &Range<usize>,
    staging: &mut [T::Compute],
) {
    let (source, staging) = staging.split_at_mut(head.len());
    for token in rows.clone() {
        // SAFETY: this head of these rows belongs to the task that calls, which has written all of it.
        let target = unsafe { out.row_part(token, 0, head.clone()) };
        T::widen_all(target, source);
        rotation.row(token, source, target, staging);
    }
}

/// The fewest panels of `block` columns that end where a head ends.
fn panels_of_whole_heads(head_dim: usize, block: usize) -> usize {
    let (mut a, mut b) = (head_dim, block);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    head_dim / a
}
