//! Model folders that are incomplete, damaged or of something else.

use rstest::rstest;
use safetensors::Dtype;
use serde_json::json;

use crate::support::{Model, Workplace};

const CONFIG: &str = "config.json";
const PREPROCESSOR: &str = "preprocessor_config.json";
const INDEX: &str = "model.safetensors.index.json";
/// The shard with the first blocks and part of a language model.
const FIRST: &str = "model-00001-of-00002.safetensors";
const LAST: &str = "model-00002-of-00002.safetensors";
/// A tensor of the first shard, `[64, 64]` bf16.
const PROJ: &str = "vision_tower.blocks.0.attn.proj.weight";
const PROJ_VALUES: usize = 64 * 64;

/// Refuses the model after `damage`; the line must begin and end as said (between may stand the
/// system's or the parser's own words).
#[rstest]
#[case::no_config(|m: &Model| m.remove(CONFIG), "cannot read model/config.json: ",
    "; pass a config.json or the folder of a released model that holds one")]
#[case::truncated_config(|m: &Model| m.truncate(CONFIG, 40), "model/config.json is not valid JSON (",
    "); fetch the file again")]
#[case::empty_config(|m: &Model| m.write(CONFIG, ""), "model/config.json is not valid JSON (",
    "); fetch the file again")]
#[case::binary_config(|m: &Model| m.write(CONFIG, b"\xff\xfe\x00"), "cannot read model/config.json: ",
    "; pass a config.json or the folder of a released model that holds one")]
#[case::another_model(
    |m: &Model| m.write(CONFIG, json!({"model_type": "bert", "hidden_size": 768}).to_string()),
    "model/config.json describes a `bert` model, not a Dots vision tower; expected model_type ", "vision_config")]
#[case::a_list(|m: &Model| m.write(CONFIG, "[]"),
    "model/config.json describes something other than a JSON object, not a Dots vision tower; ", "vision_config")]
#[case::text_for_a_number(
    |m: &Model| m.edit_json(CONFIG, |c| c["vision_config"]["embed_dim"] = "wide".into()),
    "model/config.json: embed_dim = \"wide\": ", "expected a whole number, not negative")]
#[case::absurd_depth(
    |m: &Model| m.edit_json(CONFIG, |c| c["vision_config"]["num_hidden_layers"] = 1_000_000_000.into()),
    "model/config.json: num_hidden_layers = 1000000000: ", "must be from 1 to 1024")]
#[case::no_preprocessor(|m: &Model| m.remove(PREPROCESSOR), "model/preprocessor_config.json: cannot read: ",
    "; check that the file exists and is readable")]
#[case::broken_preprocessor(|m: &Model| m.truncate(PREPROCESSOR, 3), "model/preprocessor_config.json: not valid JSON: ",
    "; restore the model's preprocessor_config.json")]
#[case::other_processor(
    |m: &Model| m.edit_json(PREPROCESSOR, |c| c["image_processor_type"] = "CLIPImageProcessor".into()),
    "model/preprocessor_config.json: image_processor_type: ", "; pass the preprocessor_config.json of a Dots model")]
#[case::other_patches(|m: &Model| m.edit_json(PREPROCESSOR, |c| c["patch_size"] = 16.into()),
    "model/preprocessor_config.json: patch_size: 16, but the tower's config.json asks for 14; ",
    "use the two files of one model, or set it to the tower's")]
#[case::other_groups(|m: &Model| m.edit_json(PREPROCESSOR, |c| c["merge_size"] = 4.into()),
    "model/preprocessor_config.json: merge_size: 4, but the tower's config.json asks for 2; ",
    "use the two files of one model, or set it to the tower's")]
#[case::other_order(|m: &Model| m.edit_json(PREPROCESSOR, |c| c["pre_pixel_shuffle"] = false.into()),
    "model/preprocessor_config.json: pre_pixel_shuffle: false, but the tower's config.json asks for true; ",
    "use the two files of one model, or set it to the tower's")]
#[case::no_weights(|m: &Model| [INDEX, FIRST, LAST].iter().for_each(|name| m.remove(name)),
    "model holds neither model.safetensors nor ", "; pass a released model's folder or one of its files")]
#[case::broken_index(|m: &Model| m.truncate(INDEX, 5), "model/model.safetensors.index.json is not a safetensors index: ",
    "; fetch it again")]
#[case::index_out_of_the_folder(
    |m: &Model| m.edit_json(INDEX, |index| index["weight_map"][PROJ] = "../page.png".into()),
    "model/model.safetensors.index.json is not a safetensors index: `../page.png` is not the name ", "; fetch it again")]
#[case::missing_shard(|m: &Model| m.remove(LAST), "model/model.safetensors.index.json lists ",
    " tensors of the tower in model-00002-of-00002.safetensors, which is not there; fetch it")]
#[case::truncated_shard(|m: &Model| m.truncate(FIRST, 1000),
    "model/model-00001-of-00002.safetensors is truncated or not a safetensors file (", "); fetch it again")]
#[case::empty_shard(|m: &Model| m.write(LAST, ""),
    "model/model-00002-of-00002.safetensors is truncated or not a safetensors file (", "); fetch it again")]
#[case::shard_of_text(|m: &Model| m.write(LAST, "version https://git-lfs.github.com/spec/v1\n"),
    "model/model-00002-of-00002.safetensors is truncated or not a safetensors file (", "); fetch it again")]
