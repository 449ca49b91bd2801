//! The kernels that a blueprint can choose.
//!
//! Each operation has a file with functions that list its kernels, which stand in `LISTS`:
//!
//! 1. A function makes the problems that a [`Selection`] asks for, and for each the blueprint by the
//!    operation's own `supports`. A choice that `supports` makes for the device, such as matrix units
//!    on one architecture and not on another, needs no more than that: the properties are those of the
//!    architecture. One that the caller makes is made here, for every value that it can have.
//! 2. A [`Variant`] has the blueprint in words, which have to differ wherever kernels do, for kernels
//!    of the same words are listed once; and the kernel by the operation's `kernel`.
//! 3. `tests.rs` counts the kernels by hand: what two blueprints have in common is found there.
//! 4. `cargo xtask audit --kernel TEXT` shows the new ones, `cargo xtask audit --update` writes them to
//!    the table. Matrix units are used where `mma` is not 0, and kept busy as far as `share` goes.

mod attention_varlen;
mod rope_qk_norm;

use core::fmt;
use std::collections::HashSet;
use std::sync::Arc;

use cubecl::ir::{DeviceProperties, ElemType, FloatKind, TargetProperties};
use cubecl::prelude::CubeKernel;
use kernels_cubecl::{TensorLayout, Unsupported};

/// The kernels of an operation.
type List = fn(&DeviceProperties, Selection) -> Result<Vec<Variant>, Unsupported>;

/// What lists kernels.
const LISTS: [List; 5] = [
    attention_varlen::forward,
    attention_varlen::asynchronous,
    attention_varlen::backward,
    rope_qk_norm::forward,
    rope_qk_norm::backward,
];

const F32: ElemType = ElemType::Float(FloatKind::F32);
const DTYPES: [ElemType; 3] =
    [F32, ElemType::Float(FloatKind::F16), ElemType::Float(FloatKind::BF16)];

const HEADS: usize = 4;

/// Which of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// Contiguous tensors within 32-bit offsets, of the head_dims that models have, with all options
    /// of a kernel or none: what nearly every call runs, and the most that it does.
    Usual,
    /// Every dtype, head_dim, layout and combination of options.
    Full,
}

impl Selection {
    /// head_dim of q and k, and of v: the towers' and common ones, every register tile among them.
    fn head_dims(self) -> &'static [(usize, usize)] {
        match self {
            Self::Usual => &[(64, 64), (72, 72), (80, 80), (128, 128), (192, 192), (256, 256)],
            Self::Full => &[
                (64, 64),
                (72, 72),
                (80, 80),
                (96, 96),
                (128, 128),
                (192, 192),
                (192, 128),
                (256, 256),
            ],
        }
    }

    fn layouts(self) -> &'static [Layout] {
        match self {
            Self::Usual => &[Layout::Packed],
            Self::Full => &[Layout::Packed, Layout::Scalar, Layout::Mixed, Layout::Wide],
        }
    }

    /// Every dtype with every pair of head_dims in every layout.
    fn inputs(self) -> impl Iterator<Item = (ElemType, (usize, usize), Layout)> {
        DTYPES.into_iter().flat_map(move |dtype| {
            self.head_dims().iter().flat_map(move |&head_dims| {
                self.layouts().iter().map(move |&layout| (dtype, head_dims, layout))
            })
        })
    }
}

/// How tensors lie in memory, as far as kernels differ by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// Read in vectors with 32-bit offsets, as nearly always.
    Packed,
    /// Read one element at a time.
    Scalar,
    /// Every second one read in vectors, the others one element at a time.
    Mixed,
    /// Reaches past 32-bit offsets.
    Wide,
}

impl Layout {
    /// Tensor number `index` of a call.
    fn tensor(self, index: usize, head_dim: usize) -> TensorLayout {
        let packed = TensorLayout::contiguous([2, HEADS, head_dim]);
        let [token, head, element] = packed.strides;
        let strides = match self {
            Self::Mixed if index.is_multiple_of(2) => packed.strides,
            Self::Packed => packed.strides,
            Self::Scalar | Self::Mixed => [2 * token, 2 * head, 2 * element],
            Self::Wide => [1 << 33, head, element],
        };
        TensorLayout { strides, ..packed }
    }
}

/// Compiles a kernel for the device with these properties.
type Build =
    Box<dyn Fn(Arc<DeviceProperties>, Arc<TargetProperties>) -> Box<dyn CubeKernel> + Send + Sync>;

/// One kernel.
pub struct Variant {
    operation: &'static str,
    blueprint: String,
    threads: usize,
    needs_cpp: bool,
    build: Build,
}

impl Variant {
    /// The operation's name.
    pub fn operation(&self) -> &'static str {
        self.operation
    }

    /// Threads of a block.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Whether the C++ compiler alone lowers what it does.
    pub fn needs_cpp(&self) -> bool {
        self.needs_cpp
    }

    /// The kernel, to be compiled for the device with these properties.
    pub fn kernel(
        &self,
        properties: Arc<DeviceProperties>,
        target: Arc<TargetProperties>,
    ) -> Box<dyn CubeKernel> {
        (self.build)(properties, target)
    }
}

/// The blueprint, in words that no other kernel has.
impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.blueprint)
    }
}

/// The selected kernels, each once.
///
/// # Errors
///
/// If the device cannot run one of them.
pub fn variants(
    properties: &DeviceProperties,
    selection: Selection,
) -> Result<Vec<Variant>, Unsupported> {
    let mut variants = Vec::new();
    for list in LISTS {
        variants.extend(list(properties, selection)?);
    }
    let mut seen = HashSet::new();
    variants.retain(|variant| seen.insert(variant.to_string()));
    Ok(variants)
}

#[cfg(test)]
mod tests;
