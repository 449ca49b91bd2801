//! `cargo xtask audit`: registers, shared memory and spills of every kernel, without a GPU.

use std::env;
use std::error::Error;
use std::process::{Command, ExitCode};

use kernel_audit::Audit;
use kernel_audit::toolchain::{Toolkit, check_llvm};

/// Builds and runs the audit. It is a program of its own, so that nothing else has to link LLVM.
pub fn run(arguments: &Audit) -> Result<ExitCode, Box<dyn Error>> {
    check_llvm()?;
    let toolkit = Toolkit::find()?;
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .args([
            "run",
            "--quiet",
            "--package",
            "kernel-audit",
            "--features",
            "llvm",
            "--manifest-path",
        ])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/audit/Cargo.toml"))
        .args(["--", "--kernel", &arguments.kernel])
        .env("CUDA_PATH", toolkit.root());
    for architecture in &arguments.architectures {
        command.args(["--arch", &architecture.to_string()]);
    }
    if arguments.full {
        command.arg("--full");
    }
    if let Some(file) = &arguments.json {
        command.arg("--json").arg(file);
    }
    let status = command.status().map_err(|error| format!("cargo run: {error}"))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
