//! The forward pass.

use std::ops::Range;

use super::{RmsNorm, RotaryTables, widened_weight};
use crate::element::{Element, Real};
use crate::simd::{HeadRows, InstructionSet, Kernels, NormRotate, RowNorm};
use crate::view::{Out, View};

pub(super) fn forward<T: Element>(
    set: InstructionSet,
    x: &View<'_, T>,
    norm: Option<&RmsNorm<'_, T>>,
    tables: Option<&RotaryTables<'_>>,
    out: Out<'_, T>,
) {
    let [tokens, heads, dim] = x.shape();
    let rotation = NormRotation::new(set, x.shape(), norm, tables);
    super::over_tokens(tokens, heads * dim, |_, tokens| {
        let zero = <T::Compute as Real>::ZERO;
        let mut staging = vec![zero; (1 + NormRotation::<T>::STAGING) * dim];
        let (from, staging) = staging.split_at_mut(dim);
        for token in tokens {
            // SAFETY: every token is visited once, by one task.
            let target = unsafe { out.heads(token) }.and_then(T::as_compute_mut);
            if let Some((source, target)) = x.heads_in_place(token).zip(target) {
                let target = HeadRows { elements: target, stride: dim, ahead: 0 };
                rotation.heads(token, source, target, heads, staging);
                continue;
            }
            for head in 0..heads {
                // SAFETY: every token and head is visited once, by one task.
                let target = unsafe { out.row(token, head) };
                rotation.row(token, x.compute_row(token, head, from), target, staging);
            }
        }
    });
}

/// Norm and rotation of one row after another.
pub(crate) struct NormRotation<'a, T: Element> {
    kernels: &'static Kernels<T::Compute>,
    norm: Option<Norm<T::Compute>>,
    tables: Option<RotaryTables<'a>>,
    head_dim: usize,
}

/// A norm in the compute type.
#[derive(Clone)]
struct Norm<C> {
    weight: Vec<C>,
    epsilon: C,
    /// Whether products with the weight are rounded to the input's type.
    rounds: bool,
}

impl<'a, T: Element> NormRotation<'a, T> {
    /// Rows of staging that [`NormRotation::row`] needs.
    pub(crate) const STAGING: usize = 3;

    /// # Panics
    ///
    /// When norm and tables are not for rows `[tokens, heads, head_dim]`.
    pub(crate) fn new(
        set: InstructionSet,
        shape: [usize; 3],
        norm: Option<&RmsNorm<'_, T>>,
        tables: Option<&RotaryTables<'a>>,
    ) -> Self {
        super::check(shape, norm, tables);
        let norm = norm.map(|norm| {
            let (weight, rounds) = widened_weight(norm);
            Norm { weight, epsilon: Real::from_f64(norm.epsilon), rounds }
        });
        let [_, _, head_dim] = shape;
        Self { kernels: T::Compute::kernels(set), norm, tables: tables.copied(), head_dim }
    }

    /// The same for some of the tokens, counted anew.
    pub(crate) fn tokens(&self, tokens: Range<usize>) -> Self {
        let half = self.head_dim / 2;
        let rows = tokens.start * half..tokens.end * half;
        let tables = self.tables.map(|RotaryTables { cos, sin }| RotaryTables {
            cos: &cos[rows.clone()],
            sin: &sin[rows],
        });
        Self { norm: self.norm.clone(), tables, ..*self }
    }

    /// Norm and rotation of the heads of a token, each with its distance to the next.
    fn heads(
        &self,
        token: usize,
        x: HeadRows<&[T::Compute]>,
        out: HeadRows<&mut [T::Compute]>,
        heads: usize,
        staging: &mut [T::Compute],
    ) {
        let dim = self.head_dim;
        let tables = super::table_rows(self.tables.as_ref(), token, dim, staging);
        let norm = self.norm.as_ref();
        let norm = norm.map(|norm| RowNorm { weight: Some(&norm.weight), epsilon: norm.epsilon });
        (self.kernels.norm_rotate)(NormRotate { x, out, heads, dim, norm, tables });
    }

    /// Norm and rotation of the elements of one head.
    pub(crate) fn row(
        &self,
        token: usize,
        source: &[T::Compute],
        target: &mut [T],
        staging: &mut [T::Compute],
    ) {
        if let Some(out) = T::as_compute_mut(target) {
            self.heads(token, HeadRows::one(source), HeadRows::one(out), 1, staging);
            return;
        }
        let dim = source.len();
        let (tables_staging, staging) = staging.split_at_mut(dim);
        let tables = super::table_rows(self.tables.as_ref(), token, dim, tables_staging);
        let (normal, rest) = staging.split_at_mut(dim);
        let run = |x: &[_], out: &mut [_], norm, tables| {
            let (x, out) = (HeadRows::one(x), HeadRows::one(out));
            (self.kernels.norm_rotate)(NormRotate { x, out, heads: 1, dim, norm, tables });
        };
        let source = match &self.norm {
            Some(norm) => {
                let plain = RowNorm { weight: None, epsilon: norm.epsilon };
                run(source, &mut *normal, Some(plain), None);
                weigh(normal, &norm.weight, norm.rounds, target);
                &*normal
            }
            None => source,
        };
        let to = &mut rest[..dim];
        run(source, &mut *to, None, tables);
        T::narrow_all(to, target);
    }
}

/// Rounds to `T`, multiplies with the weight, and rounds again if `rounds`; `rounded` is overwritten.
fn weigh<T: Element>(
    row: &mut [T::Compute],
    weight: &[T::Compute],
    rounds: bool,
    rounded: &mut [T],
) {
    T::narrow_all(row, rounded);
    T::widen_all(rounded, row);
    for (value, &weight) in row.iter_mut().zip(weight) {
        *value = *value * weight;
    }
    if rounds {
        T::narrow_all(row, rounded);
        T::widen_all(rounded, row);
    }
}
