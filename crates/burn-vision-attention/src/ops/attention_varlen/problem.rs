//! What is asked, checked once before anything runs.

use burn::tensor::{DType, Tensor};
use thiserror::Error;

use super::AttentionOptions;
use crate::Segments;
use crate::report::device_name;

/// Why tensors, segments and options do not describe an attention.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum AttentionError {
    /// A dimension of an argument differs from what another one sets.
    #[error("{argument}: expected {expected}, got {found}")]
    Shape {
        /// The argument and its dimension.
        argument: &'static str,
        /// What the other arguments ask for.
        expected: String,
        /// What was given.
        found: usize,
    },
    /// The heads of q cannot be shared out over those of k and v.
    #[error(
        "heads: expected a positive number of query heads divisible by a positive number of key heads, \
         got {heads} and {kv_heads}"
    )]
    Heads {
        /// Heads of q.
        heads: usize,
        /// Heads of k and v.
        kv_heads: usize,
    },
    /// An argument has another dtype than q.
    #[error(
        "{argument}: expected the dtype of {of}, {expected:?}, got {found:?}; cast one of them"
    )]
    DType {
        /// The argument.
        argument: &'static str,
        /// The argument that sets the dtype.
        of: &'static str,
        /// The dtype of that argument.
        expected: DType,
        /// The dtype of the argument.
        found: DType,
    },
    /// An argument is on another device than q.
    #[error("{argument}: expected the device of {of}, {expected}, got {found}; move one of them")]
    Device {
        /// The argument.
        argument: &'static str,
        /// The argument that sets the device.
        of: &'static str,
        /// The device of that argument.
        expected: String,
        /// The device of the argument.
        found: String,
    },
    /// The two sides are cut into different numbers of segments.
    #[error("segments_k: expected {expected} segments as in segments_q, got {found}")]
    SegmentCount {
        /// Segments of the queries.
        expected: usize,
        /// Segments of the keys.
        found: usize,
    },
    /// An option is not a positive number.
    #[error("{option}: expected a positive finite number, got {found}")]
    Option {
        /// The option.
        option: &'static str,
        /// Its value.
        found: f64,
    },
    /// The rotary embedding is for other tokens or heads.
    #[error("rotary_pos_emb: expected {expected} {what}, got {found}")]
    Rope {
        /// What differs: tokens or dimensions a head.
        what: &'static str,
        /// What the hidden states ask for.
        expected: usize,
        /// What was given.
        found: usize,
    },
}

/// Scores held at once by the composed implementations, in bytes of one tensor. Between two and four
/// tensors of that size are alive while a chunk runs (scores, their exponentials, temporaries), which
/// keeps all of them under 256 MiB.
pub(crate) const SCORE_BYTES: usize = 64 << 20;

/// The sizes of a checked attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) tokens: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
}

/// The arguments of an attention that has been checked.
pub(crate) struct Attention<'a> {
    pub(crate) q: Tensor<3>,
    pub(crate) k: Tensor<3>,
    pub(crate) v: Tensor<3>,
    pub(crate) segments_q: &'a Segments,
    pub(crate) segments_k: &'a Segments,
    pub(crate) options: &'a AttentionOptions,
    pub(crate) sizes: Sizes,
    pub(crate) score_bytes: usize,
}

impl<'a> Attention<'a> {
    pub(crate) fn new(
        [q, k, v]: [Tensor<3>; 3],
        segments_q: &'a Segments,
        segments_k: &'a Segments,
        options: &'a AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let [tokens, heads, head_dim] = q.dims();
        let [keys, kv_heads, key_dim] = k.dims();
        let [values, value_heads, value_dim] = v.dims();
        expect("q: tokens", segments_q.total(), "tokens as in segments_q", tokens)?;
        expect("k: tokens", segments_k.total(), "tokens as in segments_k", keys)?;
        expect("v: tokens", keys, "tokens as in k", values)?;
        expect("k: head_dim", head_dim, "dimensions as in q", key_dim)?;
        expect("v: heads", kv_heads, "heads as in k", value_heads)?;
        for (argument, dim) in [("q: head_dim", head_dim), ("v: head_dim", value_dim)] {
            if dim == 0 {
                let expected = "at least 1 dimension".to_owned();
                return Err(AttentionError::Shape { argument, expected, found: 0 });
            }
        }
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(AttentionError::Heads { heads, kv_heads });
        }
        if segments_q.len() != segments_k.len() {
            let (expected, found) = (segments_q.len(), segments_k.len());
            return Err(AttentionError::SegmentCount { expected, found });
        }
        for (argument, other) in [("k", &k), ("v", &v)] {
            expect_alike(argument, other, "q", &q)?;
        }
        options.check()?;
        let sizes = Sizes { tokens, heads, kv_heads, head_dim, value_dim };
        Ok(Self { q, k, v, segments_q, segments_k, options, sizes, score_bytes: SCORE_BYTES })
    }

    pub(crate) fn softmax_scale(&self) -> f64 {
        self.options.scale(self.sizes.head_dim)
    }

    /// Zeros and -inf: the output and lse of `tokens` queries that see no key.
    pub(crate) fn unseeing(&self, tokens: usize) -> (Tensor<3>, Tensor<2>) {
        let device = self.q.device();
        let out = [tokens, self.sizes.heads, self.sizes.value_dim];
        let lse = [tokens, self.sizes.heads];
        (
            Tensor::zeros(out, (&device, self.q.dtype())),
            Tensor::full(lse, f32::NEG_INFINITY, (&device, DType::F32)),
        )
    }
}

impl AttentionOptions {
    pub(crate) fn check(&self) -> Result<(), AttentionError> {
        let options = [("softmax_scale", self.softmax_scale), ("softcap", self.softcap)];
        for (option, value) in options {
            if let Some(found) = value.filter(|value| !(*value > 0.0 && value.is_finite())) {
                return Err(AttentionError::Option { option, found });
            }
        }
        Ok(())
    }
}

fn expect(
    argument: &'static str,
    expected: usize,
    unit: &str,
    found: usize,
) -> Result<(), AttentionError> {
    if expected == found {
        return Ok(());
    }
    Err(AttentionError::Shape { argument, expected: format!("{expected} {unit}"), found })
}

/// Checks that `tensor` has the dtype and the device of `other`.
fn expect_alike<const D: usize, const E: usize>(
    argument: &'static str,
    tensor: &Tensor<D>,
    of: &'static str,
    other: &Tensor<E>,
) -> Result<(), AttentionError> {
    let (expected, found) = (other.dtype(), tensor.dtype());
    if expected != found {
        return Err(AttentionError::DType { argument, of, expected, found });
    }
    let (expected, found) = (other.device(), tensor.device());
    if expected != found {
        let (expected, found) = (device_name(&expected), device_name(&found));
        return Err(AttentionError::Device { argument, of, expected, found });
    }
    Ok(())
}
