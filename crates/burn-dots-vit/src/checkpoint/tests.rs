#![allow(clippy::unwrap_used)]

mod save;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::{Tensor, TensorData};
use proptest::prelude::*;
use rstest::rstest;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::*;
use crate::grid::GridThw;

/// A checkpoint's tensors: dtype, shape, bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

fn read(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .map(|(key, view)| {
            (key.to_string(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        })
        .collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(key, (dtype, shape, bytes))| {
        (key, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// The mixture-of-experts fixture as one file, to be changed.
fn moe() -> (DotsVitConfig, Tensors) {
    let folder = fixture("dots3_note_tiny");
    (DotsVitConfig::from_file(&folder).unwrap(), read(&folder.join("model-vision.safetensors")))
}

const VISION: &str = "vision_encoder.";

fn load(
    config: &DotsVitConfig,
    tensors: &Tensors,
) -> Result<(DotsVisionEncoder, LoadReport), CheckpointError> {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("model.safetensors"), tensors);
    DotsVisionEncoder::load(config, folder.path(), &CheckpointOptions::default(), &Device::flex())
}

fn encode(tower: &DotsVisionEncoder) -> TensorData {
    let config = tower.config();
    let count = 16 * config.pixel_row_len();
    let values: Vec<f32> = (0..count).map(|i| (i as f32 * 0.37).sin()).collect();
    let rows = TensorData::new(values, [16, config.pixel_row_len()]);
    let rows = Tensor::from_data(rows, &Device::flex());
    tower.forward(rows, &[GridThw::new(1, 2, 4), GridThw::new(2, 2, 2)]).unwrap().into_data()
}

fn rename(tensors: &mut Tensors, from: &str, to: &str) {
    *tensors = std::mem::take(tensors)
        .into_iter()
        .map(|(key, tensor)| (key.replace(from, to), tensor))
        .collect();
}

/// Moves the tensors `parts` into one, `to`, of `shape`.
fn join(tensors: &mut Tensors, parts: impl Iterator<Item = String>, to: String, shape: Vec<usize>) {
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend(tensors.remove(&part).unwrap().2);
    }
    tensors.insert(to, (Dtype::BF16, shape, bytes));
}

fn fuse_gate_and_up(tensors: &mut Tensors) {
    let gates: Vec<String> =
        tensors.keys().filter(|key| key.ends_with(".fc1.weight")).cloned().collect();
    for gate in gates {
        let (_, shape, _) = &tensors[&gate];
        let shape = vec![2 * shape[0], shape[1]];
        let parts = [gate.clone(), gate.replace("fc1", "fc3")];
        join(tensors, parts.into_iter(), gate.replace("fc1", "fc13"), shape);
    }
}

fn stack_experts(tensors: &mut Tensors) {
    for (block, experts) in [(1, 4), (2, 8)] {
        let mlp = format!("{VISION}blocks.{block}.mlp.experts");
        let gate_up = (0..experts)
            .flat_map(|e| ["fc1", "fc3"].map(|fc| format!("{mlp}.{e}.{fc}.weight")))
            .collect::<Vec<_>>();
        join(tensors, gate_up.into_iter(), format!("{mlp}.gate_up_proj"), vec![experts, 176, 64]);
        let down = (0..experts).map(|e| format!("{mlp}.{e}.fc2.weight")).collect::<Vec<_>>();
        join(tensors, down.into_iter(), format!("{mlp}.down_proj"), vec![experts, 64, 88]);
    }
}

fn to_transformers(tensors: &mut Tensors) {
    stack_experts(tensors);
    for (from, to) in [
        ("post_trunk_norm", "norm"),
        ("adapter.", "merger."),
        ("norm_1", "norm1"),
        ("norm_2", "norm2"),
        ("fc1", "gate_proj"),
        ("fc2", "down_proj"),
        ("fc3", "up_proj"),
        ("gate_weight", "gate.weight"),
        ("router_bias", "e_score_correction_bias"),
    ] {
        rename(tensors, from, to);
    }
}

#[rstest]
#[case::release(|_: &mut Tensors| {}, VISION)]
#[case::bare(|t: &mut Tensors| rename(t, VISION, ""), "")]
#[case::vllm(|t: &mut Tensors| {
    rename(t, VISION, "visual.");
    rename(t, "attn.qkv", "attn.qkv_proj");
    rename(t, "attn.proj", "attn.out_proj");
}, "visual.")]
#[case::fused(fuse_gate_and_up, VISION)]
#[case::stacked(stack_experts, VISION)]
#[case::transformers(to_transformers, VISION)]
#[case::transformers_nested(|t: &mut Tensors| { to_transformers(t); rename(t, VISION, "model.vision_tower."); },
    "model.vision_tower.")]
