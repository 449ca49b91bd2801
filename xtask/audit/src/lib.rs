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
//! The machine code of each kernel is disassembled by `nvdisasm`: how many instructions of its hottest loop
//! are matrix products tells whether the matrix units are kept busy.
//!
//! Kernels with a producer need TMA, which `CubeCL`'s C++ compiler alone lowers: they are compiled to C++,
//! and by NVRTC from there, where that is installed.
//!
//! `table.txt` holds the figures of the usual kernels, and `table_cpp.txt` those of kernels with a
//! producer. `--check` fails and tells what is different now; `--update` writes them anew, for the change
//! to be seen where it is reviewed.
//!
//! The compiler needs LLVM and is behind the feature `llvm`, NVRTC behind `nvrtc`; nothing turns them on
//! but the audit itself. What is here without it: the list of kernels, the tools' whereabouts and the report.

pub mod architecture;
pub mod cubin;
pub mod flow;
pub mod nvdisasm;
pub mod ptxas;
pub mod report;
pub mod sass;
pub mod table;
pub mod toolchain;
pub mod variants;

#[cfg(feature = "llvm")]
pub mod compile;
#[cfg(feature = "llvm")]
pub mod device;
#[cfg(feature = "nvrtc")]
pub mod nvrtc;
#[cfg(feature = "llvm")]
pub mod selected;

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
    /// Fail if the usual kernels are not as in the table under version control, and tell what is
    /// different.
    #[arg(long, conflicts_with_all = ["architectures", "full", "kernel", "update"])]
    pub check: bool,
    /// Write the table under version control anew.
    #[arg(long, conflicts_with_all = ["architectures", "full", "kernel"])]
    pub update: bool,
}

impl Audit {
    /// The kernels to look at, before [`kernel`](Self::kernel) narrows them.
    pub fn selection(&self) -> Selection {
        if self.full { Selection::Full } else { Selection::Usual }
    }
}

#[cfg(test)]
mod tests {
    use clap::{Parser, error::ErrorKind};
    use rstest::rstest;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        audit: Audit,
    }

    #[rstest]
    #[case("--full")]
    #[case("--kernel=f16")]
    #[case("--arch=sm_80")]
    #[case("--update")]
    fn the_table_is_compared_as_a_whole(#[case] other: &str) {
        let error = Cli::try_parse_from(["audit", "--check", other]).map(|cli| cli.audit.check);
        assert_eq!(error.map_err(|error| error.kind()), Err(ErrorKind::ArgumentConflict));
        assert!(Cli::try_parse_from(["audit", "--check"]).is_ok_and(|cli| cli.audit.check));
    }
}
