//! The five interchangeable implementations and how a request is resolved.

use std::fmt;
use std::str::FromStr;

use burn::tensor::{DType, Device};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::Segments;
use crate::ops::attention_varlen::{describe_kernel, kernel_support};
use crate::report::warn_once;

/// How attention over a packed sequence is computed. All five give the same result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionImplementation {
    /// One masked score matrix over all tokens: O(tokens^2) memory, for comparison only.
    Eager,
    /// Segment by segment in plain tensor operations, with the scores held bounded.
    EagerV2,
    /// Segment by segment through Burn's own `attention` operation, with the scores held bounded.
    Sdpa,
    /// One kernel over all segments with O(tokens) memory.
    #[serde(rename = "flash_attention_2")]
    FlashAttention2,
    /// The same with keys and values copied while others are multiplied, on devices that report TMA,
    /// mbarriers and matrix units: NVIDIA's from compute capability 9.0 on with feature `cuda-cpp`, for f16
    /// and bf16. It falls back to `flash_attention_2` elsewhere. Gradients are those of
    /// `flash_attention_2`.
    #[serde(rename = "flash_attention_3")]
    FlashAttention3,
}

impl AttentionImplementation {
    /// All five, from the simplest on.
    pub const ALL: [Self; 5] =
        [Self::Eager, Self::EagerV2, Self::Sdpa, Self::FlashAttention2, Self::FlashAttention3];

    /// The name in configuration files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::EagerV2 => "eager_v2",
            Self::Sdpa => "sdpa",
            Self::FlashAttention2 => "flash_attention_2",
            Self::FlashAttention3 => "flash_attention_3",
        }
    }
}

impl fmt::Display for AttentionImplementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is none of the five.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "unknown attention implementation `{0}`: expected eager, eager_v2, sdpa, flash_attention_2 or flash_attention_3"
)]
pub struct UnknownImplementation(pub String);

impl FromStr for AttentionImplementation {
    type Err = UnknownImplementation;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|implementation| implementation.name() == name)
            .ok_or_else(|| UnknownImplementation(name.to_owned()))
    }
}

/// What decides whether a kernel can run, beside the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelRequirements {
    /// The dtype of q, k and v.
    pub dtype: DType,
    /// The head dimension of q and k.
    pub head_dim: usize,
    /// The head dimension of v.
    pub value_dim: usize,
}

/// One step down from what was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// What could not run.
    pub from: AttentionImplementation,
    /// What was tried next.
    pub to: AttentionImplementation,
    /// The property that is missing.
    pub reason: String,
}

/// What will run, and every fallback on the way there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolution {
    /// What was asked for.
    pub requested: AttentionImplementation,
    /// What runs.
    pub implementation: AttentionImplementation,
    /// The steps between the two, in order; empty when the request itself runs.
    pub fallbacks: Vec<Fallback>,
}

impl fmt::Display for Resolution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.implementation)?;
        for (step, fallback) in self.fallbacks.iter().enumerate() {
            let separator = if step == 0 { " (" } else { "; " };
            write!(f, "{separator}{} cannot run: {}", fallback.from, fallback.reason)?;
        }
        if self.fallbacks.is_empty() { Ok(()) } else { write!(f, ")") }
    }
}

