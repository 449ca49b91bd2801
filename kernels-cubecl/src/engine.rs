//! What multiplies tiles.

use core::fmt;

use cubecl::{
    features::{Plane, Tma},
    ir::{DeviceProperties, ElemType, FloatKind, OpaqueType},
};

use crate::{
    Unsupported,
    device::DeviceKind,
    tile::{
        CmmaShape, Emulated, GradientShape, LANES, MatrixTile, Simt, TileShape,
        cmma_gradient_memory, cmma_shared_memory, mma_gradient_memory, mma_shared_memory,
    },
};

/// What multiplies the tiles of an attention kernel. The loop is the same on all but those with a producer,
/// which have one of their own.
///
/// Matrix engines round weights and, in the backward pass, gradients of scores to the type of q before
/// they multiply them, as flash-attention does: in f16, gradients of scores beyond 65,504 become
/// infinite and those below 3e-8 zero, which loss scaling has to avoid. The plain engine keeps f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// Fused multiply-adds on f32 tiles, on any device.
    Simt,
    /// Cooperative matrices of the shape that the device lists, for f16 and, where it lists that, bf16:
    /// Vulkan, Metal, HIP and CUDA.
    Cmma(CmmaShape),
    /// `mma.sync.m16n8k16` and `ldmatrix`: NVIDIA from compute capability 8.0 on, f16 and bf16.
    Mma,
    /// The kernel of [`Mma`](Self::Mma) with its instructions computed in plain code, on any device
    /// and far slower than [`Simt`](Self::Simt): to test that kernel where there are no such
    /// instructions. Never chosen unless asked for.
    EmulatedMma,
    /// [`Mma`](Self::Mma) with keys and values copied by TMA while others are multiplied: NVIDIA from
    /// compute capability 9.0 on, with `CubeCL`'s C++ compiler, f16 and bf16, forward alone. Never
    /// chosen unless asked for.
    AsyncMma,
    /// The kernel of [`AsyncMma`](Self::AsyncMma) with its instructions and copies computed in plain
    /// code, on any device; see [`EmulatedMma`](Self::EmulatedMma).
    EmulatedAsyncMma,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Simt => f.write_str("simt"),
            Self::Cmma(CmmaShape { m, n, k }) => write!(f, "cmma-{m}x{n}x{k}"),
            Self::Mma => f.write_str("mma"),
            Self::EmulatedMma => f.write_str("emulated-mma"),
            Self::AsyncMma => f.write_str("mma-async"),
            Self::EmulatedAsyncMma => f.write_str("emulated-mma-async"),
        }
    }
}

/// Elements of 16 bytes of a 16-bit type.
const CHUNK: usize = 8;

/// Elements per vector in shader languages, whose vectors are no longer than 4.
const SHADER_CHUNK: usize = 4;

impl Engine {
    /// The matrix engine of a GPU for a type, if it has one. Software devices that list matrices
    /// compute them in plain code, too.
    pub(crate) fn fast(properties: &DeviceProperties, dtype: ElemType) -> Option<Self> {
        let runs = |engine: &Self| engine.check(properties, dtype).is_ok();
        let engine = Some(Self::Mma).filter(runs).or_else(|| Self::cmma(properties, dtype).ok());
        engine.filter(|_| DeviceKind::of(properties) == DeviceKind::Gpu)
    }

    /// Whether the device takes cubes of so many units, and its matrix instructions planes of them.
    pub(crate) fn fits(self, properties: &DeviceProperties, units: usize) -> bool {
        let hardware = &properties.hardware;
        let whole_planes = self == Self::Simt
            || self.is_emulated()
            || units.is_multiple_of(hardware.plane_size_max.max(1) as usize);
        whole_planes && units as u32 <= hardware.max_units_per_cube.min(hardware.max_cube_dim.0)
    }

    /// Cooperative matrices as the device lists them, for this type.
    ///
    /// # Errors
    ///
    /// If the device lists none that the kernels can use.
    pub fn cmma(properties: &DeviceProperties, dtype: ElemType) -> Result<Self, Unsupported> {
        cmma_shape(properties, dtype).map(Self::Cmma).ok_or(Unsupported::Cmma { dtype })
    }

    /// Whether the device has what the engine runs on.
    pub(crate) fn check(
        self,
        properties: &DeviceProperties,
        dtype: ElemType,
    ) -> Result<(), Unsupported> {
        let half = matches!(dtype, ElemType::Float(FloatKind::F16 | FloatKind::BF16));
        match self {
            Self::Simt => Ok(()),
            _ if !half => Err(Unsupported::Engine { engine: self, missing: "16-bit q, k and v" }),
            Self::EmulatedMma | Self::EmulatedAsyncMma => Ok(()),
            Self::Mma => check_mma(self, properties, dtype),
            Self::AsyncMma => {
                check_async(properties)?;
                check_mma(self, properties, dtype)
            }
            Self::Cmma(shape) if lists(properties, dtype, shape) => Ok(()),
            Self::Cmma(_) => Err(Unsupported::Cmma { dtype }),
        }
    }

