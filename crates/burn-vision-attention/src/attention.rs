//! The attention layer of a vision block.

use burn::config::Config;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor, assert_shape};
use thiserror::Error;

use crate::implementation::{
    AttentionImplementation, KernelRequirements, Resolution, UnknownImplementation,
    resolve_attn_implementation,
};
use crate::norm::{VisionRmsNorm, VisionRmsNormConfig};
use crate::ops::attention_varlen::{AttentionError, AttentionOptions};
use crate::ops::qkv_attention::try_qkv_attention;
use crate::ops::rope_qk_norm::QkNorm;
#[cfg(feature = "flex")]
use crate::ops::vision_attention::Layer;
use crate::{RotaryPositionEmbedding, Segments};

/// Configuration of a [`VisionAttention`].
#[derive(Config, Debug)]
pub struct VisionAttentionConfig {
    /// Width of the hidden states.
    pub dim: usize,
    /// Number of heads; divides `dim`.
    pub num_heads: usize,
    /// Whether both projections have a bias.
    #[config(default = true)]
    pub bias: bool,
    /// Whether a token ignores later tokens of its segment.
    #[config(default = false)]
    pub is_causal: bool,
    /// Added to the mean square in the norms of q and k.
    #[config(default = 1e-5)]
    pub rms_norm_eps: f64,
    /// Whether q and k are normalised per head before the rotation.
    #[config(default = false)]
    pub use_qk_norm: bool,
    /// The implementation asked for; what runs is resolved on the device at each call.
    #[config(default = "AttentionImplementation::FlashAttention2")]
    pub implementation: AttentionImplementation,
    /// What runs where the implementation asked for is a kernel that cannot. The reference's towers
    /// pass `eager` and `eager_v2`; `sdpa` or `eager_v2` suit long sequences.
    #[config(default = "AttentionImplementation::Eager")]
    pub eager_fallback: AttentionImplementation,
}

/// Why a configuration does not describe an attention layer.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum AttentionConfigError {
    /// The heads do not share out the width.
    #[error("num_heads: expected a positive divisor of dim = {dim}, got {num_heads}")]
    Heads {
        /// Width of the hidden states.
        dim: usize,
        /// Number of heads.
        num_heads: usize,
    },
    /// The epsilon of the norms is not a positive number.
    #[error("rms_norm_eps: expected a positive finite number, got {0}")]
    Epsilon(f64),
    /// The implementation's name is none of the five.
    #[error(transparent)]
    Implementation(#[from] UnknownImplementation),
}

impl VisionAttentionConfig {
    /// The dimensions of one head.
    pub fn head_dim(&self) -> usize {
        self.dim / self.num_heads.max(1)
    }

    /// A layer with fresh weights.
    ///
    /// # Panics
    ///
    /// Where [`VisionAttentionConfig::try_init`] gives an error.
    pub fn init(&self, device: &Device) -> VisionAttention {
        self.try_init(device).unwrap_or_else(|error| panic!("VisionAttentionConfig: {error}"))
    }

    /// A layer with fresh weights.
    ///
    /// # Errors
    ///
    /// When `dim` is not a positive multiple of `num_heads`, or `rms_norm_eps` is not positive.
    pub fn try_init(&self, device: &Device) -> Result<VisionAttention, AttentionConfigError> {
        let (dim, num_heads) = (self.dim, self.num_heads);
        if dim == 0 || num_heads == 0 || !dim.is_multiple_of(num_heads) {
            return Err(AttentionConfigError::Heads { dim, num_heads });
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps.is_finite()) {
            return Err(AttentionConfigError::Epsilon(self.rms_norm_eps));
        }
        let linear = |output| LinearConfig::new(dim, output).with_bias(self.bias).init(device);
        let norm = || {
            let config = VisionRmsNormConfig::new(self.head_dim()).with_epsilon(self.rms_norm_eps);
            self.use_qk_norm.then(|| config.init(device))
        };
        Ok(VisionAttention {
            qkv: linear(3 * dim),
            proj: linear(dim),
            q_norm: norm(),
            k_norm: norm(),
            num_heads,
            is_causal: self.is_causal,
            implementation: self.implementation,
            eager_fallback: self.eager_fallback,
        })
    }
}