/// Decides which implementation runs on `device`: `flash_attention_3` falls back to
/// `flash_attention_2`, and that to `eager_fallback` (the reference passes `eager` or `eager_v2`).
///
/// Every fallback is in the returned [`Resolution`] and is logged once per distinct reason, as a
/// warning. The device is asked, not the features that the crate was compiled with.
///
/// ```
/// use burn::tensor::{DType, Device};
/// use burn_vision_attention::{AttentionImplementation, KernelRequirements, resolve_attn_implementation};
///
/// let resolution = resolve_attn_implementation(
///     AttentionImplementation::FlashAttention2,
///     &Device::flex(),
///     &KernelRequirements { dtype: DType::F32, head_dim: 64, value_dim: 64 },
///     AttentionImplementation::Sdpa,
/// );
/// println!("{resolution}");
/// ```
pub fn resolve_attn_implementation(
    requested: AttentionImplementation,
    device: &Device,
    requirements: &KernelRequirements,
    eager_fallback: AttentionImplementation,
) -> Resolution {
    let mut implementation = requested;
    let mut fallbacks = Vec::new();
    while let Err(reason) = kernel_support(implementation, device, requirements) {
        let (next, reason) = match implementation {
            AttentionImplementation::FlashAttention3 => {
                (AttentionImplementation::FlashAttention2, reason)
            }
            // A fallback that is itself a kernel which cannot run would go round in circles.
            _ if is_kernel(eager_fallback) => (
                AttentionImplementation::Eager,
                format!("{reason}; and eager_fallback = {eager_fallback} is a kernel, too"),
            ),
            _ => (eager_fallback, reason),
        };
        warn_once(format!("attention: {implementation} cannot run, using {next}: {reason}"));
        fallbacks.push(Fallback { from: implementation, to: next, reason });
        implementation = next;
    }
    Resolution { requested, implementation, fallbacks }
}

/// The kernel that an implementation runs on a device for such tensors, in words: the engine that
/// multiplies, its tiles, the shared memory that they take and, where keys and values are copied meanwhile,
/// the stages of the copies.
///
/// # Errors
///
/// In words: that the implementation has no kernel, as those made of tensor operations, or the property
/// that is missing where its kernel cannot run, as in the [`Fallback`] of a request for it.
///
/// ```
/// use burn::tensor::{DType, Device};
/// use burn_vision_attention::{AttentionImplementation, KernelRequirements, describe_attn_kernel};
///
/// let requirements = KernelRequirements { dtype: DType::F32, head_dim: 64, value_dim: 64 };
/// for implementation in AttentionImplementation::ALL {
///     match describe_attn_kernel(implementation, &Device::flex(), &requirements) {
///         Ok(kernel) => println!("{implementation} runs {kernel}"),
///         Err(reason) => println!("{implementation}: {reason}"),
///     }
/// }
/// ```
pub fn describe_attn_kernel(
    implementation: AttentionImplementation,
    device: &Device,
    requirements: &KernelRequirements,
) -> Result<String, String> {
    describe_kernel(implementation, device, requirements)
}

const fn is_kernel(implementation: AttentionImplementation) -> bool {
    matches!(
        implementation,
        AttentionImplementation::FlashAttention2 | AttentionImplementation::FlashAttention3
    )
}

/// Whether an implementation needs the segment lengths as a list, beside the offsets: `eager_v2`
/// alone does, as in the reference.
pub const fn attn_uses_seqlens(implementation: AttentionImplementation) -> bool {
    matches!(implementation, AttentionImplementation::EagerV2)
}

