//! Both dialects of `config.json`.
//!
//! The release dialect (vLLM, sglang, the checkpoints) calls the tower's width `embed_dim` and
//! the language model's `hidden_size`; transformers' own dialect calls the tower's width
//! `hidden_size`. `embed_dim` present therefore decides what `hidden_size` means.

use std::str::FromStr;

use burn_vision_attention::AttentionImplementation;
use serde_json::{Map, Value};

use super::{AdapterType, ConfigError, DotsModelType, DotsVitConfig};

/// `model_type` of whole models whose `vision_config` may leave its own out.
const DENSE_MODELS: &[&str] = &["dots_vit", "dots_ocr", "dots_mocr", "dots_vlm", "dots_vlm1"];
const MOE_MODELS: &[&str] = &["dots_moe_vit", "dots3_note", "dots3_note_vision_encoder"];
/// `model_type` of transformers' own class for the mixture-of-experts tower.
const HF_TOWER: &str = "dots3_note_vision_encoder";

/// Reads a tower's config out of `value`; `origin` names it in errors.
pub(super) fn config(value: &Value, origin: &str) -> Result<DotsVitConfig, ConfigError> {
    let not_dots = |found: String| ConfigError::NotADotsTower { origin: origin.to_string(), found };
    let outer =
        value.as_object().ok_or_else(|| not_dots("something other than a JSON object".into()))?;
    let nested = outer.get("vision_config").filter(|value| !value.is_null());
    let tower = match nested {
        Some(nested) => nested
            .as_object()
            .ok_or_else(|| not_dots("a vision_config that is not an object".into()))?,
        None => outer,
    };
    let named = [tower, outer].iter().find_map(|map| map.get("model_type").and_then(Value::as_str));
    let model_type = match named {
        Some(name) if DENSE_MODELS.contains(&name) => DotsModelType::DotsVit,
        Some(name) if MOE_MODELS.contains(&name) => DotsModelType::DotsMoeVit,
        Some(name) => return Err(not_dots(format!("a `{name}` model"))),
        None if tower.contains_key("pyramid_num_routed") => DotsModelType::DotsMoeVit,
        None if tower.contains_key("embed_dim") => DotsModelType::DotsVit,
        None => return Err(not_dots("a model without model_type or embed_dim".into())),
    };
    if nested.is_none() && !["embed_dim", "hidden_size"].iter().any(|k| tower.contains_key(*k)) {
        return Err(not_dots("a model without vision_config, embed_dim or hidden_size".into()));
    }
    let fields = Fields { map: tower, origin };
    let hf_native = !tower.contains_key("embed_dim")
        && (tower.get("model_type").and_then(Value::as_str) == Some(HF_TOWER)
            || ["attention_bias", "mlp_layer_types", "per_layer_config"]
                .iter()
                .any(|key| tower.contains_key(*key)));
    let config = read(&fields, model_type, hf_native)?;
    config.validate_from(origin)?;
    Ok(config)
}

