//! Files, bytes and images to pixel rows.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use burn::tensor::{DType, Device, Tensor, TensorData};
use image::{DynamicImage, RgbImage};
use rayon::prelude::*;

use super::{PreprocessError, PreprocessorConfig, bicubic::resize_bicubic, decode, patches};
use crate::grid::GridThw;

/// Name of an in-memory image in errors.
const IN_MEMORY: &str = "image";

/// Pixel rows of one or more images, in the layout the towers take.
#[derive(Clone, Debug, PartialEq)]
pub struct PixelValues {
    /// `[rows, row_len]`, row-major. A row is one patch, channel-major:
    /// `[3, temporal_patch_size, patch_size, patch_size]`.
    pub data: Vec<f32>,
    /// Patches of all images together.
    pub rows: usize,
    /// Values per patch.
    pub row_len: usize,
    /// One grid per image or clip, in input order; their tokens sum to `rows`.
    pub grids: Vec<GridThw>,
}

impl PixelValues {
    /// The rows as an `f32` tensor `[rows, row_len]` on `device`, whatever its default float type.
    pub fn to_tensor(&self, device: &Device) -> Tensor<2> {
        let data = TensorData::new(self.data.clone(), [self.rows, self.row_len]);
        Tensor::from_data(data, (device, DType::F32))
    }

    /// Joins the rows and grids of `parts` in order.
    ///
    /// # Panics
    ///
    /// If `parts` is empty or row lengths differ.
    pub fn concat(parts: Vec<Self>) -> Self {
        let mut parts = parts.into_iter();
        let mut joined = parts.next().expect("parts must hold at least one element, got 0");
        for part in parts {
            assert_eq!(
                part.row_len, joined.row_len,
                "parts must agree in row_len, expected {}, got {}",
                joined.row_len, part.row_len
            );
            joined.rows += part.rows;
            joined.data.extend_from_slice(&part.data);
            joined.grids.extend_from_slice(&part.grids);
        }
        joined
    }
}

/// One image, preprocessed.
#[derive(Clone, Debug)]
pub struct ProcessedImage {
    /// Its pixel rows, with one grid.
    pub pixel_values: PixelValues,
    /// Its patch grid; `t` is 1.
    pub grid: GridThw,
    /// The pixels that were cut into patches, after resizing.
    pub resized: RgbImage,
}

/// One clip, preprocessed.
#[derive(Clone, Debug)]
pub struct ProcessedFrames {
    /// Its pixel rows, frame after frame, with one grid.
    pub pixel_values: PixelValues,
    /// Its patch grid; `t` is the number of frames over the temporal patch size.
    pub grid: GridThw,
    /// The frames that were cut into patches, after resizing.
    pub resized: Vec<RgbImage>,
}

/// Turns images into pixel rows and grids.
///
/// Deterministic: several images in one call give the rows that each gives alone.
#[derive(Clone, Debug)]
pub struct ImageProcessor {
    config: PreprocessorConfig,
    values: [[f32; 256]; 3],
}

impl ImageProcessor {
    /// A processor with the settings of `config`.
    ///
    /// # Errors
    ///
    /// [`PreprocessError::Config`] if [`PreprocessorConfig::validate`] refuses it.
    pub fn new(config: PreprocessorConfig) -> Result<Self, PreprocessError> {
        config.validate().map_err(|source| PreprocessError::Config {
            origin: "PreprocessorConfig".to_owned(),
            source,
        })?;
        let values = patches::value_table(&config);
        Ok(Self { config, values })
    }

    /// A processor with the settings of the model folder or JSON file at `path`.
    ///
    /// # Errors
    ///
    /// Those of [`PreprocessorConfig::from_path`].
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self, PreprocessError> {
        Self::new(PreprocessorConfig::from_path(path)?)
    }

    /// The settings.
    pub fn config(&self) -> &PreprocessorConfig {
        &self.config
    }

    /// The grid that an image of `height` by `width` pixels gets, without processing it.
    ///
    /// # Errors
    ///
    /// [`PreprocessError::Resize`], or [`PreprocessError::NotDivisible`] when resizing is off.
    pub fn grid_for(&self, height: usize, width: usize) -> Result<GridThw, PreprocessError> {
        let (height, width) = self.target_size(IN_MEMORY, height, width)?;
        Ok(self.grid(1, height, width))
    }

    /// Reads, decodes and processes a PNG or JPEG file.
    ///
    /// # Errors
    ///
    /// [`PreprocessError`] naming the file: unreadable, empty, not an image, truncated or damaged, over
    /// the pixel limit, or of a size that cannot be tiled.
    pub fn process_file(&self, path: impl AsRef<Path>) -> Result<ProcessedImage, PreprocessError> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let failed = |source| PreprocessError::Io { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(failed)?;
        let mut bytes = Vec::new();
        // Whatever is no image, be it a checkpoint or an endless device, is not read to its end.
        file.by_ref().take(decode::HEAD).read_to_end(&mut bytes).map_err(failed)?;
        decode::format(&name, &bytes)?;
        file.read_to_end(&mut bytes).map_err(failed)?;
        self.process_bytes(&name, &bytes)
    }

