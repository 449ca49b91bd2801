//! What can be wrong with a `config.json`.

use std::path::PathBuf;

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(
        "cannot read {}: {source}; pass a config.json or the folder of a released model that holds one",
        path.display()
    )]
    Read {
        /// The file asked for.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not JSON.
    #[error("{} is not valid JSON ({source}); fetch the file again", path.display())]
    Syntax {
        /// The file read.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// JSON, but of something else.
    #[error(
        "{origin} describes {found}, not a Dots vision tower; expected model_type dots_vit, \
         dots_moe_vit or dots3_note_vision_encoder, at the top or under vision_config"
    )]
    NotADotsTower {
        /// The file, or `config` for a value that came from none.
        origin: String,
        /// What it seems to be.
        found: String,
    },
    /// A field that is of the wrong type, out of range or at odds with another.
    #[error("{origin}: {field} = {value}: {remedy}")]
    Field {
        /// The file, or `config` for a value that came from none.
        origin: String,
        /// Name of the field.
        field: String,
        /// Its value.
        value: String,
        /// What would be right.
        remedy: String,
    },
}
