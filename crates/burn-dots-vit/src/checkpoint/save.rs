//! A tower into the release's layout.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use burn::module::Param;
use burn::tensor::{DType, Tensor, TensorData};
use safetensors::{Dtype, View};

use super::files::{INDEX, SINGLE, key_outside_tower};
use super::names::released;
use super::{CheckpointError, ParameterVisitor, StoredParameter};
use crate::config::DotsModelType;
use crate::encoder::DotsVisionEncoder;

const CONFIG: &str = "config.json";

/// Writes `config.json` and `model.safetensors` into `folder`.
pub(super) fn save(tower: &DotsVisionEncoder, folder: &Path) -> Result<(), CheckpointError> {
    // A setter may have changed it to what could not be loaded again.
    tower.config().validate()?;
    let (weights, config) = (folder.join(SINGLE), folder.join(CONFIG));
    let mut collect =
        Collect { model_type: tower.config().model_type, found: Vec::new(), unsupported: None };
    tower.visit_parameters(&mut collect);
    if let Some((name, dtype)) = collect.unsupported {
        let reason = format!("{name} is {dtype:?}; cast the tower to F32, BF16 or F16 first");
        return Err(fail(&weights, reason));
    }
    check_place(folder, &weights, &config)?;

    std::fs::create_dir_all(folder).map_err(|error| io_error(folder, error))?;
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let weights = Partial::write(weights, |path| {
        safetensors::serialize_to_file(collect.found, Some(metadata), path)
    })?;
    let json = serde_json::json!({
        "model_type": tower.config().model_type,
        "vision_config": tower.config(),
    });
    let config = Partial::write(config, |path| std::fs::write(path, format!("{json:#}\n")))?;
    weights.publish()?;
    config.publish()
}

/// Refuses a folder in which the files would do harm or would not be read.
fn check_place(folder: &Path, weights: &Path, config: &Path) -> Result<(), CheckpointError> {
    if folder.join(INDEX).is_file() {
        let reason = format!(
            "{INDEX} beside it lists other weights, which would be loaded instead; save into \
             another folder, or remove that model first"
        );
        return Err(fail(weights, reason));
    }
    for path in [weights, config] {
        if path.is_dir() {
            return Err(fail(path, "it is a folder; save into another folder".to_string()));
        }
    }
    if !weights.is_file() {
        return Ok(());
    }
    match key_outside_tower(weights) {
        Ok(None) => Ok(()),
        Ok(Some(key)) => {
            let reason = format!(
                "it holds {key:?}, which is not the tower's and would be lost; save into another \
                 folder"
            );
            Err(fail(weights, reason))
        }
        Err(CheckpointError::Header { reason, .. }) => {
            let reason = format!(
                "the file there is truncated or not a safetensors file ({reason}); save into \
                 another folder, or remove it first"
            );
            Err(fail(weights, reason))
        }
        Err(error) => Err(error),
    }
}

fn fail(path: &Path, reason: String) -> CheckpointError {
    CheckpointError::Write { path: path.to_path_buf(), reason }
}

fn io_error(path: &Path, error: impl Display) -> CheckpointError {
    fail(path, format!("{error}; check its folder's permissions and free space, or save elsewhere"))
}

/// A file that is written beside its place, and removed on every way out but [`Self::publish`].
struct Partial {
    place: PathBuf,
    path: PathBuf,
}

impl Partial {
    fn write<E: Display>(
        place: PathBuf,
        contents: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<Self, CheckpointError> {
        let path = place.with_added_extension("partial");
        let partial = Self { place, path };
        contents(&partial.path).map_err(|error| io_error(&partial.place, error))?;
        Ok(partial)
    }

    fn publish(self) -> Result<(), CheckpointError> {
        std::fs::rename(&self.path, &self.place).map_err(|error| io_error(&self.place, error))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After a rename there is nothing left to remove.
        let _ = std::fs::remove_file(&self.path);
    }
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_cannot_be_moved_to_its_place_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("config.json");
        let partial = Partial::write(place.clone(), |path| std::fs::write(path, "{}")).unwrap();
        assert_eq!(std::fs::read(folder.path().join("config.json.partial")).unwrap(), b"{}");
        std::fs::create_dir(&place).unwrap();
        let text = partial.publish().unwrap_err().to_string();
        assert!(text.starts_with(&format!("cannot write {}: ", place.display())), "{text}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
