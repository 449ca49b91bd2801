//! A vector register, and its portable form.

use crate::element::Real;

/// One vector register of numbers.
///
/// Everything that takes a `Vector` is `#[inline(always)]`, so that it is compiled inside the function
/// that turns the instructions of that vector on (see [`super::kernels`]).
pub trait Vector: Copy {
    /// The type of one number.
    type Scalar: Real;
    /// Numbers per register.
    const LANES: usize;
    /// Registers per row of a block: `BLOCK = VECTORS * LANES` tokens are worked on side by side.
    const VECTORS: usize;
    /// Rows of a micro-kernel: `PANEL * VECTORS` accumulators stay in registers. Divides `BLOCK`.
    const PANEL: usize;
    /// Rows of a tile of a matrix product: `ROWS * VECTORS` accumulators, the vectors of a row and a
    /// factor fill the registers.
    const ROWS: usize;

    /// Tokens per block.
    const BLOCK: usize = Self::VECTORS * Self::LANES;

    /// Every lane the same.
    fn splat(value: Self::Scalar) -> Self;
    /// # Safety
    ///
    /// `from` must be good for reading `LANES` numbers; it need not be aligned.
    unsafe fn load(from: *const Self::Scalar) -> Self;
    /// # Safety
    ///
    /// `to` must be good for writing `LANES` numbers; it need not be aligned.
    unsafe fn store(self, to: *mut Self::Scalar);
    /// The first `count` numbers, at most `LANES`, and zeros.
    ///
    /// # Safety
    ///
    /// `from` must be good for reading `count` numbers; it need not be aligned.
    unsafe fn load_first(from: *const Self::Scalar, count: usize) -> Self;
    /// Stores the first `count` numbers, at most `LANES`.
    ///
    /// # Safety
    ///
    /// `to` must be good for writing `count` numbers; it need not be aligned.
    unsafe fn store_first(self, to: *mut Self::Scalar, count: usize);
    /// `self + other`.
    fn add(self, other: Self) -> Self;
    /// `self - other`.
    fn sub(self, other: Self) -> Self;
    /// `self * other`.
    fn mul(self, other: Self) -> Self;
    /// `self / other`.
    fn div(self, other: Self) -> Self;
    /// `self * factor + addend`, fused where the machine can.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// `self > other ? self : other`: `other` where either is NaN.
    fn max(self, other: Self) -> Self;
    /// `self < other ? self : other`: `other` where either is NaN.
    fn min(self, other: Self) -> Self;
    /// To the nearest integer.
    fn round(self) -> Self;
    /// `self * 2^exponent` for an integer exponent from -126 (f64: -1022) upward.
    fn scale(self, exponent: Self) -> Self;
    /// Zero where `x < limit`, otherwise `self`.
    fn zero_where_less(self, x: Self, limit: Self) -> Self;
    /// The sum of all lanes.
    fn sum(self) -> Self::Scalar;

    /// 2^x to about 1 ulp; 0 below the normal range, NaN for NaN.
    #[inline(always)]
    fn exp2(self) -> Self {
        let integer = self.round();
        let fraction = self.sub(integer);
        let coefficients = Self::Scalar::EXP2;
        let mut sum = Self::splat(coefficients[coefficients.len() - 1]);
        for &coefficient in coefficients[..coefficients.len() - 1].iter().rev() {
            sum = sum.mul_add(fraction, Self::splat(coefficient));
        }
        sum.scale(integer).zero_where_less(self, Self::splat(Self::Scalar::EXP2_MIN))
    }

    /// Transposes `LANES` rows of `LANES` numbers, each row times `factor`.
    ///
    /// # Safety
    ///
    /// `from` must be good for reading and `to` for writing `LANES` rows of `LANES` numbers, the rows
    /// `from_stride` and `to_stride` apart.
    #[inline(always)]
    unsafe fn transpose(
        from: *const Self::Scalar,
        from_stride: usize,
        to: *mut Self::Scalar,
        to_stride: usize,
        factor: Self,
    ) {
        let mut numbers = [Self::Scalar::ZERO; 16];
        assert!(Self::LANES <= numbers.len());
        for row in 0..Self::LANES {
            // SAFETY: as promised by the caller; the array has room for a register.
            unsafe {
                Self::load(from.add(row * from_stride)).mul(factor).store(numbers.as_mut_ptr());
            }
            for (column, &number) in numbers[..Self::LANES].iter().enumerate() {
                // SAFETY: as promised by the caller.
                unsafe { *to.add(column * to_stride + row) = number };
            }
        }
    }
}

