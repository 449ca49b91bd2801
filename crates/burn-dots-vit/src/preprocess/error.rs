//! What can go wrong between a file and its pixel rows.

use std::path::PathBuf;

use super::SmartResizeError;

/// A preprocessing setting that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}; {remedy}")]
pub struct ConfigFieldError {
    /// Key of `preprocessor_config.json`, or field of [`PreprocessorConfig`](super::PreprocessorConfig).
    pub field: String,
    /// What is wrong with its value.
    pub problem: String,
    /// What to write instead.
    pub remedy: String,
}

impl ConfigFieldError {
    pub(super) fn new(
        field: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { field: field.into(), problem: problem.into(), remedy: remedy.into() }
    }
}

/// Failure of image preprocessing. Every message is one line: the file, what is wrong, what to do.
///
/// `name` is the file's path, the name given with bytes, or `image` for pixels in memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PreprocessError {
    /// A file could not be read.
    #[error("{}: cannot read: {source}; {}", path.display(), read_remedy(source))]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A configuration file is not JSON.
    #[error("{}: not valid JSON: {source}; restore the model's preprocessor_config.json", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why parsing stopped.
        source: serde_json::Error,
    },
    /// A setting cannot be used.
    #[error("{origin}: {source}")]
    Config {
        /// The configuration file, or `PreprocessorConfig` for one built in memory.
        origin: String,
        /// Field, problem and remedy.
        source: ConfigFieldError,
    },
    /// The file has no bytes.
    #[error("{name}: the file is empty; copy or download it again")]
    EmptyFile {
        /// The input.
        name: String,
    },
    /// The file's first bytes are those of no known image format.
    #[error(
        "{name}: not an image (its first bytes are of no known image format); pass a PNG or JPEG file"
    )]
    NotAnImage {
        /// The input.
        name: String,
    },
    /// An image format that this crate does not decode.
    #[error("{name}: {format} images are not supported; convert it to PNG or JPEG")]
    UnsupportedFormat {
        /// The input.
        name: String,
        /// The format that was recognised.
        format: String,
    },
    /// A pixel layout that has no defined conversion to 8-bit RGB.
    #[error(
        "{name}: {layout} pixels are not supported; convert the image to 8-bit or 16-bit grey or RGB"
    )]
    UnsupportedPixels {
        /// The input.
        name: String,
        /// The layout.
        layout: String,
    },
    /// The file ends before its image does.
    #[error(
        "{name}: the image is truncated, the file ends before its data does; copy or download it again"
    )]
    Truncated {
        /// The input.
        name: String,
    },
    /// The decoder rejected the file.
    #[error(
        "{name}: cannot decode: {}; the file is damaged or of a rare kind, save it again as PNG",
        one_line(source)
    )]
    Decode {
        /// The input.
        name: String,
        /// The decoder's reason.
        source: image::ImageError,
    },
    /// The image has more pixels than the configuration admits.
    #[error(
        "{name}: {width}x{height} (width x height) is over the limit of {max_input_pixels} pixels; \
         scale the image down, or raise max_input_pixels if you trust the file"
    )]
    TooLarge {
        /// The input.
        name: String,
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// The limit in force.
        max_input_pixels: u64,
    },
    /// No size to resize to exists.
    #[error("{name}: {source}")]
    Resize {
        /// The input.
        name: String,
        /// Why.
        source: SmartResizeError,
    },
    /// Resizing is off and patches do not tile the image.
    #[error(
        "{name}: {height}x{width} (height x width) is no multiple of {multiple} and do_resize is false; \
         resize the image to multiples of {multiple} or set do_resize to true"
    )]
    NotDivisible {
        /// The input.
        name: String,
        /// Height in pixels.
        height: usize,
        /// Width in pixels.
        width: usize,
        /// What both sides must be divisible by.
        multiple: usize,
    },
    /// An empty list of inputs.
    #[error("no {what} given; pass at least one")]
    NoInput {
        /// `images` or `frames`.
        what: &'static str,
    },
    /// The frames of a video differ in size.
    #[error(
        "frame {index} is {}x{} (width x height), frame 0 is {}x{}; resize all frames of a video to one size",
        actual.0, actual.1, expected.0, expected.1
    )]
    FrameSize {
        /// Index of the first frame that differs.
        index: usize,
        /// `(width, height)` of frame 0, in pixels.
        expected: (u32, u32),
        /// `(width, height)` of this frame, in pixels.
        actual: (u32, u32),
    },
    /// The number of frames is not a multiple of the temporal patch size.
    #[error(
        "{frames} frames are no multiple of temporal_patch_size {temporal_patch_size}; \
         drop or repeat frames at the end"
    )]
    FrameCount {
        /// Frames given.
        frames: usize,
        /// Frames per temporal patch.
        temporal_patch_size: usize,
    },
}

fn read_remedy(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::IsADirectory => "pass a file, not a folder",
        _ => "check that the file exists and is readable",
    }
}

/// Text of a decoder's error, some of which span lines.
fn one_line(error: &image::ImageError) -> String {
    let text = error.to_string();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
