//! `cargo xtask audit`: registers, shared memory and spills of every kernel, without a GPU.

use std::env;
use std::error::Error;
use std::process::{Command, ExitCode};

use kernel_audit::toolchain::{Toolkit, llvm};

/// Builds and runs the audit. It is a program of its own, so that nothing else has to link LLVM.
pub fn run() -> Result<ExitCode, Box<dyn Error>> {
    llvm()?;
    let toolkit = Toolkit::find()?;
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // Kernels with a producer are left out, in words, where what compiles them is missing.
    let features = if toolkit.nvrtc().is_some() { "llvm,nvrtc" } else { "llvm" };
    let mut command = Command::new(cargo);
    command
        .args([
            "run",
            "--quiet",
            "--package",
            "kernel-audit",
            "--features",
            features,
            "--manifest-path",
        ])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/audit/Cargo.toml"))
        .arg("--")
        // As they were given: they are the same program's.
        .args(crate::arguments())
        .env("CUDA_PATH", toolkit.root());
    let status = command.status().map_err(|error| format!("cargo run: {error}"))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