/// Self-attention over a packed sequence: projection to q, k and v, per-head RMS norm of q and k,
/// 2D rotary embedding, attention inside each segment, projection back.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_vision_attention::*;
///
/// // Two images of 2 x 2 and 1 x 3 patches.
/// let device = Device::flex();
/// let segments = Segments::from_lengths([4, 3])?;
/// let mut positions = vision_positions(2, 2, PositionOrder::RowMajor)?;
/// positions.extend(vision_positions(1, 3, PositionOrder::RowMajor)?);
///
/// let attention = VisionAttentionConfig::new(64, 4).with_use_qk_norm(true).init(&device);
/// let rope = VisionRotaryEmbedding::new(attention.head_dim() / 2).prepare(&positions, &device);
/// let x = Tensor::random([7, 64], Distribution::Default, &device);
/// let y = attention.forward(x, &segments, Some(&rope));
/// assert_eq!(y.dims(), [7, 64]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct VisionAttention {
    /// Projection to q, k and v, `dim` to `3 * dim`: rows of q, then k, then v, head by head.
    pub qkv: Linear,
    /// Output projection, `dim` to `dim`.
    pub proj: Linear,
    /// Norm of each head of q.
    pub q_norm: Option<VisionRmsNorm>,
    /// Norm of each head of k.
    pub k_norm: Option<VisionRmsNorm>,
    num_heads: usize,
    is_causal: bool,
    #[module(skip)]
    implementation: AttentionImplementation,
    #[module(skip)]
    eager_fallback: AttentionImplementation,
}

impl VisionAttention {
    /// Width of the hidden states.
    pub fn dim(&self) -> usize {
        self.proj.weight.dims()[0]
    }

    /// Number of heads.
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// The dimensions of one head.
    pub fn head_dim(&self) -> usize {
        self.dim() / self.num_heads
    }

    /// Asks for another implementation.
    pub fn set_implementation(&mut self, implementation: AttentionImplementation) {
        self.implementation = implementation;
    }

    /// Sets what runs where the implementation asked for is a kernel that cannot.
    pub fn set_eager_fallback(&mut self, eager_fallback: AttentionImplementation) {
        self.eager_fallback = eager_fallback;
    }

    /// What runs on a device for hidden states of a dtype, and every fallback on the way there.
    pub fn resolution(&self, device: &Device, dtype: DType) -> Resolution {
        let head_dim = self.head_dim();
        let requirements = KernelRequirements { dtype, head_dim, value_dim: head_dim };
        resolve_attn_implementation(self.implementation, device, &requirements, self.eager_fallback)
    }

    /// Attention over the packed tokens.
    ///
    /// # Shapes
    ///
    /// - x: `[tokens, dim]`, in the dtype of the weights
    /// - segments: over `tokens` tokens
    /// - rope: for `tokens` tokens and `head_dim`; `None` for no rotation
    /// - output: `[tokens, dim]`
    ///
    /// # Panics
    ///
    /// Where [`VisionAttention::try_forward`] gives an error, and when x is not `dim` wide.
    pub fn forward(
        &self,
        x: Tensor<2>,
        segments: &Segments,
        rope: Option<&RotaryPositionEmbedding>,
    ) -> Tensor<2> {
        self.try_forward(x, segments, rope)
            .unwrap_or_else(|error| panic!("VisionAttention: {error}"))
    }

    /// As [`VisionAttention::forward`], for segments and embeddings that come from a user's data.
    ///
    /// # Errors
    ///
    /// When the segments or the embedding are for another number of tokens, or the embedding is for
    /// another `head_dim`.
    ///
    /// # Panics
    ///
    /// When x is not `dim` wide.
    pub fn try_forward(
        &self,
        x: Tensor<2>,
        segments: &Segments,
        rope: Option<&RotaryPositionEmbedding>,
    ) -> Result<Tensor<2>, AttentionError> {
        assert_shape!(x, [_, self.dim()]);
        let tokens = x.dims()[0];
        if let Some(rope) = rope {
            self.check_rope(rope, tokens)?;
        }
        if segments.total() != tokens {
            let expected = format!("{} tokens as in segments", segments.total());
            return Err(AttentionError::Shape { argument: "x", expected, found: tokens });
        }
        if tokens == 0 {
            return Ok(x);
        }
        let resolution = self.resolution(&x.device(), x.dtype());
        let options = AttentionOptions { is_causal: self.is_causal, ..Default::default() };
        #[cfg(feature = "flex")]
        if resolution.implementation == AttentionImplementation::FlashAttention2
            && let Some(out) = self.whole(&x, segments, rope, &options)?
        {
            return Ok(out);
        }
        let qkv = self.qkv.forward(x).reshape([tokens, 3, self.num_heads, self.head_dim()]);
        let context = try_qkv_attention(
            resolution.implementation,
            qkv,
            rope,
            self.norms().as_ref(),
            segments,
            &options,
        )?;
        Ok(self.proj.forward(context.reshape([tokens, self.dim()])))
    }

    /// The layer by one kernel, where the device has it.
    #[cfg(feature = "flex")]
    fn whole(
        &self,
        x: &Tensor<2>,
        segments: &Segments,
        rope: Option<&RotaryPositionEmbedding>,
        options: &AttentionOptions,
    ) -> Result<Option<Tensor<2>>, AttentionError> {
        let norms = self.norms();
        let layer = Layer {
            qkv: &self.qkv,
            proj: &self.proj,
            heads: self.num_heads,
            norms: norms.as_ref(),
            rope,
        };
        layer.forward(x, segments, options)
    }

    fn norms(&self) -> Option<QkNorm> {
        let (q, k) = self.q_norm.as_ref().zip(self.k_norm.as_ref())?;
        Some(QkNorm { q_weight: q.weight.val(), k_weight: k.weight.val(), epsilon: q.epsilon })
    }

