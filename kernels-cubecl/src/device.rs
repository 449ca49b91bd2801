//! Questions to a device that several operations ask.

use cubecl::{
    features::{Plane, TypeUsage},
    ir::{AddressType, DeviceProperties, ElemType},
    prelude::{
        BufferCompilationArg, CubeDim, ExecutionMode, KernelSettings, TensorCompilationArg,
        TensorMetaCompilationArg,
    },
};

use crate::{TensorLayout, Unsupported};

/// Most elements that 32-bit offsets reach.
pub(crate) const MAX_32BIT_ELEMENTS: usize = u32::MAX as usize;

/// What decides between register tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceKind {
    Gpu,
    /// Software rasterisers: every read of shared memory is a loop over the lanes of a plane.
    Software,
    /// `CubeCL`'s CPU runtime: units that meet at barriers are threads.
    Cpu,
}

impl DeviceKind {
    pub(crate) fn of(properties: &DeviceProperties) -> Self {
        let hardware = &properties.hardware;
        let narrow = hardware.plane_size_min == hardware.plane_size_max
            && hardware.plane_size_max <= 16
            && !properties.features.plane.contains(Plane::Ops);
        if hardware.num_cpu_cores.is_some() {
            Self::Cpu
        } else if narrow {
            Self::Software
        } else {
            Self::Gpu
        }
    }
}

/// How a kernel on cubes of so many units is compiled without a device.
pub(crate) fn kernel_settings(units: usize, address_type: AddressType) -> KernelSettings {
    KernelSettings::new(*CubeDim::new_1d(units as u32), ExecutionMode::Unchecked, address_type)
}

/// Checks that buffers of this element type can be read, written and converted to f32.
pub(crate) fn check_dtype(
    properties: &DeviceProperties,
    argument: &'static str,
    dtype: ElemType,
) -> Result<(), Unsupported> {
    let needed = TypeUsage::Conversion | TypeUsage::Buffer;
    if matches!(dtype, ElemType::Float(_)) && properties.type_usage(dtype).is_superset(needed) {
        Ok(())
    } else {
        Err(Unsupported::Dtype { argument, dtype })
    }
}

/// The address type that reaches every element of the tensors.
pub(crate) fn address_type(
    properties: &DeviceProperties,
    tensors: &[(&'static str, TensorLayout)],
) -> Result<AddressType, Unsupported> {
    let Some((argument, layout)) = tensors.iter().max_by_key(|(_, layout)| layout.span()) else {
        return Ok(AddressType::U32);
    };
    let elements = layout.span();
    if elements <= MAX_32BIT_ELEMENTS {
        Ok(AddressType::U32)
    } else if properties.supports_address(AddressType::U64) {
        Ok(AddressType::U64)
    } else {
        Err(Unsupported::Offsets { argument, elements, limit: MAX_32BIT_ELEMENTS })
    }
}

/// Checks the number of storage buffers. One more holds the launch's metadata.
pub(crate) fn check_bindings(
    properties: &DeviceProperties,
    tensors: u32,
) -> Result<(), Unsupported> {
    let (required, available) = (tensors + 1, properties.hardware.max_bindings);
    if required > available {
        return Err(Unsupported::Bindings { required, available });
    }
    Ok(())
}

/// Checks the number of units in one cube.
pub(crate) fn check_units(properties: &DeviceProperties, units: u32) -> Result<(), Unsupported> {
    let hardware = &properties.hardware;
    let available = hardware.max_units_per_cube.min(hardware.max_cube_dim.0);
    if units > available {
        return Err(Unsupported::UnitsPerCube { required: units, available });
    }
    Ok(())
}

/// What the compiler is told about a buffer argument.
pub(crate) fn buffer_arg() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

/// What the compiler is told about a tensor argument.
pub(crate) fn tensor_arg() -> TensorCompilationArg {
    TensorCompilationArg {
        meta: TensorMetaCompilationArg { len: (), rank: () },
        buffer: buffer_arg(),
    }
}
