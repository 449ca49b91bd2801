//! Decoding against Pillow 12.2, files embedded as hex.

use std::io::Cursor;

use image::codecs::{jpeg::JpegEncoder, png::PngEncoder};
use image::{DynamicImage, ImageBuffer, ImageEncoder, ImageFormat, Luma, Rgb, RgbImage};
use rstest::rstest;

use super::{from_hex, noise};
use crate::preprocess::{
    PreprocessorConfig,
    decode::{decode, to_rgb},
};

fn decoded(bytes: &[u8]) -> RgbImage {
    decode("test", bytes, &PreprocessorConfig::default()).unwrap()
}

/// Files are `(height, width, file, expected RGB)`; expected pixels are Pillow's after transformers'
/// compositing onto white.
#[rstest]
#[case::one_bit(
    2,
    8,
    "89504e470d0a1a0a0000000d49484452000000080000000201000000004defa0400000000c49444154789c6358ca600300022f00e279f5013d0000000049454e44ae426082",
    "ffffff000000ffffff000000000000ffffff000000ffffff000000000000ffffffffffffffffffffffff000000000000"
)]
#[case::grey_2_bit(
    2,
    4,
    "89504e470d0a1a0a0000000d494844520000000400000002020000000010733a1e0000000c49444154789c639066780200013901004564919b0000000049454e44ae426082",
    "000000555555aaaaaaffffffffffffaaaaaa555555000000"
)]
#[case::palette_2_bit(
    2,
    4,
    "89504e470d0a1a0a0000000d494844520000000400000002020300000002c695f00000000c504c5445f8c2becf931aed15f5d3ef2dbbd9f3480000000c49444154789c639066780200013901004564919b0000000049454e44ae426082",
    "f8c2becf931aed15f5d3ef2dd3ef2ded15f5cf931af8c2be"
)]
#[case::palette_transparent(
    2,
    4,
    "89504e470d0a1a0a0000000d494844520000000400000002020300000002c695f00000000c504c5445f8c2becf931aed15f5d3ef2dbbd9f3480000000374524e5300804dc99861b80000000c49444154789c639066780200013901004564919b0000000049454e44ae426082",
    "ffffffe7c98cfab8fcd3ef2dd3ef2dfab8fce7c98cffffff"
)]
#[case::rgb_transparent(
    2,
    2,
    "89504e470d0a1a0a0000000d4948445200000002000000020802000000fdd49a730000000674524e53000100020003c94babf50000001449444154789c63606462e6e2e661e0e2e605b200022c00507d1379a00000000049454e44ae426082",
    "ffffff0a0b0c0a0b0dffffff"
)]
#[case::grey_alpha(
    1,
    3,
    "89504e470d0a1a0a0000000d4948445200000003000000010804000000b1e9dc3f0000000f49444154789c63106838c1ccf01f00070f025b5a52d5630000000049454e44ae426082",
    "878787fefefe000000"
)]
#[case::rgb_16_bit(
    2,
    2,
    "89504e470d0a1a0a0000000d4948445200000002000000021002000000ad4446300000002349444154789c63b099af977b56e15edb540e2e3106098950eebc87f339aa163b9f0400743a0934131787b80000000049454e44ae426082",
    "3c2ecdde950a18556e9f7a43"
)]
#[case::grey_alpha_16_bit(
    2,
    2,
    "89504e470d0a1a0a0000000d4948445200000002000000021004000000882f19ec0000001a49444154789c63d078b291610f2f471c83ac64f1be14f5c71e003597060a69a49dc20000000049454e44ae426082",
    "6a6a6afdfdfd999999757575"
)]
#[case::rgba_16_bit(
    2,
    2,
    "89504e470d0a1a0a0000000d49484452000000020000000210060000002226d1670000002d49444154789c012200ddff0084496b8c6e3daa9496382c3ebce2c1b900f4cdc94448c151eaa607a67eb23bde87179c11336597e41d0000000049454e44ae426082",
    "ad9c9eb05fccfceec5b2b2bc"
)]
fn png_layouts_decode_as_pillow_does(
    #[case] height: u32,
    #[case] width: u32,
    #[case] file: &str,
    #[case] expected: &str,
) {
    let image = decoded(&from_hex(file));
    assert_eq!(image.dimensions(), (width, height));
    assert_eq!(image.into_raw(), from_hex(expected));
}

/// The transparent level of a 4-bit PNG is one of its own 16 levels: here 3, thrice.
#[test]
fn a_transparent_grey_level_is_compared_before_scaling() {
    let file = "89504e470d0a1a0a0000000d49484452000000040000000204000000009f33cfbe0000000274524e530003ef9a9c820000000e49444154789c63605466f8ac0000029d01388a09be4a0000000049454e44ae426082";
    let levels = decoded(&from_hex(file)).pixels().map(|pixel| pixel.0[0]).collect::<Vec<_>>();
    assert_eq!(levels, [0x00, 0x11, 0x22, 0xff, 0xff, 0xff, 0x22, 0x00]);
}

