//! Numbers, storage orders and comparison for the tests.
#![allow(dead_code)]

use half::{bf16, f16};
use kernels_cpu::{Element, InstructionSet, View};

/// An element type with what comparisons need.
pub trait Float: Element + PartialEq {
    /// Relative error of one rounding.
    const EPSILON: f64;
    fn of(value: f64) -> Self;
    fn value(self) -> f64;
}

macro_rules! float {
    ($type:ty, $epsilon:expr, |$from:ident| $of:expr, |$to:ident| $value:expr) => {
        impl Float for $type {
            const EPSILON: f64 = $epsilon;
            fn of($from: f64) -> Self {
                $of
            }
            fn value(self) -> f64 {
                let $to = self;
                $value
            }
        }
    };
}

float!(f32, f32::EPSILON as f64, |x| x as f32, |x| f64::from(x));
float!(f64, f64::EPSILON, |x| x, |x| x);
float!(f16, 1.0 / 1024.0, |x| f16::from_f64(x), |x| x.to_f64());
float!(bf16, 1.0 / 128.0, |x| bf16::from_f64(x), |x| x.to_f64());

/// Every instruction set of this machine.
pub fn instruction_sets() -> Vec<InstructionSet> {
    InstructionSet::ALL.into_iter().filter(|set| set.is_available()).collect()
}

/// Pseudo-random numbers in -1..1 (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// In which order a tensor `[tokens, heads, dim]` lies in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    Contiguous,
    /// As one of the parts of packed projections, with NaN in what lies between.
    Gaps,
    /// Tokens side by side, dims apart.
    Transposed,
    /// Last token and element first.
    Flipped,
}

/// A stored tensor and its exact values.
pub struct Tensor<T> {
    pub shape: [usize; 3],
    pub values: Vec<f64>,
    data: Vec<T>,
    offset: usize,
    strides: [isize; 3],
}

impl<T: Float> Tensor<T> {
    pub fn new(shape: [usize; 3], values: Vec<f64>, order: Order) -> Self {
        let [tokens, heads, dim] = shape;
        let (t, h, d) = (tokens as isize, heads as isize, dim as isize);
        let (len, offset, strides) = match order {
            Order::Contiguous => (tokens * heads * dim, 0, [h * d, d, 1]),
            Order::Gaps => (3 + tokens * (heads * dim + 5), 3, [h * d + 5, d, 1]),
            Order::Transposed => (tokens * heads * dim, 0, [1, t * d, t]),
            Order::Flipped => {
                let len = tokens * heads * dim;
                (len, len.saturating_sub(1), [-h * d, -d, -1])
            }
        };
        let mut data = vec![T::of(f64::NAN); len];
        let mut rounded = Vec::with_capacity(values.len());
        for (i, value) in values.into_iter().enumerate() {
            let index = [i / (heads * dim), i / dim % heads, i % dim];
            let at = index.iter().zip(strides).map(|(&i, stride)| i as isize * stride);
            let stored = T::of(value);
            data[(offset as isize + at.sum::<isize>()) as usize] = stored;
            rounded.push(stored.value());
        }
        Self { shape, values: rounded, data, offset, strides }
    }

    pub fn random(shape: [usize; 3], random: &mut Random, order: Order) -> Self {
        let values = (0..shape.iter().product()).map(|_| random.next()).collect();
        Self::new(shape, values, order)
    }

    pub fn view(&self) -> View<'_, T> {
        View::new(&self.data, self.offset, self.shape, self.strides)
    }

    pub fn at(&self, token: usize, head: usize, d: usize) -> f64 {
        self.values[(token * self.shape[1] + head) * self.shape[2] + d]
    }
}

/// Compares with an error bound relative to the largest expected number (at least 1).
pub fn assert_close<T: Float>(what: &str, found: &[T], expected: &[f64], bound: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let finite = expected.iter().filter(|x| x.is_finite());
    let largest = finite.fold(1.0, |largest: f64, x| largest.max(x.abs()));
    for (i, (found, &expected)) in found.iter().zip(expected).enumerate() {
        let found = found.value();
        let same = found == expected || (found.is_nan() && expected.is_nan());
        assert!(
            same || (found - expected).abs() <= bound * largest,
            "{what}[{i}]: {found} instead of {expected}, bound {}",
            bound * largest
        );
    }
}
