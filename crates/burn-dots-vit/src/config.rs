//! What a tower is built from: [`DotsVitConfig`], read from either dialect of `config.json`.

mod error;
mod options;
mod parse;

use std::path::Path;

use burn_vision_attention::{AttentionImplementation, PositionOrder};
use serde::{Deserialize, Serialize};

pub use error::ConfigError;
pub use options::{AdapterType, DotsModelType, RopeTableDtype, RouterScoring, RouterSemantics};

/// Hyper-parameters of a Dots vision tower.
///
/// [`DotsVitConfig::dots_vit`] and [`DotsVitConfig::dots_moe_vit`] hold the reference's defaults;
/// [`DotsVitConfig::from_file`] reads a released `config.json`. Serialises in the release dialect
/// and deserialises from either.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "serde_json::Value")]
pub struct DotsVitConfig {
    /// Which released tower the defaults came from.
    pub model_type: DotsModelType,
    /// Width of the tower, `D`.
    pub embed_dim: usize,
    /// Width of the language model. The dense tower's merger projects to it.
    pub hidden_size: usize,
    /// Inner width of a dense block's SwiGLU.
    pub intermediate_size: usize,
    /// Inner width of one expert's SwiGLU.
    pub moe_intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Attention heads; `embed_dim / num_attention_heads` is the head width.
    pub num_attention_heads: usize,
    /// Image channels in a pixel row.
    pub num_channels: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Side, in patches, of the groups in which a merge-ordered image lists its tokens.
    pub spatial_merge_size: usize,
    /// Frames in a pixel row, of which the reference embeds the first.
    pub temporal_patch_size: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f64,
    /// Bias on qkv, proj and the SwiGLU projections.
    pub use_bias: bool,
    /// RMSNorm on each head's query and key.
    pub use_qk_norm: bool,
    /// Causal attention inside a frame.
    pub is_causal: bool,
    /// RMSNorm after the last block.
    pub post_norm: bool,
    /// The attention implementation to ask for.
    pub attn_implementation: AttentionImplementation,
    /// What runs where the device cannot run `attn_implementation`: `eager`, `eager_v2` or `sdpa`.
    /// Not part of a released `config.json`; the reference falls back to `eager` in the dense tower
    /// and to `eager_v2` in the other, which are slower and no more exact than the default here,
    /// `sdpa`.
    pub eager_fallback: AttentionImplementation,
    /// Experts of each block: positive for a mixture of experts, 0 or -1 for a dense block. Empty
    /// means all blocks are dense.
    pub pyramid_num_routed: Vec<i64>,
    /// Experts per token: its integer part, at most the block's number of experts. Despite the
    /// name no expert has a capacity and no token is dropped.
    pub capacity_factor: f64,
    /// Router logits to probabilities.
    pub router_scoring_func: RouterScoring,
    /// Factor on the routing weights; see [`RouterSemantics`] for when it has an effect.
    pub router_scale: f64,
    /// How routing weights are normalised. Not part of a released `config.json`.
    pub router_semantics: RouterSemantics,
    /// Kind of adapter.
    pub adapter_type: AdapterType,
    /// Width of the adapter's output tokens.
    pub adapter_out_dim: usize,
    /// Side, in patches, of the square that becomes one output token.
    pub adapter_merge_size: usize,
    /// Whether patches arrive grouped by `spatial_merge_size` (and positions follow that order)
    /// rather than row by row.
    pub pre_pixel_shuffle: bool,
    /// Precision of the rotary tables. Not part of a released `config.json`.
    pub rope_table_dtype: RopeTableDtype,
}

impl DotsVitConfig {
    /// Defaults of the dense tower (dots.ocr): 42 layers of width 1536, 12 heads.
    pub fn dots_vit() -> Self {
        Self {
            model_type: DotsModelType::DotsVit,
            embed_dim: 1536,
            hidden_size: 1536,
            intermediate_size: 4224,
            moe_intermediate_size: 2112,
            num_hidden_layers: 42,
            num_attention_heads: 12,
            num_channels: 3,
            patch_size: 14,
            spatial_merge_size: 2,
            temporal_patch_size: 1,
            rms_norm_eps: 1e-5,
            use_bias: false,
            use_qk_norm: false,
            is_causal: false,
            post_norm: true,
            attn_implementation: AttentionImplementation::FlashAttention2,
            eager_fallback: AttentionImplementation::Sdpa,
            pyramid_num_routed: Vec::new(),
            capacity_factor: 2.0,
            router_scoring_func: RouterScoring::Sigmoid,
            router_scale: 1.0,
            router_semantics: RouterSemantics::Serving,
            adapter_type: AdapterType::PatchMerger,
            adapter_out_dim: 1536,
            adapter_merge_size: 2,
            pre_pixel_shuffle: true,
            rope_table_dtype: RopeTableDtype::Float32,
        }
    }

