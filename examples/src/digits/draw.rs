//! Digits as images of many sizes.

use image::imageops::{self, FilterType};
use image::{DynamicImage, GrayImage, Luma, RgbImage};

use super::data::{Digit, SIDE};
use super::random::Random;

/// Canvas sides are multiples of this: two patches, which the tower merges into one token.
const STEP: u32 = 8;
/// The longest side of a drawn digit, in pixels.
pub const LARGEST_DIGIT: u32 = 24;
/// The longest side of a canvas, in pixels.
pub const LARGEST_CANVAS: u32 = LARGEST_DIGIT + STEP;

/// Where and how large a digit is drawn, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Width and height of the canvas.
    pub canvas: (u32, u32),
    /// Width and height of the digit.
    pub size: (u32, u32),
    /// Column and row of the digit's upper left corner.
    pub corner: (u32, u32),
}

impl Placement {
    /// A digit of one to three times its own size, up to a quarter wider or narrower than it was
    /// written, anywhere on a canvas that is the next multiple of 8 pixels or the one after, on each
    /// side: from 2 x 2 to 8 x 8 patches of 4 pixels.
    pub fn random(random: &mut Random) -> Self {
        let height = random.range(SIDE as u32, LARGEST_DIGIT);
        let width = height * random.range(80, 125) / 100;
        let size = (width.clamp(SIDE as u32, LARGEST_DIGIT), height);
        let mut side = |digit: u32| digit.next_multiple_of(STEP) + STEP * random.range(0, 1);
        let canvas = (side(size.0), side(size.1));
        let corner = (random.range(0, canvas.0 - size.0), random.range(0, canvas.1 - size.1));
        Self { canvas, size, corner }
    }
}

/// Draws a digit in white on black, in equal channels.
///
/// # Panics
///
/// When the digit does not fit on its canvas.
pub fn draw(digit: &Digit, placement: Placement) -> RgbImage {
    let Placement { canvas, size, corner } = placement;
    assert!(
        corner.0 + size.0 <= canvas.0 && corner.1 + size.1 <= canvas.1,
        "placement: the digit leaves its canvas, {placement:?}"
    );
    let side = SIDE as u32;
    let original = GrayImage::from_fn(side, side, |x, y| {
        let ink = u32::from(digit.ink[(y * side + x) as usize]);
        Luma([(ink * 255 / 16) as u8])
    });
    let scaled = imageops::resize(&original, size.0, size.1, FilterType::CatmullRom);
    let mut image = GrayImage::new(canvas.0, canvas.1);
    imageops::replace(&mut image, &scaled, i64::from(corner.0), i64::from(corner.1));
    DynamicImage::from(image).into_rgb8()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::HashSet;

    use super::*;
    use crate::digits::bundled;

    #[test]
    fn placements_keep_the_digit_whole_and_cover_every_size() {
        let mut canvases = HashSet::new();
        for seed in 0..2000 {
            let placement = Placement::random(&mut Random::new(&[seed]));
            let Placement { canvas, size, corner } = placement;
            for (canvas, size, corner) in
                [(canvas.0, size.0, corner.0), (canvas.1, size.1, corner.1)]
            {
                assert!((8..=LARGEST_DIGIT).contains(&size), "{placement:?}");
                assert!(canvas.is_multiple_of(STEP) && canvas <= LARGEST_CANVAS, "{placement:?}");
                assert!(corner + size <= canvas, "{placement:?}");
            }
            canvases.insert(canvas);
        }
        assert!(canvases.len() >= 12, "{canvases:?}");
        assert!(canvases.contains(&(8, 8)) && canvases.contains(&(32, 32)), "{canvases:?}");
    }

    #[test]
    fn at_its_own_size_a_digit_is_its_pixels() {
        let digit = &bundled().unwrap()[0];
        let placement = Placement { canvas: (16, 24), size: (8, 8), corner: (5, 16) };
        let image = draw(digit, placement);
        assert_eq!(image.dimensions(), (16, 24));
        for (x, y, pixel) in image.enumerate_pixels() {
            let inside = (5..13).contains(&x) && y >= 16;
            let ink = if inside { digit.ink[((y - 16) * 8 + x - 5) as usize] } else { 0 };
            let level = (u32::from(ink) * 255 / 16) as u8;
            assert_eq!(pixel.0, [level; 3], "{x} {y}");
        }
    }

    #[test]
    fn scaling_keeps_ink_by_area() {
        let sum = |image: RgbImage| image.pixels().map(|pixel| f64::from(pixel.0[0])).sum::<f64>();
        for digit in &bundled().unwrap()[..50] {
            let at = |width, height| Placement {
                canvas: (32, 32),
                size: (width, height),
                corner: (32 - width, 0),
            };
            let ratio = sum(draw(digit, at(24, 16))) / sum(draw(digit, at(8, 8))) / 6.0;
            assert!((0.9..1.1).contains(&ratio), "row {}: {ratio}", digit.row);
        }
    }

    #[test]
    #[should_panic(expected = "the digit leaves its canvas")]
    fn digits_do_not_leave_their_canvas() {
        let placement = Placement { canvas: (16, 16), size: (12, 12), corner: (5, 0) };
        draw(&bundled().unwrap()[0], placement);
    }
}