/// JPEG decoders round differently; libjpeg-turbo's pixels are met within 2 levels, 5 where chroma is
/// subsampled (the progressive file).
#[rstest]
#[case::rgb(
    8,
    8,
    2,
    "ffd8ffe000104a46494600010100000100010000ffdb0043000302020302020303030304030304050805050404050a070706080c0a0c0c0b0a0b0b0d0e12100d0e110e0b0b1016101113141515150c0f171816141812141514ffdb00430103040405040509050509140d0b0d1414141414141414141414141414141414141414141414141414141414141414141414141414141414141414141414141414ffc00011080008000803011100021101031101ffc40014000100000000000000000000000000000007ffc400191000010500000000000000000000000000070024334151ffc4001501010100000000000000000000000000000607ffc4001b11000104030000000000000000000000000003050607223261ffda000c03010002110311003f0042129c217196802ad9c2495f45f4c4ffd9",
    "01fe631cff6d3efe755afd7c78ff8494ff8bb6fd93d1ff9c00eb5e1cee673cec6f5aeb7676ee8095ed87b4eb8ed0ee9801d65a1cd7623dd66a5bd57278d77b96d783b6d48ad0d79302c2551dc35f3dc2675bc16d77c47696c37eb6c185d0c38e01af501bb1583caf6159af6876b16f93b076b5af7fd0b089009c4b1b9d533d9c5c5a9b63779d6c959e73b59b7ad09c840385471c874f3e86585b855f78876896866db68576d186800173401c744a3c73535a725a78756295756ab67271d0757a"
)]
#[case::grey(
    8,
    8,
    2,
    "ffd8ffe000104a46494600010100000100010000ffdb0043000302020302020303030304030304050805050404050a070706080c0a0c0c0b0a0b0b0d0e12100d0e110e0b0b1016101113141515150c0f171816141812141514ffc0000b080008000801011100ffc40014000100000000000000000000000000000006ffc40017100003010000000000000000000000000000094582ffda0008010100003f0004bba664ffd9",
    "0101011e1e1e3d3d3d5a5a5a797979959595b5b5b5d2d2d20101011e1e1e3d3d3d5a5a5a797979959595b5b5b5d2d2d20101011e1e1e3d3d3d5a5a5a797979959595b5b5b5d2d2d20101011e1e1e3d3d3d5a5a5a797979959595b5b5b5d2d2d20101011e1e1e3d3d3d5a5a5a797979959595b5b5b5d2d2d20101011e1e1e3d3d3d5a5a5a797979959595b5b5b5d2d2d20101011e1e1e3d3d3d5a5a5a797979959595b5b5b5d2d2d20101011e1e1e3d3d3d5a5a5a797979959595b5b5b5d2d2d2"
)]
#[case::progressive(
    8,
    8,
    5,
    "ffd8ffe000104a46494600010100000100010000ffdb0043000302020302020303030304030304050805050404050a070706080c0a0c0c0b0a0b0b0d0e12100d0e110e0b0b1016101113141515150c0f171816141812141514ffdb00430103040405040509050509140d0b0d1414141414141414141414141414141414141414141414141414141414141414141414141414141414141414141414141414ffc20011080008000803012200021101031101ffc4001500010100000000000000000000000000000006ffc4001501010100000000000000000000000000000305ffda000c03010002100310000001a1115bffc4001510010100000000000000000000000000000500ffda000801010001050225cbffc400191100010500000000000000000000000000050002041421ffda0008010301013f01043e3d26e2ffc4001811000203000000000000000000000000000002031131ffda0008010201013f016812f0ffc400161000030000000000000000000000000000000122ffda0008010100063f02547fffc40014100100000000000000000000000000000000ffda0008010100013f2157ffda000c0301000200030000001003ffc40014110100000000000000000000000000000000ffda0008010301013f1043ffc40014110100000000000000000000000000000000ffda0008010201013f1033ffc4001610000300000000000000000000000000000041a1ffda0008010100013f1080cfffd9",
    "12f66524fb6f41fc775dfc7e81fa899efa8fbafa99cdffa10ce65c1fed673aed6f57ec767ceb8299eb87b4eb90c7f2990ad2561cd86038d96955d87079d67b97d781b2d78ac5dd930abe531dc45b39c56557c36d7ac27698c37eb3c385c5c98e0ea85020ae5a3caf6259ae6a7cae739aac7ab6ad82c9b38a0d954b219a553c9c5d5a9b657d9a6e9c9976b59a7dc8a0860a82441c884c39895657875d79876697856db28776c58d7e027439157943327a4c4f795374785f917864aa786dbe7f76"
)]
#[case::cmyk(
    8,
    8,
    2,
    "ffd8ffee000e41646f626500640000000000ffdb0043000302020302020303030304030304050805050404050a070706080c0a0c0c0b0a0b0b0d0e12100d0e110e0b0b1016101113141515150c0f171816141812141514ffc000140800080008044311004d11005911004b1100ffc4001500010100000000000000000000000000000608ffc400201000010108030000000000000000000000001806070922334164a2455182ffda000e0443004d0059004b00003f0077111e4fd132249c2d458f2591ab277629856d9bb1ffd9",
    "ff009be20092c2008ba6008387007a6a00734b006b2e0062eb1293d0128cb3128599127e7c127562126f4512682a1260d6228abe2283a3227d8b227771226f5922693f226227225bc32e82ad2e7b942e757f2e70672e69512e63392e5d232e56af37799b377385376e7237685d376249375d3337582037529c3d6e8a3d69773d64663d60533d5a413d562e3d511c3d4c87406278405d67405958405647405038404d284049184044733f56663f52573f4e4b3f4b3d3f47303f44223f40153f3c"
)]
fn jpeg_layouts_decode_as_pillow_does(
    #[case] height: u32,
    #[case] width: u32,
    #[case] tolerance: u8,
    #[case] file: &str,
    #[case] expected: &str,
) {
    let image = decoded(&from_hex(file));
    assert_eq!(image.dimensions(), (width, height));
    for (ours, theirs) in image.into_raw().into_iter().zip(from_hex(expected)) {
        assert!(ours.abs_diff(theirs) <= tolerance, "{ours} and {theirs}");
    }
}

