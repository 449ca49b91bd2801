//! Golden cases of transformers' `Qwen2VLImageProcessorPil`.

use image::{Rgb, RgbImage};
use safetensors::SafeTensors;

use super::{fixture, processor};
use crate::grid::GridThw;
use crate::preprocess::{ImageProcessor, PixelValues};

fn read_golden(file: &str) -> (Vec<f32>, Vec<usize>, Vec<i64>) {
    let bytes = std::fs::read(fixture(file)).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let pixels = tensors.tensor("pixel_values").unwrap();
    let grid = tensors.tensor("grid_thw").unwrap();
    (
        pixels.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        pixels.shape().to_vec(),
        grid.data().as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
    )
}

fn assert_matches(ours: &PixelValues, file: &str, atol: f32) {
    let (expected, shape, grid) = read_golden(file);
    assert_eq!([ours.rows, ours.row_len], *shape, "{file}");
    let grids: Vec<_> =
        ours.grids.iter().flat_map(|g| [g.t as i64, g.h as i64, g.w as i64]).collect();
    assert_eq!(grids, grid, "{file}");
    let worst = ours.data.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert_eq!(ours.data.len(), expected.len(), "{file}");
    assert!(worst <= atol, "{file}: differs by {worst}");
}

#[test]
fn every_golden_case_is_met() {
    let text = std::fs::read(fixture("preprocess.json")).unwrap();
    let list: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let atol = list["atol"].as_f64().unwrap() as f32;
    let cases = list["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let processed = processor().process_file(fixture(case["image"].as_str().unwrap())).unwrap();
        let file = case["file"].as_str().unwrap();
        assert_matches(&processed.pixel_values, file, atol);
        let grid: GridThw = {
            let sides: [usize; 3] = serde_json::from_value(case["grid_thw"].clone()).unwrap();
            GridThw { t: sides[0], h: sides[1], w: sides[2] }
        };
        assert_eq!(processed.grid, grid, "{file}");
        assert_eq!(
            processed.resized.dimensions(),
            (grid.w as u32 * 14, grid.h as u32 * 14),
            "{file}"
        );
    }
}

/// All golden images in one call, through a tensor.
#[test]
fn golden_files_join_in_input_order() {
    let names = ["gray", "resize_down", "palette"];
    let paths: Vec<_> = names.iter().map(|name| fixture(&format!("{name}.png"))).collect();
    let joined = processor().process_files(&paths).unwrap();
    let expected: Vec<f32> = names
        .iter()
        .flat_map(|name| read_golden(&format!("preprocess_{name}.safetensors")).0)
        .collect();
    assert_eq!(joined.grids.iter().map(GridThw::tokens).sum::<usize>(), joined.rows);
    let tensor = joined.to_tensor(&Default::default());
    assert_eq!(tensor.dims(), [joined.rows, 588]);
    let values: Vec<f32> = tensor.into_data().try_to_vec().unwrap();
    let worst = values.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert_eq!(values.len(), expected.len());
    assert!(worst <= 1e-6, "differs by {worst}");
}

/// 56 x 84 pixels (height x width), R = y, G = x, B = 7y + 3x mod 256: nothing is resized.
#[test]
fn the_synthetic_page_has_its_published_values() {
    let image = RgbImage::from_fn(84, 56, |x, y| Rgb([y as u8, x as u8, (7 * y + 3 * x) as u8]));
    let processed = processor().process_image(image.clone()).unwrap();
    assert_eq!(processed.grid, GridThw { t: 1, h: 4, w: 6 });
    assert_eq!(processed.resized, image);
    let at = |row: usize, column: usize| processed.pixel_values.data[row * 588 + column];
    let near =
        |ours: f32, expected: f32| assert!((ours - expected).abs() <= 1e-6, "{ours}, {expected}");
    (0..3).for_each(|column| near(at(0, column), -1.792_262_6));
    near(at(1, 196), -1.541_988_4);
    near(at(2, 0), -1.587_884_5);
    near(at(4, 196), -1.331_879_6);
    near(at(12, 0), -1.383_506_5);
    let sum: f64 = processed.pixel_values.data.iter().copied().map(f64::from).sum();
    assert!((sum + 10_270.356_496_387_86).abs() < 1e-6, "{sum}");
}

/// The fixture folders are laid out as released models; their images are preprocessed rows already, so
/// only the configuration is read here.
#[test]
fn released_folders_configure_a_processor() {
    for folder in ["dots_ocr_tiny", "dots3_note_tiny"] {
        let processor = ImageProcessor::from_path(fixture(folder)).unwrap();
        assert_eq!(processor.config(), super::processor().config(), "{folder}");
    }
}
