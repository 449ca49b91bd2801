//! A device of an architecture, as `CubeCL`'s CUDA runtime would describe it.

use cubecl::features::{Features, Plane, Tma};
use cubecl::ir::nvidia::SmArch;
use cubecl::ir::{
    ContiguousElements, DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties,
    MemoryDeviceProperties, MmaProperties, OpaqueType, TargetProperties, VectorSize,
};
use cubecl::profile::TimingMethod;
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::manual::contiguous_elements_cuda;
use cubecl_cpp::cuda::supported_mma_combinations;
use cubecl_cpp::{register_supported_types, shared::register_mma_features};
use cubecl_llvm::shared::lowered_features::{GpuTarget, restrict_features};

use crate::architecture::Architecture;

/// What blueprints are chosen by: the features of the architecture, narrowed to what the default
/// compiler lowers.
pub fn properties(architecture: Architecture) -> DeviceProperties {
    let mut properties = all_properties(architecture);
    restrict_features(&mut properties, GpuTarget::Nvptx);
    properties
}

/// As [`properties`], with all that the C++ compiler lowers.
pub fn all_properties(architecture: Architecture) -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: architecture.max_shared_memory(),
        max_cube_count: (i32::MAX as u32, u16::MAX as u32, u16::MAX as u32),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: None,
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let name = architecture.to_string();
    let identity = DeviceIdentity { fingerprint: name.clone(), name, physical: None };
    let memory = MemoryDeviceProperties::new(u64::MAX, 512);
    let mut properties = DeviceProperties::new(
        Features::default(),
        memory,
        hardware,
        TimingMethod::Device,
        identity,
    );
    register_supported_types(&mut properties);
    let version = architecture.version();
    let cuda = CudaArchitecture { version, tensor_cores: true };
    register_mma_features(supported_mma_combinations(&cuda), &mut properties);
    let features = &mut properties.features;
    features.plane.insert(Plane::Ops);
    features.plane.insert(Plane::Sync);
    features.plane.insert(Plane::NonUniformControlFlow);
    features.memory_reinterpret = true;
    features.alignment = true;
    features.device_memory_scope = true;
    for half in [FloatKind::F16, FloatKind::BF16].map(ElemType::Float) {
        features.matmul.ldmatrix.insert(half);
        if version >= 90 {
            features.matmul.stmatrix.insert(half);
        }
    }
    properties.register_opaque_type(OpaqueType::Barrier);
    if version >= 90 {
        properties.features.tma.insert(Tma::Base);
        properties.register_opaque_type(OpaqueType::TensorMap);
    }
    properties
}

/// How matrices lie in registers.
pub fn target() -> TargetProperties {
    use cubecl::cmma::MatrixLayout;

    TargetProperties {
        mma: MmaProperties {
            register_size_bits: 32,
            const_plane_size: 32,
            register_layout_a: MatrixLayout::RowMajor,
            register_layout_b: MatrixLayout::ColMajor,
            register_layout_acc: MatrixLayout::RowMajor,
            register_duplication_a: 1,
            register_duplication_b: 1,
            register_duplication_acc: 1,
            contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
        },
    }
}

/// The architecture for the compiler.
pub fn sm_arch(architecture: Architecture) -> SmArch {
    SmArch::new(architecture.version(), true)
}
