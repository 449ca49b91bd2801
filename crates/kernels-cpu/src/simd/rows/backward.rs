//! Gradients of norm and rotation.

use super::{HeadRows, Part, Rest, RowNorm, TOGETHER, Tables, Whole, check_weights, inverse_root};
use crate::element::Real;
use crate::simd::vector::Vector;

/// The gradient of the output of [`NormRotate`](super::NormRotate) becomes that of its input, and that of
/// the weight is added to `d_weight`.
pub(crate) struct NormRotateBackward<'a, C> {
    /// Read where there is a norm.
    pub(crate) x: HeadRows<&'a [C]>,
    /// The gradient of the output, where it is not in `gradient` already.
    pub(crate) d_out: Option<HeadRows<&'a [C]>>,
    pub(crate) gradient: HeadRows<&'a mut [C]>,
    pub(crate) heads: usize,
    pub(crate) dim: usize,
    pub(crate) norm: Option<RowNorm<'a, C>>,
    pub(crate) tables: Option<Tables<'a, C>>,
    pub(crate) d_weight: &'a mut [C],
}

#[inline(always)]
pub(in crate::simd) fn norm_rotate_backward<V: Vector>(args: NormRotateBackward<'_, V::Scalar>) {
    let NormRotateBackward { x, d_out, gradient, heads, dim, norm, tables, d_weight } = args;
    if heads == 0 {
        return;
    }
    gradient.check(gradient.elements.len(), heads, dim);
    check_weights(dim, norm.as_ref(), tables);
    if norm.is_some() {
        x.check(x.elements.len(), heads, dim);
        assert_eq!(d_weight.len(), dim);
    }
    let to = gradient.elements.as_mut_ptr().cast_const();
    let to = HeadRows { elements: to, stride: gradient.stride, ahead: gradient.ahead };
    // In place, a line that is asked for once is there for both.
    let from = d_out.map_or(HeadRows { ahead: 0, ..to }, |d_out| {
        d_out.check(d_out.elements.len(), heads, dim);
        d_out.start()
    });
    for_heads!(heads, head, N => {
        // SAFETY: `head + i < heads`, within the lengths checked above; so are `dim` elements of each.
        // `x` is not read without a norm, and the weights and tables were checked, too.
        unsafe {
            let from = from.group::<N>(head, dim);
            let mut to_rows = [std::ptr::null_mut(); N];
            for (row, to) in to_rows.iter_mut().zip(to.group::<N>(head, dim)) {
                *row = to.cast_mut();
            }
            match norm {
                None => rotate_back::<V, N>(from, to_rows, dim, tables),
                Some(norm) => {
                    let x = x.start().group::<N>(head, dim);
                    norm_back::<V, N>(x, from, to_rows, dim, norm, tables, d_weight);
                }
            }
        }
    });
}

/// The rotation's inverse, which is its transpose.
///
/// # Safety
///
/// `from` must be readable, `to` writable for `dim` elements; the tables must have half as many.
#[inline(always)]
unsafe fn rotate_back<V: Vector, const N: usize>(
    from: [*const V::Scalar; N],
    to: [*mut V::Scalar; N],
    dim: usize,
    tables: Option<Tables<'_, V::Scalar>>,
) {
    // SAFETY: parts lie within `dim` elements, or within the half of them that a table has.
    unsafe {
        let Some((cos, sin)) = tables else {
            for_parts!(V, dim, part => {
                for i in 0..N {
                    part.store(part.load::<V>(from[i]), to[i]);
                }
            });
            return;
        };
        for_parts!(V, dim / 2, part => {
            let (cos, sin) = (part.load::<V>(cos.as_ptr()), part.load::<V>(sin.as_ptr()));
            for i in 0..N {
                let [low, high] = turned_back(part, dim / 2, from[i], cos, sin);
                part.store(low, to[i]);
                part.shifted(dim / 2).store(high, to[i]);
            }
        });
    }
}

