#![allow(clippy::unwrap_used)]

use rstest::rstest;
use serde_json::{Value, json};

use super::*;

fn parse(value: Value) -> Result<DotsVitConfig, ConfigError> {
    DotsVitConfig::try_from(value)
}

#[test]
fn released_dense_config_nested_and_bare() {
    let tower = json!({
        "embed_dim": 1536, "hidden_size": 1536, "num_hidden_layers": 42, "num_attention_heads": 12,
        "intermediate_size": 4224, "use_bias": false, "attn_implementation": "flash_attention_2",
        "init_merger_std": 0.02, "initializer_range": 0.02,
    });
    let nested = json!({"model_type": "dots_ocr", "hidden_size": 99, "vision_config": tower});
    assert_eq!(parse(nested).unwrap(), DotsVitConfig::dots_vit());
    assert_eq!(parse(tower).unwrap(), DotsVitConfig::dots_vit());
}

#[test]
fn released_moe_config() {
    let mut pyramid = vec![-1; 25];
    pyramid.extend((4..=64).step_by(4));
    pyramid.push(64);
    let config = parse(json!({"model_type": "dots3_note", "vision_config": {
        "model_type": "dots_moe_vit", "embed_dim": 1536, "hidden_size": 5120,
        "pyramid_num_routed": pyramid, "capacity_factor": 2, "adapter_in_dim": 1536,
        "adapter_out_dim": 5120, "adapter_type": "patch_merger", "pre_pixel_shuffle": true,
        "enable_fp8_moe": true,
    }}))
    .unwrap();
    assert_eq!(config.num_experts(24), None);
    assert_eq!(config.num_experts(25), Some(4));
    assert_eq!(config.num_experts(41), Some(64));
    assert_eq!(config.experts_per_token(64), 2);
    assert_eq!((config.head_dim(), config.use_qk_norm), (64, true));
    assert_eq!(config.position_order(), PositionOrder::MergeGrouped(2));
    assert_eq!(config.attn_implementation, AttentionImplementation::FlashAttention3);
}

#[test]
fn hf_native_dialect_means_the_same_tower() {
    let hf = parse(json!({
        "model_type": "dots3_note_vision_encoder", "hidden_size": 64, "num_attention_heads": 2,
        "num_hidden_layers": 3, "intermediate_size": 176, "moe_intermediate_size": 88,
        "attention_bias": true, "mlp_bias": true, "router_scaling_factor": 1.5,
        "num_experts_per_tok": 3, "adapter_in_dim": 64, "adapter_out_dim": 96,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "num_local_experts": 16,
        "per_layer_config": {"1": {"num_local_experts": 4}},
    }))
    .unwrap();
    let release = parse(json!({
        "model_type": "dots_moe_vit", "embed_dim": 64, "hidden_size": 96, "num_attention_heads": 2,
        "num_hidden_layers": 3, "intermediate_size": 176, "moe_intermediate_size": 88,
        "use_bias": true, "router_scale": 1.5, "capacity_factor": 3.0, "adapter_out_dim": 96,
        "pyramid_num_routed": [-1, 4, 16], "adapter_type": "patch_merger", "pre_pixel_shuffle": true,
    }))
    .unwrap();
    assert_eq!(hf, release);
}

#[test]
fn hidden_size_is_the_width_only_without_embed_dim() {
    let config = parse(json!({"model_type": "dots_vit", "embed_dim": 64, "hidden_size": 96,
        "num_attention_heads": 2}))
    .unwrap();
    assert_eq!((config.embed_dim, config.adapter_out_dim), (64, 96));
    let config = parse(json!({"model_type": "dots_moe_vit", "hidden_size": 96,
        "num_attention_heads": 2, "attention_bias": false}))
    .unwrap();
    assert_eq!((config.embed_dim, config.adapter_out_dim), (96, 5120));
}

#[test]
fn round_trips_through_its_own_json() {
    let mut config = DotsVitConfig::dots_moe_vit();
    config.router_semantics = RouterSemantics::Transformers;
    config.rope_table_dtype = RopeTableDtype::Bfloat16;
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<DotsVitConfig>(&text).unwrap(), config);
}