fn read(
    fields: &Fields<'_>,
    model_type: DotsModelType,
    hf_native: bool,
) -> Result<DotsVitConfig, ConfigError> {
    let mut c = match (model_type, hf_native) {
        (DotsModelType::DotsVit, _) => DotsVitConfig::dots_vit(),
        (DotsModelType::DotsMoeVit, false) => DotsVitConfig::dots_moe_vit(),
        (DotsModelType::DotsMoeVit, true) => hf_defaults(),
    };
    read_widths(fields, &mut c)?;
    fields.set("intermediate_size", &mut c.intermediate_size)?;
    fields.set("moe_intermediate_size", &mut c.moe_intermediate_size)?;
    fields.set("num_hidden_layers", &mut c.num_hidden_layers)?;
    fields.set_any(&["num_attention_heads", "num_heads"], &mut c.num_attention_heads)?;
    fields.set("num_channels", &mut c.num_channels)?;
    fields.set("patch_size", &mut c.patch_size)?;
    fields.set("spatial_merge_size", &mut c.spatial_merge_size)?;
    fields.set("temporal_patch_size", &mut c.temporal_patch_size)?;
    fields.set("rms_norm_eps", &mut c.rms_norm_eps)?;
    fields.set_any(&["use_bias", "attention_bias"], &mut c.use_bias)?;
    let mut mlp_bias = c.use_bias;
    fields.set("mlp_bias", &mut mlp_bias)?;
    if mlp_bias != c.use_bias {
        let remedy = format!(
            "must equal attention_bias = {}: the tower has one switch for both",
            c.use_bias
        );
        return Err(fields.error("mlp_bias", mlp_bias.to_string(), remedy));
    }
    fields.set("use_qk_norm", &mut c.use_qk_norm)?;
    fields.set("is_causal", &mut c.is_causal)?;
    fields.set("post_norm", &mut c.post_norm)?;
    fields.set("attn_implementation", &mut c.attn_implementation)?;
    fields.set("eager_fallback", &mut c.eager_fallback)?;
    fields.set_any(&["capacity_factor", "num_experts_per_tok"], &mut c.capacity_factor)?;
    fields.set("router_scoring_func", &mut c.router_scoring_func)?;
    fields.set_any(&["router_scale", "router_scaling_factor"], &mut c.router_scale)?;
    fields.set("router_semantics", &mut c.router_semantics)?;
    fields.set("adapter_type", &mut c.adapter_type)?;
    fields.set("pre_pixel_shuffle", &mut c.pre_pixel_shuffle)?;
    fields.set("rope_table_dtype", &mut c.rope_table_dtype)?;
    // The dense tower has no adapter fields: its merger follows the language model's width.
    if model_type == DotsModelType::DotsVit {
        c.adapter_out_dim = c.hidden_size;
        c.adapter_merge_size = c.spatial_merge_size.max(2);
    }
    fields.set("adapter_out_dim", &mut c.adapter_out_dim)?;
    fields.set("adapter_merge_size", &mut c.adapter_merge_size)?;
    let mut adapter_in = c.embed_dim;
    fields.set("adapter_in_dim", &mut adapter_in)?;
    if adapter_in != c.embed_dim {
        let remedy = format!("must equal the tower's width, {}", c.embed_dim);
        return Err(fields.error("adapter_in_dim", adapter_in.to_string(), remedy));
    }
    fields.set("pyramid_num_routed", &mut c.pyramid_num_routed)?;
    if !fields.has("pyramid_num_routed") && fields.has("mlp_layer_types") {
        c.pyramid_num_routed = layer_experts(fields)?;
    }
    Ok(c)
}

/// What transformers' class is fixed to, and its own defaults.
fn hf_defaults() -> DotsVitConfig {
    let mut pyramid = vec![-1; 25];
    pyramid.extend((4..=64).step_by(4));
    pyramid.push(64);
    DotsVitConfig {
        hidden_size: 5120,
        pyramid_num_routed: pyramid,
        adapter_type: AdapterType::PatchMerger,
        adapter_out_dim: 5120,
        pre_pixel_shuffle: true,
        ..DotsVitConfig::dots_moe_vit()
    }
}

/// `embed_dim` and `hidden_size`, whose meaning depends on whether the former is there.
fn read_widths(fields: &Fields<'_>, c: &mut DotsVitConfig) -> Result<(), ConfigError> {
    if fields.has("embed_dim") {
        fields.set("embed_dim", &mut c.embed_dim)?;
        fields.set("hidden_size", &mut c.hidden_size)
    } else {
        fields.set("hidden_size", &mut c.embed_dim)?;
        fields.set("adapter_out_dim", &mut c.hidden_size)
    }
}

/// transformers' `mlp_layer_types` and `per_layer_config` as experts per layer.
fn layer_experts(fields: &Fields<'_>) -> Result<Vec<i64>, ConfigError> {
    let mut kinds: Vec<String> = Vec::new();
    fields.set("mlp_layer_types", &mut kinds)?;
    let mut default_experts = 64usize;
    fields.set("num_local_experts", &mut default_experts)?;
    let per_layer = fields.map.get("per_layer_config").and_then(Value::as_object);
    kinds
        .iter()
        .enumerate()
        .map(|(layer, kind)| match kind.as_str() {
            "dense" => Ok(-1),
            "sparse" => {
                let mut experts = default_experts;
                if let Some(map) = per_layer
                    .and_then(|layers| layers.get(&layer.to_string()))
                    .and_then(Value::as_object)
                {
                    let origin = format!("{}: per_layer_config.{layer}", fields.origin);
                    let layer_fields = Fields { map, origin: &origin };
                    layer_fields.set("num_local_experts", &mut experts)?;
                }
                i64::try_from(experts).map_err(|_| {
                    fields.error("num_local_experts", experts.to_string(), "too large".into())
                })
            }
            other => Err(fields.error(
                &format!("mlp_layer_types[{layer}]"),
                other.to_string(),
                "expected dense or sparse".into(),
            )),
        })
        .collect()
}

