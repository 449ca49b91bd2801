//! RMS norm and rotation of one row: the elements of one token and head.

use super::vector::Vector;
use crate::element::Real;

/// The norm of one row.
#[derive(Clone, Copy)]
pub(crate) struct RowNorm<'a, C> {
    /// Ones when absent.
    pub(crate) weight: Option<&'a [C]>,
    pub(crate) epsilon: C,
}

/// Norm, then rotation by `(cos, sin)`, from `x` to `out`; each where it is given.
pub(crate) struct NormRotate<'a, C> {
    pub(crate) x: &'a [C],
    pub(crate) out: &'a mut [C],
    pub(crate) norm: Option<RowNorm<'a, C>>,
    pub(crate) tables: Option<(&'a [C], &'a [C])>,
}

/// The gradient of the output of [`NormRotate`] becomes that of its input, and that of the weight is
/// added to `d_weight`.
pub(crate) struct NormRotateBackward<'a, C> {
    pub(crate) x: &'a [C],
    pub(crate) gradient: &'a mut [C],
    pub(crate) norm: Option<RowNorm<'a, C>>,
    pub(crate) tables: Option<(&'a [C], &'a [C])>,
    pub(crate) d_weight: &'a mut [C],
}

#[inline(always)]
pub(super) fn norm_rotate<V: Vector>(args: NormRotate<'_, V::Scalar>) {
    let NormRotate { x, out, norm, tables } = args;
    let dim = x.len();
    assert!(out.len() == dim);
    let mut factor = V::Scalar::ONE;
    let mut weight = None;
    if let Some(norm) = norm {
        factor = row_factor::<V>(x, norm.epsilon);
        weight = norm.weight;
        assert!(weight.is_none_or(|weight| weight.len() == dim));
    }
    let factors = V::splat(factor);
    // The normalised vector, and the normalised number, at an index.
    let vector = |i: usize| {
        // SAFETY: used only for `i + LANES <= dim`, the length of x and of the weight.
        unsafe {
            let value = V::load(x.as_ptr().add(i)).mul(factors);
            match weight {
                Some(weight) => value.mul(V::load(weight.as_ptr().add(i))),
                None => value,
            }
        }
    };
    let scalar = |i: usize| x[i] * factor * weight.map_or(V::Scalar::ONE, |weight| weight[i]);
    let Some((cos, sin)) = tables else {
        for i in (0..whole::<V>(dim)).step_by(V::LANES) {
            // SAFETY: `i + LANES <= dim`, the length of out.
            unsafe { vector(i).store(out.as_mut_ptr().add(i)) };
        }
        for i in whole::<V>(dim)..dim {
            out[i] = scalar(i);
        }
        return;
    };
    let half = dim / 2;
    assert!(half * 2 == dim && cos.len() == half && sin.len() == half);
    for i in (0..whole::<V>(half)).step_by(V::LANES) {
        let (low, high) = (vector(i), vector(half + i));
        // SAFETY: `i + LANES <= half`, the length of both tables and half that of out.
        unsafe {
            let (cos, sin) = (V::load(cos.as_ptr().add(i)), V::load(sin.as_ptr().add(i)));
            low.mul(cos).sub(high.mul(sin)).store(out.as_mut_ptr().add(i));
            high.mul(cos).add(low.mul(sin)).store(out.as_mut_ptr().add(half + i));
        }
    }
    for i in whole::<V>(half)..half {
        let (low, high) = (scalar(i), scalar(half + i));
        out[i] = low * cos[i] - high * sin[i];
        out[half + i] = high * cos[i] + low * sin[i];
    }
}

#[inline(always)]
pub(super) fn norm_rotate_backward<V: Vector>(args: NormRotateBackward<'_, V::Scalar>) {
    let NormRotateBackward { x, gradient, norm, tables, d_weight } = args;
    assert!(gradient.len() == x.len());
    if let Some((cos, sin)) = tables {
        rotate_back::<V>(gradient, cos, sin);
    }
    if let Some(norm) = norm {
        norm_back::<V>(x, gradient, norm, d_weight);
    }
}

