//! Image files to digits.

use std::fmt;
use std::path::Path;

use burn::tensor::{Device, activation::softmax};
use burn_dots_vit::checkpoint::CheckpointError;
use burn_dots_vit::preprocess::{
    ConfigFieldError, ImageProcessor, PreprocessError, PreprocessorConfig,
};
use burn_dots_vit::{DotsVisionEncoder, EncoderError};
use burn_vision_attention::AttentionImplementation;
use image::RgbImage;
use thiserror::Error;

use super::classifier::{CLASSES, DigitClassifier};

/// What the classifier takes an image for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Answer {
    /// The likeliest digit and its probability.
    pub best: (usize, f32),
    /// The second likeliest.
    pub second: (usize, f32),
}

impl Answer {
    /// From the probabilities of the ten digits.
    fn new(probabilities: &[f32]) -> Self {
        let mut ranked: Vec<(usize, f32)> = probabilities.iter().copied().enumerate().collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        Self { best: ranked[0], second: ranked[1] }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |(digit, probability): (usize, f32)| (digit, 100.0 * probability);
        let ((best, sure), (second, unsure)) = (percent(self.best), percent(self.second));
        write!(f, "{best} ({sure:.1} %), then {second} ({unsure:.1} %)")
    }
}

/// Why an image has no answer, or a model gives none.
#[derive(Debug, Error)]
pub enum AnswerError {
    /// The image cannot be read.
    #[error(transparent)]
    Image(#[from] PreprocessError),
    /// All pixels are alike.
    #[error("{0}: nothing is drawn in it, all its pixels are alike; pass an image of a digit")]
    Blank(String),
    /// The model cannot be read.
    #[error(transparent)]
    Model(#[from] CheckpointError),
    /// Preprocessing and tower are of different models.
    #[error("{0}: {1}")]
    Mismatch(String, ConfigFieldError),
    /// The tower is not one of digits.
    #[error(
        "{0}: its tokens hold {1} scores, not those of ten digits; pass a folder that train_digits wrote"
    )]
    Classes(String, usize),
    /// The tower refused its input.
    #[error(transparent)]
    Tower(#[from] EncoderError),
    /// The scores are not numbers.
    #[error("{0}: its scores hold NaN or infinity; the model's weights are damaged")]
    NotFinite(String),
}

/// A trained classifier and what prepares images for it.
pub struct DigitReader {
    classifier: DigitClassifier,
    /// Resizes.
    resizing: ImageProcessor,
    /// Cuts what has been resized.
    cutting: ImageProcessor,
    device: Device,
}

impl DigitReader {
    /// Loads the folder `model` that `train_digits` wrote.
    ///
    /// # Errors
    ///
    /// [`AnswerError`] for files that are missing, damaged, or not of a classifier of digits.
    pub fn load(
        model: &Path,
        implementation: Option<AttentionImplementation>,
        device: &Device,
    ) -> Result<Self, AnswerError> {
        let (mut tower, _) = DotsVisionEncoder::from_pretrained(model, device)?;
        if tower.config().adapter_out_dim != CLASSES {
            let scores = tower.config().adapter_out_dim;
            return Err(AnswerError::Classes(model.display().to_string(), scores));
        }
        let config = PreprocessorConfig::from_path(model)?;
        config.check_tower(tower.config()).map_err(|error| {
            let file = model.join(PreprocessorConfig::FILE_NAME);
            AnswerError::Mismatch(file.display().to_string(), error)
        })?;
        if let Some(implementation) = implementation {
            tower.set_implementation(implementation);
        }
        Ok(Self {
            classifier: DigitClassifier { tower },
            cutting: ImageProcessor::new(PreprocessorConfig {
                do_resize: false,
                ..config.clone()
            })?,
            resizing: ImageProcessor::new(config)?,
            device: device.clone(),
        })
    }

