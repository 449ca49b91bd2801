//! Bad inputs: each a one-line error that names the file and the remedy.

use std::path::Path;

use image::codecs::png::PngEncoder;
use image::{GrayImage, ImageEncoder, ImageFormat, Rgb32FImage, RgbImage};
use rstest::rstest;

use super::{fixture, from_hex, noise, processor};
use crate::grid::GridThw;
use crate::preprocess::{ImageProcessor, PreprocessorConfig};

fn png(image: &RgbImage) -> Vec<u8> {
    let mut file = Vec::new();
    PngEncoder::new(&mut file)
        .write_image(image.as_raw(), image.width(), image.height(), image::ExtendedColorType::Rgb8)
        .unwrap();
    file
}

fn jpeg(image: &RgbImage) -> Vec<u8> {
    let mut file = std::io::Cursor::new(Vec::new());
    image.write_to(&mut file, ImageFormat::Jpeg).unwrap();
    file.into_inner()
}

fn cut(mut bytes: Vec<u8>, keep: usize) -> Vec<u8> {
    bytes.truncate(keep);
    bytes
}

/// Flips a bit of the compressed data, which breaks its checksum.
fn damaged(mut bytes: Vec<u8>) -> Vec<u8> {
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    bytes
}

const TRUNCATED: &str =
    "the image is truncated, the file ends before its data does; copy or download it again";

#[rstest]
#[case::empty("a.png", Vec::new(), "the file is empty; copy or download it again")]
#[case::text("a.png", b"not an image".to_vec(),
    "not an image (its first bytes are of no known image format); pass a PNG or JPEG file")]
#[case::webp("a.webp", b"RIFF\x24\0\0\0WEBPVP8 ".to_vec(), "WEBP images are not supported; convert it to PNG or JPEG")]
#[case::gif("a.gif", b"GIF89a\x01\0\x01\0".to_vec(), "GIF images are not supported; convert it to PNG or JPEG")]
#[case::png_header("a.png", cut(png(&noise(30, 30, 1)), 20), TRUNCATED)]
#[case::png_data("a.png", cut(png(&noise(30, 30, 1)), 900), TRUNCATED)]
#[case::jpeg_header("a.jpg", cut(jpeg(&noise(30, 30, 1)), 300), TRUNCATED)]
#[case::jpeg_data("a.jpg", cut(jpeg(&noise(30, 30, 1)), 900), TRUNCATED)]
#[case::jpeg_end("a.jpg", { let file = jpeg(&noise(30, 30, 1)); let len = file.len(); cut(file, len - 2) }, TRUNCATED)]
#[case::thin("a.png", png(&noise(1, 201, 1)),
    "the image is 201x1 (height x width), a side ratio over 200; crop or split it")]
#[case::flat("a.png", png(&noise(20_000, 99, 1)),
    "the image is 99x20000 (height x width), a side ratio over 200; crop or split it")]
fn bad_files_are_refused(#[case] file: &str, #[case] bytes: Vec<u8>, #[case] message: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(file);
    std::fs::write(&path, &bytes).unwrap();
    let error = processor().process_file(&path).unwrap_err().to_string();
    assert_eq!(error, format!("{}: {message}", path.display()));
    assert_eq!(
        processor().process_bytes("b", &bytes).unwrap_err().to_string(),
        format!("b: {message}")
    );
}

#[rstest]
#[case::png_checksum(damaged(png(&noise(30, 30, 1))))]
#[case::jpeg_without_image(from_hex("ffd8ffd9"))]
#[case::jpeg_short_table(from_hex("ffd8ffdb0003ffffd9"))]
fn damaged_data_is_refused_with_the_decoders_reason(#[case] bytes: Vec<u8>) {
    let error = processor().process_bytes("a.png", &bytes).unwrap_err().to_string();
    assert!(error.starts_with("a.png: cannot decode: "), "{error}");
    assert!(error.ends_with("save it again as PNG"), "{error}");
    assert!(!error.contains('\n'), "{error}");
}

