//! RMS norm and rotation of rows: the elements of one token and head.

use super::vector::Vector;
use crate::element::Real;

/// The norm of a row.
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
    let mut factor = V::splat(V::Scalar::ONE);
    let mut weight = None;
    if let Some(norm) = norm {
        factor = V::splat(row_factor::<V>(x, norm.epsilon));
        weight = norm.weight;
        assert!(weight.is_none_or(|weight| weight.len() == dim));
    }
    let normal = |part: Part| {
        let value = part.load::<V>(x).mul(factor);
        match weight {
            Some(weight) => value.mul(part.load(weight)),
            None => value,
        }
    };
    let Some((cos, sin)) = tables else {
        parts::<V>(dim).for_each(|part| part.store(normal(part), out));
        return;
    };
    let half = dim / 2;
    assert!(half * 2 == dim && cos.len() == half && sin.len() == half);
    for part in parts::<V>(half) {
        let (low, high) = (normal(part), normal(part.shifted(half)));
        let (cos, sin) = (part.load::<V>(cos), part.load::<V>(sin));
        part.store(low.mul(cos).sub(high.mul(sin)), out);
        part.shifted(half).store(high.mul(cos).add(low.mul(sin)), out);
    }
}

#[inline(always)]
pub(super) fn norm_rotate_backward<V: Vector>(args: NormRotateBackward<'_, V::Scalar>) {
    let NormRotateBackward { x, gradient, norm, tables, d_weight } = args;
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
    for part in parts::<V>(half) {
        let other = part.shifted(half);
        let (low, high) = (part.load::<V>(gradient), other.load::<V>(gradient));
        let (cos, sin) = (part.load::<V>(cos), part.load::<V>(sin));
        part.store(low.mul(cos).add(high.mul(sin)), gradient);
        other.store(high.mul(cos).sub(low.mul(sin)), gradient);
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
    let factor = V::splat(row_factor::<V>(x, norm.epsilon));
    let mut sums = V::splat(V::Scalar::ZERO);
    for part in parts::<V>(dim) {
        let product = part.load::<V>(gradient).mul(part.load::<V>(x).mul(factor));
        part.store(part.load::<V>(d_weight).add(product), d_weight);
        sums = product.mul_add(part.load(weight), sums);
    }
    let mean = V::splat(sums.sum() / V::Scalar::from_f64(dim as f64));
    for part in parts::<V>(dim) {
        let normal = part.load::<V>(x).mul(factor);
        let weighted = part.load::<V>(gradient).mul(part.load(weight));
        part.store(weighted.sub(normal.mul(mean)).mul(factor), gradient);
    }
}

/// `1 / sqrt(mean(x^2) + epsilon)`.
#[inline(always)]
fn row_factor<V: Vector>(x: &[V::Scalar], epsilon: V::Scalar) -> V::Scalar {
    let mut sums = V::splat(V::Scalar::ZERO);
    for part in parts::<V>(x.len()) {
        let x = part.load::<V>(x);
        sums = x.mul_add(x, sums);
    }
    (sums.sum() / V::Scalar::from_f64(x.len() as f64) + epsilon).rsqrt()
}

/// At most one vector of a slice.
#[derive(Clone, Copy)]
struct Part {
    start: usize,
    count: usize,
}

/// The parts of a slice with `len` numbers.
#[inline(always)]
fn parts<V: Vector>(len: usize) -> impl Iterator<Item = Part> {
    (0..len.div_ceil(V::LANES)).map(move |i| {
        let start = i * V::LANES;
        Part { start, count: (len - start).min(V::LANES) }
    })
}

impl Part {
    /// The same number of elements `by` further on.
    #[inline(always)]
    fn shifted(self, by: usize) -> Self {
        Self { start: self.start + by, count: self.count }
    }

    #[inline(always)]
    fn load<V: Vector>(self, from: &[V::Scalar]) -> V {
        debug_assert!(self.start + self.count <= from.len());
        // SAFETY: private to this file, whose functions assert the lengths of what they read.
        unsafe {
            let from = from.as_ptr().add(self.start);
            if self.count == V::LANES { V::load(from) } else { V::load_first(from, self.count) }
        }
    }

    #[inline(always)]
    fn store<V: Vector>(self, vector: V, to: &mut [V::Scalar]) {
        debug_assert!(self.start + self.count <= to.len());
        // SAFETY: as for `load`.
        unsafe {
            let to = to.as_mut_ptr().add(self.start);
            if self.count == V::LANES {
                vector.store(to)
            } else {
                vector.store_first(to, self.count)
            }
        }
    }
}
