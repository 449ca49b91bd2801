//! The whole tower.

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_vision_attention::{
    AttentionError, AttentionImplementation, PositionOrder, Resolution, RotaryPositionEmbedding,
    Segments, VisionRmsNorm, VisionRmsNormConfig, VisionRotaryEmbedding,
};
use half::bf16;

use crate::adapter::DotsAdapter;
use crate::block::DotsVisionBlock;
use crate::config::{AdapterType, ConfigError, DotsVitConfig, RopeTableDtype, RouterSemantics};
use crate::grid::{self, GridError, GridThw};
use crate::patch_embed::DotsPatchEmbed;
#[cfg(feature = "autodiff")]
use crate::recompute::recompute;

/// Input that a tower cannot encode.
#[derive(Debug, thiserror::Error)]
pub enum EncoderError {
    /// The grids are at odds with the pixel rows or with the tower.
    #[error(transparent)]
    Grid(#[from] GridError),
    /// Pixel rows of another length.
    #[error(
        "pixel_values has rows of {actual} values, the tower takes {expected} (channels x \
         temporal_patch_size x patch_size^2); prepare the images with this model's preprocessor config"
    )]
    PixelRow {
        /// Values per row that the tower takes.
        expected: usize,
        /// Values per row given.
        actual: usize,
    },
    /// Attention refused its input.
    #[error(transparent)]
    Attention(#[from] AttentionError),
}

/// A point in the forward pass at which [`DotsVisionEncoder::forward_with`] shows the hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TowerStage {
    /// After the patch embedding.
    PatchEmbed,
    /// After this block, counted from 0.
    Block(usize),
    /// After the norm behind the last block, in towers that have one.
    PostNorm,
}

/// A Dots vision tower: patch embedding, blocks, norm, adapter.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_dots_vit::{config::DotsVitConfig, encoder::DotsVisionEncoder, grid::GridThw};
///
/// let mut config = DotsVitConfig::dots_vit();
/// (config.embed_dim, config.num_attention_heads) = (32, 2);
/// (config.num_hidden_layers, config.intermediate_size, config.adapter_out_dim) = (2, 64, 48);
/// let device = Device::flex();
/// let tower = DotsVisionEncoder::new(&config, &device)?;
///
/// // Two images of 4 x 6 and 2 x 2 patches.
/// let grids = [GridThw::new(1, 4, 6), GridThw::new(1, 2, 2)];
/// let pixel_values = Tensor::random([28, config.pixel_row_len()], Distribution::Default, &device);
/// let tokens = tower.forward(pixel_values, &grids)?;
/// assert_eq!(tokens.dims(), [6 + 1, 48]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Module, Debug)]
pub struct DotsVisionEncoder {
    /// Pixel rows to tokens.
    pub patch_embed: DotsPatchEmbed,
    /// The blocks, first to last.
    pub blocks: Vec<DotsVisionBlock>,
    /// After the last block, unless the config turns it off.
    pub post_trunk_norm: Option<VisionRmsNorm>,
    /// Tokens to the language model's width.
    pub adapter: DotsAdapter,
    #[module(skip)]
    config: DotsVitConfig,
    #[module(skip)]
    rotary: VisionRotaryEmbedding,
    #[module(skip)]
    #[cfg_attr(not(feature = "autodiff"), allow(dead_code))]
    gradient_checkpointing: bool,
}

impl DotsVisionEncoder {
    /// A tower with fresh weights, which take up no memory until they are first used or loaded.
    ///
    /// # Errors
    ///
    /// As [`DotsVitConfig::validate`].
    pub fn new(config: &DotsVitConfig, device: &Device) -> Result<Self, ConfigError> {
        config.validate()?;
        warn_about(config);
        Ok(Self {
            patch_embed: DotsPatchEmbed::new(config, device),
            blocks: (0..config.num_hidden_layers)
                .map(|layer| DotsVisionBlock::new(config, layer, device))
                .collect(),
            post_trunk_norm: config.post_norm.then(|| {
                VisionRmsNormConfig::new(config.embed_dim)
                    .with_epsilon(config.rms_norm_eps)
                    .init(device)
            }),
            adapter: DotsAdapter::new(config, device),
            config: config.clone(),
            rotary: VisionRotaryEmbedding::cached(config.head_dim() / 2),
            gradient_checkpointing: false,
        })
    }

