//! Reading configurations.

use rstest::rstest;
use serde_json::{Value, json};

use crate::config::DotsVitConfig;
use crate::preprocess::{ImageProcessor, PreprocessError, PreprocessorConfig, SmartResize};

fn parse(value: Value) -> Result<PreprocessorConfig, String> {
    PreprocessorConfig::try_from(value).map_err(|error| error.to_string())
}

#[test]
fn an_empty_object_is_the_default() {
    assert_eq!(parse(json!({})), Ok(PreprocessorConfig::default()));
    assert_eq!(parse(json!({"min_pixels": null, "do_resize": null})), Ok(Default::default()));
}

#[test]
fn a_configuration_survives_json() {
    let config = PreprocessorConfig {
        smart_resize: SmartResize::DotsOcr,
        image_mean: [0.5, 0.25, 0.125],
        pre_pixel_shuffle: false,
        max_input_pixels: 1 << 33,
        ..Default::default()
    };
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<PreprocessorConfig>(&text).unwrap(), config);
}

#[rstest]
#[case::edges(json!({"size": {"shortest_edge": 4000, "longest_edge": 90_000}}), 4000, 90_000)]
#[case::pixels(json!({"size": {"min_pixels": 4000, "max_pixels": 90_000}}), 4000, 90_000)]
#[case::outer_wins(json!({"size": {"shortest_edge": 1, "longest_edge": 90_000}, "min_pixels": 5000}), 5000, 90_000)]
#[case::floats(json!({"min_pixels": 4000.0, "max_pixels": 9.0e4}), 4000, 90_000)]
#[case::unset(json!({"size": {"shortest_edge": null}}), 3136, 11_289_600)]
fn pixel_counts_are_read_from_every_place(
    #[case] value: Value,
    #[case] min: usize,
    #[case] max: usize,
) {
    let config = parse(value).unwrap();
    assert_eq!((config.min_pixels, config.max_pixels), (min, max));
}

#[test]
fn nested_settings_win_and_choose_the_dots_rule() {
    let config = parse(json!({
        "merge_size": 4,
        "image_mean": 0.5,
        "vision_config": {
            "merge_size": 2, "patch_size": 16, "pre_pixel_shuffle": false,
            "image_std": [0.5, 0.5, 0.25], "min_pixels": 1024, "max_pixels": 2_000_000,
        },
    }))
    .unwrap();
    assert_eq!((config.merge_size, config.patch_size), (2, 16));
    assert_eq!((config.image_mean, config.image_std), ([0.5; 3], [0.5, 0.5, 0.25]));
    assert_eq!((config.min_pixels, config.max_pixels), (1024, 2_000_000));
    assert_eq!(config.smart_resize, SmartResize::DotsOcr);
    assert!(!config.pre_pixel_shuffle);
    let plain = json!({"vision_config": {"smart_resize": "hugging_face"}});
    assert_eq!(parse(plain).unwrap().smart_resize, SmartResize::HuggingFace);
}

#[rstest]
#[case(json!({"image_processor_type": "Qwen2VLImageProcessorFast", "resample": 3, "do_convert_rgb": true,
    "do_center_crop": false, "crop_size": null, "processor_class": "DotsVLProcessor", "data_format": "channels_first"}))]
#[case(json!({"image_processor_type": "Dots3NoteImageProcessor", "resample": "bicubic"}))]
fn keys_that_change_nothing_are_allowed(#[case] value: Value) {
    assert_eq!(parse(value), Ok(PreprocessorConfig::default()));
}

#[rstest]
#[case(json!({"patch_size": 0}), "patch_size: must be positive, got 0; the Dots towers use 14")]
#[case(json!({"merge_size": 0}), "merge_size: must be positive, got 0; the Dots towers use 2")]
#[case(json!({"temporal_patch_size": 0}), "temporal_patch_size: must be positive, got 0; the Dots towers use 1")]
#[case(json!({"patch_size": 100_000}), "patch_size: must be at most 4096, got 100000; restore the released value")]
#[case(json!({"min_pixels": 0}), "min_pixels: must be positive, got 0; the Dots towers use 3136")]
#[case(json!({"min_pixels": 9000, "max_pixels": 8000}),
    "min_pixels: 9000 is over max_pixels 8000; lower min_pixels or raise max_pixels")]
#[case(json!({"min_pixels": 10, "max_pixels": 100}),
    "max_pixels: 100 is under 784, the area of one merge group; raise max_pixels")]
#[case(json!({"max_pixels": 1.0e12}),
    "max_pixels: must be at most 2147483648, got 1000000000000; lower max_pixels")]
#[case(json!({"min_pixels": "many"}),
    "min_pixels: expected a whole number, got \"many\"; correct the value, or remove the key for the default")]
#[case(json!({"min_pixels": -1}),
    "min_pixels: expected a whole number, got -1; correct the value, or remove the key for the default")]
#[case(json!({"image_std": [0.2, 0.0, 0.2]}),
    "image_std: must be finite and positive, got 0; restore the released values, or set do_normalize to false")]
#[case(json!({"image_mean": [0.2, 0.2]}),
    "image_mean: expected a number or three numbers, got [0.2,0.2]; correct the value, or remove the key for the default")]
