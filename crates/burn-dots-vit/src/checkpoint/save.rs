//! A tower into the release's layout.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use burn::module::Param;
use burn::tensor::{DType, Tensor, TensorData};
use safetensors::{Dtype, View};

use super::names::released;
use super::{CheckpointError, ParameterVisitor, StoredParameter};
use crate::config::DotsModelType;
use crate::encoder::DotsVisionEncoder;

/// Writes `config.json` and `model.safetensors` into `folder`.
pub(super) fn save(tower: &DotsVisionEncoder, folder: &Path) -> Result<(), CheckpointError> {
    let fail =
        |path: &Path, reason: String| CheckpointError::Write { path: path.to_path_buf(), reason };
    std::fs::create_dir_all(folder).map_err(|error| fail(folder, error.to_string()))?;

    let path = folder.join("model.safetensors");
    let mut collect =
        Collect { model_type: tower.config().model_type, found: Vec::new(), unsupported: None };
    tower.visit_parameters(&mut collect);
    if let Some((name, dtype)) = collect.unsupported {
        return Err(fail(
            &path,
            format!("{name} is {dtype:?}; cast the tower to F32, BF16 or F16 first"),
        ));
    }
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    // Written beside its place and moved there, so that a failure leaves no half file behind.
    let partial = folder.join("model.safetensors.partial");
    safetensors::serialize_to_file(collect.found, Some(metadata), &partial)
        .map_err(|error| fail(&partial, error.to_string()))?;
    std::fs::rename(&partial, &path).map_err(|error| fail(&path, error.to_string()))?;

    let path = folder.join("config.json");
    let config = serde_json::json!({
        "model_type": tower.config().model_type,
        "vision_config": tower.config(),
    });
    std::fs::write(&path, format!("{config:#}\n")).map_err(|error| fail(&path, error.to_string()))
}

struct Collect {
    model_type: DotsModelType,
    found: Vec<(String, Saved)>,
    unsupported: Option<(String, DType)>,
}

impl ParameterVisitor for Collect {
    fn visit<const D: usize>(&mut self, stored: &StoredParameter, parameter: &Param<Tensor<D>>) {
        let tensor = parameter.transform_for_save().val();
        let dtype = match tensor.dtype() {
            DType::F32 => Dtype::F32,
            DType::BF16 => Dtype::BF16,
            DType::F16 => Dtype::F16,
            other => {
                self.unsupported = Some((stored.name.clone(), other));
                return;
            }
        };
        let key = released(&stored.name, self.model_type);
        let (shape, stored) = (stored.shape.clone(), stored.clone());
        let read = Box::new(move || stored.data(tensor.clone()));
        self.found.push((key, Saved { shape, dtype, read }));
    }
}

/// A parameter that is read from its device when it is written.
struct Saved {
    shape: Vec<usize>,
    dtype: Dtype,
    read: Box<dyn Fn() -> TensorData>,
}

impl View for Saved {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned((self.read)().bytes().to_vec())
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}
