//! Pixel rows to tokens.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_vision_attention::{VisionRmsNorm, VisionRmsNormConfig};

use crate::config::DotsVitConfig;

/// The reference's `Conv2d` with kernel and stride of one patch, as the linear map it is on a
/// patch that is already flattened (channel, row, column), followed by an RMSNorm.
#[derive(Module, Debug)]
pub struct DotsPatchEmbed {
    /// The convolution's weight, flattened: `[channels * patch_size^2, embed_dim]`, with bias.
    pub proj: Linear,
    /// On the embedded patch.
    pub norm: VisionRmsNorm,
    num_channels: usize,
    temporal_patch_size: usize,
}

impl DotsPatchEmbed {
    /// Fresh weights for a validated `config`.
    pub(crate) fn new(config: &DotsVitConfig, device: &Device) -> Self {
        let patch = config.num_channels * config.patch_size * config.patch_size;
        Self {
            proj: LinearConfig::new(patch, config.embed_dim).init(device),
            norm: VisionRmsNormConfig::new(config.embed_dim)
                .with_epsilon(config.rms_norm_eps)
                .init(device),
            num_channels: config.num_channels,
            temporal_patch_size: config.temporal_patch_size,
        }
    }

    /// Embeds pixel rows. Of the `temporal_patch_size` frames in a row the first is embedded and
    /// the others are not looked at, as in the reference.
    ///
    /// # Shapes
    ///
    /// - pixel_values: `[N, channels * temporal_patch_size * patch_size^2]`, in the weights' dtype
    /// - output: `[N, embed_dim]`
    ///
    /// # Panics
    ///
    /// When the rows have another length.
    pub fn forward(&self, pixel_values: Tensor<2>) -> Tensor<2> {
        let rows = if self.temporal_patch_size == 1 {
            pixel_values
        } else {
            self.first_frame(pixel_values)
        };
        self.norm.forward(self.proj.forward(rows))
    }

    /// `[N, C * T * p * p]` to `[N, C * p * p]`.
    fn first_frame(&self, pixel_values: Tensor<2>) -> Tensor<2> {
        let [rows, values] = pixel_values.dims();
        let (channels, frames) = (self.num_channels, self.temporal_patch_size);
        assert!(
            values.is_multiple_of(channels * frames),
            "pixel_values: rows of {values} values do not hold {channels} channels of {frames} frames"
        );
        let area = values / (channels * frames);
        pixel_values
            .reshape([rows, channels, frames, area])
            .narrow(2, 0, 1)
            .reshape([rows, channels * area])
    }
}
