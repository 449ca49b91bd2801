//! `cargo xtask provision`: what building for CUDA and the audit need beyond Rust.

use std::error::Error;
use std::process::{Command, ExitCode};

use clap::Args;

/// Arguments of `cargo xtask provision`.
#[derive(Args)]
pub struct Provision {
    /// Also the compiler of CUDA C++ and its headers, for kernels that need CubeCL's C++ compiler: 52 MB to
    /// download.
    #[arg(long)]
    nvrtc: bool,
}

impl Provision {
    /// Runs the script, which does only what is missing and says what it did.
    pub fn run(&self) -> Result<ExitCode, Box<dyn Error>> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/provision.sh");
        let options = self.nvrtc.then_some("--nvrtc");
        let status = Command::new("bash").arg(script).args(options).status();
        let status = status.map_err(|error| format!("bash {script}: {error}"))?;
        Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
