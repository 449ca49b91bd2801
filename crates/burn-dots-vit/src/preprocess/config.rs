//! Constants of the preprocessing pipeline.

use std::path::{Path, PathBuf};

use burn_vision_attention::PositionOrder;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{ConfigFieldError, PreprocessError, SmartResize, config_json};
use crate::config::DotsVitConfig;

/// Settings of [`ImageProcessor`](super::ImageProcessor); [`Default`] is what dots.ocr was released with.
///
/// Deserializes from the keys of a `preprocessor_config.json`, in either dialect: dots.ocr's flat one
/// and dots3-note's, whose `vision_config` object takes precedence over the keys beside it. Absent and
/// `null` keys keep their default. Beyond the field names below these are understood:
///
/// - `size: {shortest_edge, longest_edge}` (or `{min_pixels, max_pixels}`): the two pixel counts,
///   unless `min_pixels` and `max_pixels` are given too;
/// - `image_mean` and `image_std` as one number for all channels;
/// - `resample`, which must be bicubic (3), `do_convert_rgb`, which must be true, `do_center_crop`,
///   `do_pad` and `do_flip_channel_order`, which must be false, and `image_processor_type`, which must
///   name a Qwen2-VL or Dots processor.
///
/// Other keys are allowed and have no effect on pixels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value")]
pub struct PreprocessorConfig {
    /// Smallest area to resize to, in pixels. Default 3,136 (56 x 56).
    pub min_pixels: usize,
    /// Largest area to resize to, in pixels. Default 11,289,600.
    pub max_pixels: usize,
    /// Side of a patch, in pixels. Default 14.
    pub patch_size: usize,
    /// Frames per patch. Default 1. A still image is repeated that many times.
    pub temporal_patch_size: usize,
    /// Side of the square of patches that the tower merges into one output token. Default 2.
    pub merge_size: usize,
    /// Mean per channel (R, G, B), subtracted after rescaling. Default CLIP's.
    pub image_mean: [f32; 3],
    /// Standard deviation per channel (R, G, B). Default CLIP's.
    pub image_std: [f32; 3],
    /// Factor that takes levels 0..=255 to the range of the mean. Default 1/255.
    pub rescale_factor: f64,
    /// Whether to resize. When false, images must already be multiples of the patch (in merge-grouped
    /// order, of patch times merge). Default true.
    pub do_resize: bool,
    /// Whether to multiply by `rescale_factor`. Default true.
    pub do_rescale: bool,
    /// Whether to subtract the mean and divide by the standard deviation. Default true.
    pub do_normalize: bool,
    /// Order of the pixel rows of a frame: true puts the `merge_size * merge_size` patches of a merge
    /// group next to each other, groups in row-major order; false is plain row-major order. It must
    /// agree with the tower's own setting. Default true.
    pub pre_pixel_shuffle: bool,
    /// Rule that chooses the size. Default [`SmartResize::HuggingFace`], but [`SmartResize::DotsOcr`]
    /// when read from a `vision_config` object, the dialect whose processor uses that rule.
    pub smart_resize: SmartResize,
    /// Whether to turn and mirror an image as its EXIF orientation says. Default false, as in the image
    /// processor, the dots.ocr repository and plain `Image.open`; `load_image` of transformers and
    /// vLLM's loader do turn it, so set this for photographs that should match those.
    pub apply_exif_orientation: bool,
    /// Largest image to decode, in pixels: a guard against decompression bombs, checked before pixels
    /// are decoded. Default 178,956,970, where Pillow too refuses; a 20,000 x 8,900 page passes.
    pub max_input_pixels: u64,
}

impl Default for PreprocessorConfig {
    fn default() -> Self {
        Self {
            min_pixels: 56 * 56,
            max_pixels: 11_289_600,
            patch_size: 14,
            temporal_patch_size: 1,
            merge_size: 2,
            image_mean: [0.481_454_66, 0.457_827_5, 0.408_210_73],
            image_std: [0.268_629_54, 0.261_302_6, 0.275_777_1],
            rescale_factor: 1.0 / 255.0,
            do_resize: true,
            do_rescale: true,
            do_normalize: true,
            pre_pixel_shuffle: true,
            smart_resize: SmartResize::HuggingFace,
            apply_exif_orientation: false,
            max_input_pixels: 178_956_970,
        }
    }
}