    /// Defaults of the mixture-of-experts tower (dots3-note): 42 layers of width 1536, 24 heads,
    /// q/k norm. As in the reference the defaults are all dense with the pixel-shuffle adapter;
    /// the released `config.json` names its experts and the patch merger.
    pub fn dots_moe_vit() -> Self {
        Self {
            model_type: DotsModelType::DotsMoeVit,
            hidden_size: 2048,
            num_attention_heads: 24,
            use_qk_norm: true,
            attn_implementation: AttentionImplementation::FlashAttention3,
            adapter_type: AdapterType::PixelShuffleMlp,
            adapter_out_dim: 2048,
            pre_pixel_shuffle: false,
            ..Self::dots_vit()
        }
    }

    /// Reads `path`, a `config.json` or the folder of a released model that holds one, with the
    /// tower's fields at the top or under `vision_config`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for an unreadable file, broken JSON, the config of another model, and
    /// fields of the wrong type, out of range or contradicting one another.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let path = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
        let text = std::fs::read_to_string(&path)
            .map_err(|source| ConfigError::Read { path: path.clone(), source })?;
        let value = serde_json::from_str(&text)
            .map_err(|source| ConfigError::Syntax { path: path.clone(), source })?;
        parse::config(&value, &path.display().to_string())
    }

    /// Width of one head.
    pub fn head_dim(&self) -> usize {
        self.embed_dim / self.num_attention_heads
    }

    /// Experts of block `layer`, or `None` where it is dense.
    pub fn num_experts(&self, layer: usize) -> Option<usize> {
        self.pyramid_num_routed
            .get(layer)
            .and_then(|&count| usize::try_from(count).ok())
            .filter(|&count| count > 0)
    }

    /// Experts that each token of a block with `num_experts` experts visits.
    pub fn experts_per_token(&self, num_experts: usize) -> usize {
        (self.capacity_factor as usize).min(num_experts)
    }

    /// Values in one row of `pixel_values`: channels x frames x patch side squared.
    pub fn pixel_row_len(&self) -> usize {
        self.num_channels * self.temporal_patch_size * self.patch_size * self.patch_size
    }

    /// The order in which the tower expects an image's patches. A `spatial_merge_size` of 1 still
    /// groups by 2 when `pre_pixel_shuffle` is set, as in the reference.
    pub fn position_order(&self) -> PositionOrder {
        if self.pre_pixel_shuffle {
            PositionOrder::MergeGrouped(if self.spatial_merge_size > 1 {
                self.spatial_merge_size
            } else {
                2
            })
        } else {
            PositionOrder::RowMajor
        }
    }

    /// Checks what the fields say together.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Field`] naming the first offending field, its value and what to do.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_from("config")
    }

    fn validate_from(&self, origin: &str) -> Result<(), ConfigError> {
        let fail = |field: &str, value: String, remedy: String| {
            Err(ConfigError::Field {
                origin: origin.to_string(),
                field: field.to_string(),
                value,
                remedy,
            })
        };
        for (field, value, limit) in self.sizes() {
            if !(1..=limit).contains(&value) {
                return fail(field, value.to_string(), format!("must be from 1 to {limit}"));
            }
        }
        let heads = self.num_attention_heads;
        if !self.embed_dim.is_multiple_of(heads) {
            let remedy = format!("must divide embed_dim = {}", self.embed_dim);
            return fail("num_attention_heads", heads.to_string(), remedy);
        }
        if !self.head_dim().is_multiple_of(4) {
            let remedy = format!(
                "gives heads of width {}, which must be divisible by 4: the rotary embedding \
                 splits it into halves for rows and columns, each in pairs",
                self.head_dim()
            );
            return fail("num_attention_heads", heads.to_string(), remedy);
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps > 0.0) {
            let remedy = "must be a positive number".into();
            return fail("rms_norm_eps", self.rms_norm_eps.to_string(), remedy);
        }
        if let AttentionImplementation::FlashAttention2 | AttentionImplementation::FlashAttention3 =
            self.eager_fallback
        {
            let remedy = "what stands in for a kernel cannot be one: use eager, eager_v2 or sdpa";
            return fail("eager_fallback", self.eager_fallback.to_string(), remedy.into());
        }
        self.validate_experts(&fail)?;
        self.validate_adapter(&fail)
    }

    /// Every size with the largest accepted: far beyond any tower, yet small enough that no product
    /// of them overflows and that a damaged config does not ask for a million layers.
    fn sizes(&self) -> [(&'static str, usize, usize); 12] {
        const WIDTH: usize = 1 << 20;
        [
            ("embed_dim", self.embed_dim, WIDTH),
            ("hidden_size", self.hidden_size, WIDTH),
            ("intermediate_size", self.intermediate_size, WIDTH),
            ("moe_intermediate_size", self.moe_intermediate_size, WIDTH),
            ("num_hidden_layers", self.num_hidden_layers, 1024),
            ("num_attention_heads", self.num_attention_heads, WIDTH),
            ("num_channels", self.num_channels, 1024),
            ("patch_size", self.patch_size, 1024),
            ("spatial_merge_size", self.spatial_merge_size, 64),
            ("temporal_patch_size", self.temporal_patch_size, 1024),
            ("adapter_out_dim", self.adapter_out_dim, WIDTH),
            ("adapter_merge_size", self.adapter_merge_size, 64),
        ]
    }

    fn validate_experts(
        &self,
        fail: &impl Fn(&str, String, String) -> Result<(), ConfigError>,
    ) -> Result<(), ConfigError> {
        let pyramid = &self.pyramid_num_routed;
        if !pyramid.is_empty() && pyramid.len() != self.num_hidden_layers {
            return fail(
                "pyramid_num_routed",
                format!("a list of {}", pyramid.len()),
                format!(
                    "must be empty or hold one entry per layer, num_hidden_layers = {}",
                    self.num_hidden_layers
                ),
            );
        }
        if let Some(count) = pyramid.iter().find(|&count| !(-1..=4096).contains(count)) {
            let remedy =
                "entries are a number of experts up to 4096, or 0 or -1 for a dense layer".into();
            return fail("pyramid_num_routed", count.to_string(), remedy);
        }
        // As for sizes: a module for each of them is made before any file of weights is looked at.
        const EXPERTS: i64 = 1 << 16;
        let experts: i64 = pyramid.iter().filter(|&&count| count > 0).sum();
        if experts > EXPERTS {
            let remedy = format!("must be at most {EXPERTS} experts in all layers together");
            return fail("pyramid_num_routed", format!("{experts} experts"), remedy);
        }
        if !(self.capacity_factor.is_finite() && self.capacity_factor >= 1.0) {
            let remedy = "its integer part is the number of experts per token, at least 1".into();
            return fail("capacity_factor", self.capacity_factor.to_string(), remedy);
        }
        if !self.router_scale.is_finite() || self.router_scale == 0.0 {
            let remedy = "must be a finite number other than 0".into();
            return fail("router_scale", self.router_scale.to_string(), remedy);
        }
        if self.router_semantics == RouterSemantics::Transformers
            && self.router_scoring_func == RouterScoring::Softmax
        {
            let remedy = "transformers knows sigmoid scoring only; use router_semantics = serving";
            return fail("router_scoring_func", "softmax".into(), remedy.into());
        }
        Ok(())
    }

    fn validate_adapter(
        &self,
        fail: &impl Fn(&str, String, String) -> Result<(), ConfigError>,
    ) -> Result<(), ConfigError> {
        let merge = self.adapter_merge_size;
        match self.adapter_type {
            AdapterType::PixelShuffleMlp if merge != 2 => fail(
                "adapter_merge_size",
                merge.to_string(),
                "the pixel_shuffle_mlp adapter merges 2 x 2 patches: use 2".into(),
            ),
            AdapterType::PatchMerger => match self.position_order() {
                PositionOrder::MergeGrouped(group) if group != merge => fail(
                    "adapter_merge_size",
                    merge.to_string(),
                    format!(
                        "must equal the {group} x {group} groups the patches arrive in (spatial_merge_size)"
                    ),
                ),
                _ => Ok(()),
            },
            AdapterType::PixelShuffleMlp => Ok(()),
        }
    }
}

impl TryFrom<serde_json::Value> for DotsVitConfig {
    type Error = ConfigError;

    fn try_from(value: serde_json::Value) -> Result<Self, Self::Error> {
        parse::config(&value, "config")
    }
}

#[cfg(test)]
mod tests;
