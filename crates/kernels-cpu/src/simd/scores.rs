//! What happens to the scores of attention: softmax, softcap and their gradients.

use super::vector::Vector;
use crate::element::Real;

/// One step of the online softmax: `scores` `[keys][block]` in units of log2 become weights, the
/// running maximum and sum of each lane are brought up to date, and `correction` receives the factor for
/// what was accumulated before.
pub(crate) struct Softmax<'a, C> {
    pub(crate) scores: &'a mut [C],
    pub(crate) max: &'a mut [C],
    pub(crate) sum: &'a mut [C],
    pub(crate) correction: &'a mut [C],
    pub(crate) lanes: usize,
}

/// `cap * tanh(score)` in place.
pub(crate) struct Softcap<'a, C> {
    pub(crate) scores: &'a mut [C],
    pub(crate) cap: C,
}

/// From the scores `s` (log2) and the weights' gradients, both `[keys][block]`: the weights
/// `p = 2^(s - lse)` in the place of the former, `p * (gradient - delta)` in that of the latter. With a
/// softcap, scores come as the argument of its tanh and `softcap` is the cap in units of log2.
pub(crate) struct ScoreGradient<'a, C> {
    pub(crate) scores: &'a mut [C],
    pub(crate) gradients: &'a mut [C],
    pub(crate) lse: &'a [C],
    pub(crate) delta: &'a [C],
    pub(crate) softcap: Option<C>,
}

#[inline(always)]
pub(super) fn softmax<V: Vector>(args: Softmax<'_, V::Scalar>) {
    let Softmax { scores, max, sum, correction, lanes } = args;
    assert!(max.len() >= V::BLOCK && sum.len() >= V::BLOCK && correction.len() >= V::BLOCK);
    assert!(scores.len().is_multiple_of(V::BLOCK) && lanes <= V::BLOCK);
    let rows = scores.len() / V::BLOCK;
    for lane in (0..lanes).step_by(V::LANES) {
        // SAFETY: `lane + LANES <= BLOCK`, the length of every row.
        unsafe {
            let scores = scores.as_mut_ptr().add(lane);
            let before = V::load(max.as_ptr().add(lane));
            let largest = largest(scores, rows, before);
            // A lane that has seen no key yet: anything finite leaves its weights at zero.
            let shift = finite_or_zero(largest);
            let factor = before.sub(shift).exp2();
            let total = weights(scores, rows, shift);
            let sum = sum.as_mut_ptr().add(lane);
            V::load(sum).mul_add(factor, total).store(sum);
            factor.store(correction.as_mut_ptr().add(lane));
            largest.store(max.as_mut_ptr().add(lane));
        }
    }
}

/// Runs `$body` for each of `$rows` rows: with an accumulator of the array `$accumulators` in turn, so
/// that none waits for the one before, and the last few with the first. An index that the compiler does
/// not know would keep the accumulators in memory.
macro_rules! in_turn {
    ($rows:expr, $accumulators:ident, |$row:ident, $accumulator:ident| $body:expr) => {{
        let count = $accumulators.len();
        let whole = $rows - $rows % count;
        for first in (0..whole).step_by(count) {
            for (i, $accumulator) in $accumulators.iter_mut().enumerate() {
                let $row = first + i;
                $body;
            }
        }
        for $row in whole..$rows {
            let $accumulator = &mut $accumulators[0];
            $body;
        }
    }};
}

/// The largest of `start` and the registers at the start of `rows` rows of a block.
///
/// # Safety
///
/// These must be readable.
#[inline(always)]
unsafe fn largest<V: Vector>(scores: *const V::Scalar, rows: usize, start: V) -> V {
    let mut largest = [start; 4];
    in_turn!(rows, largest, |row, largest| {
        // SAFETY: as promised by the caller.
        *largest = largest.max(unsafe { V::load(scores.add(row * V::BLOCK)) });
    });
    let [a, b, c, d] = largest;
    a.max(b).max(c.max(d))
}

/// Puts `2^(score - shift)` in the place of the scores in the registers at the start of `rows` rows of a
/// block. Returns the sum.
///
/// # Safety
///
/// These must be readable and writable.
#[inline(always)]
unsafe fn weights<V: Vector>(scores: *mut V::Scalar, rows: usize, shift: V) -> V {
    let mut totals = [V::splat(V::Scalar::ZERO); 2];
    in_turn!(rows, totals, |row, total| {
        // SAFETY: as promised by the caller.
        unsafe {
            let at = scores.add(row * V::BLOCK);
            let weight = V::load(at).sub(shift).exp2();
            weight.store(at);
            *total = total.add(weight);
        }
    });
    totals[0].add(totals[1])
}

/// Zero for negative infinity, otherwise the number itself.
#[inline(always)]
fn finite_or_zero<V: Vector>(x: V) -> V {
    // No finite number is less than the lowest one.
    x.zero_where_less(x, V::splat(V::Scalar::LOWEST))
}

#[inline(always)]
pub(super) fn softcap<V: Vector>(args: Softcap<'_, V::Scalar>) {
    let Softcap { scores, cap } = args;
    for chunk in scores.chunks_exact_mut(V::LANES) {
        // SAFETY: a chunk has `LANES` numbers.
        unsafe {
            let x = V::load(chunk.as_ptr());
            V::Scalar::tanh(x).mul(V::splat(cap)).store(chunk.as_mut_ptr());
        }
    }
}

#[inline(always)]
pub(super) fn score_gradient<V: Vector>(args: ScoreGradient<'_, V::Scalar>) {
    let ScoreGradient { scores, gradients, lse, delta, softcap } = args;
    assert!(scores.len() == gradients.len() && scores.len().is_multiple_of(V::BLOCK));
    assert!(lse.len() >= V::BLOCK && delta.len() >= V::BLOCK);
    let one = V::splat(V::Scalar::ONE);
    for (row, gradient) in
        scores.chunks_exact_mut(V::BLOCK).zip(gradients.chunks_exact_mut(V::BLOCK))
    {
        for lane in (0..V::BLOCK).step_by(V::LANES) {
            // SAFETY: `lane + LANES <= BLOCK`, the length of every row.
            unsafe {
                let score = row.as_mut_ptr().add(lane);
                let gradient = gradient.as_mut_ptr().add(lane);
                let lse = V::load(lse.as_ptr().add(lane));
                let delta = V::load(delta.as_ptr().add(lane));
                let mut x = V::load(score);
                let mut slope = V::load(gradient).sub(delta);
                if let Some(cap) = softcap {
                    let tanh = V::Scalar::tanh(x);
                    slope = slope.mul(one.sub(tanh.mul(tanh)));
                    x = tanh.mul(V::splat(cap));
                }
                let weight = x.sub(lse).exp2();
                weight.store(score);
                weight.mul(slope).store(gradient);
            }
        }
    }
}
