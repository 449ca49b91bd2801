//! Tests against golden data of transformers and Pillow, on real files.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use image::RgbImage;

use super::{ImageProcessor, PreprocessorConfig};

mod bicubic;
mod config;
mod decode;
mod errors;
mod golden;
mod laws;
mod sizes;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures")).join(name)
}

fn processor() -> ImageProcessor {
    ImageProcessor::new(PreprocessorConfig::default()).unwrap()
}

/// Noise that the generator of the golden checksums can make too: the high byte of a 64-bit linear
/// congruential generator.
fn noise(width: u32, height: u32, seed: u64) -> RgbImage {
    let mut state = seed;
    let levels = (0..width as usize * height as usize * 3)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect();
    RgbImage::from_raw(width, height, levels).unwrap()
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
        .collect()
}
