//! Which vector instructions run, and the inner loops written with them.

mod combine;
mod kernels;
mod product;
mod rows;
mod scores;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::str::FromStr;
use std::sync::OnceLock;

pub(crate) use combine::Combine;
pub use kernels::Kernels;
pub(crate) use kernels::{Across, Along, Tokens, Transpose};
pub(crate) use product::Product;
pub(crate) use rows::{HeadRows, NormRotate, NormRotateBackward, RowNorm};
pub(crate) use scores::{ScoreGradient, Softcap, Softmax};
pub use vector::Vector;

use thiserror::Error;
use vector::Portable;

/// The environment variable that caps the instruction set: `scalar`, `avx2` or `avx512`. It is read
/// once; an unknown value is logged as a warning and has no effect.
pub const ENVIRONMENT_VARIABLE: &str = "VISION_ATTENTION_CPU_SIMD";

/// The vector instructions that the kernels use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstructionSet {
    /// What every machine of the compiler's target has.
    Scalar,
    /// AVX2 and FMA of x86-64.
    Avx2,
    /// AVX-512F of x86-64.
    Avx512,
}

/// A name that is not one of an [`InstructionSet`].
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("instruction set {0:?}: expected scalar, avx2 or avx512")]
pub struct UnknownInstructionSet(
    /// The name.
    pub String,
);

impl FromStr for InstructionSet {
    type Err = UnknownInstructionSet;

    fn from_str(name: &str) -> Result<Self, UnknownInstructionSet> {
        match name {
            "scalar" => Ok(Self::Scalar),
            "avx2" => Ok(Self::Avx2),
            "avx512" => Ok(Self::Avx512),
            _ => Err(UnknownInstructionSet(name.to_owned())),
        }
    }
}

impl InstructionSet {
    /// Every instruction set, the plainest first.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// Whether this machine has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                std::arch::is_x86_feature_detected!("avx2")
                    && std::arch::is_x86_feature_detected!("fma")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available() && std::arch::is_x86_feature_detected!("avx512f")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }

    /// The best that this machine has and the environment variable `VISION_ATTENTION_CPU_SIMD`
    /// (`scalar`, `avx2` or `avx512`) permits. Both are looked at once; an unknown value is logged as a
    /// warning and has no effect.
    pub fn current() -> Self {
        static CURRENT: OnceLock<InstructionSet> = OnceLock::new();
        *CURRENT.get_or_init(|| {
            let cap = match std::env::var(ENVIRONMENT_VARIABLE).map(|name| name.parse::<Self>()) {
                Ok(Ok(cap)) => cap,
                Ok(Err(error)) => {
                    log::warn!("{ENVIRONMENT_VARIABLE}: {error}; using what the machine has");
                    Self::Avx512
                }
                Err(_) => Self::Avx512,
            };
            let permitted = |set: &Self| *set <= cap && set.is_available();
            Self::ALL.into_iter().rfind(permitted).unwrap_or(Self::Scalar)
        })
    }
}

