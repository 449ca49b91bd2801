//! Element types, and the type that each is computed in.

use std::ops::{Add, Div, Mul, Sub};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::simd::{InstructionSet, Kernels, Vector};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// An element type of the tensors: f32, f64, f16 or bf16.
pub trait Element: sealed::Sealed + Copy + Send + Sync + std::fmt::Debug + 'static {
    /// What arithmetic runs in: f64 for f64, otherwise f32.
    type Compute: Real;

    /// The exact value in the compute type.
    #[doc(hidden)]
    fn widen(self) -> Self::Compute;

    /// The nearest value of this type.
    #[doc(hidden)]
    fn narrow(value: Self::Compute) -> Self;

    /// [`Self::widen`] for as many elements as both slices have.
    #[doc(hidden)]
    fn widen_all(from: &[Self], to: &mut [Self::Compute]);

    /// [`Self::narrow`] for as many elements as both slices have.
    #[doc(hidden)]
    fn narrow_all(from: &[Self::Compute], to: &mut [Self]);

    /// The same slice, where this is the compute type.
    #[doc(hidden)]
    fn as_compute(elements: &[Self]) -> Option<&[Self::Compute]>;

    /// The same slice, where this is the compute type.
    #[doc(hidden)]
    fn as_compute_mut(elements: &mut [Self]) -> Option<&mut [Self::Compute]>;
}

/// A type that arithmetic runs in: f32 or f64.
#[doc(hidden)]
pub trait Real:
    Element<Compute = Self>
    + PartialOrd
    + Default
    + Into<f64>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Negative infinity.
    const NEG_INFINITY: Self;
    /// Positive infinity.
    const INFINITY: Self;
    /// The least finite number.
    const LOWEST: Self;
    /// Coefficients of 2^x for |x| <= 1/2, constant first.
    const EXP2: &'static [Self];
    /// Below this, 2^x is taken for zero: it is not a normal number.
    const EXP2_MIN: Self;

    /// The nearest value.
    fn from_f64(value: f64) -> Self;
    /// The nearest value.
    fn from_f32(value: f32) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// `1 / sqrt(self)`.
    fn rsqrt(self) -> Self;
    /// The kernels for one instruction set.
    fn kernels(set: InstructionSet) -> &'static Kernels<Self>;
    /// `values` in this type, through `staging` where they are not.
    fn of_f32s<'a>(values: &'a [f32], staging: &'a mut [Self]) -> &'a [Self];
    /// Hyperbolic tangent of every lane.
    fn tanh<V: Vector<Scalar = Self>>(x: V) -> V;
}

/// Coefficients `ln(2)^n / n!` of 2^x; the first left out is 4e-18 of the result at 1/2.
const EXP2_F64: [f64; 14] = {
    let mut coefficients = [1.0; 14];
    let mut n = 1;
    while n < 14 {
        coefficients[n] = coefficients[n - 1] * std::f64::consts::LN_2 / n as f64;
        n += 1;
    }
    coefficients
};

impl Real for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;
    const INFINITY: f32 = f32::INFINITY;
    const LOWEST: f32 = f32::MIN;
    /// Minimax in relative error (Remez), 1.9e-9 before rounding.
    const EXP2: &'static [f32] = &[
        1.0,
        std::f32::consts::LN_2,
        0.240_226_46,
        0.055_503_286,
        0.009_618_489,
        0.001_339_993_1,
        0.000_153_458_12,
    ];
    const EXP2_MIN: f32 = -126.0;

    fn from_f64(value: f64) -> f32 {
        value as f32
    }
    fn from_f32(value: f32) -> f32 {
        value
    }
    fn ln(self) -> f32 {
        self.ln()
    }
    #[inline(always)]
    fn rsqrt(self) -> f32 {
        1.0 / self.sqrt()
    }
    fn kernels(set: InstructionSet) -> &'static Kernels<f32> {
        crate::simd::kernels_f32(set)
    }

    fn of_f32s<'a>(values: &'a [f32], _: &'a mut [f32]) -> &'a [f32] {
        values
    }

    /// Rational approximation with the coefficients of Eigen's `generic_fast_tanh`; about 2 ulp.
    #[inline(always)]
    fn tanh<V: Vector<Scalar = f32>>(x: V) -> V {
        #[allow(clippy::excessive_precision, reason = "as published")]
        const ODD: [f32; 7] = [
            -2.76076847742355e-16,
            2.00018790482477e-13,
            -8.60467152213735e-11,
            5.12229709037114e-8,
            1.48572235717979e-5,
            6.37261928875436e-4,
            4.89352455891786e-3,
        ];
        #[allow(clippy::excessive_precision, reason = "as published")]
        const EVEN: [f32; 4] =
            [1.19825839466702e-6, 1.18534705686654e-4, 2.26843463243900e-3, 4.89352518554385e-3];
        /// Where the approximation reaches one.
        const LIMIT: f32 = 7.905_311;
        let x = V::splat(-LIMIT).max(V::splat(LIMIT).min(x));
        let square = x.mul(x);
        let horner = |coefficients: &[f32]| {
            let mut sum = V::splat(coefficients[0]);
            for &coefficient in &coefficients[1..] {
                sum = sum.mul_add(square, V::splat(coefficient));
            }
            sum
        };
        x.mul(horner(&ODD)).div(horner(&EVEN))
    }
}

