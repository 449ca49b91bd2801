//! Whole towers against the reference: `tests/fixtures` at the root of the workspace.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use burn::module::Param;
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use burn_dots_vit::checkpoint::{ParameterVisitor, StoredParameter};
use burn_dots_vit::{CheckpointOptions, DotsVisionEncoder, DotsVitConfig, GridThw, TowerStage};
use burn_vision_attention::AttentionImplementation;
use rstest::rstest;
use safetensors::SafeTensors;
use serde_json::Value;

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

fn manifest(kind: &str, name: &str) -> Value {
    let text = std::fs::read_to_string(fixtures().join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_str(&text).unwrap();
    let cases = manifest[kind].as_array().unwrap();
    cases.iter().find(|case| case["name"] == name).unwrap().clone()
}

/// The tensors of one safetensors file, as f32.
struct Golden {
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Golden {
    fn read(path: PathBuf) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, view)| {
            let values = match view.dtype() {
                safetensors::Dtype::F32 => {
                    view.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
                }
                safetensors::Dtype::I64 => view
                    .data()
                    .as_chunks()
                    .0
                    .iter()
                    .map(|b| i64::from_le_bytes(*b) as f32)
                    .collect(),
                safetensors::Dtype::I32 => view
                    .data()
                    .as_chunks()
                    .0
                    .iter()
                    .map(|b| i32::from_le_bytes(*b) as f32)
                    .collect(),
                other => panic!("{name}: {other:?}"),
            };
            (name.to_string(), (view.shape().to_vec(), values))
        });
        Self { tensors: tensors.collect() }
    }

    fn tensor(&self, name: &str, device: &Device) -> Tensor<2> {
        let (shape, values) = self.tensors[name].clone();
        Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
    }

    fn grids(&self) -> Vec<GridThw> {
        let side = |value: f32| value as usize;
        let rows = self.tensors["grid_thw"].1.as_chunks::<3>().0.iter();
        rows.map(|&[t, h, w]| GridThw::new(side(t), side(h), side(w))).collect()
    }

    /// `max|ours - expected| <= atol + rtol * max|expected|`.
    fn compare(&self, name: &str, ours: TensorData, atol: f32, rtol: f32) {
        let (shape, expected) = &self.tensors[name];
        assert_eq!(ours.shape().as_slice(), shape, "{name}");
        let ours: Vec<f32> = ours.try_to_vec().unwrap();
        let bound = atol + rtol * expected.iter().fold(0f32, |max, value| max.max(value.abs()));
        let error = ours
            .iter()
            .zip(expected)
            .map(|(ours, expected)| (ours - expected).abs())
            .fold(0f32, |max, error| if error.is_nan() { f32::NAN } else { max.max(error) });
        assert!(error <= bound, "{name}: error {error:e}, bound {bound:e}");
    }
}

struct Case {
    case: Value,
    data: Golden,
    tower: DotsVisionEncoder,
}

fn encoder_case(name: &str, device: &Device) -> Case {
    let case = manifest("encoder", name);
    let path = |field: &str| fixtures().join(case[field].as_str().unwrap());
    let config = DotsVitConfig::from_file(path("config")).unwrap();
    let options = CheckpointOptions::default();
    let (tower, report) =
        DotsVisionEncoder::load(&config, path("weights"), &options, device).unwrap();
    assert!(report.is_complete() && report.unused.is_empty(), "{report}");
    assert_eq!(report.prefix, "");
    Case { data: Golden::read(path("data")), tower, case }
}

fn bound(case: &Value, field: &str) -> f32 {
    case[field].as_f64().unwrap() as f32
}

#[rstest]
fn every_stage_matches_the_reference(
    #[values("dense_merger", "dense_shuffle", "moe_sigmoid", "video")] name: &str,
    #[values(
        AttentionImplementation::Eager,
        AttentionImplementation::EagerV2,
        AttentionImplementation::Sdpa,
        AttentionImplementation::FlashAttention2,
        AttentionImplementation::FlashAttention3
    )]
    implementation: AttentionImplementation,
) {
    let device = Device::flex();
    let Case { case, data, mut tower } = encoder_case(name, &device);
    tower.set_implementation(implementation);
    let (atol, rtol) = (bound(&case, "atol"), bound(&case, "rtol"));
    let mut seen = 0;
    let mut check = |stage: TowerStage, hidden: &Tensor<2>| {
        let name = match stage {
            TowerStage::PatchEmbed => "expected.patch_embed".to_string(),
            TowerStage::Block(layer) => format!("expected.block.{layer}"),
            TowerStage::PostNorm => return,
        };
        data.compare(&name, hidden.to_data(), atol, rtol);
        seen += 1;
    };
    let out = tower
        .forward_with(data.tensor("pixel_values", &device), &data.grids(), &mut check)
        .unwrap();
    assert_eq!(seen, 1 + tower.config().num_hidden_layers);
    data.compare("expected.out", out.into_data(), atol, rtol);
}

