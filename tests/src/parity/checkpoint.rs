//! Folders laid out like released models, from config.json to the output.

use std::path::Path;

use burn::tensor::DType;
use burn_dots_vit::DotsVisionEncoder;
use burn_vision_attention::AttentionImplementation;

use super::encoder::inputs;
use super::{CaseError, Verdict, check, relative, unless_unsupported};
use crate::devices::NamedDevice;
use crate::fixtures::{CheckpointCase, Fixture};

pub(super) fn run(
    directory: &Path,
    case: &CheckpointCase,
    device: &NamedDevice,
    implementation: AttentionImplementation,
) -> Result<Verdict, CaseError> {
    let folder = directory.join(&case.dir);
    let golden = Fixture::open(folder.join("expected.safetensors"))?;
    let (mut tower, report) = DotsVisionEncoder::from_pretrained(&folder, &device.device)?;
    if !report.unused.is_empty() {
        return Err(format!("weights that nothing uses: {}", report.unused.join(", ")).into());
    }
    tower.set_implementation(implementation);
    unless_unsupported(&tower.resolution(&device.device, DType::F32), || {
        let (pixel_values, grids) = inputs(&golden, &device.device)?;
        let out = tower.forward(pixel_values, &grids)?;
        Ok(vec![check(&golden, "expected.out", out, relative(case.atol, case.rtol))?])
    })
}
