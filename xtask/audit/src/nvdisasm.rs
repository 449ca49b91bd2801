//! Disassembling the machine code of many kernels at once.

use std::fs;
use std::path::Path;
use std::process::Command;

use thiserror::Error;

use crate::architecture::Architecture;
use crate::cubin::CubinError;
use crate::sass::{Instruction, SassError, parse};

/// Why machine code could not be read.
#[derive(Debug, Error)]
pub enum NvdisasmError {
    /// The program could not be run, or a file could not be written.
    #[error("{path}: {error}")]
    Io {
        /// The program or file.
        path: String,
        /// What the system says.
        error: std::io::Error,
    },
    /// The code was refused.
    #[error("nvdisasm refuses the code: {0}")]
    Refused(String),
    /// There is no code.
    #[error(transparent)]
    Cubin(#[from] CubinError),
    /// The disassembly has another form than the one that is read here.
    #[error(transparent)]
    Sass(#[from] SassError),
}

/// The instructions of each kernel, from its machine code.
///
/// # Errors
///
/// If `nvdisasm` does not run or refuses the code, or if its output is not understood.
pub fn disassemble(
    nvdisasm: &Path,
    kernels: &[Vec<u8>],
    architecture: Architecture,
) -> Result<Vec<Vec<Instruction>>, NvdisasmError> {
    let io = |path: &Path| {
        let path = path.display().to_string();
        move |error| NvdisasmError::Io { path, error }
    };
    let folder = tempfile::tempdir().map_err(io(&std::env::temp_dir()))?;
    let source = folder.path().join("kernels.bin");
    fs::write(&source, kernels.concat()).map_err(io(&source))?;
    let output = Command::new(nvdisasm)
        .args(["--binary", architecture.machine()])
        .arg(&source)
        .output()
        .map_err(io(nvdisasm))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        let reason = errors.lines().next().unwrap_or("no reason given");
        return Err(NvdisasmError::Refused(reason.to_owned()));
    }
    let sizes = kernels.iter().map(Vec::len).collect::<Vec<_>>();
    Ok(parse(&String::from_utf8_lossy(&output.stdout), &sizes)?)
}
