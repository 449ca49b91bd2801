//! Laws that hold for every image.

use image::{Rgb, RgbImage};
use proptest::prelude::*;

use super::{noise, processor};
use crate::grid::GridThw;
use crate::preprocess::patches::patch_position;
use crate::preprocess::{
    ImageProcessor, MAX_ASPECT_RATIO, PixelValues, PreprocessorConfig, SmartResize, resize_bicubic,
};

fn with(change: impl FnOnce(&mut PreprocessorConfig)) -> ImageProcessor {
    let mut config = PreprocessorConfig::default();
    change(&mut config);
    ImageProcessor::new(config).unwrap()
}

fn sorted_rows(values: &PixelValues) -> Vec<Vec<u32>> {
    let mut rows: Vec<Vec<u32>> = values
        .data
        .chunks_exact(values.row_len)
        .map(|row| row.iter().map(|value| value.to_bits()).collect())
        .collect();
    rows.sort_unstable();
    rows
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_constant_image_stays_constant(
        size in (1u32..90, 1u32..90), target in (1u32..90, 1u32..90), colour: [u8; 3],
    ) {
        let image = RgbImage::from_pixel(size.0, size.1, Rgb(colour));
        let resized = resize_bicubic(&image, target.0, target.1);
        prop_assert_eq!(resized.dimensions(), target);
        prop_assert!(resized.pixels().all(|pixel| pixel.0 == colour));
    }

    #[test]
    fn mirroring_commutes_with_resizing(
        size in (1u32..40, 1u32..40), target in (1u32..40, 1u32..40), seed: u64,
    ) {
        // Weights of mirrored positions may round apart by one unit in 2^22, so by at most a level.
        let image = noise(size.0, size.1, seed);
        let one = image::imageops::rotate180(&resize_bicubic(&image, target.0, target.1));
        let other = resize_bicubic(&image::imageops::rotate180(&image), target.0, target.1);
        for (a, b) in one.as_raw().iter().zip(other.as_raw()) {
            prop_assert!(a.abs_diff(*b) <= 1);
        }
    }

    #[test]
    fn the_two_orders_hold_the_same_rows(size in (30u32..200, 30u32..200), seed: u64) {
        let image = noise(size.0, size.1, seed);
        let grouped = processor().process_image(image.clone()).unwrap();
        let plain = with(|config| config.pre_pixel_shuffle = false).process_image(image).unwrap();
        prop_assert_eq!(grouped.grid, plain.grid);
        let (ours, theirs) = (&grouped.pixel_values, &plain.pixel_values);
        prop_assert_eq!(sorted_rows(ours), sorted_rows(theirs));
        // And each row is where its order says.
        for (index, row) in ours.data.chunks_exact(ours.row_len).enumerate() {
            let (y, x) = patch_position(index, grouped.grid, 2, true);
            let at = y * grouped.grid.w + x;
            prop_assert_eq!(row, &theirs.data[at * ours.row_len..][..ours.row_len]);
        }
    }

    #[test]
    fn sizes_are_tiled_and_bounded(height in 1usize..6000, width in 1usize..6000) {
        prop_assume!(height.max(width) as f64 / height.min(width) as f64 <= MAX_ASPECT_RATIO);
        let config = PreprocessorConfig::default();
        for rule in [SmartResize::HuggingFace, SmartResize::DotsOcr] {
            let (h, w) = rule
                .target_size(height, width, 28, config.min_pixels, config.max_pixels)
                .unwrap();
            prop_assert!(h > 0 && w > 0 && h % 28 == 0 && w % 28 == 0);
            prop_assert!((config.min_pixels..=config.max_pixels).contains(&(h * w)));
        }
    }

    #[test]
    fn several_images_give_what_each_gives_alone(
        sizes in prop::collection::vec((1u32..120, 1u32..120), 1..5), seed: u64,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut paths = Vec::new();
        let mut parts = Vec::new();
        for (index, (width, height)) in sizes.into_iter().enumerate() {
            let image = noise(width, height, seed.wrapping_add(index as u64));
            let path = folder.path().join(format!("{index}.png"));
            image.save(&path).unwrap();
            paths.push(path);
            parts.push(processor().process_image(image).unwrap().pixel_values);
        }
        let joined = processor().process_files(&paths).unwrap();
        prop_assert_eq!(joined, PixelValues::concat(parts));
    }

    #[test]
    fn frames_give_what_each_gives_alone(size in (1u32..80, 1u32..80), count in 1usize..4, seed: u64) {
        let frames: Vec<_> = (0..count).map(|i| noise(size.0, size.1, seed.wrapping_add(i as u64))).collect();
        let video = processor().process_frames(&frames).unwrap();
        let alone: Vec<_> =
            frames.into_iter().map(|frame| processor().process_image(frame).unwrap()).collect();
        prop_assert_eq!(video.grid, GridThw { t: count, ..alone[0].grid });
        prop_assert_eq!(&video.pixel_values.grids, &vec![video.grid]);
        let joined: Vec<f32> = alone.iter().flat_map(|image| image.pixel_values.data.clone()).collect();
        prop_assert_eq!(video.pixel_values.data, joined);
        for (ours, theirs) in video.resized.iter().zip(&alone) {
            prop_assert_eq!(ours, &theirs.resized);
        }
    }
}

