//! Registers, shared memory and spills of every kernel that a blueprint can choose, without a GPU.
//!
//! Kernels are compiled to PTX by the compiler that `CubeCL`'s CUDA runtime uses, then assembled by
//! `ptxas`, whose report is read. A kernel that needs local memory, for spilled registers or an
//! array that is indexed at run time, fails: local memory is device memory, and the inner loops
//! would wait for it.
//!
//! Blocks have a known number of threads, so `ptxas` tries to let more of them reside by taking 72
//! registers instead of 80, or 40 instead of 46, and spills a value or two where that just fails. No
//! kernel can prevent it: the fewer registers it needs, the lower the next goal. Such a kernel is
//! listed but passes, if it spills nothing when assembled for one resident block.
//!
//! The compiler needs LLVM and is behind the feature `llvm`, which nothing turns on but the audit
//! itself. What is here without it: the list of kernels, the tools' whereabouts and the report.

pub mod architecture;
pub mod ptxas;
pub mod report;
pub mod toolchain;
pub mod variants;

#[cfg(feature = "llvm")]
pub mod compile;
#[cfg(feature = "llvm")]
pub mod device;

use std::path::PathBuf;

use architecture::Architecture;
use clap::Args;
use variants::Selection;

/// Arguments of the audit.
#[derive(Args, Clone, Debug)]
pub struct Audit {
    /// GPU architecture to assemble for, repeatable.
    #[arg(long = "arch", value_enum, value_name = "ARCH",
        default_values_t = [Architecture::Sm80, Architecture::Sm90a])]
    pub architectures: Vec<Architecture>,
    /// Also rare layouts, head_dims and combinations of options: some ten minutes per architecture.
    #[arg(long)]
    pub full: bool,
    /// Only kernels whose blueprint in words, as in the table, has this text in it.
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub kernel: String,
    /// Write the rows of the table to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl Audit {
    /// The kernels to look at, before [`kernel`](Self::kernel) narrows them.
    pub fn selection(&self) -> Selection {
        if self.full { Selection::Full } else { Selection::Usual }
    }
}
