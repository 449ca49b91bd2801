//! The size an image is resized to before it is cut into patches.

use serde::{Deserialize, Serialize};

/// Largest ratio of the longer to the shorter side that either rule accepts.
pub const MAX_ASPECT_RATIO: f64 = 200.0;

/// Rule that maps an image's size to one that `factor` divides and whose area lies between two bounds.
///
/// Both rules round each side to the nearest multiple of `factor` (ties to even) and, where the area
/// then leaves the bounds, scale both sides by a common ratio and round inwards. They part where a
/// side rounds to zero and where enlarging passes the upper bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SmartResize {
    /// `smart_resize` of transformers' Qwen2-VL image processor, which dots.ocr's released
    /// configuration names.
    #[default]
    HuggingFace,
    /// `smart_resize` of the dots.ocr repository and of the dots3-note processor: no side is
    /// rounded below `factor`, and an enlarged size over the upper bound is shrunk again.
    DotsOcr,
}

/// A size that no rule accepts.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SmartResizeError {
    /// A side is zero.
    #[error(
        "the image is {height}x{width} (height x width), it has no pixels; pass one with at least one pixel"
    )]
    Empty {
        /// Height in pixels.
        height: usize,
        /// Width in pixels.
        width: usize,
    },
    /// The longer side exceeds [`MAX_ASPECT_RATIO`] times the shorter.
    #[error(
        "the image is {height}x{width} (height x width), a side ratio over {MAX_ASPECT_RATIO}; crop or split it"
    )]
    AspectRatio {
        /// Height in pixels.
        height: usize,
        /// Width in pixels.
        width: usize,
    },
}

impl SmartResize {
    /// `(height, width)` in pixels to resize an image of `height` by `width` pixels to.
    ///
    /// `factor` (patch size times merge size) divides both results. Their product lies in
    /// `min_pixels..=max_pixels`, but for very thin images at narrow bounds, where no side can go below
    /// `factor`. All arithmetic is the reference's, in `f64`.
    ///
    /// # Errors
    ///
    /// [`SmartResizeError`] when the image is empty or its sides differ by more than
    /// [`MAX_ASPECT_RATIO`].
    ///
    /// # Panics
    ///
    /// If `factor` or `min_pixels` is zero.
    pub fn target_size(
        self,
        height: usize,
        width: usize,
        factor: usize,
        min_pixels: usize,
        max_pixels: usize,
    ) -> Result<(usize, usize), SmartResizeError> {
        assert!(factor > 0, "factor must be positive, got 0");
        assert!(min_pixels > 0, "min_pixels must be positive, got 0");
        if height == 0 || width == 0 {
            return Err(SmartResizeError::Empty { height, width });
        }
        if height.max(width) as f64 / height.min(width) as f64 > MAX_ASPECT_RATIO {
            return Err(SmartResizeError::AspectRatio { height, width });
        }

        let floor = match self {
            Self::HuggingFace => 0,
            Self::DotsOcr => factor,
        };
        let (h, w) = (height as f64, width as f64);
        let (min, max) = (min_pixels as f64, max_pixels as f64);
        let nearest =
            |side: f64| ((side / factor as f64).round_ties_even() as usize * factor).max(floor);
        let shrink = |side: f64, beta: f64| {
            ((side / beta / factor as f64).floor() as usize * factor).max(factor)
        };
        let enlarge = |side: f64, beta: f64| (side * beta / factor as f64).ceil() as usize * factor;

        let (new_h, new_w) = (nearest(h), nearest(w));
        if new_h.saturating_mul(new_w) > max_pixels {
            let beta = (h * w / max).sqrt();
            return Ok((shrink(h, beta), shrink(w, beta)));
        }
        if new_h * new_w >= min_pixels {
            return Ok((new_h, new_w));
        }
        let beta = (min / (h * w)).sqrt();
        let (new_h, new_w) = (enlarge(h, beta), enlarge(w, beta));
        if self == Self::DotsOcr && new_h * new_w > max_pixels {
            let (h, w) = (new_h as f64, new_w as f64);
            let beta = (h * w / max).sqrt();
            return Ok((shrink(h, beta), shrink(w, beta)));
        }
        Ok((new_h, new_w))
    }
}
