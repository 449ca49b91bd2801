//! Assembling PTX and reading what `ptxas -v` says about it.

use core::fmt;
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
    /// The PTX has another form than the one that is changed here.
    #[error("the PTX has no {0}: the compiler has changed, adapt the audit to it")]
    Ptx(&'static str),
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

/// Most bytes that the assembler may spill for the sake of more resident blocks: 8 registers, the
/// unit in which a multiprocessor hands them out.
const TRADED: u32 = 32;

/// What became of a kernel's variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// All stay in registers.
    Clean,
    /// A few are spilled, though registers are left: the assembler would rather have another block
    /// reside on the multiprocessor. It does not know how many the shared memory lets reside, which
    /// is only asked for at launch.
    Traded,
    /// Local memory is needed.
    Spilled,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Clean => "clean",
            Self::Traded => "traded",
            Self::Spilled => "spilled",
        })
    }
}

impl Verdict {
    /// Judges a kernel by its usage, and by its usage if the assembler is content with one resident
    /// block.
    pub fn of(usage: &Usage, alone: &Usage) -> Self {
        match (usage.is_clean(), alone.is_clean() && usage.local_memory <= TRADED) {
            (true, _) => Self::Clean,
            (false, true) => Self::Traded,
            (false, false) => Self::Spilled,
        }
    }
}

/// The module without a wish for resident blocks beyond the first.
///
/// # Errors
///
/// If the kernel does not say how many threads a block has.
pub fn alone(ptx: &str) -> Result<String, PtxasError> {
    // The compiler of C++ says the most that there are.
    const THREADS: [&str; 2] = ["\n.reqntid ", "\n.maxntid "];
    let end = |start: usize| ptx[start + 1..].find('\n').map(|length| start + 1 + length);
    let Some(end) = THREADS.iter().find_map(|threads| ptx.find(threads)).and_then(end) else {
        return Err(PtxasError::Ptx("threads of a block (.reqntid, .maxntid)"));
    };
    Ok(format!("{}\n.minnctapersm 1{}", &ptx[..end], &ptx[end..]))
}

/// The number that stands directly before `what`.
fn before(line: &str, what: &str) -> Option<u32> {
    let end = line.find(what)?;
    let start = line[..end].rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
    line[start..end].parse().ok()
}

/// A kernel that has been assembled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assembled {
    /// What it takes.
    pub usage: Usage,
    /// The file that `ptxas` writes.
    pub cubin: Vec<u8>,
}

/// Assembles a module with one kernel and reads the report.
///
/// # Errors
///
/// If `ptxas` does not run or refuses the module, or if its report is not understood.
pub fn assemble(
    ptxas: &Path,
    ptx: &str,
    architecture: Architecture,
) -> Result<Assembled, PtxasError> {
    let io = |path: &Path| {
        let path = path.display().to_string();
        move |error| PtxasError::Io { path, error }
    };
    let folder = tempfile::tempdir().map_err(io(&std::env::temp_dir()))?;
    let [source, cubin] = ["kernel.ptx", "kernel.cubin"].map(|name| folder.path().join(name));
    fs::write(&source, ptx).map_err(io(&source))?;
    let output = Command::new(ptxas)
        .args(["--verbose", "--gpu-name", &architecture.to_string(), "--output-file"])
        .arg(&cubin)
        .arg(&source)
        .output()
        .map_err(io(ptxas))?;
    let report = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let reason = report.lines().find(|line| line.contains("error") || line.contains("fatal"));
        let reason = reason.or(report.lines().next()).unwrap_or("no reason given");
        return Err(PtxasError::Refused(reason.to_owned()));
    }
    let usage = Usage::parse(&report)?;
    Ok(Assembled { usage, cubin: fs::read(&cubin).map_err(io(&cubin))? })
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

    const FEW: Usage = usage(40, 8);

    const fn usage(registers: u32, local_memory: u32) -> Usage {
        Usage {
            registers,
            static_shared_memory: 0,
            stack_frame: local_memory,
            spill_stores: local_memory,
            spill_loads: local_memory,
            local_memory,
        }
    }

    #[rstest]
    #[case::all_in_registers(usage(40, 0), usage(46, 0), Verdict::Clean)]
    #[case::one_block_fewer_would_do(FEW, usage(46, 0), Verdict::Traded)]
    #[case::needed_in_any_case(FEW, usage(255, 4), Verdict::Spilled)]
    #[case::too_many_for_a_trade(usage(40, 40), usage(64, 0), Verdict::Spilled)]
    fn spills_are_judged_by_what_needs_them(
        #[case] own: Usage,
        #[case] alone: Usage,
        #[case] expected: Verdict,
    ) {
        assert_eq!(Verdict::of(&own, &alone), expected);
    }

    #[test]
    fn one_resident_block_is_all_that_is_wished_for() {
        let ptx = ".visible .entry kernel(\n)\n.reqntid 64, 1, 1\n{\n";
        let expected = ".visible .entry kernel(\n)\n.reqntid 64, 1, 1\n.minnctapersm 1\n{\n";
        assert_eq!(alone(ptx).unwrap(), expected);
        let ptx = ptx.replace(".reqntid", ".maxntid");
        assert_eq!(alone(&ptx).unwrap(), expected.replace(".reqntid", ".maxntid"));
        let error = alone(".visible .entry kernel()\n{\n").unwrap_err().to_string();
        assert!(error.contains(".reqntid"), "{error}");
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
