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

// After the macros, which it uses.
mod backward;

pub(crate) use backward::NormRotateBackward;
pub(super) use backward::norm_rotate_backward;

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
