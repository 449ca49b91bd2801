//! PNG and JPEG bytes to 8-bit RGB, as Pillow's `convert("RGB")` and transformers' compositing do it.

use std::io::{Cursor, ErrorKind};

use image::{
    DynamicImage, GrayAlphaImage, ImageDecoder, ImageError, ImageFormat, ImageReader, Limits, Rgb,
    RgbImage, RgbaImage,
};

use super::{PreprocessError, PreprocessorConfig};

/// More bytes than any format's signature has.
pub(super) const HEAD: u64 = 64;

/// Decodes `bytes`; `name` appears in errors only.
pub(super) fn decode(
    name: &str,
    bytes: &[u8],
    config: &PreprocessorConfig,
) -> Result<RgbImage, PreprocessError> {
    let format = format(name, bytes)?;
    let name = || name.to_owned();
    // The JPEG decoder fills what is missing with grey; Pillow refuses such a file, and so does this.
    if format == ImageFormat::Jpeg && !jpeg_is_complete(bytes) {
        return Err(PreprocessError::Truncated { name: name() });
    }
    let failed = |source| decode_error(name(), source);

    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut limits = Limits::no_limits();
    // Up to 8 bytes a pixel (16-bit RGBA), for the image and once more for chunks beside it.
    limits.max_alloc = Some(config.max_input_pixels.saturating_mul(16));
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(failed)?;
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) > config.max_input_pixels {
        return Err(PreprocessError::TooLarge {
            name: name(),
            width,
            height,
            max_input_pixels: config.max_input_pixels,
        });
    }
    let orientation = if config.apply_exif_orientation {
        Some(decoder.orientation().map_err(failed)?)
    } else {
        None
    };
    let mut image = DynamicImage::from_decoder(decoder).map_err(failed)?;
    if let Some(orientation) = orientation {
        image.apply_orientation(orientation);
    }
    to_rgb(&name(), image)
}

/// The format that the first bytes of a file announce; [`HEAD`] of them are enough.
pub(super) fn format(name: &str, bytes: &[u8]) -> Result<ImageFormat, PreprocessError> {
    let name = name.to_owned();
    if bytes.is_empty() {
        return Err(PreprocessError::EmptyFile { name });
    }
    match image::guess_format(bytes) {
        Ok(format @ (ImageFormat::Png | ImageFormat::Jpeg)) => Ok(format),
        Ok(other) => {
            let format = format!("{other:?}").to_uppercase();
            Err(PreprocessError::UnsupportedFormat { name, format })
        }
        Err(_) => Err(PreprocessError::NotAnImage { name }),
    }
}

fn decode_error(name: String, source: ImageError) -> PreprocessError {
    match source {
        ImageError::IoError(error) if error.kind() == ErrorKind::UnexpectedEof => {
            PreprocessError::Truncated { name }
        }
        source => PreprocessError::Decode { name, source },
    }
}

/// 8-bit RGB of `image`: grey repeated, 16-bit samples cut to their high byte, transparency composited
/// onto white.
pub(super) fn to_rgb(name: &str, image: DynamicImage) -> Result<RgbImage, PreprocessError> {
    Ok(match image {
        DynamicImage::ImageRgb8(image) => image,
        DynamicImage::ImageLuma8(_) => image.into_rgb8(),
        DynamicImage::ImageLumaA8(image) => grey_on_white(&image),
        DynamicImage::ImageRgba8(image) => colour_on_white(&image),
        DynamicImage::ImageLuma16(image) => map(&image, |p| Rgb([high(p.0[0]); 3])),
        DynamicImage::ImageRgb16(image) => map(&image, |p| Rgb(p.0.map(high))),
        DynamicImage::ImageLumaA16(image) => {
            map(&image, |p| Rgb([over_white(high(p.0[0]), high(p.0[1])); 3]))
        }
        DynamicImage::ImageRgba16(image) => map(&image, |p| {
            let [r, g, b, a] = p.0.map(high);
            Rgb([r, g, b].map(|level| over_white(level, a)))
        }),
        other => {
            return Err(PreprocessError::UnsupportedPixels {
                name: name.to_owned(),
                layout: format!("{:?}", other.color()),
            });
        }
    })
}

fn grey_on_white(image: &GrayAlphaImage) -> RgbImage {
    map(image, |p| Rgb([over_white(p.0[0], p.0[1]); 3]))
}

fn colour_on_white(image: &RgbaImage) -> RgbImage {
    map(image, |p| {
        let [r, g, b, a] = p.0;
        Rgb([r, g, b].map(|level| over_white(level, a)))
    })
}

fn map<P: image::Pixel>(
    image: &image::ImageBuffer<P, Vec<P::Subpixel>>,
    convert: impl Fn(&P) -> Rgb<u8>,
) -> RgbImage {
    let (width, height) = image.dimensions();
    let levels = image.pixels().flat_map(|pixel| convert(pixel).0).collect();
    RgbImage::from_raw(width, height, levels).expect("three levels for each pixel")
}

/// High byte of a 16-bit sample.
fn high(sample: u16) -> u8 {
    (sample >> 8) as u8
}

/// `level` at opacity `alpha` over white, rounded to nearest: equal to Pillow's `alpha_composite` with
/// an opaque white background for all 65,536 arguments.
fn over_white(level: u8, alpha: u8) -> u8 {
    let sum = u32::from(level) * u32::from(alpha) + 255 * (255 - u32::from(alpha));
    ((sum + 127) / 255) as u8
}

/// Whether the JPEG marker sequence in `bytes` reaches the end-of-image marker.
///
/// Segments are stepped over by their length, so that markers inside an embedded thumbnail do not
/// count (ITU-T T.81, annex B).
fn jpeg_is_complete(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    loop {
        let Some((marker, after)) = next_marker(rest) else {
            return false;
        };
        match marker {
            0xD9 => return true,
            // SOI, TEM and restart markers carry no segment.
            0x01 | 0xD0..=0xD8 => rest = after,
            _ => {
                let Some(&[high, low]) = after.first_chunk::<2>() else {
                    return false;
                };
                let len = usize::from(u16::from_be_bytes([high, low]));
                let Some(tail) = after.get(len..) else {
                    return false;
                };
                rest = tail;
            }
        }
    }
}

/// The next marker's code and what follows it; skips entropy-coded data, where `FF 00` is a level of
/// 255, and fill bytes.
fn next_marker(bytes: &[u8]) -> Option<(u8, &[u8])> {
    let mut at = 0;
    loop {
        at += bytes.get(at..)?.iter().position(|&byte| byte == 0xFF)? + 1;
        match *bytes.get(at)? {
            0x00 => at += 1,
            0xFF => {}
            code => return Some((code, &bytes[at + 1..])),
        }
    }
}