/// The segment lengths (in tokens) where the resolved implementation needs them, nothing otherwise.
///
/// [`VisionAttention`](crate::VisionAttention) does not need it, since it reads a [`Segments`]; it
/// is here for code that is ported from the reference.
pub fn prepare_seqlens_for_attention(
    resolution: &Resolution,
    segments: &Segments,
) -> Option<Vec<usize>> {
    attn_uses_seqlens(resolution.implementation).then(|| segments.lengths().collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use AttentionImplementation::*;
    use rstest::rstest;

    const REQUIREMENTS: KernelRequirements =
        KernelRequirements { dtype: DType::F32, head_dim: 64, value_dim: 64 };

    #[test]
    fn names_parse_print_and_serialise_alike() {
        for implementation in AttentionImplementation::ALL {
            let name = implementation.to_string();
            assert_eq!(name.parse(), Ok(implementation));
            assert_eq!(serde_json::to_value(implementation).unwrap(), name);
            assert_eq!(
                serde_json::from_value::<AttentionImplementation>(name.into()).unwrap(),
                implementation
            );
        }
    }

    #[test]
    fn an_unknown_name_lists_the_five() {
        let message = "flash".parse::<AttentionImplementation>().unwrap_err().to_string();
        for implementation in AttentionImplementation::ALL {
            assert!(message.contains(implementation.name()), "{message}");
        }
    }

    /// A dtype that no kernel computes in.
    const UNSERVED: DType = DType::Flex32;

    #[rstest]
    #[case(Eager, Sdpa, UNSERVED, &[])]
    #[case(EagerV2, Eager, UNSERVED, &[])]
    #[case(Sdpa, Eager, UNSERVED, &[])]
    #[case(FlashAttention2, Sdpa, DType::F32, &[])]
    #[case(FlashAttention2, Sdpa, UNSERVED, &[(FlashAttention2, Sdpa)])]
    #[case(FlashAttention3, Sdpa, DType::F16, &[(FlashAttention3, FlashAttention2)])]
    #[case(FlashAttention3, EagerV2, UNSERVED, &[(FlashAttention3, FlashAttention2), (FlashAttention2, EagerV2)])]
    #[case(FlashAttention2, FlashAttention3, UNSERVED, &[(FlashAttention2, Eager)])]
    fn requests_fall_back_in_order(
        #[case] requested: AttentionImplementation,
        #[case] eager_fallback: AttentionImplementation,
        #[case] dtype: DType,
        #[case] expected: &[(AttentionImplementation, AttentionImplementation)],
        #[values(Device::flex(), Device::flex().autodiff())] device: Device,
    ) {
        let requirements = KernelRequirements { dtype, ..REQUIREMENTS };
        let resolution =
            resolve_attn_implementation(requested, &device, &requirements, eager_fallback);
        let steps: Vec<_> = resolution.fallbacks.iter().map(|step| (step.from, step.to)).collect();
        assert_eq!(steps, expected);
        assert_eq!(resolution.implementation, expected.last().map_or(requested, |step| step.1));
        for step in &resolution.fallbacks {
            assert!(resolution.to_string().contains(&step.reason));
        }
    }

    /// What cannot run has the reason that a request for it would be given.
    #[rstest]
    #[case(Eager, DType::F32)]
    #[case(EagerV2, DType::F32)]
    #[case(Sdpa, DType::F32)]
    #[case(FlashAttention2, DType::F32)]
    #[case(FlashAttention2, UNSERVED)]
    #[case(FlashAttention3, DType::F16)]
    fn kernels_are_described_where_they_run(
        #[case] implementation: AttentionImplementation,
        #[case] dtype: DType,
        #[values(Device::flex(), Device::flex().autodiff())] device: Device,
    ) {
        let requirements = KernelRequirements { dtype, ..REQUIREMENTS };
        let description = describe_attn_kernel(implementation, &device, &requirements);
        let resolution = resolve_attn_implementation(implementation, &device, &requirements, Eager);
        match resolution.fallbacks.first() {
            Some(fallback) => assert_eq!(description.unwrap_err(), fallback.reason),
            None if is_kernel(implementation) => {
                assert!(description.unwrap().starts_with("attention_varlen "));
            }
            None => {
                let reason = description.unwrap_err();
                assert!(reason.starts_with(implementation.name()), "{reason}");
                assert!(reason.ends_with("has no kernel"), "{reason}");
            }
        }
    }

    #[test]
    fn only_eager_v2_takes_lengths() {
        let segments = Segments::from_lengths([3, 0, 4]).unwrap();
        for requested in [Eager, EagerV2, Sdpa] {
            let resolution =
                resolve_attn_implementation(requested, &Device::flex(), &REQUIREMENTS, Eager);
            let expected = (requested == EagerV2).then(|| vec![3, 0, 4]);
            assert_eq!(prepare_seqlens_for_attention(&resolution, &segments), expected);
            assert_eq!(attn_uses_seqlens(requested), requested == EagerV2);
        }
    }
}
