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
    let zero = V::splat(V::Scalar::ZERO);
    assert!(max.len() >= V::BLOCK && sum.len() >= V::BLOCK && correction.len() >= V::BLOCK);
    assert!(scores.len().is_multiple_of(V::BLOCK) && lanes <= V::BLOCK);
    for lane in (0..lanes).step_by(V::LANES) {
        // SAFETY: `lane + LANES <= BLOCK`, the length of every row.
        unsafe {
            let before = V::load(max.as_ptr().add(lane));
            let mut largest = [before; 4];
            for (i, row) in scores.chunks_exact(V::BLOCK).enumerate() {
                largest[i % 4] = largest[i % 4].max(V::load(row.as_ptr().add(lane)));
            }
            let largest = largest[0].max(largest[1]).max(largest[2].max(largest[3]));
            // A lane that has seen no key yet: anything finite leaves its weights at zero.
            let shift = finite_or_zero(largest);
            let factor = before.sub(shift).exp2();
            let mut total = [zero; 2];
            for (i, row) in scores.chunks_exact_mut(V::BLOCK).enumerate() {
                let at = row.as_mut_ptr().add(lane);
                let weight = V::load(at).sub(shift).exp2();
                weight.store(at);
                total[i % 2] = total[i % 2].add(weight);
            }
            let sum = sum.as_mut_ptr().add(lane);
            V::load(sum).mul_add(factor, total[0].add(total[1])).store(sum);
            factor.store(correction.as_mut_ptr().add(lane));
            largest.store(max.as_mut_ptr().add(lane));
        }
    }
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