    /// Bytes of shared memory of one cube.
    pub(crate) fn shared_memory(self, shape: TileShape) -> usize {
        match self {
            Self::Simt => Simt::shared_memory(shape),
            Self::Cmma(_) => cmma_shared_memory(shape),
            Self::Mma | Self::AsyncMma => mma_shared_memory(shape),
            Self::EmulatedMma => {
                mma_shared_memory(shape) + Emulated::shared_memory(shape.units() / LANES)
            }
            Self::EmulatedAsyncMma => {
                Self::EmulatedMma.shared_memory(shape) + Emulated::counts_memory(shape)
            }
        }
    }

    /// As [`shared_memory`](Self::shared_memory), for a gradient loop.
    pub(crate) fn gradient_memory(self, shape: GradientShape) -> usize {
        match self {
            Self::Simt => Simt::gradient_memory(shape),
            Self::Cmma(_) => cmma_gradient_memory(shape),
            Self::Mma | Self::AsyncMma => mma_gradient_memory(shape),
            Self::EmulatedMma | Self::EmulatedAsyncMma => {
                mma_gradient_memory(shape) + Emulated::shared_memory(shape.grid.units() / LANES)
            }
        }
    }

    /// What its matrix units work on.
    pub(crate) fn matrix_tile(self, operand: ElemType) -> MatrixTile {
        let chunk = if matches!(self, Self::Mma | Self::AsyncMma) { CHUNK } else { SHADER_CHUNK };
        // Software devices hold arrays in memory anyway, and compile every barrier slowly.
        let unroll = !self.is_emulated();
        let cmma = if let Self::Cmma(shape) = self { Some(shape) } else { None };
        MatrixTile { operand, chunk, unroll, cmma, ring: None }
    }

    /// Whether instructions are computed in plain code.
    fn is_emulated(self) -> bool {
        matches!(self, Self::EmulatedMma | Self::EmulatedAsyncMma)
    }

    /// Whether keys and values come through rings.
    pub(crate) fn is_async(self) -> bool {
        matches!(self, Self::AsyncMma | Self::EmulatedAsyncMma)
    }
}

/// Whether tiles can be copied by themselves.
fn check_async(properties: &DeviceProperties) -> Result<(), Unsupported> {
    let lacks = |missing| Err(Unsupported::Engine { engine: Engine::AsyncMma, missing });
    let features = &properties.features;
    match () {
        () if !features.tma.contains(Tma::Base)
            || !features.supports_type(OpaqueType::TensorMap) =>
        {
            lacks("TMA: compute capability 9.0, and CubeCL's C++ compiler (feature `cuda-cpp`)")
        }
        () if !features.supports_type(OpaqueType::Barrier) => {
            lacks("mbarrier: CubeCL's C++ compiler (feature `cuda-cpp`)")
        }
        () => Ok(()),
    }
}

fn check_mma(
    engine: Engine,
    properties: &DeviceProperties,
    dtype: ElemType,
) -> Result<(), Unsupported> {
    let lacks = |missing| Err(Unsupported::Engine { engine, missing });
    let features = &properties.features;
    let single = ElemType::Float(FloatKind::F32);
    let has_instruction = features.matmul.mma.iter().any(|config| {
        (config.a_type, config.b_type, config.cd_type) == (dtype, dtype, single)
            && (config.m, config.n, config.k) == (16, 8, 16)
    });
    let lanes = LANES as u32;
    let hardware = &properties.hardware;
    match () {
        () if !has_instruction => lacks("matrix instructions m16n8k16 into f32"),
        () if !features.matmul.ldmatrix.contains(&dtype) => lacks("ldmatrix"),
        () if (hardware.plane_size_min, hardware.plane_size_max) != (lanes, lanes) => {
            lacks("planes of 32 units")
        }
        () if !features.plane.contains(Plane::Ops) => lacks("plane operations"),
        () => Ok(()),
    }
}

/// Whether the device lists cooperative matrices of this shape from this type into f32.
fn lists(properties: &DeviceProperties, dtype: ElemType, shape: CmmaShape) -> bool {
    let single = ElemType::Float(FloatKind::F32);
    let CmmaShape { m, n, k } = shape;
    properties.features.matmul.cmma.iter().any(|config| {
        (config.a_type, config.b_type, config.cd_type) == (dtype, dtype, single)
            && (config.m as usize, config.n as usize, config.k as usize) == (m, n, k)
    })
}

/// The largest shape of cooperative matrices that tiles divide into.
fn cmma_shape(properties: &DeviceProperties, dtype: ElemType) -> Option<CmmaShape> {
    let sizes = [16, 8];
    let shapes = sizes.into_iter().flat_map(move |m| {
        sizes.into_iter().flat_map(move |n| sizes.map(|k| CmmaShape { m, n, k }))
    });
    shapes.into_iter().find(|&shape| lists(properties, dtype, shape))
}