impl Real for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;
    const INFINITY: f64 = f64::INFINITY;
    const LOWEST: f64 = f64::MIN;
    const EXP2: &'static [f64] = &EXP2_F64;
    const EXP2_MIN: f64 = -1022.0;

    fn from_f64(value: f64) -> f64 {
        value
    }
    fn from_f32(value: f32) -> f64 {
        f64::from(value)
    }
    fn ln(self) -> f64 {
        self.ln()
    }
    #[inline(always)]
    fn rsqrt(self) -> f64 {
        1.0 / self.sqrt()
    }
    fn kernels(set: InstructionSet) -> &'static Kernels<f64> {
        crate::simd::kernels_f64(set)
    }

    fn of_f32s<'a>(values: &'a [f32], staging: &'a mut [f64]) -> &'a [f64] {
        for (to, &from) in staging.iter_mut().zip(values) {
            *to = f64::from(from);
        }
        &staging[..values.len()]
    }

    #[inline(always)]
    fn tanh<V: Vector<Scalar = f64>>(x: V) -> V {
        let mut lanes = [0.0; 16];
        // SAFETY: no vector has more than 16 lanes of f64.
        unsafe {
            x.store(lanes.as_mut_ptr());
            for lane in &mut lanes[..V::LANES] {
                *lane = lane.tanh();
            }
            V::load(lanes.as_ptr())
        }
    }
}

macro_rules! element_of_itself {
    ($type:ty) => {
        impl Element for $type {
            type Compute = $type;

            #[inline(always)]
            fn widen(self) -> $type {
                self
            }
            #[inline(always)]
            fn narrow(value: $type) -> $type {
                value
            }
            #[inline(always)]
            fn widen_all(from: &[$type], to: &mut [$type]) {
                let len = from.len().min(to.len());
                to[..len].copy_from_slice(&from[..len]);
            }
            #[inline(always)]
            fn narrow_all(from: &[$type], to: &mut [$type]) {
                Self::widen_all(from, to);
            }
            #[inline(always)]
            fn as_compute(elements: &[$type]) -> Option<&[$type]> {
                Some(elements)
            }
            #[inline(always)]
            fn as_compute_mut(elements: &mut [$type]) -> Option<&mut [$type]> {
                Some(elements)
            }
        }
    };
}

macro_rules! half_element {
    ($type:ty, |$halves:ident, $singles:ident| widen $widen:expr, narrow $narrow:expr) => {
        impl Element for $type {
            type Compute = f32;

            #[inline(always)]
            fn widen(self) -> f32 {
                self.to_f32()
            }
            #[inline(always)]
            fn narrow(value: f32) -> $type {
                <$type>::from_f32(value)
            }
            fn widen_all(from: &[$type], to: &mut [f32]) {
                let len = from.len().min(to.len());
                let ($halves, $singles) = (&from[..len], &mut to[..len]);
                $widen
            }
            fn narrow_all(from: &[f32], to: &mut [$type]) {
                let len = from.len().min(to.len());
                let ($halves, $singles) = (&mut to[..len], &from[..len]);
                $narrow
            }
            fn as_compute(_: &[$type]) -> Option<&[f32]> {
                None
            }
            fn as_compute_mut(_: &mut [$type]) -> Option<&mut [f32]> {
                None
            }
        }
    };
}

element_of_itself!(f32);
element_of_itself!(f64);
half_element!(
    f16,
    |halves, singles| widen halves.convert_to_f32_slice(singles),
    narrow halves.convert_from_f32_slice(singles)
);
// Loops that compilers make vectors of; those of `half` branch on each number.
half_element!(
    bf16,
    |halves, singles| widen for (single, half) in singles.iter_mut().zip(halves) {
        *single = f32::from_bits(u32::from(half.to_bits()) << 16);
    },
    narrow for (half, single) in halves.iter_mut().zip(singles) {
        let bits = single.to_bits();
        // To the nearest, ties to even.
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        *half = bf16::from_bits(if single.is_nan() { quiet } else { rounded } as u16);
    }
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_slices_convert_as_single_numbers_do() {
        let singles: Vec<_> = (0..=u32::MAX).step_by(4099).map(f32::from_bits).collect();
        let mut halves = vec![bf16::ZERO; singles.len()];
        bf16::narrow_all(&singles, &mut halves);
        let mut widened = vec![0.0; singles.len()];
        bf16::widen_all(&halves, &mut widened);
        for ((single, half), widened) in singles.into_iter().zip(halves).zip(widened) {
            assert_eq!(half.to_bits(), bf16::from_f32(single).to_bits(), "{single}");
            assert!(widened.to_bits() == half.to_f32().to_bits() || single.is_nan(), "{single}");
        }
    }
}
