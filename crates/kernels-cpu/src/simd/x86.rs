//! AVX-512 and AVX2 registers.

use std::arch::x86_64::*;

use super::vector::Vector;

/// Sixteen f32.
#[derive(Clone, Copy)]
pub struct Avx512F32(__m512);
/// Eight f64.
#[derive(Clone, Copy)]
pub struct Avx512F64(__m512d);
/// Eight f32.
#[derive(Clone, Copy)]
pub struct Avx2F32(__m256);
/// Four f64.
#[derive(Clone, Copy)]
pub struct Avx2F64(__m256d);

/// The methods that differ in nothing but the names of their instructions. Each is written as an
/// expression of raw registers.
macro_rules! vector {
    (
        $vector:ident, $scalar:ty, lanes $lanes:literal, vectors $vectors:literal, panel $panel:literal,
        rows $rows:literal,
        splat $splat:ident, load $load:ident, store $store:ident, add $add:ident, sub $sub:ident,
        mul $mul:ident, div $div:ident, fmadd $fmadd:ident, max $max:ident, min $min:ident,
        mask |$count:ident| $mask:expr, load_first $load_first:expr, store_first $store_first:ident,
        round |$x:ident| $round:expr,
        scale |$value:ident, $exponent:ident| $scale:expr,
        zero_where_less |$kept:ident, $at:ident, $limit:ident| $zero:expr,
        sum |$all:ident| $sum:expr
        $(, transpose $transpose:ident)?
    ) => {
        impl Vector for $vector {
            type Scalar = $scalar;
            const LANES: usize = $lanes;
            const VECTORS: usize = $vectors;
            const PANEL: usize = $panel;
            const ROWS: usize = $rows;

            #[inline(always)]
            fn splat(value: $scalar) -> Self {
                // SAFETY: a vector of this type exists only in functions that turn its instructions on,
                // and those run only where the machine was found to have them.
                Self(unsafe { $splat(value) })
            }
            #[inline(always)]
            unsafe fn load(from: *const $scalar) -> Self {
                // SAFETY: as for `splat`; the caller promises that the memory is readable.
                Self(unsafe { $load(from) })
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $scalar) {
                // SAFETY: as for `splat`; the caller promises that the memory is writable.
                unsafe { $store(to, self.0) }
            }
            #[inline(always)]
            unsafe fn load_first(from: *const $scalar, $count: usize) -> Self {
                // SAFETY: as for `load`; masked lanes are not read.
                Self(unsafe { $load_first($mask, from) })
            }
            #[inline(always)]
            unsafe fn store_first(self, to: *mut $scalar, $count: usize) {
                // SAFETY: as for `store`; masked lanes are not written.
                unsafe { $store_first(to, $mask, self.0) }
            }
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                // SAFETY: as for `splat`.
                Self(unsafe { $add(self.0, other.0) })
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                // SAFETY: as for `splat`.
                Self(unsafe { $sub(self.0, other.0) })
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                // SAFETY: as for `splat`.
                Self(unsafe { $mul(self.0, other.0) })
            }
            #[inline(always)]
            fn div(self, other: Self) -> Self {
                // SAFETY: as for `splat`.
                Self(unsafe { $div(self.0, other.0) })
            }
            #[inline(always)]
            fn mul_add(self, factor: Self, addend: Self) -> Self {
                // SAFETY: as for `splat`.
                Self(unsafe { $fmadd(self.0, factor.0, addend.0) })
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                // SAFETY: as for `splat`.
                Self(unsafe { $max(self.0, other.0) })
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                // SAFETY: as for `splat`.
                Self(unsafe { $min(self.0, other.0) })
            }
            #[inline(always)]
            fn round(self) -> Self {
                let $x = self.0;
                // SAFETY: as for `splat`.
                Self(unsafe { $round })
            }
            #[inline(always)]
            fn scale(self, exponent: Self) -> Self {
                let ($value, $exponent) = (self.0, exponent.0);
                // SAFETY: as for `splat`.
                Self(unsafe { $scale })
            }
            #[inline(always)]
            fn zero_where_less(self, x: Self, limit: Self) -> Self {
                let ($kept, $at, $limit) = (self.0, x.0, limit.0);
                // SAFETY: as for `splat`.
                Self(unsafe { $zero })
            }
            #[inline(always)]
            fn sum(self) -> $scalar {
                let $all = self.0;
                // SAFETY: as for `splat`.
                unsafe { $sum }
            }
            $(
                #[inline(always)]
                unsafe fn transpose(
                    from: *const $scalar,
                    from_stride: usize,
                    to: *mut $scalar,
                    to_stride: usize,
                    factor: Self,
                ) {
                    // SAFETY: the caller's promise is passed on; instructions as for `splat`.
                    unsafe { $transpose(from, from_stride, to, to_stride, factor.0) }
                }
            )?
        }
    };
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