    /// Decodes and processes the bytes of a PNG or JPEG file; `name` stands for them in errors.
    ///
    /// # Errors
    ///
    /// As [`Self::process_file`], reading aside.
    pub fn process_bytes(
        &self,
        name: &str,
        bytes: &[u8],
    ) -> Result<ProcessedImage, PreprocessError> {
        self.process_rgb(name, decode::decode(name, bytes, &self.config)?)
    }

    /// Processes an image in memory, a [`DynamicImage`] or any buffer that converts to one.
    ///
    /// # Errors
    ///
    /// [`PreprocessError`] for floating-point pixels, or a size that cannot be tiled.
    pub fn process_image(
        &self,
        image: impl Into<DynamicImage>,
    ) -> Result<ProcessedImage, PreprocessError> {
        self.process_rgb(IN_MEMORY, decode::to_rgb(IN_MEMORY, image.into())?)
    }

    /// Processes several files, decoding them in parallel; rows and grids come in input order.
    ///
    /// # Errors
    ///
    /// [`PreprocessError::NoInput`] for an empty list, else the error of the first file, in input order,
    /// that has one.
    pub fn process_files<P: AsRef<Path> + Sync>(
        &self,
        paths: &[P],
    ) -> Result<PixelValues, PreprocessError> {
        if paths.is_empty() {
            return Err(PreprocessError::NoInput { what: "images" });
        }
        // Collected before the first error is picked, so that the one reported does not depend on timing.
        let results: Vec<_> =
            paths.par_iter().map(|path| Ok(self.process_file(path)?.pixel_values)).collect();
        Ok(PixelValues::concat(results.into_iter().collect::<Result<_, _>>()?))
    }

    /// Processes the frames of one video. Every `temporal_patch_size` of them form one grid step; with
    /// the released value of 1, each frame is a step.
    ///
    /// # Errors
    ///
    /// [`PreprocessError`] when there is no frame, frames differ in size or do not fill the last step,
    /// or their size cannot be tiled.
    pub fn process_frames(&self, frames: &[RgbImage]) -> Result<ProcessedFrames, PreprocessError> {
        let Some(head) = frames.first() else {
            return Err(PreprocessError::NoInput { what: "frames" });
        };
        let expected = head.dimensions();
        for (index, frame) in frames.iter().enumerate() {
            if frame.dimensions() != expected {
                return Err(PreprocessError::FrameSize {
                    index,
                    expected,
                    actual: frame.dimensions(),
                });
            }
        }
        let temporal = self.config.temporal_patch_size;
        if !frames.len().is_multiple_of(temporal) {
            return Err(PreprocessError::FrameCount {
                frames: frames.len(),
                temporal_patch_size: temporal,
            });
        }
        let size = self.target_size("video", expected.1 as usize, expected.0 as usize)?;
        let resized: Vec<_> = frames
            .iter()
            .map(|frame| resize_bicubic(frame, size.1 as u32, size.0 as u32))
            .collect();
        let grid = self.grid(frames.len() / temporal, size.0, size.1);
        let pixel_values = self.pixel_values(&resized.iter().collect::<Vec<_>>(), grid);
        Ok(ProcessedFrames { pixel_values, grid, resized })
    }

    fn process_rgb(&self, name: &str, image: RgbImage) -> Result<ProcessedImage, PreprocessError> {
        let (width, height) = image.dimensions();
        let (new_height, new_width) = self.target_size(name, height as usize, width as usize)?;
        let target = (new_width as u32, new_height as u32);
        let resized = if target == (width, height) {
            image
        } else {
            resize_bicubic(&image, target.0, target.1)
        };
        let grid = self.grid(1, new_height, new_width);
        let frames = vec![&resized; self.config.temporal_patch_size];
        let pixel_values = self.pixel_values(&frames, grid);
        Ok(ProcessedImage { pixel_values, grid, resized })
    }

    /// `(height, width)` to resize to, tiled by whole patches.
    fn target_size(
        &self,
        name: &str,
        height: usize,
        width: usize,
    ) -> Result<(usize, usize), PreprocessError> {
        let config = &self.config;
        if config.do_resize {
            return config
                .smart_resize
                .target_size(height, width, config.factor(), config.min_pixels, config.max_pixels)
                .map_err(|source| PreprocessError::Resize { name: name.to_owned(), source });
        }
        let multiple = if config.pre_pixel_shuffle { config.factor() } else { config.patch_size };
        let tiled = |side: usize| side > 0 && side.is_multiple_of(multiple);
        if tiled(height) && tiled(width) {
            Ok((height, width))
        } else {
            Err(PreprocessError::NotDivisible { name: name.to_owned(), height, width, multiple })
        }
    }

    fn grid(&self, t: usize, height: usize, width: usize) -> GridThw {
        GridThw { t, h: height / self.config.patch_size, w: width / self.config.patch_size }
    }

    fn pixel_values(&self, frames: &[&RgbImage], grid: GridThw) -> PixelValues {
        PixelValues {
            data: patches::pixel_rows(frames, grid, &self.config, &self.values),
            rows: grid.tokens(),
            row_len: self.config.row_len(),
            grids: vec![grid],
        }
    }
}