#[case(json!({"rescale_factor": 0.0}),
    "rescale_factor: must be finite and positive, got 0; use 0.00392156862745098 (1/255), or do_rescale false")]
#[case(json!({"do_resize": 1}),
    "do_resize: expected true or false, got 1; correct the value, or remove the key for the default")]
#[case(json!({"resample": 2}),
    "resample: only bicubic (3) is implemented, got 2; set it to 3, or resize the images yourself and set do_resize to false")]
#[case(json!({"do_convert_rgb": false}),
    "do_convert_rgb: false is not supported, the towers take whole RGB images; set it to true")]
#[case(json!({"do_center_crop": true}),
    "do_center_crop: true is not supported, the towers take whole RGB images; set it to false")]
#[case(json!({"size": {"height": 224, "width": 224}}),
    "size.height: this key has no meaning for a smart resize; give size shortest_edge and longest_edge, as pixel counts")]
#[case(json!({"size": 224}),
    "size: expected an object with shortest_edge and longest_edge (pixel counts), got 224; correct the value, or remove the key for the default")]
#[case(json!({"image_processor_type": "CLIPImageProcessor"}),
    "image_processor_type: expected a Qwen2-VL or Dots image processor, got \"CLIPImageProcessor\"; pass the preprocessor_config.json of a Dots model")]
#[case(json!({"smart_resize": "square"}),
    "smart_resize: expected \"hugging_face\" or \"dots_ocr\", got \"square\"; correct the value, or remove the key for the default")]
#[case(json!({"vision_config": 3}),
    "vision_config: expected an object, got 3; correct the value, or remove the key for the default")]
#[case(json!([]), "(root): expected an object, got []; restore the model's preprocessor_config.json")]
fn unusable_settings_are_named(#[case] value: Value, #[case] message: &str) {
    assert_eq!(parse(value).unwrap_err(), message);
}

#[test]
fn files_are_named_in_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(PreprocessorConfig::FILE_NAME);
    let shown = path.display().to_string();

    let error = PreprocessorConfig::from_path(folder.path()).unwrap_err();
    assert!(matches!(error, PreprocessError::Io { .. }));
    assert!(error.to_string().starts_with(&format!("{shown}: cannot read: ")), "{error}");

    std::fs::write(&path, "{").unwrap();
    let error = PreprocessorConfig::from_path(folder.path()).unwrap_err();
    assert!(error.to_string().starts_with(&format!("{shown}: not valid JSON: ")), "{error}");

    std::fs::write(&path, r#"{"patch_size": 0}"#).unwrap();
    let error = PreprocessorConfig::from_path(&path).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{shown}: patch_size: must be positive, got 0; the Dots towers use 14")
    );

    std::fs::write(&path, r#"{"vision_config": {"image_details": {"low": {}}}}"#).unwrap();
    assert!(PreprocessorConfig::from_path(&path).is_ok());
}

#[test]
fn a_processor_refuses_what_was_set_in_memory() {
    let config = PreprocessorConfig { image_std: [0.1, f32::NAN, 0.1], ..Default::default() };
    assert_eq!(
        ImageProcessor::new(config).unwrap_err().to_string(),
        "PreprocessorConfig: image_std: must be finite and positive, got NaN; \
         restore the released values, or set do_normalize to false"
    );
}

/// Rows of another length or in another order than the tower's are found out before they are made.
#[rstest]
#[case(json!({}), json!({}), None)]
#[case(json!({"patch_size": 16}), json!({}), Some("patch_size: 16, but the tower's config.json asks for 14"))]
#[case(json!({"temporal_patch_size": 2}), json!({}),
    Some("temporal_patch_size: 2, but the tower's config.json asks for 1"))]
#[case(json!({"merge_size": 1}), json!({}), Some("merge_size: 1, but the tower's config.json asks for 2"))]
#[case(json!({"pre_pixel_shuffle": false}), json!({}),
    Some("pre_pixel_shuffle: false, but the tower's config.json asks for true"))]
#[case(json!({}), json!({"pre_pixel_shuffle": false}),
    Some("pre_pixel_shuffle: true, but the tower's config.json asks for false"))]
#[case(json!({"pre_pixel_shuffle": false}), json!({"pre_pixel_shuffle": false}), None)]
#[case(json!({"merge_size": 1}), json!({"pre_pixel_shuffle": false}), None)]
#[case(json!({}), json!({"num_channels": 4}),
    Some("num_channels: images have 3, but the tower's config.json asks for 4"))]
fn settings_must_be_those_of_the_tower(
    #[case] settings: Value,
    #[case] tower: Value,
    #[case] problem: Option<&str>,
) {
    let mut config = json!({"model_type": "dots_vit", "embed_dim": 64, "num_attention_heads": 2});
    config.as_object_mut().unwrap().extend(tower.as_object().unwrap().clone());
    let tower: DotsVitConfig = serde_json::from_value(config).unwrap();
    let answer = PreprocessorConfig::try_from(settings).unwrap().check_tower(&tower);
    let remedy = "use the two files of one model, or set it to the tower's";
    let expected = problem.map(|problem| format!("{problem}; {remedy}"));
    assert_eq!(answer.err().map(|error| error.to_string()), expected);
}