#[case::transformers_bare(|t: &mut Tensors| { to_transformers(t); rename(t, VISION, ""); }, "")]
fn every_layout_is_the_same_tower(#[case] change: fn(&mut Tensors), #[case] prefix: &str) {
    let (config, tensors) = moe();
    let expected = encode(&load(&config, &tensors).unwrap().0);
    let mut changed = tensors;
    change(&mut changed);
    // Language-model tensors beside the tower are none of its business.
    changed.insert("model.norm.weight".into(), (Dtype::I64, vec![1], vec![0; 8]));
    let (tower, report) = load(&config, &changed).unwrap();
    assert_eq!(report.prefix, prefix);
    assert!(report.unused.is_empty(), "{report}");
    assert_eq!(encode(&tower), expected);
}

#[rstest]
#[case::missing(|t: &mut Tensors| { t.remove(&format!("{VISION}blocks.0.norm_1.weight")); },
    "1 missing: blocks.0.norm_1.weight")]
#[case::mis_shaped(|t: &mut Tensors| { t.insert(format!("{VISION}blocks.0.norm_1.weight"), (Dtype::F32, vec![3], vec![0; 12])); },
    "1 mis-shaped: blocks.0.norm_1.weight (expected [64], found [3])")]
#[case::untransposed(|t: &mut Tensors| { t.get_mut(&format!("{VISION}blocks.0.mlp.fc1.weight")).unwrap().1.reverse(); },
    "blocks.0.mlp.fc1.weight (expected [176, 64], found [64, 176])")]
#[case::fewer_experts(|t: &mut Tensors| {
    stack_experts(t);
    let (_, shape, bytes) = t.get_mut(&format!("{VISION}blocks.1.mlp.experts.gate_up_proj")).unwrap();
    shape[0] = 3;
    bytes.truncate(3 * 176 * 64 * 2);
}, "1 mis-shaped: blocks.1.mlp.experts.gate_up_proj (expected [4, 176, 64], found [3, 176, 64])")]
#[case::dtype(|t: &mut Tensors| { t.insert(format!("{VISION}post_trunk_norm.weight"), (Dtype::F64, vec![64], vec![0; 512])); },
    "vision_encoder.post_trunk_norm.weight is stored as F64")]
#[case::duplicate(|t: &mut Tensors| { let norm = t[&format!("{VISION}post_trunk_norm.weight")].clone();
    t.insert(format!("{VISION}norm.weight"), norm); }, "both hold the parameter post_trunk_norm.weight")]
#[case::two_towers(|t: &mut Tensors| { let mut other = t.clone(); rename(&mut other, VISION, "visual."); t.extend(other); },
    "prefixes `vision_encoder.`, `visual.`")]
#[case::no_tower(|t: &mut Tensors| { *t = Tensors::from([("model.norm.weight".into(), (Dtype::F32, vec![1], vec![0; 4]))]); },
    "no Dots vision tower")]
fn broken_checkpoints_are_named(#[case] change: fn(&mut Tensors), #[case] needle: &str) {
    let (config, mut tensors) = moe();
    change(&mut tensors);
    let text = load(&config, &tensors).unwrap_err().to_string();
    assert!(text.contains(needle), "{text}");
    assert!(!text.contains('\n'), "{text}");
}

#[test]
fn unused_tensors_are_reported_and_harmless() {
    let (config, mut tensors) = moe();
    let key = format!("{VISION}rotary_pos_emb.inv_freq");
    tensors.insert(key, (Dtype::F32, vec![1], vec![0; 4]));
    let (_, report) = load(&config, &tensors).unwrap();
    assert_eq!(report.unused, ["rotary_pos_emb.inv_freq"]);
    assert!(report.to_string().contains("unused: rotary_pos_emb.inv_freq"), "{report}");
}

#[test]
fn the_report_of_another_tower_is_complete() {
    let (mut config, tensors) = moe();
    config.pyramid_num_routed = vec![-1, -1, 8];
    let Err(CheckpointError::Incomplete(report)) = load(&config, &tensors) else {
        panic!("a dense block cannot load from experts");
    };
    let dense = ["fc1", "fc2", "fc3"].map(|fc| format!("blocks.1.mlp.{fc}.weight"));
    assert_eq!(report.missing, dense);
    assert_eq!(report.unused.len(), 2 + 4 * 3);
    assert_eq!(report.to_string().lines().count(), 1 + 3 + 14);
}