/// The tower's JSON object, with typed access whose errors name field, value and file.
struct Fields<'a> {
    map: &'a Map<String, Value>,
    origin: &'a str,
}

impl Fields<'_> {
    fn error(&self, field: &str, value: String, remedy: String) -> ConfigError {
        ConfigError::Field {
            origin: self.origin.to_string(),
            field: field.to_string(),
            value,
            remedy,
        }
    }

    fn has(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(|value| !value.is_null())
    }

    /// Overwrites `target` where the field is present and not null.
    fn set<T: FromJson>(&self, key: &str, target: &mut T) -> Result<(), ConfigError> {
        if let Some(value) = self.map.get(key).filter(|value| !value.is_null()) {
            *target =
                T::from_json(value).map_err(|remedy| self.error(key, value.to_string(), remedy))?;
        }
        Ok(())
    }

    /// [`Self::set`] for a field with a name in each dialect, which must not contradict.
    fn set_any<T: FromJson + PartialEq>(
        &self,
        keys: &[&str],
        target: &mut T,
    ) -> Result<(), ConfigError> {
        let mut first: Option<(&str, T)> = None;
        for key in keys.iter().filter(|key| self.has(key)) {
            let value = &self.map[*key];
            let parsed =
                T::from_json(value).map_err(|remedy| self.error(key, value.to_string(), remedy))?;
            match &first {
                Some((earlier, known)) if *known != parsed => {
                    let remedy =
                        format!("contradicts {earlier} = {}; keep one", self.map[*earlier]);
                    return Err(self.error(key, value.to_string(), remedy));
                }
                Some(_) => {}
                None => first = Some((key, parsed)),
            }
        }
        if let Some((_, value)) = first {
            *target = value;
        }
        Ok(())
    }
}

/// A field's type; the error says what was expected.
trait FromJson: Sized {
    fn from_json(value: &Value) -> Result<Self, String>;
}

impl FromJson for usize {
    fn from_json(value: &Value) -> Result<Self, String> {
        value
            .as_u64()
            .and_then(|number| usize::try_from(number).ok())
            .ok_or_else(|| "expected a whole number, not negative".into())
    }
}

impl FromJson for f64 {
    fn from_json(value: &Value) -> Result<Self, String> {
        value.as_f64().ok_or_else(|| "expected a number".into())
    }
}

impl FromJson for bool {
    fn from_json(value: &Value) -> Result<Self, String> {
        value.as_bool().ok_or_else(|| "expected true or false".into())
    }
}

impl FromJson for String {
    fn from_json(value: &Value) -> Result<Self, String> {
        value.as_str().map(str::to_string).ok_or_else(|| "expected text".into())
    }
}

impl FromJson for i64 {
    fn from_json(value: &Value) -> Result<Self, String> {
        value.as_i64().ok_or_else(|| "expected a whole number".into())
    }
}

impl<T: FromJson> FromJson for Vec<T> {
    fn from_json(value: &Value) -> Result<Self, String> {
        let items = value.as_array().ok_or_else(|| "expected a list".to_string())?;
        items
            .iter()
            .enumerate()
            .map(|(i, item)| T::from_json(item).map_err(|remedy| format!("entry {i}: {remedy}")))
            .collect()
    }
}

/// Enums by name.
macro_rules! from_json_by_name {
    ($($name:ty),+) => {$(
        impl FromJson for $name {
            fn from_json(value: &Value) -> Result<Self, String> {
                let text = String::from_json(value)?;
                <$name>::from_str(&text).map_err(|error| error.to_string())
            }
        }
    )+};
}
from_json_by_name!(
    AdapterType,
    super::RouterScoring,
    super::RouterSemantics,
    super::RopeTableDtype,
    AttentionImplementation
);
