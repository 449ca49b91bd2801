//! The backward pass.

use std::sync::Mutex;

use super::{RmsNorm, RotaryTables, widened_weight};
use crate::element::{Element, Real};
use crate::simd::{HeadRows, InstructionSet, Kernels, NormRotateBackward, RowNorm};
use crate::view::{Out, View};

pub(super) fn backward<T: Element>(
    set: InstructionSet,
    x: &View<'_, T>,
    norm: Option<&RmsNorm<'_, T>>,
    tables: Option<&RotaryTables<'_>>,
    d_out: Option<View<'_, T>>,
    d_input: Out<'_, T>,
) -> Vec<T::Compute> {
    let zero = <T::Compute as Real>::ZERO;
    let [tokens, heads, dim] = x.shape();
    let weight = norm.map(widened_weight);
    let norm = norm.zip(weight.as_ref()).map(|(norm, (weight, _))| RowNorm {
        weight: Some(weight.as_slice()),
        epsilon: Real::from_f64(norm.epsilon),
    });
    let weight_len = if norm.is_some() { dim } else { 0 };
    let pass = Pass { kernels: T::Compute::kernels(set), x, norm, tables, d_out, d_input };
    let partial_sums = Mutex::new(Vec::new());
    super::over_tokens(tokens, heads * dim, |chunk, tokens| {
        let mut staging = vec![zero; (3 * heads + 1) * dim];
        let mut d_weight = vec![zero; weight_len];
        tokens.for_each(|token| pass.token(token, &mut d_weight, &mut staging));
        if weight_len > 0 {
            let mut sums = partial_sums.lock().expect("no task panics while it holds the lock");
            sums.push((chunk, d_weight));
        }
    });
    let mut partial_sums = partial_sums.into_inner().expect("no task panicked");
    partial_sums.sort_unstable_by_key(|(chunk, _)| *chunk);
    let mut d_weight = vec![zero; weight_len];
    for (_, part) in partial_sums {
        for (sum, part) in d_weight.iter_mut().zip(part) {
            *sum = *sum + part;
        }
    }
    d_weight
}

struct Pass<'a, T: Element> {
    kernels: &'static Kernels<T::Compute>,
    x: &'a View<'a, T>,
    norm: Option<RowNorm<'a, T::Compute>>,
    tables: Option<&'a RotaryTables<'a>>,
    /// In `d_input` where absent.
    d_out: Option<View<'a, T>>,
    d_input: Out<'a, T>,
}

impl<T: Element> Pass<'_, T> {
    /// Adds to `d_weight`; `staging` has room for three times the rows of a token and one more. Each token
    /// is visited once, by one task.
    fn token(&self, token: usize, d_weight: &mut [T::Compute], staging: &mut [T::Compute]) {
        let [_, heads, dim] = self.x.shape();
        let (tables, staging) = staging.split_at_mut(dim);
        let tables = super::table_rows(self.tables, token, dim, tables);
        let (x_rows, staging) = staging.split_at_mut(heads * dim);
        let (d_out_rows, target_rows) = staging.split_at_mut(heads * dim);
        let x = match self.norm {
            Some(_) => self.x.heads(token, x_rows),
            None => HeadRows::one(&[][..]),
        };
        let mut run = |d_out, target: &mut [_], ahead| {
            let gradient = HeadRows { elements: target, stride: dim, ahead };
            let (norm, kernels) = (self.norm, self.kernels);
            let args =
                NormRotateBackward { x, d_out, gradient, heads, dim, norm, tables, d_weight };
            (kernels.norm_rotate_backward)(args);
        };
        let d_out = self.d_out.as_ref().map(|d_out| d_out.heads(token, d_out_rows));
        // SAFETY: this token is visited once, by one task.
        if let Some(target) = unsafe { self.d_input.heads(token) }.and_then(T::as_compute_mut) {
            let (_, ahead) = self.d_input.place(token, 0);
            return run(d_out, target, ahead as isize);
        }
        if d_out.is_none() {
            for (head, row) in target_rows.chunks_exact_mut(dim).enumerate() {
                // SAFETY: as above.
                T::widen_all(unsafe { self.d_input.row(token, head) }, row);
            }
        }
        run(d_out, &mut *target_rows, 0);
        for (head, row) in target_rows.chunks_exact(dim).enumerate() {
            // SAFETY: as above.
            T::narrow_all(row, unsafe { self.d_input.row(token, head) });
        }
    }
}
