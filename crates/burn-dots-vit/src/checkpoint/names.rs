//! The names a tower's tensors go by.
//!
//! Inside this crate every tensor has its *canonical* name: that of the dots3-note release without
//! prefix (`blocks.0.norm_1.weight`, `adapter.mlp.0.weight`).

use crate::config::{AdapterType, DotsModelType};

/// What the tower's keys begin with in the checkpoints known.
pub(super) const PREFIXES: [&str; 7] = [
    "vision_tower.",
    "vision_encoder.",
    "visual.",
    "model.vision_tower.",
    "model.vision_encoder.",
    "model.visual.",
    "",
];

/// Whether `key`, stripped of its prefix, belongs to a tower.
pub(super) fn is_tower_key(key: &str) -> bool {
    const ROOTS: [&str; 6] =
        ["patch_embed.", "blocks.", "post_trunk_norm.", "norm.", "adapter.", "merger."];
    ROOTS.iter().any(|root| key.starts_with(root))
}

/// The canonical name of `key`, a key without prefix in any dialect: the dots.ocr and dots3-note
/// releases, vLLM's aliases, and transformers' own names.
pub(super) fn canonical(key: &str) -> String {
    let parts: Vec<&str> = key.split('.').collect();
    match parts.as_slice() {
        ["patch_embed", "patchifier", rest @ ..] => format!("patch_embed.{}", rest.join(".")),
        ["merger", rest @ ..] => format!("adapter.{}", rest.join(".")),
        ["norm", rest @ ..] => format!("post_trunk_norm.{}", rest.join(".")),
        ["blocks", block, rest @ ..] => format!("blocks.{block}.{}", canonical_in_block(rest)),
        _ => key.to_string(),
    }
}

fn canonical_in_block(parts: &[&str]) -> String {
    match parts {
        ["norm1", rest @ ..] => format!("norm_1.{}", rest.join(".")),
        ["norm2", rest @ ..] => format!("norm_2.{}", rest.join(".")),
        ["attn", "qkv_proj", rest @ ..] => format!("attn.qkv.{}", rest.join(".")),
        ["attn", "out_proj", rest @ ..] => format!("attn.proj.{}", rest.join(".")),
        ["mlp", "gate", "weight"] => "mlp.gate_weight".into(),
        ["mlp", "e_score_correction_bias"] | ["mlp", "gate", "e_score_correction_bias"] => {
            "mlp.router_bias".into()
        }
        ["mlp", "experts", expert, projection, rest @ ..] => {
            format!("mlp.experts.{expert}.{}.{}", swiglu(projection), rest.join("."))
        }
        ["mlp", projection, rest @ ..] if !rest.is_empty() && *projection != "experts" => {
            format!("mlp.{}.{}", swiglu(projection), rest.join("."))
        }
        _ => parts.join("."),
    }
}

/// transformers' names of the three projections to the release's.
fn swiglu(projection: &str) -> &str {
    match projection {
        "gate_proj" => "fc1",
        "up_proj" => "fc3",
        "down_proj" => "fc2",
        other => other,
    }
}

/// Where else the tensor `canonical` of `shape` may be stored: as one of `parts` equal, consecutive
/// pieces of a larger tensor.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fused {
    /// Canonical name of the larger tensor.
    pub key: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Which piece.
    pub part: usize,
}

/// fc1 and fc3 fused into `fc13` (gate rows first), and transformers' stacks of all experts.
pub(super) fn fused(canonical: &str, shape: &[usize], num_experts: Option<usize>) -> Vec<Fused> {
    let mut found = Vec::new();
    let parts: Vec<&str> = canonical.split('.').collect();
    let [head @ .., projection, leaf] = parts.as_slice() else {
        return found;
    };
    let Some(half) = (match *projection {
        "fc1" => Some(Some(0)),
        "fc3" => Some(Some(1)),
        "fc2" => Some(None),
        _ => None,
    }) else {
        return found;
    };
    let head = head.join(".");
    if let Some(half) = half {
        let mut shape = shape.to_vec();
        shape[0] *= 2;
        found.push(Fused { key: format!("{head}.fc13.{leaf}"), shape, part: half });
    }
    if let (Some(experts), "weight", [out, inner]) = (num_experts, *leaf, shape)
        && let Some((stack, expert)) = head.rsplit_once('.')
        && let Ok(expert) = expert.parse::<usize>()
    {
        let (name, rows, part) = match half {
            Some(half) => ("gate_up_proj", 2 * out, 2 * expert + half),
            None => ("down_proj", *out, expert),
        };
        found.push(Fused {
            key: format!("{stack}.{name}"),
            shape: vec![experts, rows, *inner],
            part,
        });
    }
    found
}

/// The block that a canonical name belongs to.
pub(super) fn block_of(canonical: &str) -> Option<usize> {
    canonical.strip_prefix("blocks.")?.split('.').next()?.parse().ok()
}

