//! The backward pass.

use std::sync::Mutex;

use super::{RmsNorm, RotaryTables, widened_weight};
use crate::element::{Element, Real};
use crate::simd::{Heads, InstructionSet, NormRotateBackward, RowNorm};
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
    let kernels = T::Compute::kernels(set);
    let [tokens, heads, dim] = x.shape();
    let weight = norm.map(widened_weight);
    let row_norm = norm.zip(weight.as_ref()).map(|(norm, (weight, _))| RowNorm {
        weight: Some(weight.as_slice()),
        epsilon: Real::from_f64(norm.epsilon),
    });
    let weight_len = if norm.is_some() { dim } else { 0 };
    let partial_sums = Mutex::new(Vec::new());
    super::over_tokens(tokens, heads * dim, |chunk, tokens| {
        let mut staging = vec![zero; 3 * dim];
        let (tables_staging, staging) = staging.split_at_mut(dim);
        let (from, staging) = staging.split_at_mut(dim);
        let mut d_weight = vec![zero; weight_len];
        for token in tokens {
            let tables = super::table_rows(tables, token, dim, tables_staging);
            type From<'a, C> = (&'a [C], usize);
            type To<'a, C> = (&'a mut [C], usize);
            let mut run = |(x, x_stride): From<'_, _>, (gradient, stride): To<'_, _>, heads| {
                let x = Heads { elements: x, stride: x_stride };
                let gradient = Heads { elements: gradient, stride };
                let (norm, d_weight) = (row_norm, &mut *d_weight);
                let args = NormRotateBackward { x, gradient, heads, dim, norm, tables, d_weight };
                (kernels.norm_rotate_backward)(args);
            };
            let next = token + 1..(token + 2).min(x.shape()[0]);
            for head in 0..heads {
                if row_norm.is_some() {
                    x.prefetch(next.clone(), head);
                }
                d_input.prefetch(next.clone(), head);
            }
            // SAFETY: every token is visited once, by one task.
            let gradient = unsafe { d_input.heads(token) }.and_then(T::as_compute_mut);
            if let Some((x, gradient)) = x.heads_in_place(token).zip(gradient) {
                if let Some(d_out) = &d_out {
                    for (head, row) in gradient.chunks_exact_mut(dim).enumerate() {
                        d_out.read(token, head, row);
                    }
                }
                run(x, (gradient, dim), heads);
                continue;
            }
            for head in 0..heads {
                // SAFETY: every token and head is visited once, by one task.
                let target = unsafe { d_input.row(token, head) };
                let x = match row_norm {
                    Some(_) => x.compute_row(token, head, from),
                    None => &[],
                };
                match T::as_compute_mut(target) {
                    Some(gradient) => {
                        if let Some(d_out) = &d_out {
                            d_out.read(token, head, gradient);
                        }
                        run((x, 0), (gradient, 0), 1);
                    }
                    None => {
                        match &d_out {
                            Some(d_out) => d_out.read(token, head, staging),
                            None => T::widen_all(target, staging),
                        }
                        run((x, 0), (&mut staging[..], 0), 1);
                        T::narrow_all(staging, target);
                    }
                }
            }
        }
        if weight_len > 0 {
            partial_sums
                .lock()
                .expect("no task panics while it holds the lock")
                .push((chunk, d_weight));
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
