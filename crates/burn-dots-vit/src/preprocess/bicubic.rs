//! Pillow 12's bicubic resampling of 8-bit RGB, bit for bit.
//!
//! Keys' cubic with `a = -0.5`, widened by the scale when shrinking; weights are normalised in `f64`
//! and rounded to 22 fractional bits; each pass accumulates in `i32` and writes `u8`, the horizontal
//! pass first. Pillow 13 may swap the passes, and then differs by several levels on noisy images.

use image::RgbImage;
use rayon::prelude::*;

/// Fractional bits of a weight: 32, less 8 for the sample and 2 for sign and overshoot.
const PRECISION_BITS: u32 = 32 - 8 - 2;
/// Half of the last kept bit, so that the final shift rounds.
const ROUND: i32 = 1 << (PRECISION_BITS - 1);
const CHANNELS: usize = 3;

/// Resizes `image` to `width` by `height` pixels as `PIL.Image.resize((width, height), BICUBIC)` of
/// Pillow 12 does, bit for bit. Equal sizes return an unchanged copy.
///
/// # Panics
///
/// If a side of `image`, `width` or `height` is zero.
pub fn resize_bicubic(image: &RgbImage, width: u32, height: u32) -> RgbImage {
    let (in_width, in_height) = image.dimensions();
    assert!(
        in_width > 0 && in_height > 0,
        "image must have pixels, got {in_width}x{in_height} (width x height)"
    );
    assert!(width > 0 && height > 0, "width and height must be positive, got {width}x{height}");
    let widened;
    let source = if width == in_width {
        image
    } else {
        widened = horizontal(image, width);
        &widened
    };
    if height == in_height { source.clone() } else { vertical(source, height) }
}

/// For every output position, the run of input positions it reads and their weights.
struct Taps {
    /// First input position and number of positions, per output position.
    runs: Vec<(usize, usize)>,
    /// Weights of all runs, each run padded to `stride`.
    weights: Vec<i32>,
    stride: usize,
}

impl Taps {
    fn new(input: usize, output: usize) -> Self {
        let scale = input as f64 / output as f64;
        let filter_scale = scale.max(1.0);
        let support = 2.0 * filter_scale;
        let stride = support.ceil() as usize * 2 + 1;
        // Pillow multiplies by the reciprocal; dividing would round differently.
        let inverse_scale = 1.0 / filter_scale;

        let mut runs = Vec::with_capacity(output);
        let mut weights = vec![0i32; output * stride];
        let mut exact = Vec::with_capacity(stride);
        for (position, row) in weights.chunks_exact_mut(stride).enumerate() {
            let centre = (position as f64 + 0.5) * scale;
            // Casts saturate at zero and truncate, as C's do on the values in question.
            let first = (centre - support + 0.5) as usize;
            let end = ((centre + support + 0.5) as usize).min(input);
            exact.clear();
            exact
                .extend((first..end).map(|tap| cubic((tap as f64 - centre + 0.5) * inverse_scale)));
            let total: f64 = exact.iter().sum();
            for (weight, value) in row.iter_mut().zip(&exact) {
                let value = if total == 0.0 { *value } else { value / total };
                let half = if value < 0.0 { -0.5 } else { 0.5 };
                *weight = (half + value * f64::from(1u32 << PRECISION_BITS)) as i32;
            }
            runs.push((first, end - first));
        }
        Self { runs, weights, stride }
    }

    /// First input position and weights of output position `index`.
    fn at(&self, index: usize) -> (usize, &[i32]) {
        let (first, len) = self.runs[index];
        (first, &self.weights[index * self.stride..][..len])
    }
}

/// Keys' cubic convolution kernel with `a = -0.5`, in Pillow's order of operations.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

fn to_level(accumulator: i32) -> u8 {
    (accumulator >> PRECISION_BITS).clamp(0, 255) as u8
}

fn horizontal(image: &RgbImage, width: u32) -> RgbImage {
    let (in_width, height) = image.dimensions();
    let taps = Taps::new(in_width as usize, width as usize);
    let in_row = in_width as usize * CHANNELS;
    let out_row = width as usize * CHANNELS;
    let mut output = vec![0u8; out_row * height as usize];
    output.par_chunks_exact_mut(out_row).zip(image.as_raw().par_chunks_exact(in_row)).for_each(
        |(out, row)| {
            for (index, pixel) in out.chunks_exact_mut(CHANNELS).enumerate() {
                let (first, weights) = taps.at(index);
                let mut sums = [ROUND; CHANNELS];
                let run = &row[first * CHANNELS..][..weights.len() * CHANNELS];
                for (weight, sample) in weights.iter().zip(run.chunks_exact(CHANNELS)) {
                    for (sum, &level) in sums.iter_mut().zip(sample) {
                        *sum += weight * i32::from(level);
                    }
                }
                for (level, sum) in pixel.iter_mut().zip(sums) {
                    *level = to_level(sum);
                }
            }
        },
    );
    RgbImage::from_raw(width, height, output).expect("the buffer was sized for the image")
}

fn vertical(image: &RgbImage, height: u32) -> RgbImage {
    let (width, in_height) = image.dimensions();
    let taps = Taps::new(in_height as usize, height as usize);
    let row_len = width as usize * CHANNELS;
    let input = image.as_raw();
    let mut output = vec![0u8; row_len * height as usize];
    output.par_chunks_exact_mut(row_len).enumerate().for_each_init(
        || vec![0i32; row_len],
        |sums, (index, out)| {
            let (first, weights) = taps.at(index);
            sums.fill(ROUND);
            let rows = input[first * row_len..].chunks_exact(row_len);
            for (weight, row) in weights.iter().zip(rows) {
                for (sum, &level) in sums.iter_mut().zip(row) {
                    *sum += weight * i32::from(level);
                }
            }
            for (level, &sum) in out.iter_mut().zip(sums.iter()) {
                *level = to_level(sum);
            }
        },
    );
    RgbImage::from_raw(width, height, output).expect("the buffer was sized for the image")
}
