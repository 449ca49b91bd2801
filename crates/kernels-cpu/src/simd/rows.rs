//! RMS norm and rotation of rows, each the elements of one token and head.

use super::vector::Vector;
use crate::element::Real;
use crate::view::prefetch_line;

/// cos and sin of a token.
pub(crate) type Tables<'a, C> = (&'a [C], &'a [C]);

/// The norm of a row.
#[derive(Clone, Copy)]
pub(crate) struct RowNorm<'a, C> {
    /// Ones when absent.
    pub(crate) weight: Option<&'a [C]>,
    pub(crate) epsilon: C,
}

/// Norm, then rotation by `(cos, sin)`, of the heads of one token from `x` to `out`; each where it is
/// given.
pub(crate) struct NormRotate<'a, C> {
    pub(crate) x: HeadRows<&'a [C]>,
    pub(crate) out: HeadRows<&'a mut [C]>,
    pub(crate) heads: usize,
    pub(crate) dim: usize,
    pub(crate) norm: Option<RowNorm<'a, C>>,
    pub(crate) tables: Option<Tables<'a, C>>,
}

/// The gradient of the output of [`NormRotate`] becomes that of its input, and that of the weight is
/// added to `d_weight`.
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

/// The heads of one token.
#[derive(Clone, Copy)]
pub(crate) struct HeadRows<S> {
    pub(crate) elements: S,
    /// From one head to the next.
    pub(crate) stride: usize,
    /// From one token to the next, which is asked for meanwhile; 0 for nothing.
    pub(crate) ahead: isize,
}

impl<S> HeadRows<S> {
    /// A single head.
    pub(crate) fn one(elements: S) -> Self {
        Self { elements, stride: 0, ahead: 0 }
    }

    /// # Panics
    ///
    /// When there are not as many.
    fn check(&self, len: usize, heads: usize, dim: usize) {
        assert!(len >= (heads - 1) * self.stride + dim);
    }
}

impl<C> HeadRows<&[C]> {
    fn start(&self) -> HeadRows<*const C> {
        HeadRows { elements: self.elements.as_ptr(), stride: self.stride, ahead: self.ahead }
    }
}

impl<C> HeadRows<*const C> {
    /// Where `N` heads from `head` on begin, each with `dim` elements. Those of the next token are asked
    /// for: a whole token at once would hold the processor up.
    #[inline(always)]
    fn group<const N: usize>(&self, head: usize, dim: usize) -> [*const C; N] {
        let mut rows = [self.elements; N];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = self.elements.wrapping_add((head + i) * self.stride);
            if self.ahead != 0 {
                let next = row.wrapping_offset(self.ahead);
                for element in (0..dim).step_by(CACHE_LINE / size_of::<C>()) {
                    prefetch_line(next.wrapping_add(element));
                }
            }
        }
        rows
    }
}

/// Bytes.
const CACHE_LINE: usize = 64;

/// Heads that are worked on together, so that none of them waits for its own sums.
const TOGETHER: usize = 4;

/// Runs `$body` for all heads, with the constant `$n` set to the number that `$head` and those after it
/// are worked on together.
macro_rules! for_heads {
    ($heads:expr, $head:ident, $n:ident => $body:expr) => {{
        let mut $head = 0;
        while $head + TOGETHER <= $heads {
            const $n: usize = TOGETHER;
            $body;
            $head += $n;
        }
        while $head < $heads {
            const $n: usize = 1;
            $body;
            $head += $n;
        }
    }};
}

/// Runs `$body` for each [`Part`] of `$len` elements.
macro_rules! for_parts {
    ($v:ty, $len:expr, $part:ident => $body:expr) => {{
        let len = $len;
        let mut start = 0;
        while start + <$v>::LANES <= len {
            let $part = Whole { start };
            $body;
            start += <$v>::LANES;
        }
        if start < len {
            let $part = Rest { start, count: len - start };
            $body;
        }
    }};
}

#[inline(always)]
pub(super) fn norm_rotate<V: Vector>(args: NormRotate<'_, V::Scalar>) {
    let NormRotate { x, out, heads, dim, norm, tables } = args;
    if heads == 0 {
        return;
    }
    x.check(x.elements.len(), heads, dim);
    out.check(out.elements.len(), heads, dim);
    check_weights(dim, norm.as_ref(), tables);
    let (from, to) = (x.start(), out.elements.as_mut_ptr());
    for_heads!(heads, head, N => {
        let x = from.group::<N>(head, dim);
        // SAFETY: `head + i < heads`, within the lengths checked above; so are `dim` elements of each.
        let out: [_; N] = unsafe { std::array::from_fn(|i| to.add((head + i) * out.stride)) };
        // SAFETY: as above.
        unsafe { norm_rotate_heads::<V, N>(x, out, dim, norm, tables) }
    });
}

fn check_weights<C>(dim: usize, norm: Option<&RowNorm<'_, C>>, tables: Option<Tables<'_, C>>) {
    let weight = norm.and_then(|norm| norm.weight);
    assert!(weight.is_none_or(|weight| weight.len() == dim));
    assert!(tables.is_none_or(|(cos, sin)| {
        dim.is_multiple_of(2) && cos.len() == dim / 2 && sin.len() == dim / 2
    }));
}