#[rstest]
#[case(json!([1]), "not a Dots vision tower")]
#[case(json!({"model_type": "bert", "hidden_size": 768}), "a `bert` model")]
#[case(json!({"model_type": "qwen2_vl", "vision_config": {"embed_dim": 1280}}), "a `qwen2_vl` model")]
#[case(json!({"vision_config": {"model_type": "siglip_vision_model"}}), "a `siglip_vision_model` model")]
#[case(json!({"vision_config": 3}), "not an object")]
#[case(json!({"hidden_size": 768}), "without model_type")]
#[case(json!({"model_type": "dots_ocr", "vocab_size": 7}), "without vision_config")]
fn other_models_are_refused(#[case] value: Value, #[case] needle: &str) {
    let error = parse(value).unwrap_err();
    assert!(matches!(error, ConfigError::NotADotsTower { .. }), "{error}");
    assert!(error.to_string().contains(needle), "{error}");
}

#[rstest]
#[case("embed_dim", json!("big"), "expected a whole number")]
#[case("embed_dim", json!(-1), "expected a whole number")]
#[case("embed_dim", json!(64.5), "expected a whole number")]
#[case("embed_dim", json!(1u64 << 40), "from 1 to 1048576")]
#[case("embed_dim", json!(0), "from 1 to")]
#[case("num_attention_heads", json!(0), "from 1 to")]
#[case("num_attention_heads", json!(7), "must divide embed_dim = 1536")]
#[case("num_attention_heads", json!(768), "divisible by 4")]
#[case("num_hidden_layers", json!(0), "from 1 to")]
#[case("patch_size", json!(0), "from 1 to")]
#[case("rms_norm_eps", json!(0.0), "positive")]
#[case("use_bias", json!("no"), "expected true or false")]
#[case("pyramid_num_routed", json!([4]), "num_hidden_layers = 42")]
#[case("pyramid_num_routed", json!(vec![4096; 42]), "at most 65536 experts in all layers together")]
#[case("num_hidden_layers", json!(1_000_000), "from 1 to 1024")]
#[case("pyramid_num_routed", json!([4, "x"]), "entry 1: expected a whole number")]
#[case("pyramid_num_routed", json!(4), "expected a list")]
#[case("capacity_factor", json!(0.5), "at least 1")]
#[case("router_scale", json!(0.0), "other than 0")]
#[case("router_scoring_func", json!("relu"), "expected one of sigmoid, softmax")]
#[case("adapter_type", json!("mlp"), "expected one of patch_merger, pixel_shuffle_mlp")]
#[case("adapter_in_dim", json!(8), "must equal the tower's width, 1536")]
#[case("adapter_merge_size", json!(3), "2 x 2")]
#[case("attn_implementation", json!("turbo"), "flash_attention_2")]
#[case("eager_fallback", json!("flash_attention_2"), "use eager, eager_v2 or sdpa")]
#[case("eager_fallback", json!("flash_attention_3"), "use eager, eager_v2 or sdpa")]
#[case("attention_bias", json!(true), "contradicts use_bias = false")]
fn bad_fields_are_named(#[case] field: &str, #[case] value: Value, #[case] needle: &str) {
    let mut config = json!({"model_type": "dots_moe_vit", "embed_dim": 1536, "use_bias": false});
    config[field] = value.clone();
    let error = parse(config).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, ConfigError::Field { .. }), "{text}");
    assert!(text.contains(&format!("{field} = ")) && text.contains(needle), "{text}");
    assert!(!text.contains('\n'), "{text}");
}

#[rstest]
fn every_plain_implementation_is_a_fallback(#[values("eager", "eager_v2", "sdpa")] name: &str) {
    let config = json!({"model_type": "dots_vit", "embed_dim": 1536, "eager_fallback": name});
    let config = parse(config).unwrap();
    assert_eq!(config.eager_fallback.name(), name);
}

#[test]
fn patch_merger_needs_the_groups_it_merges() {
    let mut config = DotsVitConfig::dots_vit();
    config.spatial_merge_size = 4;
    let text = config.validate().unwrap_err().to_string();
    assert!(text.contains("adapter_merge_size = 2") && text.contains("4 x 4"), "{text}");
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = DotsVitConfig::from_file(dir.path()).unwrap_err();
    assert!(matches!(error, ConfigError::Read { .. }) && error.to_string().contains("config.json"));
    let path = dir.path().join("config.json");
    std::fs::write(&path, "{\"embed_dim\": 15").unwrap();
    let error = DotsVitConfig::from_file(&path).unwrap_err();
    assert!(matches!(error, ConfigError::Syntax { .. }), "{error}");
    std::fs::write(&path, "{\"model_type\": \"dots_vit\", \"embed_dim\": 0}").unwrap();
    let text = DotsVitConfig::from_file(&path).unwrap_err().to_string();
    assert!(text.contains("config.json") && text.contains("embed_dim = 0"), "{text}");
}
