//! Image preprocessing of the Dots towers: file to pixel rows.
//!
//! The pipeline is the one of transformers' `Qwen2VLImageProcessorPil` with a temporal patch of one,
//! reproduced to the last bit for files whose decoding is exact (PNG):
//!
//! 1. decode to 8-bit RGB, transparency composited onto white;
//! 2. [`SmartResize`] picks a size that whole merge groups tile, near the image's own;
//! 3. [`resize_bicubic`] is Pillow 12's bicubic, fixed-point arithmetic included;
//! 4. `(x * rescale_factor - mean) / std` in `f32`;
//! 5. cut into patches, one row each, in merge-grouped or row-major order.
//!
//! [`ImageProcessor`] does all five; [`PreprocessorConfig`] holds the constants and reads them from a
//! model's `preprocessor_config.json`.
//!
//! # Differences from Pillow
//!
//! - 16-bit grey keeps the high byte of each sample, as Pillow does for every other 16-bit layout. Pillow
//!   itself clamps 16-bit grey at 255, which turns nearly all of such a page white.
//! - A transparent level of a 2-bit or 4-bit grey PNG is honoured, as the format demands; Pillow compares
//!   it with the samples already scaled to 8 bits.
//! - JPEG decoders round differently, and interpolate subsampled chroma differently. Against
//!   libjpeg-turbo, at most 3 levels were seen without chroma subsampling, 5 with it on pictures, and 36
//!   on coloured noise; black on white text stays within 1. Use PNG where bits must agree.
//! - EXIF orientation is ignored by default, see [`PreprocessorConfig::apply_exif_orientation`].
//!
//! Colour profiles and gamma chunks are not applied, there as here.

mod bicubic;
mod config;
mod config_json;
mod decode;
mod error;
mod patches;
mod processor;
mod smart_resize;
#[cfg(test)]
mod tests;

pub use bicubic::resize_bicubic;
pub use config::PreprocessorConfig;
pub use error::{ConfigFieldError, PreprocessError};
pub use processor::{ImageProcessor, PixelValues, ProcessedFrames, ProcessedImage};
pub use smart_resize::{MAX_ASPECT_RATIO, SmartResize, SmartResizeError};
