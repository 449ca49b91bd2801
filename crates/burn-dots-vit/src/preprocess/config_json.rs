//! Reading a [`PreprocessorConfig`] out of a JSON object, key by key, so that errors name the key.

use serde_json::{Map, Value};

use super::{ConfigFieldError, PreprocessorConfig, SmartResize};

type Keys = Map<String, Value>;
type Parsed<T> = Result<T, ConfigFieldError>;

/// Builds and validates the configuration that `keys`, or its `vision_config` object, describes.
pub(super) fn resolve(keys: &Keys) -> Parsed<PreprocessorConfig> {
    let merged;
    let (keys, default_rule) = match present(keys, "vision_config") {
        None => (keys, SmartResize::HuggingFace),
        Some(Value::Object(nested)) => {
            let mut outer = keys.clone();
            outer.remove("vision_config");
            outer.extend(nested.iter().map(|(k, v)| (k.clone(), v.clone())));
            merged = outer;
            (&merged, SmartResize::DotsOcr)
        }
        Some(other) => return Err(mismatch("vision_config", "an object", other)),
    };
    refuse_unsupported(keys)?;

    let mut config =
        PreprocessorConfig { smart_resize: default_rule, ..PreprocessorConfig::default() };
    apply_size(keys, &mut config)?;
    assign(&mut config.min_pixels, count(keys, "min_pixels")?);
    assign(&mut config.max_pixels, count(keys, "max_pixels")?);
    assign(&mut config.patch_size, count(keys, "patch_size")?);
    assign(&mut config.temporal_patch_size, count(keys, "temporal_patch_size")?);
    assign(&mut config.merge_size, count(keys, "merge_size")?);
    assign(&mut config.image_mean, channels(keys, "image_mean")?);
    assign(&mut config.image_std, channels(keys, "image_std")?);
    assign(&mut config.rescale_factor, number(keys, "rescale_factor")?);
    assign(&mut config.do_resize, flag(keys, "do_resize")?);
    assign(&mut config.do_rescale, flag(keys, "do_rescale")?);
    assign(&mut config.do_normalize, flag(keys, "do_normalize")?);
    assign(&mut config.pre_pixel_shuffle, flag(keys, "pre_pixel_shuffle")?);
    assign(&mut config.apply_exif_orientation, flag(keys, "apply_exif_orientation")?);
    assign(
        &mut config.max_input_pixels,
        count(keys, "max_input_pixels")?.map(|pixels| pixels as u64),
    );
    if let Some(value) = present(keys, "smart_resize") {
        config.smart_resize = serde_json::from_value(value.clone())
            .map_err(|_| mismatch("smart_resize", "\"hugging_face\" or \"dots_ocr\"", value))?;
    }
    config.validate()?;
    Ok(config)
}

/// Refuses keys that ask for other pixels than this crate would make.
fn refuse_unsupported(keys: &Keys) -> Parsed<()> {
    if let Some(value) = present(keys, "resample") {
        let bicubic = value.as_f64() == Some(3.0)
            || value.as_str().is_some_and(|name| name.eq_ignore_ascii_case("bicubic"));
        if !bicubic {
            return Err(ConfigFieldError::new(
                "resample",
                format!("only bicubic (3) is implemented, got {value}"),
                "set it to 3, or resize the images yourself and set do_resize to false",
            ));
        }
    }
    let required = [
        ("do_convert_rgb", true),
        ("do_center_crop", false),
        ("do_pad", false),
        ("do_flip_channel_order", false),
    ];
    for (key, expected) in required {
        if flag(keys, key)?.is_some_and(|value| value != expected) {
            return Err(ConfigFieldError::new(
                key,
                format!("{} is not supported, the towers take whole RGB images", !expected),
                format!("set it to {expected}"),
            ));
        }
    }
    if let Some(value) = present(keys, "image_processor_type") {
        let known = value
            .as_str()
            .is_some_and(|name| name.starts_with("Qwen2") || name.starts_with("Dots"));
        if !known {
            return Err(ConfigFieldError::new(
                "image_processor_type",
                format!("expected a Qwen2-VL or Dots image processor, got {value}"),
                "pass the preprocessor_config.json of a Dots model",
            ));
        }
    }
    Ok(())
}

/// Reads `size`, the newer place of the two pixel counts.
fn apply_size(keys: &Keys, config: &mut PreprocessorConfig) -> Parsed<()> {
    let size = match present(keys, "size") {
        None => return Ok(()),
        Some(Value::Object(size)) => size,
        Some(other) => {
            return Err(mismatch(
                "size",
                "an object with shortest_edge and longest_edge (pixel counts)",
                other,
            ));
        }
    };
    for (key, value) in size.iter().filter(|(_, value)| !value.is_null()) {
        let field = match key.as_str() {
            "shortest_edge" | "min_pixels" => &mut config.min_pixels,
            "longest_edge" | "max_pixels" => &mut config.max_pixels,
            _ => {
                return Err(ConfigFieldError::new(
                    format!("size.{key}"),
                    "this key has no meaning for a smart resize",
                    "give size shortest_edge and longest_edge, as pixel counts",
                ));
            }
        };
        *field = as_count(&format!("size.{key}"), value)?;
    }
    Ok(())
}

/// A key's value, with `null` read as absent: released files spell defaults as `null`.
fn present<'a>(keys: &'a Keys, key: &str) -> Option<&'a Value> {
    keys.get(key).filter(|value| !value.is_null())
}

fn assign<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

fn mismatch(key: &str, expected: &str, value: &Value) -> ConfigFieldError {
    ConfigFieldError::new(
        key,
        format!("expected {expected}, got {value}"),
        "correct the value, or remove the key for the default",
    )
}

fn as_count(key: &str, value: &Value) -> Parsed<usize> {
    // Some files write counts as floats; a whole number is accepted in either spelling.
    let whole =
        value.as_f64().filter(|number| number.fract() == 0.0 && (0.0..=9.0e15).contains(number));
    value
        .as_u64()
        .or(whole.map(|number| number as u64))
        .and_then(|count| usize::try_from(count).ok())
        .ok_or_else(|| mismatch(key, "a whole number", value))
}

fn count(keys: &Keys, key: &str) -> Parsed<Option<usize>> {
    present(keys, key).map(|value| as_count(key, value)).transpose()
}

fn number(keys: &Keys, key: &str) -> Parsed<Option<f64>> {
    present(keys, key)
        .map(|value| value.as_f64().ok_or_else(|| mismatch(key, "a number", value)))
        .transpose()
}

fn flag(keys: &Keys, key: &str) -> Parsed<Option<bool>> {
    present(keys, key)
        .map(|value| value.as_bool().ok_or_else(|| mismatch(key, "true or false", value)))
        .transpose()
}

/// One number for all channels, or three of them.
fn channels(keys: &Keys, key: &str) -> Parsed<Option<[f32; 3]>> {
    let Some(value) = present(keys, key) else {
        return Ok(None);
    };
    let parsed = match value {
        Value::Array(items) => items
            .iter()
            .map(Value::as_f64)
            .collect::<Option<Vec<_>>>()
            .and_then(|numbers| <[f64; 3]>::try_from(numbers).ok()),
        other => other.as_f64().map(|number| [number; 3]),
    };
    parsed
        .map(|numbers| Some(numbers.map(|number| number as f32)))
        .ok_or_else(|| mismatch(key, "a number or three numbers", value))
}
