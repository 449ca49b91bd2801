//! The fused norm and rotation and its gradient.

use cubecl::ir::{DeviceProperties, ElemType};
use kernels_cubecl::rope_qk_norm::{self, RmsNorm, backward};
use kernels_cubecl::{RopeQkNormProblem, TensorLayout, Unsupported};

use super::{F32, HEADS, Layout, Selection, Variant};

const EPSILON: f32 = 1e-6;

/// Storage buffers that are too few for queries and keys in one launch, and enough for either.
const FEW_BINDINGS: u32 = 6;

/// Queries and keys in one launch, and in two where the device binds few buffers.
pub(super) fn forward(
    properties: &DeviceProperties,
    selection: Selection,
) -> Result<Vec<Variant>, Unsupported> {
    let mut few = properties.clone();
    few.hardware.max_bindings = FEW_BINDINGS;
    let mut variants = Vec::new();
    for (dtype, (head_dim, _), layout) in selection.inputs() {
        let tensor = |index| layout.tensor(index, head_dim);
        let rotation = RopeQkNormProblem::new(tensor(0), tensor(1), dtype);
        for (weight, rotates) in options(dtype, selection) {
            let norm = weight.map(|weight_dtype| RmsNorm { epsilon: EPSILON, weight_dtype });
            let rotary = if rotates { rotation.rotary } else { None };
            let problem = RopeQkNormProblem { norm, rotary, ..rotation };
            for properties in [properties, &few] {
                let blueprint = rope_qk_norm::supports(properties, &problem)?;
                variants.push(Variant {
                    operation: "rope_qk_norm",
                    blueprint: blueprint.to_string(),
                    threads: blueprint.units(),
                    needs_cpp: false,
                    build: Box::new(move |properties, target| {
                        rope_qk_norm::kernel(blueprint, properties, target)
                    }),
                });
            }
        }
    }
    Ok(variants)
}

/// Both of a packed projection in place, and one tensor; and the sums of the weights' gradients.
pub(super) fn backward(
    properties: &DeviceProperties,
    selection: Selection,
) -> Result<Vec<Variant>, Unsupported> {
    let mut variants = Vec::new();
    for (dtype, (head_dim, _), layout) in selection.inputs() {
        for (weight, rotates) in options(dtype, selection) {
            for problem in [packed(layout, head_dim, dtype), single(layout, head_dim, dtype)] {
                let norm = weight.map(|weight_dtype| RmsNorm { epsilon: EPSILON, weight_dtype });
                let rotary = if rotates { problem.rotary } else { None };
                let problem = backward::RopeQkNormBackwardProblem { norm, rotary, ..problem };
                let blueprint = backward::supports(properties, &problem)?;
                variants.push(Variant {
                    operation: "rope_qk_norm_backward",
                    blueprint: blueprint.to_string(),
                    threads: blueprint.units(),
                    needs_cpp: false,
                    build: Box::new(move |properties, target| {
                        backward::kernel(blueprint, properties, target)
                    }),
                });
                variants.extend(blueprint.weight_gradient().map(|blueprint| Variant {
                    operation: "rope_qk_norm_weight_gradient",
                    blueprint: blueprint.to_string(),
                    threads: blueprint.units(),
                    needs_cpp: false,
                    build: Box::new(move |properties, target| {
                        backward::weight_gradient_kernel(blueprint, properties, target)
                    }),
                }));
            }
        }
    }
    Ok(variants)
}

fn packed(layout: Layout, head_dim: usize, dtype: ElemType) -> backward::RopeQkNormBackwardProblem {
    let [x, dx] = [0, 1].map(|index| {
        let TensorLayout { strides: [token, head, element], .. } = layout.tensor(index, head_dim);
        [3 * token, HEADS * head, head, element]
    });
    backward::RopeQkNormBackwardProblem::packed([2, HEADS, head_dim], x, dx, dtype)
}

fn single(layout: Layout, head_dim: usize, dtype: ElemType) -> backward::RopeQkNormBackwardProblem {
    let [x, d_out] = [0, 1].map(|index| layout.tensor(index, head_dim));
    backward::RopeQkNormBackwardProblem::single(x, d_out, dtype)
}

/// Type of the weights if there is a norm, and whether there is a rotation: at least one of them.
fn options(
    dtype: ElemType,
    selection: Selection,
) -> impl Iterator<Item = (Option<ElemType>, bool)> {
    let weights = [None, Some(dtype), Some(F32)];
    let all = weights.into_iter().flat_map(|weight| [true, false].map(|rotates| (weight, rotates)));
    all.filter(move |&(weight, rotates)| {
        let asked = selection == Selection::Full || weight == Some(dtype) || weight.is_none();
        asked && (weight.is_some() || rotates)
    })
}