    fn check_rope(
        &self,
        rope: &RotaryPositionEmbedding,
        tokens: usize,
    ) -> Result<(), AttentionError> {
        for (what, expected, found) in [
            ("tokens", tokens, rope.tokens()),
            ("dimensions a head", self.head_dim(), rope.head_dim()),
        ] {
            if expected != found {
                return Err(AttentionError::Rope { what, expected, found });
            }
        }
        Ok(())
    }
}

impl ModuleDisplay for VisionAttention {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content
            .add("dim", &self.dim())
            .add("num_heads", &self.num_heads)
            .add("bias", &self.qkv.bias.is_some())
            .add("use_qk_norm", &self.q_norm.is_some())
            .add("is_causal", &self.is_causal)
            .add("implementation", &self.implementation.name().to_owned())
            .optional()
    }
}

/// The pre-norm residual wiring of a block: `hidden_states + attention(norm(hidden_states))`, each
/// `[tokens, dim]`.
///
/// # Errors
///
/// As [`VisionAttention::try_forward`].
pub fn apply_vision_attention_residual(
    hidden_states: Tensor<2>,
    norm: &VisionRmsNorm,
    attention: &VisionAttention,
    segments: &Segments,
    rope: Option<&RotaryPositionEmbedding>,
) -> Result<Tensor<2>, AttentionError> {
    let normed = norm.forward(hidden_states.clone());
    Ok(hidden_states + attention.try_forward(normed, segments, rope)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::VisionRotaryEmbedding;
    use burn::tensor::{Distribution, Tolerance};
    use rstest::rstest;

    fn hidden_states(tokens: usize, dim: usize) -> Tensor<2> {
        Tensor::random([tokens, dim], Distribution::Normal(0.0, 1.0), &Device::flex())
    }

    #[test]
    fn the_defaults_are_the_references() {
        let config = VisionAttentionConfig::new(64, 4);
        assert!(config.bias && !config.is_causal && !config.use_qk_norm);
        assert_eq!(config.rms_norm_eps, 1e-5);
        assert_eq!(config.eager_fallback, AttentionImplementation::Eager);
    }

    #[rstest]
    #[case(VisionAttentionConfig::new(65, 4), "positive divisor of dim = 65, got 4")]
    #[case(VisionAttentionConfig::new(64, 0), "got 0")]
    #[case(VisionAttentionConfig::new(0, 4), "dim = 0")]
    #[case(VisionAttentionConfig::new(64, 4).with_rms_norm_eps(0.0), "rms_norm_eps")]
    fn bad_configurations_are_errors(#[case] config: VisionAttentionConfig, #[case] message: &str) {
        let error = config.try_init(&Device::flex()).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }

    #[rstest]
    #[case(7, 16, 8, "expected 8 tokens, got 7")]
    #[case(8, 12, 8, "expected 16 dimensions a head, got 12")]
    fn an_embedding_of_another_size_is_an_error(
        #[case] positions: usize,
        #[case] head_dim: usize,
        #[case] tokens: usize,
        #[case] message: &str,
    ) {
        let device = Device::flex();
        let attention = VisionAttentionConfig::new(32, 2).init(&device);
        let rope =
            VisionRotaryEmbedding::new(head_dim / 2).prepare(&vec![[0, 0]; positions], &device);
        let segments = Segments::from_lengths([tokens]).unwrap();
        let error =
            attention.try_forward(hidden_states(tokens, 32), &segments, Some(&rope)).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }

    #[test]
    fn segments_of_another_length_are_an_error() {
        let attention = VisionAttentionConfig::new(32, 2).init(&Device::flex());
        let segments = Segments::from_lengths([3, 4]).unwrap();
        let error = attention.try_forward(hidden_states(8, 32), &segments, None).unwrap_err();
        assert_eq!(error.to_string(), "x: expected 7 tokens as in segments, got 8");
    }

    #[test]
    fn no_tokens_give_no_tokens() {
        let attention = VisionAttentionConfig::new(32, 2).init(&Device::flex());
        let segments = Segments::from_lengths([0, 0]).unwrap();
        assert_eq!(attention.forward(hidden_states(0, 32), &segments, None).dims(), [0, 32]);
    }

    #[test]
    fn the_residual_adds_the_normed_attention() {
        let device = Device::flex();
        let attention = VisionAttentionConfig::new(32, 2).init(&device);
        let norm = VisionRmsNormConfig::new(32).init(&device);
        let segments = Segments::from_lengths([3, 4]).unwrap();
        let x = hidden_states(7, 32);
        let expected = x.clone() + attention.forward(norm.forward(x.clone()), &segments, None);
        let y = apply_vision_attention_residual(x, &norm, &attention, &segments, None).unwrap();
        y.into_data().assert_approx_eq::<f32>(&expected.into_data(), Tolerance::absolute(1e-6));
    }
}
