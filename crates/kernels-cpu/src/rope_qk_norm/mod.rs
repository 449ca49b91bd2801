//! Per-head RMS norm and rotary position embedding in one pass.
//!
//! For each token and head, with `x` the `head_dim` elements:
//!
//! 1. norm (optional): `x * rsqrt(mean(x^2) + epsilon)`, rounded to the type of `x`, then times the
//!    weight, rounded to the wider of both types;
//! 2. rotation (optional), half-split: `out[i] = x[i] cos[i] - x[i + d/2] sin[i]` and
//!    `out[i + d/2] = x[i + d/2] cos[i] + x[i] sin[i]` for `i < d/2`, rounded once.
//!
//! Arithmetic is f32, for f64 inputs f64. Queries and keys are two calls.

mod backward;
mod forward;

pub(crate) use forward::NormRotation;

use std::ops::Range;

use rayon::prelude::*;

use crate::element::{Element, Real};
use crate::simd::InstructionSet;
use crate::view::{View, ViewMut};

/// The weight of a norm, `[head_dim]`.
#[derive(Clone, Copy, Debug)]
pub enum NormWeight<'a, T> {
    /// In f32, whatever the type of the input.
    F32(&'a [f32]),
    /// In the type of the input.
    Input(&'a [T]),
}

/// A per-head RMS norm.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<'a, T> {
    /// Factor on each normalised element, shared by all heads.
    pub weight: NormWeight<'a, T>,
    /// Added to the mean square.
    pub epsilon: f64,
}

/// cos and sin of the rotary embedding, each `[tokens, head_dim / 2]`, row-major.
#[derive(Clone, Copy, Debug)]
pub struct RotaryTables<'a> {
    /// Cosines.
    pub cos: &'a [f32],
    /// Sines.
    pub sin: &'a [f32],
}

/// The output's gradient, and where the input's gradient goes.
#[derive(Debug)]
pub enum GradientBuffers<'a, T> {
    /// Two places.
    Separate {
        /// Gradient of the output, `[tokens, heads, head_dim]`.
        d_out: View<'a, T>,
        /// Gradient of the input, in the same shape; overwritten.
        d_input: ViewMut<'a, T>,
    },
    /// The output's gradient, to be overwritten with the input's: say, the q slot of a packed
    /// `[tokens, 3, heads, head_dim]` gradient.
    InPlace(ViewMut<'a, T>),
}

/// Norm and rotation of `x` `[tokens, heads, head_dim]` into `out` of the same shape, by the best
/// instructions available ([`InstructionSet::current`]).
///
/// # Panics
///
/// When the shapes do not fit together, or when there are tables and `head_dim` is odd.
pub fn forward<T: Element>(
    x: &View<'_, T>,
    norm: Option<&RmsNorm<'_, T>>,
    tables: Option<&RotaryTables<'_>>,
    out: ViewMut<'_, T>,
) {
    forward_with(InstructionSet::current(), x, norm, tables, out);
}

/// [`forward`] by the instructions that the caller chooses.
///
/// # Panics
///
/// As for [`forward`], and when the machine does not have `set`.
pub fn forward_with<T: Element>(
    set: InstructionSet,
    x: &View<'_, T>,
    norm: Option<&RmsNorm<'_, T>>,
    tables: Option<&RotaryTables<'_>>,
    out: ViewMut<'_, T>,
) {
    check(x.shape(), norm, tables);
    assert_eq!(out.shape(), x.shape(), "out: expected the shape of x");
    forward::forward(set, x, norm, tables, out.out);
}

/// The gradients of [`forward`], which takes `x`, `norm` and `tables`, by the best instructions
/// available ([`InstructionSet::current`]).
///
/// Returns the gradient of the norm's weight, `[head_dim]`, in the compute type; empty without a norm.
/// Its sums over tokens are grouped by their number alone, so that no result depends on threads. The
/// roundings of the forward pass count as identities.
///
/// # Panics
///
/// When the shapes do not fit together, or when there are tables and `head_dim` is odd.
pub fn backward<T: Element>(
    x: &View<'_, T>,
    norm: Option<&RmsNorm<'_, T>>,
    tables: Option<&RotaryTables<'_>>,
    gradients: GradientBuffers<'_, T>,
) -> Vec<T::Compute> {
    backward_with(InstructionSet::current(), x, norm, tables, gradients)
}