impl TryFrom<Value> for PreprocessorConfig {
    type Error = ConfigFieldError;

    fn try_from(value: Value) -> Result<Self, Self::Error> {
        match value {
            Value::Object(keys) => config_json::resolve(&keys),
            other => Err(ConfigFieldError::new(
                "(root)",
                format!("expected an object, got {other}"),
                "restore the model's preprocessor_config.json",
            )),
        }
    }
}

impl PreprocessorConfig {
    /// Name of the file inside a model folder.
    pub const FILE_NAME: &str = "preprocessor_config.json";

    /// Reads `path`, a JSON file or a folder that holds [`Self::FILE_NAME`].
    ///
    /// # Errors
    ///
    /// [`PreprocessError::Io`], [`PreprocessError::Json`], or [`PreprocessError::Config`] naming the key
    /// that is malformed, inconsistent, or asks for a transformation that this crate does not do.
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self, PreprocessError> {
        let path = path.as_ref();
        let path = if path.is_dir() { path.join(Self::FILE_NAME) } else { PathBuf::from(path) };
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(source) => return Err(PreprocessError::Io { path, source }),
        };
        let value: Value = match serde_json::from_slice(&text) {
            Ok(value) => value,
            Err(source) => return Err(PreprocessError::Json { path, source }),
        };
        warn_of_details(&path, &value);
        Self::try_from(value).map_err(|source| PreprocessError::Config {
            origin: path.display().to_string(),
            source,
        })
    }

    /// Side of a merge group in pixels, `patch_size * merge_size`: what resized sides are multiples of.
    pub fn factor(&self) -> usize {
        self.patch_size * self.merge_size
    }

    /// Values in a pixel row: `3 * temporal_patch_size * patch_size * patch_size`.
    pub fn row_len(&self) -> usize {
        3 * self.temporal_patch_size * self.patch_size * self.patch_size
    }

    /// Checks that every field is usable and that they agree.
    ///
    /// # Errors
    ///
    /// [`ConfigFieldError`] for the first field that is not.
    pub fn validate(&self) -> Result<(), ConfigFieldError> {
        let positive = [
            ("patch_size", self.patch_size, "14"),
            ("temporal_patch_size", self.temporal_patch_size, "1"),
            ("merge_size", self.merge_size, "2"),
            ("min_pixels", self.min_pixels, "3136"),
        ];
        for (field, value, usual) in positive {
            if value == 0 {
                return Err(ConfigFieldError::new(
                    field,
                    "must be positive, got 0",
                    format!("the Dots towers use {usual}"),
                ));
            }
        }
        let bounded = [
            ("patch_size", self.patch_size),
            ("temporal_patch_size", self.temporal_patch_size),
            ("merge_size", self.merge_size),
        ];
        for (field, value) in bounded {
            if value > MAX_SIDE {
                return Err(ConfigFieldError::new(
                    field,
                    format!("must be at most {MAX_SIDE}, got {value}"),
                    "restore the released value",
                ));
            }
        }
        self.validate_areas()?;
        self.validate_normalisation()
    }

    /// Checks that pixel rows made with these settings are those that a tower of `tower` takes: their
    /// length, and the order in which patches come. A wrong order has no other symptom than wrong
    /// features.
    ///
    /// # Errors
    ///
    /// [`ConfigFieldError`] for the first field at odds with the tower's.
    pub fn check_tower(&self, tower: &DotsVitConfig) -> Result<(), ConfigFieldError> {
        let differs = |field: &str, ours: String, theirs: String| {
            Err(ConfigFieldError::new(
                field,
                format!("{ours}, but the tower's config.json asks for {theirs}"),
                "use the two files of one model, or set it to the tower's",
            ))
        };
        if tower.num_channels != 3 {
            return differs("num_channels", "images have 3".into(), tower.num_channels.to_string());
        }
        for (field, ours, theirs) in [
            ("patch_size", self.patch_size, tower.patch_size),
            ("temporal_patch_size", self.temporal_patch_size, tower.temporal_patch_size),
        ] {
            if ours != theirs {
                return differs(field, ours.to_string(), theirs.to_string());
            }
        }
        match tower.position_order() {
            PositionOrder::MergeGrouped(group) => {
                if !self.pre_pixel_shuffle {
                    return differs("pre_pixel_shuffle", "false".into(), "true".into());
                }
                if self.merge_size != group {
                    return differs("merge_size", self.merge_size.to_string(), group.to_string());
                }
            }
            // Groups of one patch are in row-major order, too.
            PositionOrder::RowMajor if self.pre_pixel_shuffle && self.merge_size > 1 => {
                return differs("pre_pixel_shuffle", "true".into(), "false".into());
            }
            PositionOrder::RowMajor => {}
        }
        Ok(())
    }

    fn validate_areas(&self) -> Result<(), ConfigFieldError> {
        if self.min_pixels > self.max_pixels {
            return Err(ConfigFieldError::new(
                "min_pixels",
                format!("{} is over max_pixels {}", self.min_pixels, self.max_pixels),
                "lower min_pixels or raise max_pixels",
            ));
        }
        if self.max_pixels > MAX_AREA {
            return Err(ConfigFieldError::new(
                "max_pixels",
                format!("must be at most {MAX_AREA}, got {}", self.max_pixels),
                "lower max_pixels",
            ));
        }
        let group = self.factor() * self.factor();
        if self.max_pixels < group {
            return Err(ConfigFieldError::new(
                "max_pixels",
                format!("{} is under {group}, the area of one merge group", self.max_pixels),
                "raise max_pixels",
            ));
        }
        if self.max_input_pixels == 0 {
            return Err(ConfigFieldError::new(
                "max_input_pixels",
                "must be positive, got 0",
                "leave it out for the default",
            ));
        }
        Ok(())
    }

    fn validate_normalisation(&self) -> Result<(), ConfigFieldError> {
        if !self.rescale_factor.is_finite() || self.rescale_factor <= 0.0 {
            return Err(ConfigFieldError::new(
                "rescale_factor",
                format!("must be finite and positive, got {}", self.rescale_factor),
                "use 0.00392156862745098 (1/255), or do_rescale false",
            ));
        }
        if let Some(mean) = self.image_mean.iter().find(|mean| !mean.is_finite()) {
            return Err(ConfigFieldError::new(
                "image_mean",
                format!("must be finite, got {mean}"),
                "restore the released values",
            ));
        }
        let usable = |std: &&f32| std.is_finite() && **std > 0.0;
        if let Some(std) = self.image_std.iter().find(|std| !usable(std)) {
            return Err(ConfigFieldError::new(
                "image_std",
                format!("must be finite and positive, got {std}"),
                "restore the released values, or set do_normalize to false",
            ));
        }
        Ok(())
    }
}

/// Bound on patch, merge and frame counts: far over any model's, and no product of them overflows.
const MAX_SIDE: usize = 4096;
/// Bound on the resized area: at any admitted ratio, sides then fit the image type's `u32`.
const MAX_AREA: usize = 1 << 31;

/// Says that per-request sizes are not applied: nothing else tells the user which sizes are in force.
fn warn_of_details(path: &Path, value: &Value) {
    let details =
        |keys: &Map<String, Value>| keys.get("image_details").is_some_and(|d| !d.is_null());
    let Some(keys) = value.as_object() else {
        return;
    };
    let nested = keys.get("vision_config").and_then(Value::as_object);
    if details(keys) || nested.is_some_and(details) {
        log::warn!(
            "{}: image_details names sizes per request; min_pixels and max_pixels apply to all images, \
             set them for the detail you want",
            path.display()
        );
    }
}
