//! The forward pass.

use super::{RmsNorm, RotaryTables, widened_weight};
use crate::element::{Element, Real};
use crate::simd::{InstructionSet, NormRotate, RowNorm};
use crate::view::{Out, View};

pub(super) fn forward<T: Element>(
    set: InstructionSet,
    x: &View<'_, T>,
    norm: Option<&RmsNorm<'_, T>>,
    tables: Option<&RotaryTables<'_>>,
    out: Out<'_, T>,
) {
    let kernels = T::Compute::kernels(set);
    let [tokens, heads, dim] = x.shape();
    let weight = norm.map(widened_weight);
    let norm = norm.zip(weight.as_ref()).map(|(norm, (weight, rounds))| {
        let epsilon = <T::Compute as Real>::from_f64(norm.epsilon);
        (RowNorm { weight: Some(weight), epsilon }, *rounds)
    });
    super::over_tokens(tokens, heads * dim, |_, tokens| {
        let mut staging = vec![<T::Compute as Real>::ZERO; 4 * dim];
        let (tables_staging, staging) = staging.split_at_mut(dim);
        let (from, staging) = staging.split_at_mut(dim);
        let (normal, to) = staging.split_at_mut(dim);
        for token in tokens {
            let tables = super::table_rows(tables, token, dim, tables_staging);
            for head in 0..heads {
                x.prefetch(token + 1..(token + 2).min(x.shape()[0]), head);
                // SAFETY: every token and head is visited once, by one task.
                let target = unsafe { out.row(token, head) };
                let source = x.compute_row(token, head, from);
                if let Some(out) = T::as_compute_mut(target) {
                    let norm = norm.map(|(norm, _)| norm);
                    (kernels.norm_rotate)(NormRotate { x: source, out, norm, tables });
                    continue;
                }
                let source = match norm {
                    Some((norm, rounds)) => {
                        let plain = Some(RowNorm { weight: None, ..norm });
                        let args = NormRotate { x: source, out: normal, norm: plain, tables: None };
                        (kernels.norm_rotate)(args);
                        weigh(normal, norm.weight.unwrap_or(&[]), rounds, target);
                        &*normal
                    }
                    None => source,
                };
                (kernels.norm_rotate)(NormRotate { x: source, out: to, norm: None, tables });
                T::narrow_all(to, target);
            }
        }
    });
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
