//! The kernels that a blueprint can choose.

use core::fmt;
use std::collections::HashSet;
use std::sync::Arc;

use cubecl::ir::{DeviceProperties, ElemType, FloatKind, TargetProperties};
use cubecl::prelude::CubeKernel;
use kernels_cubecl::rope_qk_norm::RmsNorm;
use kernels_cubecl::{
    AttentionBlueprint, AttentionProblem, RopeQkNormBlueprint, RopeQkNormProblem, TensorLayout,
    Unsupported, attention_varlen, rope_qk_norm,
};

/// head_dim of q and k, and of v: the towers' and common ones, every register tile among them.
const HEAD_DIMS: [(usize, usize); 8] =
    [(64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)];

const F32: ElemType = ElemType::Float(FloatKind::F32);
const DTYPES: [ElemType; 3] =
    [F32, ElemType::Float(FloatKind::F16), ElemType::Float(FloatKind::BF16)];

const HEADS: usize = 4;

/// How tensors lie in memory, as far as kernels differ by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// Read in vectors with 32-bit offsets, as nearly always.
    Packed,
    /// Read one element at a time.
    Scalar,
    /// Reaches past 32-bit offsets.
    Wide,
}

impl Layout {
    const ALL: [Self; 3] = [Self::Packed, Self::Scalar, Self::Wide];

    fn tensor(self, head_dim: usize) -> TensorLayout {
        let packed = TensorLayout::contiguous([2, HEADS, head_dim]);
        let [token, head, element] = packed.strides;
        let strides = match self {
            Self::Packed => packed.strides,
            Self::Scalar => [2 * token, 2 * head, 2 * element],
            Self::Wide => [1 << 33, head, element],
        };
        TensorLayout { strides, ..packed }
    }
}

/// One kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// Packed attention.
    Attention(AttentionBlueprint),
    /// Fused norm and rotation of queries and keys.
    RopeQkNorm(RopeQkNormBlueprint),
}

impl Variant {
    /// The operation's name.
    pub fn operation(&self) -> &'static str {
        match self {
            Self::Attention(_) => "attention_varlen",
            Self::RopeQkNorm(_) => "rope_qk_norm",
        }
    }

    /// Threads of a block.
    pub fn threads(&self) -> usize {
        match self {
            Self::Attention(blueprint) => blueprint.units(),
            Self::RopeQkNorm(blueprint) => blueprint.units(),
        }
    }

    /// The kernel, to be compiled for the device with these properties.
    pub fn kernel(
        &self,
        properties: Arc<DeviceProperties>,
        target: Arc<TargetProperties>,
    ) -> Box<dyn CubeKernel> {
        match *self {
            Self::Attention(blueprint) => attention_varlen::kernel(blueprint, properties, target),
            Self::RopeQkNorm(blueprint) => rope_qk_norm::kernel(blueprint, properties, target),
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attention(blueprint) => blueprint.fmt(f),
            Self::RopeQkNorm(blueprint) => blueprint.fmt(f),
        }
    }
}

/// The kernels for every dtype, head_dim, layout, mask, softcap, norm and rotation on a device, each
/// once.
///
/// # Errors
///
/// If the device cannot run one of them.
pub fn variants(properties: &DeviceProperties) -> Result<Vec<Variant>, Unsupported> {
    let mut variants = Vec::new();
    for problem in attention_problems() {
        variants.push(Variant::Attention(attention_varlen::supports(properties, &problem)?));
    }
    for problem in rope_problems() {
        variants.push(Variant::RopeQkNorm(rope_qk_norm::supports(properties, &problem)?));
    }
    let mut seen = HashSet::new();
    variants.retain(|variant| seen.insert(*variant));
    Ok(variants)
}

fn attention_problems() -> impl Iterator<Item = AttentionProblem> {
    inputs().flat_map(|(dtype, (head_dim, value_dim), layout)| {
        let (q, v) = (layout.tensor(head_dim), layout.tensor(value_dim));
        let plain = AttentionProblem::new(q, q, v, dtype);
        let sides = [None, Some(1)];
        sides.into_iter().flat_map(move |left| {
            sides.into_iter().flat_map(move |right| {
                let window = (left, right);
                [None, Some(30.0)].map(|softcap| AttentionProblem { window, softcap, ..plain })
            })
        })
    })
}

