//! Images that are none, or that no tower takes.

use image::ImageFormat;
use rstest::rstest;

use crate::support::{Workplace, file_of, fixture, waves, without_last};

const TRUNCATED: &str =
    "the image is truncated, the file ends before its data does; copy or download it again";

fn png(width: u32, height: u32) -> Vec<u8> {
    file_of(waves(width, height), ImageFormat::Png)
}

fn jpeg(width: u32, height: u32) -> Vec<u8> {
    file_of(waves(width, height), ImageFormat::Jpeg)
}

/// One good image does not save the run from a bad one.
#[rstest]
#[case::empty(Vec::new(), "the file is empty; copy or download it again")]
#[case::truncated_png(without_last(png(60, 40), 300), TRUNCATED)]
#[case::truncated_jpeg(without_last(jpeg(60, 40), 300), TRUNCATED)]
#[case::jpeg_without_its_end(without_last(jpeg(60, 40), 2), TRUNCATED)]
#[case::text(b"a letter".to_vec(),
    "not an image (its first bytes are of no known image format); pass a PNG or JPEG file")]
#[case::gif(b"GIF89a\x01\0\x01\0".to_vec(), "GIF images are not supported; convert it to PNG or JPEG")]
#[case::one_byte(b"\x89".to_vec(),
    "not an image (its first bytes are of no known image format); pass a PNG or JPEG file")]
#[case::signature_alone(b"\x89PNG\r\n\x1a\n".to_vec(), TRUNCATED)]
#[case::wide(
    png(20_000, 99),
    "the image is 99x20000 (height x width), a side ratio over 200; crop or split it"
)]
#[case::narrow(
    png(3, 601),
    "the image is 601x3 (height x width), a side ratio over 200; crop or split it"
)]
fn bad_images_are_refused(#[case] contents: Vec<u8>, #[case] expected: &str) {
    let place = Workplace::new();
    place.copy_image("gray.png", "good.png");
    place.write("bad.png", contents);
    for arguments in [&["bad.png"][..], &["good.png", "bad.png"]] {
        assert_eq!(place.refuse(arguments), format!("bad.png: {expected}"));
    }
}

#[test]
fn damaged_images_are_refused() {
    let place = Workplace::new();
    let mut contents = png(60, 40);
    let middle = contents.len() / 2;
    contents[middle] ^= 1;
    place.write("bad.png", contents);
    let line = place.refuse(&["bad.png"]);
    assert!(line.starts_with("bad.png: cannot decode: "), "{line}");
    assert!(
        line.ends_with("; the file is damaged or of a rare kind, save it again as PNG"),
        "{line}"
    );
}

#[test]
fn images_that_are_not_there_are_refused() {
    let place = Workplace::new();
    let line = place.refuse(&["nowhere.png"]);
    assert!(line.starts_with("nowhere.png: cannot read: "), "{line}");
    assert!(line.ends_with("; check that the file exists and is readable"), "{line}");

    std::fs::create_dir(place.path("folder.png")).unwrap();
    let line = place.refuse(&["folder.png"]);
    assert!(line.starts_with("folder.png: cannot read: "), "{line}");
    assert!(line.ends_with("; pass a file, not a folder"), "{line}");
}

/// A header that promises more pixels than memory holds is believed by nobody.
#[test]
fn decompression_bombs_are_refused() {
    let place = Workplace::new();
    let mut contents = png(8, 8);
    contents[16..24].copy_from_slice(&[0, 0, 0xff, 0xff, 0, 0, 0xff, 0xff]);
    let checksum = crc32(&contents[12..29]);
    contents[29..33].copy_from_slice(&checksum.to_be_bytes());
    place.write("bomb.png", contents);
    assert_eq!(
        place.refuse(&["bomb.png"]),
        "bomb.png: 65535x65535 (width x height) is over the limit of 178956970 pixels; \
         scale the image down, or raise max_input_pixels if you trust the file"
    );
}

/// A checkpoint taken for an image must not be read to its end: here a terabyte, none of it on disk.
#[test]
fn large_files_that_are_no_image_are_not_read() {
    let place = Workplace::new();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 40).unwrap();
    let line = place.refuse(&[file.path()]);
    assert!(line.ends_with("; pass a PNG or JPEG file"), "{line}");
}

/// The checksum of PNG chunks (ISO 3309).
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 * (crc & 1)))
    })
}

/// The rules' limits from inside: one pixel becomes the smallest admitted square, and the widest
/// ratio is 200.
#[rstest]
#[case::one_pixel(1, 1, [1, 4, 4])]
#[case::one_line(200, 1, [1, 2, 58])]
#[case::column(1, 200, [1, 58, 2])]
fn small_images_are_enlarged(#[case] width: u32, #[case] height: u32, #[case] grid: [i64; 3]) {
    let place = Workplace::new();
    place.write("a.png", png(width, height));
    place.encode(&["a.png"]);
    assert_eq!(place.features("features.safetensors").grids, [grid]);
}

/// As wide as the rules admit: encoded in full where the model's max_pixels admits it, else shrunk.
#[rstest]
#[case::png(ImageFormat::Png)]
#[case::jpeg(ImageFormat::Jpeg)]
fn wide_images_are_shrunk(#[case] format: ImageFormat) {
    let place = Workplace::new();
    place.write("wide", file_of(waves(20_000, 100), format));
    let model = place.copy_model("dots_ocr_tiny");
    model.edit_json("preprocessor_config.json", |config| config["max_pixels"] = 400_000.into());
    place.encode(&["wide", "--model", "model"]);
    let features = place.features("features.safetensors");
    // sqrt(20,000 * 100 / 400,000) = 2.236..: 8944 x 44.7 pixels, in whole groups of 28.
    assert_eq!(features.grids, [[1, 2, 638]]);
    assert_eq!(features.shape, [319, 96]);
    // Painted as wide as common viewers show, twice with a gap.
    assert!(place.picture("features.png").width() <= 16_384);
}

#[test]
fn the_first_bad_image_is_named() {
    let place = Workplace::new();
    place.write("a.png", b"text");
    place.write("b.png", b"");
    let good = fixture("gray.png").into_os_string();
    let line = place.refuse(&[good, "b.png".into(), "a.png".into()]);
    assert_eq!(line, "b.png: the file is empty; copy or download it again");
}