/// The canonical name of a module's parameter, from its path in the module (without enum variants).
pub(super) fn from_module_path(path: &[String], adapter: AdapterType) -> String {
    let parts: Vec<&str> = path.iter().map(String::as_str).collect();
    let sequential = match (parts.as_slice(), adapter) {
        (["adapter", "fc1", ..], AdapterType::PatchMerger) => Some("mlp.0"),
        (["adapter", "fc2", ..], AdapterType::PatchMerger) => Some("mlp.2"),
        (["adapter", "norm", ..], AdapterType::PixelShuffleMlp) => Some("proj.0"),
        (["adapter", "fc1", ..], AdapterType::PixelShuffleMlp) => Some("proj.1"),
        (["adapter", "fc2", ..], AdapterType::PixelShuffleMlp) => Some("proj.3"),
        _ => None,
    };
    let (last, middle) = parts.split_last().expect("parameters have names");
    let leaf = match *last {
        "gamma" => "weight",
        "beta" => "bias",
        other => other,
    };
    match sequential {
        Some(name) => format!("adapter.{name}.{leaf}"),
        None => middle.iter().chain([&leaf]).copied().collect::<Vec<_>>().join("."),
    }
}

/// Prefix and name under which a release of `model_type` stores the tensor `canonical`.
pub(super) fn released(canonical: &str, model_type: DotsModelType) -> String {
    if model_type == DotsModelType::DotsMoeVit {
        return format!("vision_encoder.{canonical}");
    }
    let name = if let Some(rest) = canonical.strip_prefix("patch_embed.") {
        format!("patch_embed.patchifier.{rest}")
    } else if let Some(rest) = canonical.strip_prefix("adapter.") {
        format!("merger.{rest}")
    } else {
        canonical.replace(".norm_1.", ".norm1.").replace(".norm_2.", ".norm2.")
    };
    format!("vision_tower.{name}")
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("patch_embed.patchifier.proj.weight", "patch_embed.proj.weight")]
    #[case("patch_embed.norm.weight", "patch_embed.norm.weight")]
    #[case("merger.mlp.0.bias", "adapter.mlp.0.bias")]
    #[case("norm.weight", "post_trunk_norm.weight")]
    #[case("blocks.7.norm1.weight", "blocks.7.norm_1.weight")]
    #[case("blocks.7.attn.qkv_proj.weight", "blocks.7.attn.qkv.weight")]
    #[case("blocks.7.attn.out_proj.bias", "blocks.7.attn.proj.bias")]
    #[case("blocks.7.mlp.gate_proj.weight", "blocks.7.mlp.fc1.weight")]
    #[case("blocks.7.mlp.up_proj.weight", "blocks.7.mlp.fc3.weight")]
    #[case("blocks.7.mlp.down_proj.weight", "blocks.7.mlp.fc2.weight")]
    #[case("blocks.7.mlp.gate.weight", "blocks.7.mlp.gate_weight")]
    #[case("blocks.7.mlp.gate_weight", "blocks.7.mlp.gate_weight")]
    #[case("blocks.7.mlp.e_score_correction_bias", "blocks.7.mlp.router_bias")]
    #[case("blocks.7.mlp.experts.3.gate_proj.weight", "blocks.7.mlp.experts.3.fc1.weight")]
    #[case("blocks.7.mlp.experts.gate_up_proj", "blocks.7.mlp.experts.gate_up_proj")]
    #[case("blocks.7.mlp.experts.down_proj", "blocks.7.mlp.experts.down_proj")]
    #[case("blocks.7.mlp.fc13.weight", "blocks.7.mlp.fc13.weight")]
    fn dialects(#[case] key: &str, #[case] expected: &str) {
        assert_eq!(canonical(key), expected);
        assert_eq!(canonical(expected), expected);
    }

    #[test]
    fn pieces_of_larger_tensors() {
        let dense = fused("blocks.1.mlp.fc3.weight", &[5, 3], None);
        assert_eq!(
            dense,
            [Fused { key: "blocks.1.mlp.fc13.weight".into(), shape: vec![10, 3], part: 1 }]
        );
        let expert = fused("blocks.1.mlp.experts.2.fc3.weight", &[5, 3], Some(4));
        assert_eq!(
            expert,
            [
                Fused {
                    key: "blocks.1.mlp.experts.2.fc13.weight".into(),
                    shape: vec![10, 3],
                    part: 1
                },
                Fused {
                    key: "blocks.1.mlp.experts.gate_up_proj".into(),
                    shape: vec![4, 10, 3],
                    part: 5
                },
            ]
        );
        let down = fused("blocks.1.mlp.experts.2.fc2.weight", &[3, 5], Some(4));
        assert_eq!(
            down,
            [Fused { key: "blocks.1.mlp.experts.down_proj".into(), shape: vec![4, 3, 5], part: 2 }]
        );
        assert!(fused("blocks.1.attn.qkv.weight", &[9, 3], None).is_empty());
    }

    #[rstest]
    #[case(DotsModelType::DotsVit, "blocks.0.norm_1.weight", "vision_tower.blocks.0.norm1.weight")]
    #[case(
        DotsModelType::DotsVit,
        "patch_embed.proj.bias",
        "vision_tower.patch_embed.patchifier.proj.bias"
    )]
    #[case(DotsModelType::DotsVit, "adapter.mlp.2.weight", "vision_tower.merger.mlp.2.weight")]
    #[case(
        DotsModelType::DotsMoeVit,
        "blocks.0.norm_1.weight",
        "vision_encoder.blocks.0.norm_1.weight"
    )]
    fn names_on_disk(#[case] model: DotsModelType, #[case] name: &str, #[case] expected: &str) {
        let released = released(name, model);
        assert_eq!(released, expected);
        let stripped = PREFIXES.iter().find_map(|prefix| released.strip_prefix(prefix));
        assert_eq!(stripped.map(canonical).as_deref(), Some(name));
    }
}