#[test]
fn values_beyond_f16_are_refused() {
    let (config, mut tensors) = moe();
    let huge: Vec<u8> = (0..64).flat_map(|_| 1e5f32.to_le_bytes()).collect();
    tensors.insert(format!("{VISION}post_trunk_norm.weight"), (Dtype::F32, vec![64], huge));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("one.safetensors");
    write(&path, &tensors);
    let load = |dtype| {
        let options = CheckpointOptions::default().with_dtype(dtype);
        DotsVisionEncoder::load(&config, &path, &options, &Device::flex())
    };
    let error = load(DType::F16).unwrap_err();
    assert!(matches!(error, CheckpointError::OutOfRange { value: 1e5, .. }), "{error}");
    assert!(load(DType::BF16).is_ok());
    let error = load(DType::I32).unwrap_err();
    assert!(error.to_string().contains("ask for F32, BF16 or F16"), "{error}");
}

/// `router_bias` decides selections among f32 numbers.
#[test]
fn router_bias_stays_f32() {
    let (config, tensors) = moe();
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("only.safetensors"), &tensors);
    let options = CheckpointOptions::default().with_dtype(DType::BF16);
    let (tower, _) =
        DotsVisionEncoder::load(&config, folder.path(), &options, &Device::flex()).unwrap();
    let crate::block::DotsFfn::Moe(moe) = &tower.blocks[1].mlp else {
        panic!("block 1 has experts");
    };
    assert_eq!(moe.router_bias.val().dtype(), DType::F32);
    assert_eq!(moe.gate_weight.val().dtype(), DType::BF16);
}

fn copy_fixture(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    folder
}

fn pretrained_error(folder: &Path) -> CheckpointError {
    DotsVisionEncoder::from_pretrained(folder, &Device::flex()).unwrap_err()
}

#[test]
fn only_shards_of_the_tower_are_needed() {
    let folder = copy_fixture("dots3_note_tiny");
    std::fs::remove_file(folder.path().join("model-00001-of-00001.safetensors")).unwrap();
    DotsVisionEncoder::from_pretrained(folder.path(), &Device::flex()).unwrap();
    std::fs::remove_file(folder.path().join("model-vision.safetensors")).unwrap();
    let error = pretrained_error(folder.path());
    let CheckpointError::MissingShard { shard, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(shard, "model-vision.safetensors");
}

#[rstest]
#[case("{\"weight_map\": ", "not a safetensors index")]
#[case("{}", "missing field `weight_map`")]
#[case(
    "{\"weight_map\": {\"visual.blocks.0.x\": \"../other.safetensors\"}}",
    "not the name of a file beside it"
)]
#[case("{\"weight_map\": {\"lm_head.weight\": \"a.safetensors\"}}", "no Dots vision tower")]
fn broken_indices(#[case] text: &str, #[case] needle: &str) {
    let folder = copy_fixture("dots_ocr_tiny");
    std::fs::write(folder.path().join("model.safetensors.index.json"), text).unwrap();
    let error = pretrained_error(folder.path()).to_string();
    assert!(error.contains(needle), "{error}");
}

#[test]
fn folders_and_files_that_hold_nothing() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(pretrained_error(folder.path()), CheckpointError::Config(_)));
    std::fs::copy(fixture("dots_ocr_tiny/config.json"), folder.path().join("config.json")).unwrap();
    assert!(matches!(pretrained_error(folder.path()), CheckpointError::NoWeights { .. }));
    let (config, _) = moe();
    let gone = folder.path().join("gone.safetensors");
    let options = CheckpointOptions::default();
    let error = DotsVisionEncoder::load(&config, gone, &options, &Device::flex()).unwrap_err();
    assert!(matches!(error, CheckpointError::Read { .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// A download that stopped anywhere is a typed error that names the file.
    #[test]
    fn truncated_files(keep in 0.0f64..1.0) {
        let folder = copy_fixture("dots_ocr_tiny");
        let path = folder.path().join("model-00002-of-00002.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..(keep * bytes.len() as f64) as usize]).unwrap();
        let error = pretrained_error(folder.path());
        prop_assert!(matches!(error, CheckpointError::Header { .. }), "{}", error);
        prop_assert!(error.to_string().contains("model-00002-of-00002.safetensors"));
    }

    /// Damage to the header never panics: it is an error, or does not touch the tower.
    #[test]
    fn damaged_headers(at in 0usize..400, byte in any::<u8>()) {
        let folder = copy_fixture("dots_ocr_tiny");
        let path = folder.path().join("model-00001-of-00002.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[at] = byte;
        std::fs::write(&path, &bytes).unwrap();
        if let Err(error) = DotsVisionEncoder::from_pretrained(folder.path(), &Device::flex()) {
            prop_assert!(!error.to_string().contains('\n'), "{}", error);
        }
    }
}