#[case::mis_shaped(
    |m: &Model| m.edit_tensors(FIRST, |t| t.get_mut(PROJ).unwrap().1 = vec![32, 128]),
    "the checkpoint does not fit the config: 1 mis-shaped: blocks.0.attn.proj.weight (expected [64, 64], found [32, 128]); ",
    "check that config.json belongs to these weights")]
#[case::missing_tensor(|m: &Model| m.edit_tensors(FIRST, |t| { t.remove(PROJ); }),
    "the checkpoint does not fit the config: 1 missing: blocks.0.attn.proj.weight; ",
    "check that config.json belongs to these weights")]
#[case::one_layer_more(
    |m: &Model| m.edit_json(CONFIG, |c| c["vision_config"]["num_hidden_layers"] = 4.into()),
    "the checkpoint does not fit the config: ", "check that config.json belongs to these weights")]
#[case::integers(
    |m: &Model| m.edit_tensors(FIRST, |t| {
        t.insert(PROJ.into(), (Dtype::I8, vec![64, 64], vec![1; PROJ_VALUES]));
    }),
    "model/model-00001-of-00002.safetensors: vision_tower.blocks.0.attn.proj.weight is stored as I8, ",
    "not BF16, F16 or F32; convert the checkpoint to one of these")]
#[case::eight_bit_floats(
    |m: &Model| m.edit_tensors(FIRST, |t| {
        t.insert(PROJ.into(), (Dtype::F8_E4M3, vec![64, 64], vec![1; PROJ_VALUES]));
    }),
    "model/model-00001-of-00002.safetensors: vision_tower.blocks.0.attn.proj.weight is stored as F8_E4M3, ",
    "not BF16, F16 or F32; convert the checkpoint to one of these")]
#[case::not_a_number(
    |m: &Model| m.edit_tensors(FIRST, |t| t.get_mut(PROJ).unwrap().2 = [0xc0, 0x7f].repeat(PROJ_VALUES)),
    "page.png: its features hold NaN or infinity; ", "the model's weights are damaged, fetch them again")]
fn bad_models_are_refused(#[case] damage: fn(&Model), #[case] begins: &str, #[case] ends: &str) {
    let place = Workplace::new();
    place.copy_image("gray.png", "page.png");
    damage(&place.copy_model("dots_ocr_tiny"));
    let line = place.refuse(&["page.png", "--model", "model"]);
    assert!(line.starts_with(begins), "{line}");
    assert!(line.ends_with(ends), "{line}");
}

#[rstest]
#[case::not_there("elsewhere")]
#[case::a_file("page.png")]
#[case::a_name_on_a_hub("rednote-hilab/dots.ocr")]
fn models_that_are_no_folder_are_refused(#[case] model: &str) {
    let place = Workplace::new();
    place.copy_image("gray.png", "page.png");
    assert_eq!(
        place.refuse(&["page.png", "--model", model]),
        format!("--model {model}: not a folder; pass the folder of a downloaded model")
    );
}

/// A value that f16 cannot hold is named rather than turned into infinity.
#[test]
fn weights_beyond_f16_are_refused_in_f16_alone() {
    let place = Workplace::new();
    place.copy_image("gray.png", "page.png");
    // 2^17 in bf16.
    let huge = [0x00, 0x48].repeat(PROJ_VALUES);
    place.copy_model("dots_ocr_tiny").edit_tensors(FIRST, |t| t.get_mut(PROJ).unwrap().2 = huge);
    assert_eq!(
        place.refuse(&["page.png", "--model", "model", "--dtype", "f16"]),
        "vision_tower.blocks.0.attn.proj.weight holds 131072, beyond the range of F16; load it as F32 or BF16"
    );
    place.encode(&["page.png", "--model", "model", "--dtype", "bf16"]);
}

/// Weights that f16 holds can still lead beyond it.
#[test]
fn features_beyond_f16_are_refused() {
    let place = Workplace::new();
    place.copy_image("gray.png", "page.png");
    place.copy_model("dots_ocr_tiny").edit_tensors(FIRST, |t| {
        let weight = t.get_mut("vision_tower.blocks.0.mlp.fc1.weight").unwrap();
        // 2^15 in bf16.
        weight.2 = [0x00, 0x47].repeat(176 * 64);
    });
    assert_eq!(
        place.refuse(&["page.png", "--model", "model", "--dtype", "f16"]),
        "page.png: its features hold NaN or infinity; its numbers may be beyond the range of f16, \
         use --dtype bf16 or f32"
    );
    place.encode(&["page.png", "--model", "model"]);
}

/// Tensors of the tower that nothing takes are worth a warning, not a refusal.
#[test]
fn tensors_without_a_use_are_told_of() {
    let place = Workplace::new();
    place.copy_image("gray.png", "page.png");
    let model = place.copy_model("dots_ocr_tiny");
    model.edit_tensors(FIRST, |t| {
        for key in ["vision_tower.mask_token", "vision_tower.two\nlines\u{1b}[2J"] {
            t.insert(key.into(), (Dtype::F32, vec![1], vec![0; 4]));
        }
    });
    let output = place.command(&["page.png", "--model", "model"]).output().unwrap();
    assert!(output.status.success());
    let stderr = String::from_utf8(output.stderr).unwrap();
    let expected = r" parameters; 2 unused: mask_token, two\nlines\u{1b}[2J";
    let line = stderr.strip_suffix('\n').unwrap();
    assert!(line.contains("model: loaded ") && line.ends_with(expected), "{stderr}");
    assert!(!line.contains(char::is_control), "{stderr}");
}