    /// The config the tower was built from, with later changes of implementation.
    pub fn config(&self) -> &DotsVitConfig {
        &self.config
    }

    /// The dtype the tower computes in: that of its weights.
    pub fn dtype(&self) -> DType {
        self.patch_embed.proj.weight.val().dtype()
    }

    /// Asks every block for another attention implementation.
    pub fn set_implementation(&mut self, implementation: AttentionImplementation) {
        self.config.attn_implementation = implementation;
        for block in &mut self.blocks {
            block.attn.set_implementation(implementation);
        }
    }

    /// Changes what runs where a device cannot run the implementation asked for. The reference
    /// passes `eager` in the dense tower and `eager_v2` in the other; the default here is `sdpa`.
    /// A flash implementation is no fallback: `eager` runs instead, as [`Self::resolution`] says, and
    /// the tower cannot be saved.
    pub fn set_eager_fallback(&mut self, fallback: AttentionImplementation) {
        self.config.eager_fallback = fallback;
        for block in &mut self.blocks {
            block.attn.set_eager_fallback(fallback);
        }
    }

    /// Whether training keeps only the input of each block and computes the rest of it anew in the
    /// backward pass: less memory for one more forward pass. Off at first; no effect without gradients.
    #[cfg(feature = "autodiff")]
    pub fn set_gradient_checkpointing(&mut self, gradient_checkpointing: bool) {
        self.gradient_checkpointing = gradient_checkpointing;
    }

    /// What the attention of this tower runs as on `device` in `dtype`, with every fallback taken
    /// and its reason. All blocks resolve alike.
    pub fn resolution(&self, device: &Device, dtype: DType) -> Resolution {
        self.blocks[0].attn.resolution(device, dtype)
    }

    /// Encodes a batch of images or clips.
    ///
    /// `pixel_values` is cast to the tower's dtype first (the f32 rows that preprocessing makes are
    /// thus rounded once in a bf16 tower, as in the reference).
    ///
    /// # Shapes
    ///
    /// - pixel_values: `[sum of t * h * w, channels * temporal_patch_size * patch_size^2]`, rows in
    ///   the order of [`DotsVitConfig::position_order`], images one after another
    /// - output: `[sum of merged tokens, adapter_out_dim]`, where an image has
    ///   [`GridThw::merged_tokens`] of `adapter_merge_size`
    ///
    /// # Errors
    ///
    /// [`EncoderError`] where grids are empty, do not tile or do not match the pixel rows.
    pub fn forward(
        &self,
        pixel_values: Tensor<2>,
        grid_thw: &[GridThw],
    ) -> Result<Tensor<2>, EncoderError> {
        self.forward_with(pixel_values, grid_thw, &mut |_, _| {})
    }

    /// [`Self::forward`] that shows `observe` the hidden states `[sum of t * h * w, embed_dim]` at
    /// each [`TowerStage`], for progress and for comparing layer by layer.
    ///
    /// On asynchronous devices the observer runs when a stage is queued, not when it is computed.
    ///
    /// # Errors
    ///
    /// As [`Self::forward`].
    pub fn forward_with(
        &self,
        pixel_values: Tensor<2>,
        grid_thw: &[GridThw],
        observe: &mut impl FnMut(TowerStage, &Tensor<2>),
    ) -> Result<Tensor<2>, EncoderError> {
        let features = self.forward_features_with(pixel_values, grid_thw, observe)?;
        Ok(self.adapter.forward(features, grid_thw))
    }

    /// The hidden states behind the last block and its norm, before the adapter:
    /// `[sum of t * h * w, embed_dim]`.
    ///
    /// # Errors
    ///
    /// As [`Self::forward`].
    pub fn forward_features(
        &self,
        pixel_values: Tensor<2>,
        grid_thw: &[GridThw],
    ) -> Result<Tensor<2>, EncoderError> {
        self.forward_features_with(pixel_values, grid_thw, &mut |_, _| {})
    }

