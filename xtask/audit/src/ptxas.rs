//! Assembling PTX and reading what `ptxas -v` says about it.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde::Serialize;
use thiserror::Error;

use crate::architecture::Architecture;

/// Why a kernel could not be assembled.
#[derive(Debug, Error)]
pub enum PtxasError {
    /// The program could not be run, or a file could not be written.
    #[error("{path}: {error}")]
    Io {
        /// The program or file.
        path: String,
        /// What the system says.
        error: std::io::Error,
    },
    /// The PTX was refused.
    #[error("ptxas refuses the kernel: {0}")]
    Refused(String),
    /// The report has another form than the one that is read here.
    #[error("ptxas reports no {0}: its output has changed, adapt the audit to it")]
    Report(&'static str),
}

/// What one kernel takes, per thread where not said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Registers.
    pub registers: u32,
    /// Shared memory of known size, in bytes per block. `CubeCL`'s own is allocated at launch and
    /// not counted here.
    pub static_shared_memory: u32,
    /// Stack of the kernel's own, in bytes.
    pub stack_frame: u32,
    /// Bytes written by spills.
    pub spill_stores: u32,
    /// Bytes read back by spills.
    pub spill_loads: u32,
    /// Local memory, in bytes: the stack with that of the functions called.
    pub local_memory: u32,
}

impl Usage {
    /// Reads the report of a module with one kernel. Functions that it calls count as part of it.
    ///
    /// # Errors
    ///
    /// If the report has no registers or no spills.
    pub fn parse(report: &str) -> Result<Self, PtxasError> {
        let mut usage = Self::default();
        let (mut used, mut framed) = (false, false);
        for line in report.lines() {
            if let Some(stack_frame) = before(line, " bytes stack frame") {
                framed = true;
                usage.stack_frame += stack_frame;
                usage.spill_stores += before(line, " bytes spill stores").unwrap_or(0);
                usage.spill_loads += before(line, " bytes spill loads").unwrap_or(0);
            }
            if let Some(registers) = before(line, " registers") {
                used = true;
                usage.registers = usage.registers.max(registers);
                usage.static_shared_memory += before(line, " bytes smem").unwrap_or(0);
                usage.local_memory += before(line, " bytes cumulative stack size").unwrap_or(0)
                    + before(line, " bytes lmem").unwrap_or(0);
            }
        }
        match (used, framed) {
            (false, _) => Err(PtxasError::Report("registers")),
            (_, false) => Err(PtxasError::Report("spills")),
            (true, true) => Ok(usage),
        }
    }

    /// Whether everything stays in registers and shared memory.
    pub fn is_clean(&self) -> bool {
        self.stack_frame == 0
            && self.spill_stores == 0
            && self.spill_loads == 0
            && self.local_memory == 0
    }
}

/// The number that stands directly before `what`.
fn before(line: &str, what: &str) -> Option<u32> {
    let end = line.find(what)?;
    let start = line[..end].rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
    line[start..end].parse().ok()
}

/// Assembles a module with one kernel and reads the report.
///
/// # Errors
///
/// If `ptxas` does not run or refuses the module, or if its report is not understood.
pub fn assemble(ptxas: &Path, ptx: &str, architecture: Architecture) -> Result<Usage, PtxasError> {
    let io = |path: &Path| {
        let path = path.display().to_string();
        move |error| PtxasError::Io { path, error }
    };
    let folder = tempfile::tempdir().map_err(io(&std::env::temp_dir()))?;
    let source = folder.path().join("kernel.ptx");
    fs::write(&source, ptx).map_err(io(&source))?;
    let output = Command::new(ptxas)
        .args(["--verbose", "--gpu-name", &architecture.to_string(), "--output-file"])
        .arg(folder.path().join("kernel.cubin"))
        .arg(&source)
        .output()
        .map_err(io(ptxas))?;
    let report = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let reason = report.lines().find(|line| line.contains("error") || line.contains("fatal"));
        let reason = reason.or(report.lines().next()).unwrap_or("no reason given");
        return Err(PtxasError::Refused(reason.to_owned()));
    }
    Usage::parse(&report)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rstest::rstest;

    use super::*;

    /// Output of release 13.2: a clean kernel, the same one held to 64 registers, and one with an
    /// array that is indexed at run time.
    const CLEAN: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attention_varlen_f_f32_nq_4_nk_4_nv_4_89622185' for 'sm_90a'
ptxas info    : Function properties for attention_varlen_f_f32_nq_4_nk_4_nv_4_89622185
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 162 registers, used 1 barriers
ptxas info    : Compile time = 146.522 ms
";
    const SPILLED: &str = "\
ptxas info    : Overriding maximum register limit 256 for 'attention_varlen_f_f32_nq_4_nk_4_nv_4_89622185' with  64 of maxrregcount option
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attention_varlen_f_f32_nq_4_nk_4_nv_4_89622185' for 'sm_90a'
ptxas info    : Function properties for attention_varlen_f_f32_nq_4_nk_4_nv_4_89622185
    240 bytes stack frame, 604 bytes spill stores, 524 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 240 bytes cumulative stack size
ptxas info    : Compile time = 144.114 ms
";
    const INDEXED: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'indexed' for 'sm_80'
ptxas info    : Function properties for indexed
    64 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers, 64 bytes cumulative stack size, 364 bytes cmem[0]
ptxas info    : Compile time = 2.077 ms
";

    #[rstest]
    #[case(CLEAN, Usage { registers: 162, ..Usage::default() }, true)]
    #[case(
        SPILLED,
        Usage {
            registers: 64,
            stack_frame: 240,
            spill_stores: 604,
            spill_loads: 524,
            local_memory: 240,
            ..Usage::default()
        },
        false
    )]
    #[case(
        INDEXED,
        Usage { registers: 10, stack_frame: 64, local_memory: 64, ..Usage::default() },
        false
    )]
    fn reports_are_read(#[case] report: &str, #[case] expected: Usage, #[case] clean: bool) {
        let usage = Usage::parse(report).unwrap();
        assert_eq!(usage, expected);
        assert_eq!(usage.is_clean(), clean);
    }

    #[rstest]
    #[case("", "registers")]
    #[case("ptxas info    : 0 bytes gmem", "registers")]
    #[case("ptxas info    : Used 10 registers, used 0 barriers", "spills")]
    fn a_report_without_numbers_is_no_clean_kernel(#[case] report: &str, #[case] missing: &str) {
        let error = Usage::parse(report).unwrap_err().to_string();
        assert!(error.contains(missing), "{error}");
    }
}
