//! Released checkpoints to towers and back.
//!
//! [`DotsVisionEncoder::from_pretrained`] reads the folder of a released model: `config.json` and
//! safetensors, in one file or sharded. Dialect and prefix of the keys are found, not asked for:
//!
//! | tensors of | prefix | differences |
//! |---|---|---|
//! | dots.ocr | `vision_tower.` | `patch_embed.patchifier.`, `norm1`, `merger` |
//! | dots3-note | `vision_encoder.` | `norm_1`, `adapter`, `gate_weight`, `router_bias` |
//! | vLLM | `visual.` | also `attn.qkv_proj`, `attn.out_proj`, fused `mlp.fc13` |
//! | transformers | any, or none | `norm`, `gate_proj`, `mlp.gate.weight`, stacked experts, .. |
//!
//! Files are mapped into memory and read tensor by tensor. Stored BF16, F16 and F32 all load;
//! linear weights are transposed to Burn's `[in, out]` and the patch convolution is flattened.

mod convert;
mod error;
mod files;
mod load;
mod names;
mod parameter;
mod save;

use std::path::Path;

use burn::tensor::{DType, Device};

pub use error::{CheckpointError, LoadReport, ShapeMismatch};
pub use parameter::{ParameterVisitor, StoredParameter};

use crate::config::DotsVitConfig;
use crate::encoder::DotsVisionEncoder;

/// How to load a checkpoint.
#[derive(Clone, Debug, Default)]
pub struct CheckpointOptions {
    /// What the tower computes in: `F32`, `BF16` or `F16`, whatever the file stores. `None` is
    /// `F32` on every device, which represents any stored weight exactly; half precision halves
    /// memory and runs the matrix units of GPUs. `router_bias` stays f32 in any case.
    pub dtype: Option<DType>,
}

impl CheckpointOptions {
    /// Sets the dtype the tower computes in.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }
}

impl DotsVisionEncoder {
    /// Loads the released model in the folder `dir` (`config.json` and weights) as f32.
    ///
    /// # Errors
    ///
    /// As [`Self::from_pretrained_with`].
    pub fn from_pretrained(
        dir: impl AsRef<Path>,
        device: &Device,
    ) -> Result<(Self, LoadReport), CheckpointError> {
        Self::from_pretrained_with(dir, &CheckpointOptions::default(), device)
    }

    /// Loads the released model in the folder `dir` (`config.json` and weights).
    ///
    /// The report names tensors of the tower that nothing took; the caller decides whether that
    /// matters.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`] for a bad config, files that are missing, damaged or of another model,
    /// and, with the whole report, for parameters without a tensor of their shape.
    pub fn from_pretrained_with(
        dir: impl AsRef<Path>,
        options: &CheckpointOptions,
        device: &Device,
    ) -> Result<(Self, LoadReport), CheckpointError> {
        let config = DotsVitConfig::from_file(dir.as_ref())?;
        Self::load(&config, dir, options, device)
    }

    /// Loads weights from `path` into a tower of `config`: a folder, a single safetensors file, or
    /// a `model.safetensors.index.json`.
    ///
    /// # Errors
    ///
    /// As [`Self::from_pretrained_with`].
    pub fn load(
        config: &DotsVitConfig,
        path: impl AsRef<Path>,
        options: &CheckpointOptions,
        device: &Device,
    ) -> Result<(Self, LoadReport), CheckpointError> {
        load::load(config, path.as_ref(), options, device)
    }

    /// Writes `config.json` and `model.safetensors` into the folder `dir`, which is made if need
    /// be, with the key names and layout of the tower's release and the dtype of its parameters.
    /// Files of these names are replaced once both are written whole, so that a failure to write
    /// leaves the folder's files as they were and nothing beside them.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Config`] for a config that could not be loaded again, and
    /// [`CheckpointError::Write`] where
    ///
    /// - a file cannot be written;
    /// - a parameter is of a dtype that releases do not have;
    /// - `dir` holds a `model.safetensors.index.json`, whose shards would be loaded instead;
    /// - the `model.safetensors` in `dir` is not a tower's alone, such as a whole model's.
    ///
    /// [`CheckpointError::Read`] where a `model.safetensors` is there and cannot be looked at.
    pub fn save_pretrained(&self, dir: impl AsRef<Path>) -> Result<(), CheckpointError> {
        save::save(self, dir.as_ref())
    }
}

#[cfg(test)]
mod tests;