/// A table of the inner loops for one vector type, each compiled with its instructions turned on.
macro_rules! kernels {
    ($name:ident, $vector:ty $(, $features:literal)?) => {
        static $name: Kernels<<$vector as Vector>::Scalar> = {
            type V = $vector;
            type C = <V as Vector>::Scalar;
            const PANEL: usize = V::PANEL;
            const ROWS: usize = V::ROWS;
            const VECTORS: usize = V::VECTORS;
            const _: () = assert!(V::BLOCK.is_multiple_of(PANEL));

            macro_rules! loops {
                ($function:ident: $arguments:ty = $body:expr) => {{
                    fn $function(arguments: $arguments) {
                        $(#[target_feature(enable = $features)])?
                        fn specialised(arguments: $arguments) {
                            $body(arguments)
                        }
                        // SAFETY: the table is handed out only where the instructions exist.
                        #[allow(unused_unsafe)]
                        unsafe {
                            specialised(arguments)
                        }
                    }
                    $function
                }};
            }
            Kernels {
                block: V::BLOCK,
                lanes: V::LANES,
                panel: PANEL,
                rows: ROWS,
                along: loops!(along: kernels::Along<'_, C> = kernels::along::<V, PANEL>),
                across: loops!(across: kernels::Across<'_, C> = kernels::across::<V, PANEL>),
                combine: loops!(combine: combine::Combine<'_, C> = combine::combine::<V, PANEL>),
                product: loops!(
                    product: product::Product<'_, C> = product::product::<V, ROWS, VECTORS>
                ),
                transpose: loops!(transpose: kernels::Transpose<'_, C> = kernels::transpose::<V>),
                softmax: loops!(softmax: scores::Softmax<'_, C> = scores::softmax::<V>),
                softcap: loops!(softcap: scores::Softcap<'_, C> = scores::softcap::<V>),
                score_gradient: loops!(
                    score_gradient: scores::ScoreGradient<'_, C> = scores::score_gradient::<V>
                ),
                norm_rotate: loops!(
                    norm_rotate: rows::NormRotate<'_, C> = rows::norm_rotate::<V>
                ),
                norm_rotate_backward: loops!(
                    norm_rotate_backward: rows::NormRotateBackward<'_, C> =
                        rows::norm_rotate_backward::<V>
                ),
            }
        };
    };
}

macro_rules! table {
    ($name:ident, $scalar:ty, $avx512:ident, $avx2:ident) => {
        /// The inner loops for `set`.
        ///
        /// # Panics
        ///
        /// When this machine does not have `set`.
        pub(crate) fn $name(set: InstructionSet) -> &'static Kernels<$scalar> {
            kernels!(PORTABLE, Portable<$scalar>);
            assert!(set.is_available(), "set: this machine does not have {set:?}");
            #[cfg(target_arch = "x86_64")]
            {
                kernels!(AVX512, x86::$avx512, "avx512f,avx2,fma");
                kernels!(AVX2, x86::$avx2, "avx2,fma");
                match set {
                    InstructionSet::Avx512 => return &AVX512,
                    InstructionSet::Avx2 => return &AVX2,
                    InstructionSet::Scalar => {}
                }
            }
            &PORTABLE
        }
    };
}

table!(kernels_f32, f32, Avx512F32, Avx2F32);
table!(kernels_f64, f64, Avx512F64, Avx2F64);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Real;

    /// `function` in place of `inputs` by every instruction set, relative to `exact`.
    fn check<C: Real>(
        inputs: impl Iterator<Item = f64> + Clone,
        function: fn(&'static Kernels<C>, &mut [C]),
        exact: fn(f64) -> f64,
        bound: f64,
    ) {
        for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
            let kernels = C::kernels(set);
            let mut values: Vec<C> = inputs.clone().map(C::from_f64).collect();
            values.resize(values.len().next_multiple_of(kernels.block), C::ZERO);
            let before = values.clone();
            function(kernels, &mut values);
            for (x, found) in before.into_iter().zip(values) {
                let [x, found]: [f64; 2] = [x.into(), found.into()];
                let expected = exact(x);
                assert!(
                    (found - expected).abs() <= bound * expected.abs()
                        || (found.is_nan() && expected.is_nan()),
                    "{set:?}: {found} instead of {expected} at {x}"
                );
            }
        }
    }

    /// Inputs are at most 0, so that the maximum 0 leaves them alone.
    fn weights<C: Real>(kernels: &Kernels<C>, values: &mut [C]) {
        let [mut max, mut sum, mut correction] = [(); 3].map(|()| vec![C::ZERO; kernels.block]);
        (kernels.softmax)(Softmax {
            scores: values,
            max: &mut max,
            sum: &mut sum,
            correction: &mut correction,
            lanes: kernels.block,
        });
    }

    fn tanh<C: Real>(kernels: &Kernels<C>, values: &mut [C]) {
        (kernels.softcap)(Softcap { scores: values, cap: C::ONE });
    }

    #[test]
    fn powers_of_two_are_exact_to_an_ulp() {
        let inputs = (0..20_000).map(|i| -f64::from(i) * 0.006);
        check::<f32>(inputs.clone(), weights, f64::exp2, 1.3e-7);
        check::<f64>(inputs, weights, f64::exp2, 4e-16);
        let zeros = [-127.0, -200.0, -3e30, f64::NEG_INFINITY].into_iter();
        check::<f32>(zeros.clone(), weights, |x| if x == 0.0 { 1.0 } else { 0.0 }, 0.0);
        let zeros = zeros.map(|x| 20.0 * x);
        check::<f64>(zeros, weights, |x| if x == 0.0 { 1.0 } else { 0.0 }, 0.0);
    }

    #[test]
    fn tangents_are_exact_to_a_few_ulp() {
        let inputs = (-20_000..20_000).map(|i| f64::from(i) * 0.0006).chain([1e-20, 1e9, f64::NAN]);
        check::<f32>(inputs.clone(), tanh, f64::tanh, 5e-7);
        check::<f64>(inputs, tanh, f64::tanh, 4e-16);
    }

    #[test]
    fn names_are_those_of_the_sets() {
        let names = ["scalar", "avx2", "avx512"].map(str::parse);
        assert_eq!(names, InstructionSet::ALL.map(Ok));
        let error = "avx1024".parse::<InstructionSet>();
        assert_eq!(error, Err(UnknownInstructionSet("avx1024".into())));
        assert!(InstructionSet::current().is_available());
    }
}