vector!(
    Avx512F32, f32, lanes 16, vectors 2, panel 8, rows 12,
    splat _mm512_set1_ps, load _mm512_loadu_ps, store _mm512_storeu_ps,
    add _mm512_add_ps, sub _mm512_sub_ps, mul _mm512_mul_ps, div _mm512_div_ps,
    fmadd _mm512_fmadd_ps, max _mm512_max_ps, min _mm512_min_ps,
    mask |count| (0xffff_u32 >> (16 - count)) as u16,
    load_first _mm512_maskz_loadu_ps, store_first _mm512_mask_storeu_ps,
    round |x| _mm512_roundscale_ps::<NEAREST>(x),
    scale |value, exponent| _mm512_scalef_ps(value, exponent),
    zero_where_less |kept, x, limit|
        _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, limit), kept),
    sum |all| _mm512_reduce_add_ps(all),
    transpose transpose_16x16
);

vector!(
    Avx512F64, f64, lanes 8, vectors 2, panel 8, rows 12,
    splat _mm512_set1_pd, load _mm512_loadu_pd, store _mm512_storeu_pd,
    add _mm512_add_pd, sub _mm512_sub_pd, mul _mm512_mul_pd, div _mm512_div_pd,
    fmadd _mm512_fmadd_pd, max _mm512_max_pd, min _mm512_min_pd,
    mask |count| (0xff_u32 >> (8 - count)) as u8,
    load_first _mm512_maskz_loadu_pd, store_first _mm512_mask_storeu_pd,
    round |x| _mm512_roundscale_pd::<NEAREST>(x),
    scale |value, exponent| _mm512_scalef_pd(value, exponent),
    zero_where_less |kept, x, limit|
        _mm512_maskz_mov_pd(_mm512_cmp_pd_mask::<_CMP_NLT_UQ>(x, limit), kept),
    sum |all| _mm512_reduce_add_pd(all)
);

vector!(
    Avx2F32, f32, lanes 8, vectors 2, panel 4, rows 6,
    splat _mm256_set1_ps, load _mm256_loadu_ps, store _mm256_storeu_ps,
    add _mm256_add_ps, sub _mm256_sub_ps, mul _mm256_mul_ps, div _mm256_div_ps,
    fmadd _mm256_fmadd_ps, max _mm256_max_ps, min _mm256_min_ps,
    mask |count| _mm256_cmpgt_epi32(
        _mm256_set1_epi32(count as i32),
        _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
    ),
    load_first |mask, from| _mm256_maskload_ps(from, mask), store_first _mm256_maskstore_ps,
    round |x| _mm256_round_ps::<NEAREST>(x),
    scale |value, exponent| {
        // 128 makes infinity of any number; the caller zeroes what lies below -126.
        let exponent = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_set1_ps(128.0), exponent));
        let bits = _mm256_slli_epi32::<23>(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)));
        _mm256_mul_ps(value, _mm256_castsi256_ps(bits))
    },
    zero_where_less |kept, x, limit|
        _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, limit), kept),
    sum |all| {
        let half = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps::<1>(all));
        let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
        _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
    },
    transpose transpose_8x8
);

vector!(
    Avx2F64, f64, lanes 4, vectors 2, panel 4, rows 6,
    splat _mm256_set1_pd, load _mm256_loadu_pd, store _mm256_storeu_pd,
    add _mm256_add_pd, sub _mm256_sub_pd, mul _mm256_mul_pd, div _mm256_div_pd,
    fmadd _mm256_fmadd_pd, max _mm256_max_pd, min _mm256_min_pd,
    mask |count| _mm256_cmpgt_epi64(
        _mm256_set1_epi64x(count as i64),
        _mm256_setr_epi64x(0, 1, 2, 3),
    ),
    load_first |mask, from| _mm256_maskload_pd(from, mask), store_first _mm256_maskstore_pd,
    round |x| _mm256_round_pd::<NEAREST>(x),
    scale |value, exponent| {
        let exponent = _mm256_cvtpd_epi32(_mm256_min_pd(_mm256_set1_pd(1024.0), exponent));
        let biased = _mm256_cvtepi32_epi64(_mm_add_epi32(exponent, _mm_set1_epi32(1023)));
        _mm256_mul_pd(value, _mm256_castsi256_pd(_mm256_slli_epi64::<52>(biased)))
    },
    zero_where_less |kept, x, limit|
        _mm256_and_pd(_mm256_cmp_pd::<_CMP_NLT_UQ>(x, limit), kept),
    sum |all| {
        let half = _mm_add_pd(_mm256_castpd256_pd128(all), _mm256_extractf128_pd::<1>(all));
        _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)))
    }
);

