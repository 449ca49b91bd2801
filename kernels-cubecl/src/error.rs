//! Why a kernel cannot serve a problem, or a launch was refused.

use cubecl::ir::ElemType;
use thiserror::Error;

use crate::Engine;

/// A property that the problem needs and the kernel or the device does not have.
///
/// Returned by the `supports` functions, so that a resolver can report it and pick another
/// implementation.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum Unsupported {
    /// The device cannot store and convert this element type.
    #[error(
        "{argument}: the device does not support {dtype} buffers with conversion to f32; convert the tensor to f32"
    )]
    Dtype {
        /// The tensor argument.
        argument: &'static str,
        /// Its element type.
        dtype: ElemType,
    },
    /// The head dimension is outside the set that the kernel is written for.
    #[error("{argument}: head_dim {head_dim} is not supported; allowed: {allowed}")]
    HeadDim {
        /// The tensor argument.
        argument: &'static str,
        /// The requested head dimension, in elements.
        head_dim: usize,
        /// The allowed set, in words.
        allowed: &'static str,
    },
    /// The engine that was asked for does not run on the device, or not for the problem.
    #[error("{engine} needs {missing}")]
    Engine {
        /// What was asked for.
        engine: Engine,
        /// What is missing.
        missing: &'static str,
    },
    /// The device has no cooperative matrices for this element type, or none of a usable shape.
    #[error(
        "the device lists no cooperative matrices of 8 or 16 rows, columns and steps from {dtype} into f32"
    )]
    Cmma {
        /// The element type of the operands.
        dtype: ElemType,
    },
    /// The smallest tile needs more shared memory than the device has.
    #[error(
        "the smallest tile needs {required} bytes of shared memory, the device has {available}"
    )]
    SharedMemory {
        /// Bytes needed by the smallest tile.
        required: usize,
        /// Bytes that the device offers to one cube.
        available: usize,
    },
    /// The kernel binds more storage buffers than the device can.
    #[error("the kernel needs {required} storage buffers, the device binds {available}")]
    Bindings {
        /// Storage buffers bound by the kernel, metadata included.
        required: u32,
        /// Storage buffers that the device binds at once.
        available: u32,
    },
    /// The cube is larger than the device allows.
    #[error("the kernel needs {required} units per cube, the device allows {available}")]
    UnitsPerCube {
        /// Units of one cube.
        required: u32,
        /// Units that the device allows in one cube.
        available: u32,
    },
    /// Element offsets of a tensor pass 32 bits and the device has no 64-bit addressing.
    #[error(
        "{argument}: {elements} elements pass the 32-bit offset limit of {limit} and the device has no 64-bit addressing; split the batch"
    )]
    Offsets {
        /// The tensor argument.
        argument: &'static str,
        /// Elements between the first and the last one addressed.
        elements: usize,
        /// The largest number of elements addressed by 32-bit offsets.
        limit: usize,
    },
    /// More tokens than token indices can tell apart.
    #[error("{argument}: {tokens} tokens pass the limit of {limit}; split the batch")]
    Tokens {
        /// The tensor argument.
        argument: &'static str,
        /// Tokens of the tensor.
        tokens: usize,
        /// The largest supported number of tokens.
        limit: usize,
    },
    /// More cubes than a folded grid holds.
    #[error("{cubes} cubes pass the grid limit of {limit}; split the batch")]
    Grid {
        /// Cubes needed.
        cubes: u64,
        /// The largest supported number of cubes.
        limit: u64,
    },
}

/// Why a launch was refused. Nothing has been queued on the device when this is returned.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum LaunchError {
    /// No blueprint exists for the problem on this device.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The work list was built for another tile size or other token counts.
    #[error(
        "work list: {property} is {actual}, the launch needs {expected}; rebuild the list for this problem's blueprint"
    )]
    WorkList {
        /// The property that differs.
        property: &'static str,
        /// What the launch needs.
        expected: usize,
        /// What the list was built for.
        actual: usize,
    },
    /// The tensor reaches past the end of its buffer.
    #[error("{argument}: shape and strides reach {required} bytes, the buffer holds {available}")]
    OutOfBounds {
        /// The tensor argument.
        argument: &'static str,
        /// Bytes reached by the last element.
        required: u64,
        /// Bytes of the buffer.
        available: u64,
    },
    /// The tensor starts at an address that the planned vector reads cannot use.
    #[error(
        "{argument}: buffer offset of {offset} bytes is not a multiple of {alignment}; copy the tensor"
    )]
    Misaligned {
        /// The tensor argument.
        argument: &'static str,
        /// Byte offset of the first element in its allocation.
        offset: u64,
        /// Required alignment in bytes.
        alignment: u64,
    },
}
