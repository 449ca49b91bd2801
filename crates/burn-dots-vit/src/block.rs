//! One pre-norm transformer block.

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_vision_attention::{
    AttentionError, RotaryPositionEmbedding, Segments, VisionAttention, VisionAttentionConfig,
    VisionRmsNorm, VisionRmsNormConfig, apply_vision_attention_residual,
};

use crate::config::DotsVitConfig;
use crate::mlp::DotsSwiGluFfn;
use crate::moe::DotsMoeFfn;

/// The feed-forward half of a block.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)] // Dozens per tower at most: boxing would save nothing.
pub enum DotsFfn {
    /// One SwiGLU for every token.
    Dense(DotsSwiGluFfn),
    /// A few of many SwiGLUs for each token.
    Moe(DotsMoeFfn),
}

impl DotsFfn {
    /// # Shapes
    ///
    /// - x: `[tokens, dim]`
    /// - output: `[tokens, dim]`
    ///
    /// # Panics
    ///
    /// When `x` has another width.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Dense(mlp) => mlp.forward(x),
            Self::Moe(mlp) => mlp.forward(x),
        }
    }
}

/// `x + attn(norm_1(x))`, then `x + mlp(norm_2(x))`.
#[derive(Module, Debug)]
pub struct DotsVisionBlock {
    /// Before attention.
    pub norm_1: VisionRmsNorm,
    /// Attention within each frame.
    pub attn: VisionAttention,
    /// Before the feed-forward layer.
    pub norm_2: VisionRmsNorm,
    /// SwiGLU or mixture of experts.
    pub mlp: DotsFfn,
}

impl DotsVisionBlock {
    /// Fresh weights of block `layer` of a validated `config`.
    pub(crate) fn new(config: &DotsVitConfig, layer: usize, device: &Device) -> Self {
        let norm = || {
            VisionRmsNormConfig::new(config.embed_dim)
                .with_epsilon(config.rms_norm_eps)
                .init(device)
        };
        let attn = VisionAttentionConfig::new(config.embed_dim, config.num_attention_heads)
            .with_bias(config.use_bias)
            .with_is_causal(config.is_causal)
            .with_rms_norm_eps(config.rms_norm_eps)
            .with_use_qk_norm(config.use_qk_norm)
            .with_implementation(config.attn_implementation)
            .with_eager_fallback(config.eager_fallback);
        Self {
            norm_1: norm(),
            attn: attn.init(device),
            norm_2: norm(),
            mlp: match config.num_experts(layer) {
                Some(experts) => DotsFfn::Moe(DotsMoeFfn::new(config, experts, device)),
                None => DotsFfn::Dense(DotsSwiGluFfn::new(
                    config.embed_dim,
                    config.intermediate_size,
                    config.use_bias,
                    device,
                )),
            },
        }
    }

    /// # Shapes
    ///
    /// - x: `[tokens, dim]`, in the dtype of the weights
    /// - segments: over `tokens` tokens
    /// - rope: for `tokens` tokens
    /// - output: `[tokens, dim]`
    ///
    /// # Errors
    ///
    /// When segments or rope are for another number of tokens.
    ///
    /// # Panics
    ///
    /// When `x` has another width.
    pub fn forward(
        &self,
        x: Tensor<2>,
        segments: &Segments,
        rope: &RotaryPositionEmbedding,
    ) -> Result<Tensor<2>, AttentionError> {
        let x = apply_vision_attention_residual(x, &self.norm_1, &self.attn, segments, Some(rope))?;
        let update = self.mlp.forward(self.norm_2.forward(x.clone()));
        Ok(x + update)
    }
}