#[test]
fn grouped_order_is_the_published_one() {
    let grid = GridThw { t: 1, h: 4, w: 6 };
    let order: Vec<_> = (0..13).map(|index| patch_position(index, grid, 2, true)).collect();
    let expected = [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (0, 2),
        (0, 3),
        (1, 2),
        (1, 3),
        (0, 4),
        (0, 5),
        (1, 4),
        (1, 5),
        (2, 0),
    ];
    assert_eq!(order, expected);
}

/// With two frames a patch, a still image is repeated: `[3, 2, 14, 14]` with equal halves per channel.
#[test]
fn a_still_image_fills_its_temporal_patch_with_copies() {
    let image = noise(56, 56, 3);
    let single = processor().process_image(image.clone()).unwrap().pixel_values;
    let double = with(|config| config.temporal_patch_size = 2);
    let repeated = double.process_image(image.clone()).unwrap().pixel_values;
    assert_eq!((repeated.rows, repeated.row_len), (single.rows, 2 * single.row_len));
    for (two, one) in repeated
        .data
        .chunks_exact(196)
        .collect::<Vec<_>>()
        .chunks_exact(2)
        .zip(single.data.chunks_exact(196))
    {
        assert_eq!((two[0], two[1]), (one, one));
    }
    let clip = double.process_frames(&[image.clone(), image]).unwrap();
    assert_eq!(clip.grid.t, 1);
    assert_eq!(clip.pixel_values.data, repeated.data);
}

#[test]
fn switches_leave_out_their_step() {
    let image = noise(56, 56, 4);
    let raw = with(|config| {
        config.do_rescale = false;
        config.do_normalize = false;
    });
    let raw = raw.process_image(image.clone()).unwrap();
    assert_eq!(raw.pixel_values.data[1], f32::from(image.get_pixel(1, 0).0[0]));
    let scaled = with(|config| config.do_normalize = false).process_image(image.clone()).unwrap();
    assert_eq!(scaled.pixel_values.data[1], f32::from(image.get_pixel(1, 0).0[0]) / 255.0);

    // Row-major order needs whole patches only, not whole merge groups.
    let as_is = with(|config| {
        config.do_resize = false;
        config.pre_pixel_shuffle = false;
    });
    let odd = as_is.process_image(noise(42, 28, 5)).unwrap();
    assert_eq!(odd.grid, GridThw { t: 1, h: 2, w: 3 });
    assert_eq!(as_is.grid_for(28, 42).unwrap(), odd.grid);
}