/// Four numbers that the compiler keeps in whatever registers every machine of its target has.
#[derive(Clone, Copy)]
pub struct Portable<C>([C; 4]);

macro_rules! portable_vector {
    ($scalar:ty, $bits:ty, $mantissa_bits:literal, $bias:literal) => {
        impl Portable<$scalar> {
            #[inline(always)]
            fn zip(self, other: Self, f: impl Fn($scalar, $scalar) -> $scalar) -> Self {
                let [a, b, c, d] = self.0;
                let [e, g, h, i] = other.0;
                Self([f(a, e), f(b, g), f(c, h), f(d, i)])
            }
        }

        impl Vector for Portable<$scalar> {
            type Scalar = $scalar;
            const LANES: usize = 4;
            // 64-bit Arm has twice the registers of the x86-64 baseline.
            const VECTORS: usize = if cfg!(target_arch = "aarch64") { 4 } else { 2 };
            const PANEL: usize = 4;
            const ROWS: usize = 4;

            #[inline(always)]
            fn splat(value: $scalar) -> Self {
                Self([value; 4])
            }
            #[inline(always)]
            unsafe fn load(from: *const $scalar) -> Self {
                // SAFETY: the caller promises 4 readable numbers; arrays of them need no alignment
                // beyond theirs.
                Self(unsafe { *from.cast() })
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $scalar) {
                // SAFETY: as for `load`.
                unsafe { *to.cast() = self.0 }
            }
            #[inline(always)]
            unsafe fn load_first(from: *const $scalar, count: usize) -> Self {
                let mut numbers = [0.0; 4];
                for (i, number) in numbers.iter_mut().enumerate().take(count) {
                    // SAFETY: the caller promises `count` readable numbers.
                    *number = unsafe { *from.add(i) };
                }
                Self(numbers)
            }
            #[inline(always)]
            unsafe fn store_first(self, to: *mut $scalar, count: usize) {
                for (i, number) in self.0.into_iter().enumerate().take(count) {
                    // SAFETY: the caller promises `count` writable numbers.
                    unsafe { *to.add(i) = number };
                }
            }
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.zip(other, |a, b| a + b)
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self.zip(other, |a, b| a - b)
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.zip(other, |a, b| a * b)
            }
            #[inline(always)]
            fn div(self, other: Self) -> Self {
                self.zip(other, |a, b| a / b)
            }
            #[inline(always)]
            fn mul_add(self, factor: Self, addend: Self) -> Self {
                // Where it is not an instruction, `mul_add` is a slow library call.
                if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
                    let product = [0, 1, 2, 3]
                        .map(|lane: usize| self.0[lane].mul_add(factor.0[lane], addend.0[lane]));
                    Self(product)
                } else {
                    self.mul(factor).add(addend)
                }
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                self.zip(other, |a, b| if a > b { a } else { b })
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                self.zip(other, |a, b| if a < b { a } else { b })
            }
            #[inline(always)]
            fn round(self) -> Self {
                // Adding 1.5 * 2^(mantissa bits) leaves no room for a fraction; larger numbers, for
                // which that fails, have no use for an exact exponent.
                let shift = Self::splat((3u64 << ($mantissa_bits - 1)) as $scalar);
                self.add(shift).sub(shift)
            }
            #[inline(always)]
            fn scale(self, exponent: Self) -> Self {
                self.zip(exponent, |value, exponent| {
                    let exponent = exponent.min($bias as $scalar + 1.0) as i32 + $bias;
                    value * <$scalar>::from_bits((exponent.max(0) as $bits) << $mantissa_bits)
                })
            }
            #[inline(always)]
            fn zero_where_less(self, x: Self, limit: Self) -> Self {
                let kept = x.zip(limit, |x, limit| if x < limit { 0.0 } else { 1.0 });
                Self([0, 1, 2, 3].map(|i: usize| if kept.0[i] == 0.0 { 0.0 } else { self.0[i] }))
            }
            #[inline(always)]
            fn sum(self) -> $scalar {
                let [a, b, c, d] = self.0;
                (a + b) + (c + d)
            }
        }
    };
}

portable_vector!(f32, u32, 23, 127);
portable_vector!(f64, u64, 52, 1023);