/// `burn_dots_vit::grid` derives what the reference was given.
#[rstest]
fn segments_and_angles_match_the_reference(
    #[values("dense_merger", "dense_shuffle", "moe_sigmoid", "video")] name: &str,
) {
    let device = Device::flex();
    let Case { data, tower, .. } = encoder_case(name, &device);
    let segments = burn_dots_vit::grid::segments(&data.grids()).unwrap();
    let offsets: Vec<f32> = segments.offsets().iter().map(|&offset| offset as f32).collect();
    assert_eq!(offsets, data.tensors["cu_seqlens"].1);
    let order = tower.config().position_order();
    let positions = burn_dots_vit::grid::positions(&data.grids(), order).unwrap();
    let rotary = burn_vision_attention::VisionRotaryEmbedding::new(tower.config().head_dim() / 2);
    data.compare("rotary_pos_emb", rotary.angles(&positions, &device).into_data(), 1e-5, 1e-6);
}

#[rstest]
#[case("dots_ocr_tiny", "vision_tower.", 2)]
#[case("dots3_note_tiny", "vision_encoder.", 1)]
fn released_folders_load_and_encode(
    #[case] name: &str,
    #[case] prefix: &str,
    #[case] files: usize,
) {
    let device = Device::flex();
    let case = manifest("checkpoint", name);
    let folder = fixtures().join(case["dir"].as_str().unwrap());
    let (tower, report) = DotsVisionEncoder::from_pretrained(&folder, &device).unwrap();
    assert!(report.is_complete() && report.unused.is_empty(), "{report}");
    assert_eq!((report.prefix.as_str(), report.files.len()), (prefix, files));
    assert_eq!(tower.dtype(), DType::F32);
    let data = Golden::read(folder.join("expected.safetensors"));
    let out = tower.forward(data.tensor("pixel_values", &device), &data.grids()).unwrap();
    data.compare("expected.out", out.into_data(), bound(&case, "atol"), bound(&case, "rtol"));

    // Half precision takes the same weights; rounding its arithmetic costs about 1%.
    for dtype in [DType::BF16, DType::F16] {
        let options = CheckpointOptions::default().with_dtype(dtype);
        let (tower, _) =
            DotsVisionEncoder::from_pretrained_with(&folder, &options, &device).unwrap();
        assert_eq!(tower.dtype(), dtype);
        let out = tower.forward(data.tensor("pixel_values", &device), &data.grids()).unwrap();
        assert_eq!(out.dtype(), dtype);
        data.compare("expected.out", out.cast(DType::F32).into_data(), 0.0, 0.05);
    }
}

#[rstest]
fn gradients_match_the_reference(
    #[values("dense_merger", "dense_shuffle", "moe_sigmoid", "video")] name: &str,
    #[values(AttentionImplementation::EagerV2, AttentionImplementation::FlashAttention2)]
    implementation: AttentionImplementation,
) {
    let device = Device::flex().autodiff();
    let Case { case, data, mut tower } = encoder_case(name, &device);
    tower.set_implementation(implementation);
    let pixel_values = data.tensor("pixel_values", &device).require_grad();
    let out = tower.forward(pixel_values.clone(), &data.grids()).unwrap();
    let gradients = (out * data.tensor("cotangent", &device)).sum().backward();

    let (atol, rtol) = (bound(&case, "grad_atol"), bound(&case, "grad_rtol"));
    let pixels = pixel_values.grad(&gradients).unwrap().into_data();
    data.compare("expected.grad.pixel_values", pixels, atol, rtol);
    let mut check = Check { data: &data, gradients: &gradients, atol, rtol, seen: 0 };
    tower.visit_parameters(&mut check);
    let expected = data.tensors.keys().filter(|name| name.starts_with("expected.grad.")).count();
    assert_eq!(check.seen + 1, expected);
}

struct Check<'a> {
    data: &'a Golden,
    gradients: &'a Gradients,
    atol: f32,
    rtol: f32,
    seen: usize,
}

impl ParameterVisitor for Check<'_> {
    fn visit<const D: usize>(&mut self, stored: &StoredParameter, parameter: &Param<Tensor<D>>) {
        let name = format!("expected.grad.{}", stored.name);
        let gradient = parameter.val().grad(self.gradients);
        if stored.name.ends_with(".router_bias") {
            assert!(gradient.is_none(), "{name}");
            return;
        }
        // An expert that no token visited has no gradient here and zero in the reference.
        let gradient = gradient.unwrap_or_else(|| parameter.val().inner().zeros_like());
        self.data.compare(&name, stored.data(gradient), self.atol, self.rtol);
        self.seen += 1;
    }
}
