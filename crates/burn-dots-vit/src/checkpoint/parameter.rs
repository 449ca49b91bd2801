//! A tower's parameters by the names and in the layout of its release.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorData};

use super::names::from_module_path;
use crate::config::DotsVitConfig;
use crate::encoder::DotsVisionEncoder;

/// How a release stores one parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredParameter {
    /// Its name in the dots3-note release without prefix, for example `blocks.0.mlp.fc1.weight`.
    pub name: String,
    /// Its shape on disk: PyTorch's, `[out, in]` for linear weights.
    pub shape: Vec<usize>,
    /// Its shape in the module.
    pub(super) module_shape: Vec<usize>,
    /// Whether the module holds the transpose of what is on disk.
    pub(super) transpose: bool,
}

impl StoredParameter {
    /// `path` is the parameter's in the module, without enum variants.
    pub(super) fn new(path: &ModulePath, module_shape: &[usize], config: &DotsVitConfig) -> Self {
        let name = from_module_path(&path.0, config.adapter_type);
        // Every matrix is a linear weight, [in, out] here and [out, in] on disk, but for the router.
        let transpose = module_shape.len() == 2 && !name.ends_with(".gate_weight");
        let shape = match module_shape {
            [_, out] if name == "patch_embed.proj.weight" => {
                vec![*out, config.num_channels, config.patch_size, config.patch_size]
            }
            [inner, out] if transpose => vec![*out, *inner],
            other => other.to_vec(),
        };
        Self { name, shape, module_shape: module_shape.to_vec(), transpose }
    }

    /// Reads `tensor`, the parameter or its gradient, back in the layout on disk.
    ///
    /// # Panics
    ///
    /// When `tensor` does not have the parameter's shape, or the device fails.
    pub fn data<const D: usize>(&self, tensor: Tensor<D>) -> TensorData {
        let shape = tensor.shape();
        assert_eq!(
            shape.as_slice(),
            self.module_shape,
            "tensor: not the shape of the parameter {}",
            self.name
        );
        let tensor = if self.transpose { tensor.transpose() } else { tensor };
        let data = tensor.into_data();
        let dtype = data.dtype();
        TensorData::from_bytes(data.into_bytes(), self.shape.clone(), dtype)
    }
}

/// Sees every parameter of a tower; see [`DotsVisionEncoder::visit_parameters`].
pub trait ParameterVisitor {
    /// Called once for each parameter.
    fn visit<const D: usize>(&mut self, stored: &StoredParameter, parameter: &Param<Tensor<D>>);
}

impl DotsVisionEncoder {
    /// Shows every parameter with its name and layout in the release, for exporting weights or
    /// gradients. Parameters that are not initialised yet stay so unless the visitor reads them.
    pub fn visit_parameters(&self, visitor: &mut impl ParameterVisitor) {
        self.visit(&mut Named { path: ModulePath::default(), config: self.config(), visitor });
    }
}

struct Named<'a, V> {
    path: ModulePath,
    config: &'a DotsVitConfig,
    visitor: &'a mut V,
}

impl<V: ParameterVisitor> ModuleVisitor for Named<'_, V> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, container: &str) {
        self.path.exit(container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let shape = param.lazy_shape();
        let stored = StoredParameter::new(&self.path, shape.as_slice(), self.config);
        self.visitor.visit(&stored, param);
    }
}

/// Where a module traversal is; enum variants are not part of a parameter's name.
#[derive(Default)]
pub(super) struct ModulePath(Vec<String>);

impl ModulePath {
    pub fn enter(&mut self, name: &str, container: &str) {
        if !container.starts_with("Enum:") {
            self.0.push(name.to_string());
        }
    }

    pub fn exit(&mut self, container: &str) {
        if !container.starts_with("Enum:") {
            self.0.pop();
        }
    }
}