/// With `n = x * r`, where `r = 1 / sqrt(mean(x^2) + epsilon)`, and the gradient `g` of `n * weight`, which
/// is that of the output rotated back: `d_weight += g * n`,
/// `dx = r * (g * weight - n * r * mean(g * weight * x))`. Both means take one look at `x` and `g`, and the
/// results another; to rotate again costs less than to put `g` away.
///
/// # Safety
///
/// `x` and `from` must be readable, `to` writable for `dim` elements; weights must have as many, the
/// tables half as many.
#[inline(always)]
unsafe fn norm_back<V: Vector, const N: usize>(
    x: [*const V::Scalar; N],
    from: [*const V::Scalar; N],
    to: [*mut V::Scalar; N],
    dim: usize,
    norm: RowNorm<'_, V::Scalar>,
    tables: Option<Tables<'_, V::Scalar>>,
    d_weight: &mut [V::Scalar],
) {
    let weight = norm.weight.expect("the gradient of a norm is taken with its weight").as_ptr();
    let d_weight = d_weight.as_mut_ptr();
    // SAFETY: parts lie within `dim` elements, or within the half of them that a table has.
    unsafe {
        let mut sums = [NormSums::<V>::new(); N];
        match tables {
            None => for_parts!(V, dim, part => {
                for i in 0..N {
                    sums[i].add(part.load(x[i]), part.load::<V>(from[i]), part.load(weight));
                }
            }),
            Some((cos, sin)) => for_parts!(V, dim / 2, part => {
                let other = part.shifted(dim / 2);
                let (cos, sin) = (part.load::<V>(cos.as_ptr()), part.load::<V>(sin.as_ptr()));
                for i in 0..N {
                    let [low, high] = turned_back(part, dim / 2, from[i], cos, sin);
                    sums[i].add(part.load(x[i]), low, part.load(weight));
                    sums[i].add(other.load(x[i]), high, other.load(weight));
                }
            }),
        }
        let mut means = [NormMeans::<V>::new(); N];
        for i in 0..N {
            means[i] = sums[i].means(dim, norm.epsilon);
        }
        match tables {
            None => for_parts!(V, dim, part => {
                let mut d_part = part.load(d_weight);
                for i in 0..N {
                    let gradient = part.load(from[i]);
                    let (x, weight) = (part.load(x[i]), part.load(weight));
                    part.store(means[i].gradient(x, gradient, weight, &mut d_part), to[i]);
                }
                part.store(d_part, d_weight);
            }),
            Some((cos, sin)) => for_parts!(V, dim / 2, part => {
                let other = part.shifted(dim / 2);
                let (cos, sin) = (part.load::<V>(cos.as_ptr()), part.load::<V>(sin.as_ptr()));
                let (mut d_low, mut d_high) = (part.load(d_weight), other.load(d_weight));
                for i in 0..N {
                    let [low, high] = turned_back(part, dim / 2, from[i], cos, sin);
                    let (x_low, x_high) = (part.load(x[i]), other.load(x[i]));
                    let low = means[i].gradient(x_low, low, part.load(weight), &mut d_low);
                    let high = means[i].gradient(x_high, high, other.load(weight), &mut d_high);
                    part.store(low, to[i]);
                    other.store(high, to[i]);
                }
                part.store(d_low, d_weight);
                other.store(d_high, d_weight);
            }),
        }
    }
}

/// A part of the first half of a row and that of the second half, rotated back.
///
/// # Safety
///
/// Both must be readable.
#[inline(always)]
unsafe fn turned_back<V: Vector>(
    part: impl Part,
    half: usize,
    from: *const V::Scalar,
    cos: V,
    sin: V,
) -> [V; 2] {
    // SAFETY: as promised by the caller.
    let (low, high) = unsafe { (part.load::<V>(from), part.shifted(half).load::<V>(from)) };
    [low.mul(cos).add(high.mul(sin)), high.mul(cos).sub(low.mul(sin))]
}

/// What the means behind the gradient of a norm are made of.
#[derive(Clone, Copy)]
struct NormSums<V> {
    /// Of `x^2`.
    squares: V,
    /// Of `x * g * weight`.
    products: V,
}

impl<V: Vector> NormSums<V> {
    #[inline(always)]
    fn new() -> Self {
        let zero = V::splat(V::Scalar::ZERO);
        Self { squares: zero, products: zero }
    }

    #[inline(always)]
    fn add(&mut self, x: V, gradient: V, weight: V) {
        self.squares = x.mul_add(x, self.squares);
        self.products = gradient.mul(weight).mul_add(x, self.products);
    }

    #[inline(always)]
    fn means(self, dim: usize, epsilon: V::Scalar) -> NormMeans<V> {
        let one_of_dim = V::Scalar::ONE / V::Scalar::from_f64(dim as f64);
        let root = inverse_root(self.squares, one_of_dim, epsilon);
        let mean = root * (self.products.sum() * one_of_dim);
        NormMeans { root: V::splat(root), mean: V::splat(mean) }
    }
}

/// See [`norm_back`].
#[derive(Clone, Copy)]
struct NormMeans<V> {
    /// `r`.
    root: V,
    /// `r * mean(g * weight * x)`.
    mean: V,
}

impl<V: Vector> NormMeans<V> {
    #[inline(always)]
    fn new() -> Self {
        let zero = V::splat(V::Scalar::ZERO);
        Self { root: zero, mean: zero }
    }

    /// The gradient of `x`; that of the weight is added to `d_weight`.
    #[inline(always)]
    fn gradient(self, x: V, gradient: V, weight: V, d_weight: &mut V) -> V {
        let normal = x.mul(self.root);
        *d_weight = gradient.mul_add(normal, *d_weight);
        gradient.mul(weight).sub(normal.mul(self.mean)).mul(self.root)
    }
}