#[test]
fn a_missing_file_is_named() {
    let error = processor().process_file("no/such.png").unwrap_err().to_string();
    assert!(error.starts_with("no/such.png: cannot read: "), "{error}");
}

#[test]
fn the_pixel_limit_is_checked_before_decoding() {
    let limited = |limit| {
        ImageProcessor::new(PreprocessorConfig { max_input_pixels: limit, ..Default::default() })
            .unwrap()
    };
    // Only the header is there: the limit must be noticed before the data is missed.
    let header = cut(png(&noise(100, 100, 1)), 60);
    assert_eq!(
        limited(9_999).process_bytes("a.png", &header).unwrap_err().to_string(),
        "a.png: 100x100 (width x height) is over the limit of 9999 pixels; \
         scale the image down, or raise max_input_pixels if you trust the file"
    );
    let whole = png(&noise(100, 100, 1));
    assert!(limited(10_000).process_bytes("a.png", &whole).is_ok());
}

#[test]
fn one_pixel_fills_the_smallest_grid() {
    let processed =
        processor().process_image(RgbImage::from_pixel(1, 1, image::Rgb([9, 8, 7]))).unwrap();
    assert_eq!(processed.grid, GridThw { t: 1, h: 4, w: 4 });
    assert!(processed.resized.pixels().all(|pixel| pixel.0 == [9, 8, 7]));
}

#[test]
fn a_page_twenty_thousand_pixels_wide_is_processed() {
    let page = png(&RgbImage::from_pixel(20_000, 100, image::Rgb([1, 2, 3])));
    let processed = processor().process_bytes("wide.png", &page).unwrap();
    assert_eq!(processed.grid, GridThw { t: 1, h: 8, w: 1428 });
}

#[test]
fn memory_images_are_checked_too() {
    let message = |error: crate::preprocess::PreprocessError| error.to_string();
    assert_eq!(
        message(processor().process_image(GrayImage::new(0, 0)).unwrap_err()),
        "image: the image is 0x0 (height x width), it has no pixels; pass one with at least one pixel"
    );
    assert_eq!(
        message(processor().process_image(Rgb32FImage::new(4, 4)).unwrap_err()),
        "image: Rgb32F pixels are not supported; convert the image to 8-bit or 16-bit grey or RGB"
    );
    let as_is = PreprocessorConfig { do_resize: false, ..Default::default() };
    assert_eq!(
        message(ImageProcessor::new(as_is).unwrap().process_image(noise(56, 42, 1)).unwrap_err()),
        "image: 42x56 (height x width) is no multiple of 28 and do_resize is false; \
         resize the image to multiples of 28 or set do_resize to true"
    );
}

#[test]
fn lists_and_frames_are_checked() {
    let message = |error: crate::preprocess::PreprocessError| error.to_string();
    let none: [&Path; 0] = [];
    assert_eq!(
        message(processor().process_files(&none).unwrap_err()),
        "no images given; pass at least one"
    );
    assert_eq!(
        message(processor().process_frames(&[]).unwrap_err()),
        "no frames given; pass at least one"
    );
    assert_eq!(
        message(
            processor()
                .process_frames(&[noise(30, 40, 1), noise(30, 40, 2), noise(40, 30, 3)])
                .unwrap_err()
        ),
        "frame 2 is 40x30 (width x height), frame 0 is 30x40; resize all frames of a video to one size"
    );
    let pairs = PreprocessorConfig { temporal_patch_size: 2, ..Default::default() };
    assert_eq!(
        message(
            ImageProcessor::new(pairs).unwrap().process_frames(&[noise(30, 40, 1)]).unwrap_err()
        ),
        "1 frames are no multiple of temporal_patch_size 2; drop or repeat frames at the end"
    );
    // The first bad file in input order is reported.
    let paths = [fixture("gray.png"), "missing_1.png".into(), "missing_2.png".into()];
    let error = message(processor().process_files(&paths).unwrap_err());
    assert!(error.starts_with("missing_1.png: "), "{error}");
}