fn rope_problems() -> impl Iterator<Item = RopeQkNormProblem> {
    inputs().flat_map(|(dtype, (head_dim, _), layout)| {
        let tensor = layout.tensor(head_dim);
        let rotation = RopeQkNormProblem::new(tensor, tensor, dtype);
        let weights = [None, Some(dtype), Some(F32)];
        weights.into_iter().flat_map(move |weight| {
            let norm = weight.map(|weight_dtype| RmsNorm { epsilon: 1e-6, weight_dtype });
            [rotation.rotary, None].map(|rotary| RopeQkNormProblem { norm, rotary, ..rotation })
        })
    })
}

/// Every dtype with every pair of head_dims in every layout.
fn inputs() -> impl Iterator<Item = (ElemType, (usize, usize), Layout)> {
    DTYPES.into_iter().flat_map(|dtype| {
        HEAD_DIMS
            .into_iter()
            .flat_map(move |head_dims| Layout::ALL.map(|layout| (dtype, head_dims, layout)))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use cubecl::features::{Features, TypeUsage};
    use cubecl::ir::{
        AddressType, DeviceIdentity, HardwareProperties, MemoryDeviceProperties, VectorSize,
    };
    use cubecl::profile::TimingMethod;

    use super::*;

    fn properties() -> DeviceProperties {
        let hardware = HardwareProperties {
            load_width: 128,
            vector_register_count: None,
            plane_size_min: 32,
            plane_size_max: 32,
            max_bindings: 1024,
            max_shared_memory_size: 227 * 1024,
            max_cube_count: (i32::MAX as u32, 65_535, 65_535),
            max_units_per_cube: 1024,
            max_cube_dim: (1024, 1024, 64),
            num_streaming_multiprocessors: None,
            num_tensor_cores: None,
            min_tensor_cores_dim: None,
            num_cpu_cores: None,
            last_level_cache_size: None,
            max_vector_size: VectorSize::MAX,
            cube_mma_reserved_shared_memory: 0,
        };
        let identity =
            DeviceIdentity { name: "test".into(), fingerprint: "test".into(), physical: None };
        let memory = MemoryDeviceProperties::new(u64::MAX, 512);
        let mut properties = DeviceProperties::new(
            Features::default(),
            memory,
            hardware,
            TimingMethod::Device,
            identity,
        );
        for dtype in DTYPES {
            properties.register_type_usage(dtype, TypeUsage::all());
        }
        for address in [AddressType::U32, AddressType::U64] {
            properties.register_address_type(address);
        }
        properties
    }

    #[test]
    fn every_choice_is_listed_once() {
        let variants = variants(&properties()).unwrap();
        let names = variants.iter().map(Variant::to_string).collect::<Vec<_>>();
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len(), "a name twice");
        let count = |operation, choices: &[&str]| {
            let of = |name: &&String| {
                name.starts_with(operation) && choices.iter().all(|choice| name.contains(choice))
            };
            names.iter().filter(of).count()
        };
        // 3 dtypes, 8 pairs of head_dims, 3 layouts, 4 masks, with and without softcap.
        assert_eq!(count("attention_varlen", &[]), 3 * 8 * 3 * 4 * 2);
        assert_eq!(count("attention_varlen", &["U64", "right-bounded"]), 3 * 8 * 2 * 2);
        assert_eq!(count("attention_varlen", &["[1, 1, 1]", "softcap"]), 3 * 8 * 4);
        assert_eq!(count("attention_varlen", &["head_dim 72/72", "bf16"]), 3 * 4 * 2);
        // f32 has two norms, the others three; 7 head_dims, 3 layouts, with and without rotation.
        assert_eq!(count("rope_qk_norm", &[]), (2 + 3 + 3) * 7 * 3 * 2);
        assert_eq!(count("rope_qk_norm", &["norm(", "rotary", "head_dim 80"]), (1 + 2 + 2) * 3);
    }
}