/// The rotation's inverse, which is its transpose.
#[inline(always)]
fn rotate_back<V: Vector>(gradient: &mut [V::Scalar], cos: &[V::Scalar], sin: &[V::Scalar]) {
    let half = gradient.len() / 2;
    assert!(half * 2 == gradient.len() && cos.len() == half && sin.len() == half);
    let (lows, highs) = gradient.split_at_mut(half);
    for i in (0..whole::<V>(half)).step_by(V::LANES) {
        // SAFETY: `i + LANES <= half`, the length of all four.
        unsafe {
            let (low, high) = (V::load(lows.as_ptr().add(i)), V::load(highs.as_ptr().add(i)));
            let (cos, sin) = (V::load(cos.as_ptr().add(i)), V::load(sin.as_ptr().add(i)));
            low.mul(cos).add(high.mul(sin)).store(lows.as_mut_ptr().add(i));
            high.mul(cos).sub(low.mul(sin)).store(highs.as_mut_ptr().add(i));
        }
    }
    for i in whole::<V>(half)..half {
        let (low, high) = (lows[i], highs[i]);
        lows[i] = low * cos[i] + high * sin[i];
        highs[i] = high * cos[i] - low * sin[i];
    }
}

/// With `n = x * r` and the gradient `g` of `n * weight`:
/// `d_weight += g * n`, `dx = r * (g * weight - n * mean(g * weight * n))`.
#[inline(always)]
fn norm_back<V: Vector>(
    x: &[V::Scalar],
    gradient: &mut [V::Scalar],
    norm: RowNorm<'_, V::Scalar>,
    d_weight: &mut [V::Scalar],
) {
    let dim = x.len();
    let weight = norm.weight.expect("the gradient of a norm is taken with its weight");
    assert!(weight.len() == dim && d_weight.len() == dim && gradient.len() == dim);
    let factor = row_factor::<V>(x, norm.epsilon);
    let factors = V::splat(factor);
    let mut sums = V::splat(V::Scalar::ZERO);
    for i in (0..whole::<V>(dim)).step_by(V::LANES) {
        // SAFETY: `i + LANES <= dim`, the length of all four.
        unsafe {
            let normal = V::load(x.as_ptr().add(i)).mul(factors);
            let product = V::load(gradient.as_ptr().add(i)).mul(normal);
            let d_weight = d_weight.as_mut_ptr().add(i);
            V::load(d_weight).add(product).store(d_weight);
            sums = product.mul_add(V::load(weight.as_ptr().add(i)), sums);
        }
    }
    let mut sum = sums.sum();
    for i in whole::<V>(dim)..dim {
        let product = gradient[i] * x[i] * factor;
        d_weight[i] = d_weight[i] + product;
        sum = sum + product * weight[i];
    }
    let mean = sum / V::Scalar::from_f64(dim as f64);
    let means = V::splat(mean);
    for i in (0..whole::<V>(dim)).step_by(V::LANES) {
        // SAFETY: as above.
        unsafe {
            let normal = V::load(x.as_ptr().add(i)).mul(factors);
            let gradient = gradient.as_mut_ptr().add(i);
            let weighted = V::load(gradient).mul(V::load(weight.as_ptr().add(i)));
            weighted.sub(normal.mul(means)).mul(factors).store(gradient);
        }
    }
    for i in whole::<V>(dim)..dim {
        gradient[i] = (gradient[i] * weight[i] - x[i] * factor * mean) * factor;
    }
}

/// `1 / sqrt(mean(x^2) + epsilon)`.
#[inline(always)]
fn row_factor<V: Vector>(x: &[V::Scalar], epsilon: V::Scalar) -> V::Scalar {
    let mut sums = V::splat(V::Scalar::ZERO);
    for i in (0..whole::<V>(x.len())).step_by(V::LANES) {
        // SAFETY: `i + LANES` is at most the length of x.
        let x = unsafe { V::load(x.as_ptr().add(i)) };
        sums = x.mul_add(x, sums);
    }
    let rest = x[whole::<V>(x.len())..].iter().fold(sums.sum(), |sum, &x| sum + x * x);
    (rest / V::Scalar::from_f64(x.len() as f64) + epsilon).rsqrt()
}

/// The part of `len` that whole vectors cover.
#[inline(always)]
fn whole<V: Vector>(len: usize) -> usize {
    len - len % V::LANES
}