/// # Safety
///
/// `x` must be readable, `out` writable for `dim` elements; weights and tables must fit `dim`.
#[inline(always)]
unsafe fn norm_rotate_heads<V: Vector, const N: usize>(
    x: [*const V::Scalar; N],
    out: [*mut V::Scalar; N],
    dim: usize,
    norm: Option<RowNorm<'_, V::Scalar>>,
    tables: Option<Tables<'_, V::Scalar>>,
) {
    let one = V::splat(V::Scalar::ONE);
    // SAFETY: parts lie within `dim` elements, or within the half of them that a table has.
    unsafe {
        let factors = match norm {
            Some(norm) => factors::<V, N>(x, dim, norm.epsilon),
            None => [one; N],
        };
        let weights = norm.and_then(|norm| norm.weight);
        macro_rules! weight {
            ($part:expr) => {
                match weights {
                    Some(weights) => $part.load::<V>(weights.as_ptr()),
                    None => one,
                }
            };
        }
        let Some((cos, sin)) = tables else {
            for_parts!(V, dim, part => {
                let weight = weight!(part);
                for i in 0..N {
                    part.store(part.load::<V>(x[i]).mul(factors[i]).mul(weight), out[i]);
                }
            });
            return;
        };
        for_parts!(V, dim / 2, part => {
            let other = part.shifted(dim / 2);
            let (cos, sin) = (part.load::<V>(cos.as_ptr()), part.load::<V>(sin.as_ptr()));
            let (low_weight, high_weight) = (weight!(part), weight!(other));
            for i in 0..N {
                let low = part.load::<V>(x[i]).mul(factors[i]).mul(low_weight);
                let high = other.load::<V>(x[i]).mul(factors[i]).mul(high_weight);
                part.store(low.mul(cos).sub(high.mul(sin)), out[i]);
                other.store(high.mul(cos).add(low.mul(sin)), out[i]);
            }
        });
    }
}

#[inline(always)]
pub(super) fn norm_rotate_backward<V: Vector>(args: NormRotateBackward<'_, V::Scalar>) {
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

/// `1 / sqrt(mean(x^2) + epsilon)` of each row.
///
/// # Safety
///
/// `x` must be readable for `dim` elements.
#[inline(always)]
unsafe fn factors<V: Vector, const N: usize>(
    x: [*const V::Scalar; N],
    dim: usize,
    epsilon: V::Scalar,
) -> [V; N] {
    let mut sums = [V::splat(V::Scalar::ZERO); N];
    for_parts!(V, dim, part => {
        for i in 0..N {
            // SAFETY: parts lie within `dim` elements.
            let x = unsafe { part.load::<V>(x[i]) };
            sums[i] = x.mul_add(x, sums[i]);
        }
    });
    let one_of_dim = V::Scalar::ONE / V::Scalar::from_f64(dim as f64);
    // Loops throughout: instructions are not turned on inside of what a closure is given to.
    for sums in &mut sums {
        *sums = V::splat(inverse_root(*sums, one_of_dim, epsilon));
    }
    sums
}

/// `1 / sqrt(sum * one_of_dim + epsilon)` of the sum of all lanes. To divide by the dimension would take
/// as long as the rest of a short row.
#[inline(always)]
fn inverse_root<V: Vector>(sums: V, one_of_dim: V::Scalar, epsilon: V::Scalar) -> V::Scalar {
    (sums.sum() * one_of_dim + epsilon).rsqrt()
}

/// As many elements as a vector has.
#[derive(Clone, Copy)]
struct Whole {
    start: usize,
}

/// Fewer elements.
#[derive(Clone, Copy)]
struct Rest {
    start: usize,
    count: usize,
}

/// Elements of a row that a vector holds.
trait Part: Copy {
    /// The same number of elements `by` further on.
    fn shifted(self, by: usize) -> Self;

    /// # Safety
    ///
    /// The part must be readable.
    unsafe fn load<V: Vector>(self, from: *const V::Scalar) -> V;

    /// # Safety
    ///
    /// The part must be writable.
    unsafe fn store<V: Vector>(self, vector: V, to: *mut V::Scalar);
}

impl Part for Whole {
    #[inline(always)]
    fn shifted(self, by: usize) -> Self {
        Self { start: self.start + by }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(self, from: *const V::Scalar) -> V {
        // SAFETY: as promised by the caller.
        unsafe { V::load(from.add(self.start)) }
    }

    #[inline(always)]
    unsafe fn store<V: Vector>(self, vector: V, to: *mut V::Scalar) {
        // SAFETY: as promised by the caller.
        unsafe { vector.store(to.add(self.start)) }
    }
}

impl Part for Rest {
    #[inline(always)]
    fn shifted(self, by: usize) -> Self {
        Self { start: self.start + by, ..self }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(self, from: *const V::Scalar) -> V {
        // SAFETY: as promised by the caller.
        unsafe { V::load_first(from.add(self.start), self.count) }
    }

    #[inline(always)]
    unsafe fn store<V: Vector>(self, vector: V, to: *mut V::Scalar) {
        // SAFETY: as promised by the caller.
        unsafe { vector.store_first(to.add(self.start), self.count) }
    }
}