/// [`backward`] by the instructions that the caller chooses.
///
/// # Panics
///
/// As for [`backward`], and when the machine does not have `set`.
pub fn backward_with<T: Element>(
    set: InstructionSet,
    x: &View<'_, T>,
    norm: Option<&RmsNorm<'_, T>>,
    tables: Option<&RotaryTables<'_>>,
    gradients: GradientBuffers<'_, T>,
) -> Vec<T::Compute> {
    check(x.shape(), norm, tables);
    let (d_out, d_input) = match gradients {
        GradientBuffers::Separate { d_out, d_input } => {
            assert_eq!(d_out.shape(), x.shape(), "d_out: expected the shape of x");
            (Some(d_out), d_input)
        }
        GradientBuffers::InPlace(gradient) => (None, gradient),
    };
    assert_eq!(d_input.shape(), x.shape(), "d_input: expected the shape of x");
    backward::backward(set, x, norm, tables, d_out, d_input.out)
}

fn check<T: Element>(
    [tokens, _, head_dim]: [usize; 3],
    norm: Option<&RmsNorm<'_, T>>,
    tables: Option<&RotaryTables<'_>>,
) {
    if let Some(RmsNorm { weight, .. }) = norm {
        let len = match weight {
            NormWeight::F32(weight) => weight.len(),
            NormWeight::Input(weight) => weight.len(),
        };
        assert_eq!(len, head_dim, "weight: expected {head_dim} elements, got {len}");
    }
    if let Some(RotaryTables { cos, sin }) = tables {
        assert!(head_dim.is_multiple_of(2), "x: expected an even head_dim, got {head_dim}");
        let expected = tokens * head_dim / 2;
        assert_eq!(cos.len(), expected, "cos: expected [{tokens}, {}]", head_dim / 2);
        assert_eq!(sin.len(), expected, "sin: expected [{tokens}, {}]", head_dim / 2);
    }
}

/// The weight in the compute type, and whether products with it are rounded to the input's type.
fn widened_weight<T: Element>(norm: &RmsNorm<'_, T>) -> (Vec<T::Compute>, bool) {
    match norm.weight {
        NormWeight::F32(weight) => (weight.iter().map(|&w| Real::from_f32(w)).collect(), false),
        NormWeight::Input(weight) => (weight.iter().map(|&w| w.widen()).collect(), true),
    }
}

/// Runs `task` on all tokens, in numbered chunks whose size depends on `width`, the elements per token,
/// alone; on all threads where that pays.
fn over_tokens(tokens: usize, width: usize, task: impl Fn(usize, Range<usize>) + Sync) {
    /// Elements of a chunk.
    const CHUNK: usize = 1 << 15;
    if width == 0 {
        return;
    }
    let size = (CHUNK / width).max(1);
    let run = |chunk: usize| task(chunk, chunk * size..(chunk * size + size).min(tokens));
    let chunks = tokens.div_ceil(size);
    if chunks <= 2 {
        (0..chunks).for_each(run);
    } else {
        (0..chunks).into_par_iter().for_each(run);
    }
}

/// cos and sin of one token in the compute type.
fn table_rows<'a, C: Real>(
    tables: Option<&RotaryTables<'a>>,
    token: usize,
    dim: usize,
    staging: &'a mut [C],
) -> Option<(&'a [C], &'a [C])> {
    let half = dim / 2;
    let (first, second) = staging.split_at_mut(half);
    tables.map(|RotaryTables { cos, sin }| {
        let row = token * half..(token + 1) * half;
        (C::of_f32s(&cos[row.clone()], first), C::of_f32s(&sin[row], second))
    })
}