/// # Safety
///
/// As for [`Vector::transpose`]; needs AVX-512F.
#[inline(always)]
unsafe fn transpose_16x16(
    from: *const f32,
    from_stride: usize,
    to: *mut f32,
    to_stride: usize,
    factor: __m512,
) {
    // SAFETY: the caller promises the instructions and the memory.
    unsafe {
        let mut r = [_mm512_setzero_ps(); 16];
        for (i, row) in r.iter_mut().enumerate() {
            *row = _mm512_mul_ps(_mm512_loadu_ps(from.add(i * from_stride)), factor);
        }
        // Within every 128-bit lane: 4x4 transposes of rows 4i..4i+4.
        let mut q = [_mm512_setzero_ps(); 16];
        for i in [0, 4, 8, 12] {
            let pd = |x| _mm512_castps_pd(x);
            let low = _mm512_unpacklo_ps(r[i], r[i + 1]);
            let high = _mm512_unpackhi_ps(r[i], r[i + 1]);
            let low2 = _mm512_unpacklo_ps(r[i + 2], r[i + 3]);
            let high2 = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
            q[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(low), pd(low2)));
            q[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(low), pd(low2)));
            q[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(high), pd(high2)));
            q[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(high), pd(high2)));
        }
        // q[4i + j], lane l: column 4l + j of rows 4i..4i+4. Now a 4x4 transpose of lanes.
        for j in 0..4 {
            let a = _mm512_shuffle_f32x4::<0x44>(q[j], q[4 + j]);
            let b = _mm512_shuffle_f32x4::<0xee>(q[j], q[4 + j]);
            let c = _mm512_shuffle_f32x4::<0x44>(q[8 + j], q[12 + j]);
            let d = _mm512_shuffle_f32x4::<0xee>(q[8 + j], q[12 + j]);
            let store = |column: usize, x| _mm512_storeu_ps(to.add(column * to_stride), x);
            store(j, _mm512_shuffle_f32x4::<0x88>(a, c));
            store(4 + j, _mm512_shuffle_f32x4::<0xdd>(a, c));
            store(8 + j, _mm512_shuffle_f32x4::<0x88>(b, d));
            store(12 + j, _mm512_shuffle_f32x4::<0xdd>(b, d));
        }
    }
}

/// # Safety
///
/// As for [`Vector::transpose`]; needs AVX.
#[inline(always)]
unsafe fn transpose_8x8(
    from: *const f32,
    from_stride: usize,
    to: *mut f32,
    to_stride: usize,
    factor: __m256,
) {
    // SAFETY: the caller promises the instructions and the memory.
    unsafe {
        let mut r = [_mm256_setzero_ps(); 8];
        for (i, row) in r.iter_mut().enumerate() {
            *row = _mm256_mul_ps(_mm256_loadu_ps(from.add(i * from_stride)), factor);
        }
        let mut q = [_mm256_setzero_ps(); 8];
        for i in [0, 4] {
            let low = _mm256_unpacklo_ps(r[i], r[i + 1]);
            let high = _mm256_unpackhi_ps(r[i], r[i + 1]);
            let low2 = _mm256_unpacklo_ps(r[i + 2], r[i + 3]);
            let high2 = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
            q[i] = _mm256_shuffle_ps::<0x44>(low, low2);
            q[i + 1] = _mm256_shuffle_ps::<0xee>(low, low2);
            q[i + 2] = _mm256_shuffle_ps::<0x44>(high, high2);
            q[i + 3] = _mm256_shuffle_ps::<0xee>(high, high2);
        }
        for j in 0..4 {
            let store = |column: usize, x| _mm256_storeu_ps(to.add(column * to_stride), x);
            store(j, _mm256_permute2f128_ps::<0x20>(q[j], q[4 + j]));
            store(4 + j, _mm256_permute2f128_ps::<0x31>(q[j], q[4 + j]));
        }
    }
}
