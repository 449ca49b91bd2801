//! Reading golden data.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device, Tensor, TensorData};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// Why golden data cannot be read.
#[derive(Debug, Error)]
pub enum FixtureError {
    /// A file cannot be opened.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file does not hold what its name says.
    #[error("{path}: {reason}", path = path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A tensor is missing.
    #[error("{path}: no tensor `{name}`", path = path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
}

/// The repository's own golden data.
pub fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// The tensors of one safetensors file.
#[derive(Clone, Debug)]
pub struct Fixture {
    path: PathBuf,
    tensors: BTreeMap<String, TensorData>,
}

impl Fixture {
    /// Reads a whole file.
    ///
    /// # Errors
    ///
    /// When it cannot be read or holds a dtype that Burn does not know.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, FixtureError> {
        let path = path.into();
        let bytes = read(&path)?;
        let malformed = |reason: String| FixtureError::Malformed { path: path.clone(), reason };
        let file =
            SafeTensors::deserialize(&bytes).map_err(|error| malformed(error.to_string()))?;
        let mut tensors = BTreeMap::new();
        for (name, view) in file.tensors() {
            let dtype = match view.dtype() {
                Dtype::F64 => DType::F64,
                Dtype::F32 => DType::F32,
                Dtype::F16 => DType::F16,
                Dtype::BF16 => DType::BF16,
                Dtype::I64 => DType::I64,
                Dtype::I32 => DType::I32,
                other => return Err(malformed(format!("tensor `{name}` has dtype {other:?}"))),
            };
            let data =
                TensorData::from_bytes_vec(view.data().to_vec(), view.shape().to_vec(), dtype);
            tensors.insert(name.to_owned(), data);
        }
        Ok(Self { path, tensors })
    }

    /// Whether the file holds a tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The data of a tensor, as stored.
    ///
    /// # Errors
    ///
    /// When there is none of that name.
    pub fn data(&self, name: &str) -> Result<&TensorData, FixtureError> {
        let missing = || FixtureError::Missing { path: self.path.clone(), name: name.to_owned() };
        self.tensors.get(name).ok_or_else(missing)
    }

    /// A tensor on a device, in the dtype it is stored in.
    ///
    /// # Errors
    ///
    /// When there is none of that name, or its rank is not `D`.
    pub fn tensor<const D: usize>(
        &self,
        name: &str,
        device: &Device,
    ) -> Result<Tensor<D>, FixtureError> {
        let data = self.data(name)?;
        if data.shape().len() != D {
            let reason = format!("tensor `{name}` has rank {}, expected {D}", data.shape().len());
            return Err(FixtureError::Malformed { path: self.path.clone(), reason });
        }
        Ok(Tensor::from_data(data.clone(), (device, data.dtype())))
    }

    /// The values of a tensor of any dtype as f64.
    ///
    /// # Errors
    ///
    /// When there is none of that name.
    pub fn values(&self, name: &str) -> Result<Vec<f64>, FixtureError> {
        Ok(self.data(name)?.iter::<f64>().collect())
    }

    /// The values of an integer tensor.
    ///
    /// # Errors
    ///
    /// When there is none of that name.
    pub fn integers(&self, name: &str) -> Result<Vec<i64>, FixtureError> {
        Ok(self.data(name)?.iter::<i64>().collect())
    }
}

/// Reads a JSON file.
///
/// # Errors
///
/// When it cannot be read or does not hold a `T`.
pub fn json<T: DeserializeOwned>(path: &Path) -> Result<T, FixtureError> {
    serde_json::from_slice(&read(path)?).map_err(|error| FixtureError::Malformed {
        path: path.to_owned(),
        reason: error.to_string(),
    })
}

fn read(path: &Path) -> Result<Vec<u8>, FixtureError> {
    fs::read(path).map_err(|source| FixtureError::Io { path: path.to_owned(), source })
}

/// `manifest.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Manifest {
    /// Attention layers.
    pub attention: Vec<AttentionCase>,
    /// Whole towers.
    pub encoder: Vec<EncoderCase>,
    /// Folders laid out like released models.
    pub checkpoint: Vec<CheckpointCase>,
}

/// One attention layer.
#[derive(Clone, Debug, Deserialize)]
#[allow(missing_docs)] // the fields are those of manifest.json, described in fixtures/README.md
pub struct AttentionCase {
    pub name: String,
    pub file: String,
    pub dim: usize,
    pub num_heads: usize,
    pub bias: bool,
    pub use_qk_norm: bool,
    pub rms_norm_eps: f64,
    pub rotary: bool,
    pub is_causal: bool,
    pub seqlens: Vec<usize>,
    pub dtype: String,
    pub atol: f64,
    pub grad_atol: f64,
}

/// One tower with its weights.
#[derive(Clone, Debug, Deserialize)]
#[allow(missing_docs)] // as above
pub struct EncoderCase {
    pub name: String,
    pub config: String,
    pub weights: String,
    pub data: String,
    pub atol: f64,
    pub rtol: f64,
    pub grad_atol: f64,
    pub grad_rtol: f64,
}

/// One model folder.
#[derive(Clone, Debug, Deserialize)]
#[allow(missing_docs)] // as above
pub struct CheckpointCase {
    pub name: String,
    pub dir: String,
    pub atol: f64,
    pub rtol: f64,
}

/// `preprocess.json`.
#[derive(Clone, Debug, Deserialize)]
#[allow(missing_docs)] // as above
pub struct Preprocess {
    pub atol: f64,
    pub cases: Vec<PreprocessCase>,
}

/// One image with its pixel values.
#[derive(Clone, Debug, Deserialize)]
#[allow(missing_docs)] // as above
pub struct PreprocessCase {
    pub name: String,
    pub image: String,
    pub file: String,
    pub grid_thw: [usize; 3],
}
