//! Bicubic resampling against Pillow 12.2.

use rstest::rstest;

use super::noise;
use crate::preprocess::resize_bicubic;

/// 64-bit FNV-1a.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Expected checksums are those of `Image.fromarray(noise).resize((width, height), BICUBIC)`; sizes are
/// `(height, width)`.
#[rstest]
#[case(1, (1, 1), (56, 56), 0x2e99a62d93ea91e5)]
#[case(2, (1, 150), (28, 700), 0x2b87bbff5a4bb59d)]
#[case(3, (10, 13), (56, 84), 0x603e8af3ae2d2359)]
#[case(4, (101, 150), (112, 140), 0xab62e28fb989cc45)]
#[case(5, (300, 33), (308, 28), 0xcd7a060db5a7eb0a)]
#[case(6, (97, 61), (97, 28), 0x580efe12c16188b8)]
#[case(7, (61, 97), (140, 97), 0x90494a791340bd3e)]
#[case(8, (64, 64), (64, 64), 0x01bd0a620df1a843)]
#[case(9, (211, 307), (28, 56), 0xde6c159888651dc6)]
#[case(10, (7, 500), (28, 1008), 0x33dff863b7887435)]
#[case(11, (333, 222), (332, 223), 0xd9bf5003da1a2611)]
#[case(12, (5, 5), (1, 1), 0x6a990b1b0256026e)]
#[case(13, (180, 250), (181, 125), 0xe2e679aa478d9bd7)]
fn pixels_are_pillows_to_the_bit(
    #[case] seed: u64,
    #[case] from: (u32, u32),
    #[case] to: (u32, u32),
    #[case] expected: u64,
) {
    let resized = resize_bicubic(&noise(from.1, from.0, seed), to.1, to.0);
    assert_eq!(resized.dimensions(), (to.1, to.0));
    assert_eq!(checksum(resized.as_raw()), expected);
}

#[test]
#[should_panic(expected = "width and height must be positive, got 0x3")]
fn an_empty_target_is_a_programming_error() {
    resize_bicubic(&noise(2, 2, 1), 0, 3);
}