#[test]
fn grey_of_sixteen_bits_keeps_its_high_byte() {
    let grey = ImageBuffer::<Luma<u16>, _>::from_raw(2, 1, vec![0x12ff, 0xfe00]).unwrap();
    let mut file = Cursor::new(Vec::new());
    DynamicImage::from(grey).write_to(&mut file, ImageFormat::Png).unwrap();
    assert_eq!(decoded(file.get_ref()).into_raw(), [0x12, 0x12, 0x12, 0xfe, 0xfe, 0xfe]);
}

#[test]
fn alpha_over_white_rounds_to_nearest() {
    for alpha in 0..=255u8 {
        let pixels = (0..=255u8).flat_map(|level| [level, alpha]).collect();
        let image = image::GrayAlphaImage::from_raw(256, 1, pixels).unwrap();
        for (level, pixel) in to_rgb("test", image.into()).unwrap().pixels().enumerate() {
            let opacity = f64::from(alpha) / 255.0;
            let exact = level as f64 * opacity + 255.0 * (1.0 - opacity);
            assert_eq!(*pixel, Rgb([exact.round() as u8; 3]), "level {level}, alpha {alpha}");
        }
    }
}

/// An EXIF block with one tag: orientation 6, "turn a quarter clockwise to view".
const TURN_CLOCKWISE: &str = "49492a0008000000010012010300010000000600000000000000";

#[rstest]
fn exif_orientation_is_applied_on_request(
    #[values(false, true)] apply: bool,
    #[values(false, true)] jpeg: bool,
) {
    let image = RgbImage::from_fn(16, 8, |x, _| Rgb(if x < 8 { [0; 3] } else { [255; 3] }));
    let mut file = Vec::new();
    let exif = from_hex(TURN_CLOCKWISE);
    if jpeg {
        let mut encoder = JpegEncoder::new_with_quality(&mut file, 100);
        encoder.set_exif_metadata(exif).unwrap();
        encoder.encode_image(&image).unwrap();
    } else {
        let mut encoder = PngEncoder::new(&mut file);
        encoder.set_exif_metadata(exif).unwrap();
        encoder.write_image(image.as_raw(), 16, 8, image::ExtendedColorType::Rgb8).unwrap();
    }
    let config = PreprocessorConfig { apply_exif_orientation: apply, ..Default::default() };
    let seen = decode("test", &file, &config).unwrap();
    let dark = |x: u32, y: u32| seen.get_pixel(x, y).0[0] < 10;
    if apply {
        // The left half, dark, is on top after the turn.
        assert_eq!(seen.dimensions(), (8, 16));
        assert!(dark(0, 0) && dark(7, 7) && !dark(0, 8) && !dark(7, 15));
    } else {
        assert_eq!(seen.dimensions(), (16, 8));
        assert!(dark(0, 0) && dark(7, 7) && !dark(8, 0) && !dark(15, 7));
    }
}

#[test]
fn markers_inside_a_segment_do_not_end_a_jpeg() {
    // A comment that holds an end-of-image marker, as an embedded thumbnail would.
    let mut file = Vec::new();
    JpegEncoder::new(&mut file).encode_image(&noise(24, 16, 9)).unwrap();
    let whole = decoded(&file);
    file.splice(2..2, [0xFF, 0xFE, 0x00, 0x04, 0xFF, 0xD9]);
    assert_eq!(decoded(&file), whole);
    let half = &file[..file.len() - 20];
    let error = decode("cut.jpg", half, &PreprocessorConfig::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cut.jpg: the image is truncated, the file ends before its data does; copy or download it again"
    );
}
