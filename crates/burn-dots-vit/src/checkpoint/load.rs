//! Checkpoint tensors into a tower.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Tensor};

use super::convert::{ConvertError, convert};
use super::files::{Stored, TowerFiles};
use super::names::{block_of, fused};
use super::parameter::ModulePath;
use super::{
    CheckpointError, CheckpointOptions, LoadReport, ParameterVisitor, ShapeMismatch,
    StoredParameter,
};
use crate::config::DotsVitConfig;
use crate::encoder::DotsVisionEncoder;

/// Where a parameter's values are.
struct Planned {
    wanted: StoredParameter,
    tensor: Stored,
    /// Which of how many equal pieces of the stored tensor.
    part: [usize; 2],
}

/// Loads `path` into a tower of `config`.
pub(super) fn load(
    config: &DotsVitConfig,
    path: &Path,
    options: &CheckpointOptions,
    device: &Device,
) -> Result<(DotsVisionEncoder, LoadReport), CheckpointError> {
    let dtype = target_dtype(options, device)?;
    let tower = DotsVisionEncoder::new(config, device)?;
    let files = TowerFiles::open(path)?;
    let (plan, report) = plan(&tower, &files)?;
    if !report.is_complete() {
        return Err(CheckpointError::Incomplete(Box::new(report)));
    }
    let mut loader =
        Loader { path: ModulePath::default(), config, files: &files, plan, dtype, error: None };
    let tower = tower.map(&mut loader);
    match loader.error {
        Some(error) => Err(error),
        None => Ok((tower, report)),
    }
}

fn target_dtype(options: &CheckpointOptions, device: &Device) -> Result<DType, CheckpointError> {
    let dtype = options.dtype.unwrap_or(DType::F32);
    let remedy = match dtype {
        DType::F32 | DType::BF16 | DType::F16 if device.supports_dtype(dtype) => return Ok(dtype),
        DType::F32 | DType::BF16 | DType::F16 => "the device does not compute in it, ask for F32",
        _ => "ask for F32, BF16 or F16",
    };
    Err(CheckpointError::TargetDtype { dtype, device: format!("{device:?}"), remedy })
}

/// Finds every parameter's tensor, and which parameters and tensors are left over.
fn plan(
    tower: &DotsVisionEncoder,
    files: &TowerFiles,
) -> Result<(HashMap<String, Planned>, LoadReport), CheckpointError> {
    let mut report = LoadReport {
        files: files.shards.iter().map(|shard| shard.path.clone()).collect(),
        prefix: files.prefix.clone(),
        ..LoadReport::default()
    };
    let mut plan = HashMap::new();
    let mut used = HashSet::new();
    for wanted in parameters(tower) {
        let Some((key, shape, part)) = find(&wanted, files, tower.config()) else {
            report.missing.push(wanted.name);
            continue;
        };
        let tensor = &files.tensors[&key];
        used.insert(key.clone());
        if tensor.shape != shape {
            let mismatch = ShapeMismatch { key, expected: shape, found: tensor.shape.clone() };
            // A fused tensor is asked for once per piece and reported once.
            if !report.mismatched.contains(&mismatch) {
                report.mismatched.push(mismatch);
            }
            continue;
        }
        report.loaded += 1;
        let tensor = tensor.clone();
        plan.insert(wanted.name.clone(), Planned { wanted, tensor, part });
    }
    report.unused = files
        .tensors
        .iter()
        .filter(|(name, _)| !used.contains(*name))
        .map(|(_, tensor)| tensor.key[files.prefix.len()..].to_string())
        .collect();
    Ok((plan, report))
}

/// The canonical name and expected shape of the stored tensor that holds `wanted`, and which piece
/// of it.
fn find(
    wanted: &StoredParameter,
    files: &TowerFiles,
    config: &DotsVitConfig,
) -> Option<(String, Vec<usize>, [usize; 2])> {
    if files.tensors.contains_key(&wanted.name) {
        return Some((wanted.name.clone(), wanted.shape.clone(), [0, 1]));
    }
    let experts = block_of(&wanted.name).and_then(|block| config.num_experts(block));
    let pieces = fused(&wanted.name, &wanted.shape, experts);
    pieces.into_iter().find(|piece| files.tensors.contains_key(&piece.key)).map(|piece| {
        let whole: usize = piece.shape.iter().product();
        let parts = whole / wanted.shape.iter().product::<usize>();
        (piece.key, piece.shape, [piece.part, parts])
    })
}

/// Every parameter of the tower.
fn parameters(tower: &DotsVisionEncoder) -> Vec<StoredParameter> {
    struct Collect(Vec<StoredParameter>);
    impl ParameterVisitor for Collect {
        fn visit<const D: usize>(&mut self, stored: &StoredParameter, _: &Param<Tensor<D>>) {
            self.0.push(stored.clone());
        }
    }
    let mut collect = Collect(Vec::new());
    tower.visit_parameters(&mut collect);
    collect.0
}

/// Replaces every parameter by its planned tensor, one at a time, so that no more than one tensor
/// is in memory twice.
struct Loader<'a> {
    path: ModulePath,
    config: &'a DotsVitConfig,
    files: &'a TowerFiles,
    /// By name.
    plan: HashMap<String, Planned>,
    dtype: DType,
    /// The first failure; parameters after it stay as they are.
    error: Option<CheckpointError>,
}

impl Loader<'_> {
    fn read<const D: usize>(
        &self,
        planned: &Planned,
        device: &Device,
    ) -> Result<Tensor<D>, CheckpointError> {
        let Planned { wanted, tensor, part: [part, parts] } = planned;
        // The selection bias is compared with f32 probabilities: rounding it would move choices.
        let dtype = if wanted.name.ends_with(".router_bias") { DType::F32 } else { self.dtype };
        let rows = wanted.shape[0];
        let columns = wanted.shape[1..].iter().product();
        let bytes = self.files.bytes(tensor, *part, *parts);
        let data = convert(
            bytes,
            tensor.dtype,
            [rows, columns],
            wanted.transpose,
            &wanted.module_shape,
            dtype,
        )
        .map_err(|error| match error {
            ConvertError::Stored => CheckpointError::StoredDtype {
                path: self.files.shards[tensor.shard].path.clone(),
                tensor: tensor.key.clone(),
                dtype: format!("{:?}", tensor.dtype),
            },
            ConvertError::OutOfRange(value) => {
                CheckpointError::OutOfRange { tensor: tensor.key.clone(), value, dtype }
            }
        })?;
        Ok(device
            .memory_persistent_allocations(data, |data| Tensor::from_data(data, (device, dtype))))
    }
}

impl ModuleMapper for Loader<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, container: &str) {
        self.path.exit(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape = param.lazy_shape();
        let StoredParameter { name, .. } =
            StoredParameter::new(&self.path, shape.as_slice(), self.config);
        let Some(planned) = self.plan.remove(&name) else {
            return param;
        };
        if self.error.is_some() {
            return param;
        }
        match self.read(&planned, &param.lazy_device()) {
            Ok(tensor) => {
                let id = param.id;
                param.transform_for_load(tensor, id)
            }
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}
