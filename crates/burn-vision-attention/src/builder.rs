//! The attention layer by the name of an implementation.

use burn::tensor::Device;

use crate::attention::{AttentionConfigError, VisionAttention, VisionAttentionConfig};
use crate::implementation::AttentionImplementation;

/// Values that a tower sets over those of a shared [`VisionAttentionConfig`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionOverrides {
    /// Width of the hidden states.
    pub dim: Option<usize>,
    /// Number of heads.
    pub num_heads: Option<usize>,
    /// Whether both projections have a bias.
    pub bias: Option<bool>,
}

/// Builds the layer by the name of an implementation, as the reference does.
///
/// ```
/// use burn::tensor::Device;
/// use burn_vision_attention::*;
///
/// let config = VisionAttentionConfig::new(64, 4);
/// let overrides = AttentionOverrides { bias: Some(false), ..Default::default() };
/// let fallback = AttentionImplementation::EagerV2;
/// let attention =
///     build_vision_attention("flash_attention_2", &config, overrides, fallback, &Device::flex())?;
/// assert!(attention.qkv.bias.is_none());
/// # Ok::<(), AttentionConfigError>(())
/// ```
///
/// # Errors
///
/// When the name is none of the five, which the error lists, or the configuration is not valid.
pub fn build_vision_attention(
    attn_implementation: &str,
    config: &VisionAttentionConfig,
    overrides: AttentionOverrides,
    eager_fallback: AttentionImplementation,
    device: &Device,
) -> Result<VisionAttention, AttentionConfigError> {
    let mut config = config.clone();
    config.implementation = attn_implementation.parse()?;
    config.eager_fallback = eager_fallback;
    config.dim = overrides.dim.unwrap_or(config.dim);
    config.num_heads = overrides.num_heads.unwrap_or(config.num_heads);
    config.bias = overrides.bias.unwrap_or(config.bias);
    config.try_init(device)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_builder_overrides_and_lists_the_names() {
        let device = Device::flex();
        let config = VisionAttentionConfig::new(64, 4);
        let overrides = AttentionOverrides { dim: Some(32), num_heads: Some(2), bias: Some(false) };
        let build = |name| {
            build_vision_attention(name, &config, overrides, AttentionImplementation::Sdpa, &device)
        };
        let attention = build("eager_v2").unwrap();
        assert_eq!((attention.dim(), attention.num_heads(), attention.head_dim()), (32, 2, 16));
        assert!(attention.qkv.bias.is_none() && attention.proj.bias.is_none());
        let error = build("flash").unwrap_err().to_string();
        assert!(
            error.contains("eager, eager_v2, sdpa, flash_attention_2 or flash_attention_3"),
            "{error}"
        );
    }
}