    fn forward_features_with(
        &self,
        pixel_values: Tensor<2>,
        grid_thw: &[GridThw],
        observe: &mut impl FnMut(TowerStage, &Tensor<2>),
    ) -> Result<Tensor<2>, EncoderError> {
        self.check(&pixel_values, grid_thw)?;
        let segments = grid::segments(grid_thw)?;
        let positions = grid::positions(grid_thw, self.config.position_order())?;
        let rope = self.rope(&positions, &pixel_values.device());

        let mut x = self.patch_embed.forward(pixel_values.cast(self.dtype()));
        observe(TowerStage::PatchEmbed, &x);
        for (layer, block) in self.blocks.iter().enumerate() {
            x = self.run_block(block, x, &segments, &rope)?;
            observe(TowerStage::Block(layer), &x);
        }
        if let Some(norm) = &self.post_trunk_norm {
            x = norm.forward(x);
            observe(TowerStage::PostNorm, &x);
        }
        Ok(x)
    }

    fn run_block(
        &self,
        block: &DotsVisionBlock,
        x: Tensor<2>,
        segments: &Segments,
        rope: &RotaryPositionEmbedding,
    ) -> Result<Tensor<2>, AttentionError> {
        #[cfg(feature = "autodiff")]
        if self.gradient_checkpointing {
            let segments = segments.clone();
            let [cos, sin] = [&rope.cos, &rope.sin].map(|table| table.clone().without_autodiff());
            let rope = RotaryPositionEmbedding { cos, sin };
            let forward = move |block: &DotsVisionBlock, x| {
                block.forward(x, &segments, &rope).expect("both are made for these tokens")
            };
            return Ok(recompute(block, x, std::sync::Arc::new(forward)));
        }
        block.forward(x, segments, rope)
    }

    fn check(&self, pixel_values: &Tensor<2>, grid_thw: &[GridThw]) -> Result<(), EncoderError> {
        let [rows, actual] = pixel_values.dims();
        grid::check_rows(grid_thw, rows)?;
        let expected = self.config.pixel_row_len();
        if actual != expected {
            return Err(EncoderError::PixelRow { expected, actual });
        }
        if self.config.adapter_type == AdapterType::PatchMerger {
            grid::check_divisible(grid_thw, self.config.adapter_merge_size)?;
        }
        Ok(())
    }

    fn rope(&self, positions: &[[u32; 2]], device: &Device) -> RotaryPositionEmbedding {
        match self.config.rope_table_dtype {
            RopeTableDtype::Float32 => self.rotary.prepare(positions, device),
            RopeTableDtype::Bfloat16 => {
                // Rounded on the host, since not every device knows bf16.
                let angles = self.rotary.angles(positions, device).into_data();
                let shape = angles.shape().clone();
                let rounded: Vec<f32> =
                    angles.iter::<f32>().map(|angle| bf16::from_f32(angle).to_f32()).collect();
                let angles =
                    Tensor::from_data(TensorData::new(rounded, shape), (device, DType::F32));
                RotaryPositionEmbedding::from_angles(angles)
            }
        }
    }
}

/// Configs that are legal in the reference but do something other than they seem to.
fn warn_about(config: &DotsVitConfig) {
    let grouped = matches!(config.position_order(), PositionOrder::MergeGrouped(_));
    match config.adapter_type {
        AdapterType::PatchMerger if !grouped => log::warn!(
            "adapter_type = patch_merger merges consecutive tokens, but pre_pixel_shuffle = false \
             numbers them row by row: patches that are not neighbours are merged"
        ),
        AdapterType::PixelShuffleMlp if grouped => log::warn!(
            "adapter_type = pixel_shuffle_mlp takes row-major tokens, but pre_pixel_shuffle = true \
             numbers them in groups: patches that are not neighbours are merged"
        ),
        _ => {}
    }
    let experts = config.pyramid_num_routed.iter().any(|&count| count > 0);
    let cancelled = config.router_semantics == RouterSemantics::Serving;
    if experts && cancelled && config.router_scale != 1.0 {
        log::warn!(
            "router_scale = {} has no effect: the serving reference divides by the sum of the routing \
             weights (set router_semantics = transformers to apply it)",
            config.router_scale
        );
    }
}

#[cfg(test)]
mod tests;
