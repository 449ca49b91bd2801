//! Values times weights, where the elements of a value lie side by side.

use super::kernels::{accumulate, with_vectors};
use super::vector::Vector;
use crate::ahead::Ahead;
use crate::element::Real;
use crate::view::RowsMut;

/// `out[q][d] = (before[q] * out[q][d] + sum over r of weights[r][q] * values[r][d]) * after[q]`.
///
/// Vector lanes are elements here, not tokens: values are read and results are written where they lie,
/// and neither is transposed.
pub(crate) struct Combine<'a, C> {
    /// A row of a block for each value, with a lane for each query.
    pub(crate) weights: &'a [C],
    /// Rows with the elements of `out`, so far apart.
    pub(crate) values: (&'a [C], usize),
    /// A row for each query, of a block at the most.
    pub(crate) out: RowsMut<'a, C>,
    /// Without, `out` is overwritten.
    pub(crate) before: Option<&'a [C]>,
    pub(crate) after: Option<&'a [C]>,
    pub(crate) ahead: &'a mut Ahead,
}

#[inline(always)]
pub(super) fn combine<V: Vector, const PANEL: usize>(mut args: Combine<'_, V::Scalar>) {
    let [queries, dim] = args.out.shape();
    let keys = args.weights.len() / V::BLOCK;
    let (values, stride) = args.values;
    assert!(args.weights.len().is_multiple_of(V::BLOCK) && queries <= V::BLOCK);
    assert!(keys == 0 || values.len() >= (keys - 1) * stride + dim);
    let enough = |factors: Option<&[_]>| factors.is_none_or(|factors| factors.len() >= queries);
    assert!(enough(args.before) && enough(args.after));
    let mut column = 0;
    while column < dim {
        with_vectors!(V, dim - column, N => {
            for query in (0..queries).step_by(PANEL) {
                // SAFETY: asserted above; `column < dim` and `query < queries`.
                unsafe {
                    if dim - column >= N * V::LANES {
                        columns::<V, PANEL, N>(&mut args, query, column, None);
                    } else {
                        let last = dim - column - (N - 1) * V::LANES;
                        columns::<V, PANEL, N>(&mut args, query, column, Some(last));
                    }
                }
            }
            column += N * V::LANES;
        });
    }
}

/// Some elements, from `column` on, for a panel of queries. `last` elements are in the last register,
/// where it is not full.
///
/// # Safety
///
/// There must be such elements and queries, values for all weights, and factors for all queries.
#[inline(always)]
unsafe fn columns<V: Vector, const PANEL: usize, const N: usize>(
    args: &mut Combine<'_, V::Scalar>,
    query: usize,
    column: usize,
    last: Option<usize>,
) {
    let Combine { weights, values: (values, stride), out, before, after, ahead } = args;
    let [queries, _] = out.shape();
    let here = PANEL.min(queries - query);
    let mut acc = [[V::splat(V::Scalar::ZERO); N]; PANEL];
    // SAFETY: blocks are whole panels, so that there are weights for the panel; all else is promised by
    // the caller.
    unsafe {
        if let Some(before) = before {
            for (i, acc) in acc.iter_mut().enumerate().take(here) {
                let row = out.row(query + i).add(column).cast_const();
                let factor = V::splat(before[query + i]);
                for (j, acc) in acc.iter_mut().enumerate() {
                    let vector = match last {
                        Some(last) if j + 1 == N => V::load_first(row.add(j * V::LANES), last),
                        _ => V::load(row.add(j * V::LANES)),
                    };
                    *acc = vector.mul(factor);
                }
            }
        }
        let weights = (weights.as_ptr().add(query), weights.len() / V::BLOCK);
        let values = values.as_ptr().wrapping_add(column);
        let weight = |t: usize, i: usize| weights.0.add(t * V::BLOCK + i);
        accumulate(&mut acc, weight, (values, *stride, last), weights.1, ahead);
        for (i, acc) in acc.iter().enumerate().take(here) {
            let row = out.row(query + i).add(column);
            let factor = V::splat(after.map_or(V::Scalar::ONE, |after| after[query + i]));
            for (j, acc) in acc.iter().enumerate() {
                let vector = acc.mul(factor);
                match last {
                    Some(last) if j + 1 == N => vector.store_first(row.add(j * V::LANES), last),
                    _ => vector.store(row.add(j * V::LANES)),
                }
            }
        }
    }
}
