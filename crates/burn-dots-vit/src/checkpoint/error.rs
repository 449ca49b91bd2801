//! What can be wrong with a checkpoint.

use std::fmt;
use std::path::PathBuf;

use burn::tensor::DType;

use super::names::PREFIXES;
use crate::config::ConfigError;

/// A tensor of another shape than the tower's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeMismatch {
    /// Key in the checkpoint, without the tower's prefix.
    pub key: String,
    /// The shape the config asks for, as PyTorch stores it (`[out, in]` for linear weights).
    pub expected: Vec<usize>,
    /// The shape in the file.
    pub found: Vec<usize>,
}

impl fmt::Display for ShapeMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (expected {:?}, found {:?})", self.key, self.expected, self.found)
    }
}

/// What became of every tensor of a checkpoint's tower. Keys are without the prefix; `Display`
/// lists them all, one to a line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// The safetensors files opened: of a sharded checkpoint those that hold part of the tower.
    pub files: Vec<PathBuf>,
    /// What the tower's keys begin with.
    pub prefix: String,
    /// Number of parameters loaded.
    pub loaded: usize,
    /// Parameters without a tensor.
    pub missing: Vec<String>,
    /// Tensors of another shape than their parameters.
    pub mismatched: Vec<ShapeMismatch>,
    /// Tensors of the tower that no parameter takes.
    pub unused: Vec<String>,
}

impl LoadReport {
    /// Whether every parameter has its tensor. Unused tensors do not count.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.mismatched.is_empty()
    }

    /// One line that names up to three keys of each kind; empty where every tensor was used and every
    /// parameter loaded. The keys are the file's own, control characters included.
    pub fn summary(&self) -> String {
        let shapes: Vec<String> = self.mismatched.iter().map(ToString::to_string).collect();
        [("missing", &self.missing), ("mis-shaped", &shapes), ("unused", &self.unused)]
            .into_iter()
            .filter(|(_, keys)| !keys.is_empty())
            .map(|(kind, keys)| {
                let shown = keys.iter().take(3).cloned().collect::<Vec<_>>().join(", ");
                let more = match keys.len().saturating_sub(3) {
                    0 => String::new(),
                    more => format!(" and {more} more"),
                };
                format!("{} {kind}: {shown}{more}", keys.len())
            })
            .collect::<Vec<_>>()
            .join("; ")
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files: Vec<String> = self.files.iter().map(|path| path.display().to_string()).collect();
        write!(
            f,
            "loaded {} parameters with prefix `{}` from {}; {} missing, {} mis-shaped, {} unused",
            self.loaded,
            self.prefix,
            files.join(", "),
            self.missing.len(),
            self.mismatched.len(),
            self.unused.len()
        )?;
        for key in &self.missing {
            write!(f, "\nmissing: {key}")?;
        }
        for mismatch in &self.mismatched {
            write!(f, "\nmis-shaped: {mismatch}")?;
        }
        for key in &self.unused {
            write!(f, "\nunused: {key}")?;
        }
        Ok(())
    }
}

/// A checkpoint that cannot be loaded or saved.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The `config.json` beside the weights.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No weights where they were looked for.
    #[error(
        "{} holds neither model.safetensors nor model.safetensors.index.json nor a single other \
         .safetensors file; pass a released model's folder or one of its files",
        path.display()
    )]
    NoWeights {
        /// The folder.
        path: PathBuf,
    },
    /// A file that cannot be opened or read.
    #[error("cannot read {}: {source}; check that it exists and may be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A shard index that says nothing useful.
    #[error("{} is not a safetensors index: {reason}; fetch it again", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A shard with part of the tower that is not there.
    #[error("{} lists {tensors} tensors of the tower in {shard}, which is not there; fetch it", index.display())]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The missing file's name.
        shard: String,
        /// How many of the tower's tensors it holds.
        tensors: usize,
    },
    /// A damaged or truncated file, or one of another format.
    #[error("{} is truncated or not a safetensors file ({reason}); fetch it again", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What the header check found.
        reason: String,
    },
    /// A checkpoint of something else.
    #[error(
        "no Dots vision tower in {}: no key like blocks.0.norm_1.weight with prefix {}; pass the \
         checkpoint (or shard) that holds the vision weights",
        path.display(), PREFIXES.map(|p| format!("`{p}`")).join(", ")
    )]
    NoTower {
        /// The file or folder.
        path: PathBuf,
    },
    /// Two towers in one checkpoint.
    #[error(
        "{} holds towers with the prefixes {}; keep one of them in the file to load",
        path.display(), prefixes.join(", ")
    )]
    SeveralTowers {
        /// The file or folder.
        path: PathBuf,
        /// Their prefixes.
        prefixes: Vec<String>,
    },
    /// Two tensors for one parameter.
    #[error("{first} and {second} both hold the parameter {parameter}; remove one of them")]
    Duplicate {
        /// The parameter in the release's naming.
        parameter: String,
        /// One key.
        first: String,
        /// The other.
        second: String,
    },
    /// A tensor in a number format that the tower cannot take.
    #[error(
        "{}: {tensor} is stored as {dtype}, not BF16, F16 or F32; convert the checkpoint to one of these",
        path.display()
    )]
    StoredDtype {
        /// The file.
        path: PathBuf,
        /// Key of the tensor.
        tensor: String,
        /// Its format.
        dtype: String,
    },
    /// A dtype the tower cannot be loaded as.
    #[error("cannot load a tower as {dtype:?} on {device}: {remedy}")]
    TargetDtype {
        /// The dtype asked for.
        dtype: DType,
        /// The device.
        device: String,
        /// What to ask for instead.
        remedy: &'static str,
    },
    /// A weight that the target dtype would turn into infinity.
    #[error("{tensor} holds {value}, beyond the range of {dtype:?}; load it as F32 or BF16")]
    OutOfRange {
        /// Key of the tensor.
        tensor: String,
        /// The first such value.
        value: f32,
        /// The dtype asked for.
        dtype: DType,
    },
    /// Parameters without a tensor of their shape.
    #[error(
        "the checkpoint does not fit the config: {}; check that config.json belongs to these weights",
        .0.summary()
    )]
    Incomplete(Box<LoadReport>),
    /// A file that cannot be written, or that would be lost or never read if it were.
    #[error("cannot write {}: {reason}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why, and what to do.
        reason: String,
    },
}
