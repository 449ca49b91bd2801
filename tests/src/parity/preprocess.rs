//! Images to pixel values.

use std::path::Path;

use burn_dots_vit::GridThw;
use burn_dots_vit::preprocess::{ImageProcessor, PreprocessorConfig};

use super::{CaseError, Verdict, check_values};
use crate::fixtures::{Fixture, PreprocessCase};

pub(super) fn run(
    directory: &Path,
    case: &PreprocessCase,
    atol: f64,
) -> Result<Verdict, CaseError> {
    let golden = Fixture::open(directory.join(&case.file))?;
    let processor = ImageProcessor::new(PreprocessorConfig::default())?;
    let image = processor.process_file(directory.join(&case.image))?;
    let [t, h, w] = case.grid_thw;
    if image.grid != GridThw::new(t, h, w) {
        return Err(format!("grid {}, expected {t} x {h} x {w}", image.grid).into());
    }
    let pixels = &image.pixel_values;
    let values: Vec<f64> = pixels.data.iter().copied().map(f64::from).collect();
    let shape = [pixels.rows, pixels.row_len];
    Ok(Verdict::Ran(vec![check_values(&golden, "pixel_values", &shape, &values, |_| atol)?]))
}