    /// Reads the digit in a PNG or JPEG file of any size.
    ///
    /// # Errors
    ///
    /// [`AnswerError`] naming the file.
    pub fn read(&self, image: &Path) -> Result<Answer, AnswerError> {
        let name = || image.display().to_string();
        let resized = self.resizing.process_file(image)?.resized;
        let normal = white_on_black(&resized).ok_or_else(|| AnswerError::Blank(name()))?;
        let pixels = self.cutting.process_image(normal)?.pixel_values;
        let logits = self.classifier.forward(pixels.to_tensor(&self.device), &pixels.grids)?;
        let probabilities = softmax(logits, 1).into_data();
        let probabilities: Vec<f32> = probabilities.iter::<f32>().collect();
        if probabilities.iter().any(|probability| !probability.is_finite()) {
            return Err(AnswerError::NotFinite(name()));
        }
        Ok(Answer::new(&probabilities))
    }

    /// The classifier, for what it says of its tower.
    pub fn classifier(&self) -> &DigitClassifier {
        &self.classifier
    }
}

/// The image in grey, stretched from black to white, and inverted where its border is light: what is
/// drawn becomes white. `None` when all pixels are alike.
fn white_on_black(image: &RgbImage) -> Option<RgbImage> {
    let (width, height) = image.dimensions();
    let grey = image::DynamicImage::from(image.clone()).into_luma8();
    let levels = || grey.pixels().map(|pixel| pixel.0[0]);
    let (low, high) = (levels().min()?, levels().max()?);
    if low == high {
        return None;
    }
    let stretched = |level: u8| {
        let (level, low, high) = (u32::from(level), u32::from(low), u32::from(high));
        ((level - low) * 255 / (high - low)) as u8
    };
    let border = grey.enumerate_pixels().filter(|(x, y, _)| {
        let at = |position: u32, side: u32| position == 0 || position + 1 == side;
        at(*x, width) || at(*y, height)
    });
    let (sum, count) = border.fold((0u32, 0u32), |(sum, count), (.., pixel)| {
        (sum + u32::from(stretched(pixel.0[0])), count + 1)
    });
    let dark_on_light = 2 * sum > 255 * count;
    Some(RgbImage::from_fn(width, height, |x, y| {
        let level = stretched(grey.get_pixel(x, y).0[0]);
        image::Rgb([if dark_on_light { 255 - level } else { level }; 3])
    }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::digits::{Placement, bundled, draw};

    #[test]
    fn the_two_likeliest_are_named() {
        let mut probabilities = [0.01; 10];
        (probabilities[7], probabilities[1]) = (0.875, 0.045);
        let answer = Answer::new(&probabilities);
        assert_eq!((answer.best, answer.second), ((7, 0.875), (1, 0.045)));
        assert_eq!(answer.to_string(), "7 (87.5 %), then 1 (4.5 %)");
    }

    #[test]
    fn drawn_digits_are_left_alone_and_others_become_like_them() {
        for digit in &bundled().unwrap()[..20] {
            let placement = Placement { canvas: (24, 24), size: (16, 16), corner: (3, 5) };
            let drawn = draw(digit, placement);
            let brightest = drawn.pixels().map(|pixel| pixel.0[0]).max().unwrap();
            let near = |image: &RgbImage, expected: &RgbImage| {
                let pairs = image.iter().zip(expected.iter());
                pairs.map(|(a, b)| a.abs_diff(*b)).max().unwrap()
            };
            let as_is = white_on_black(&drawn).unwrap();
            assert!(near(&as_is, &drawn) <= 255 - brightest, "row {}", digit.row);
            // Pencil on grey paper.
            let pencil = RgbImage::from_fn(24, 24, |x, y| {
                let ink = u32::from(drawn.get_pixel(x, y).0[0]);
                image::Rgb([(200 - ink * 120 / 255) as u8; 3])
            });
            assert!(near(&white_on_black(&pencil).unwrap(), &as_is) <= 4, "row {}", digit.row);
        }
    }

    #[test]
    fn blank_images_show_nothing() {
        assert!(white_on_black(&RgbImage::from_pixel(8, 16, image::Rgb([9; 3]))).is_none());
    }
}
