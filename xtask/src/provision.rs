//! `cargo xtask provision`: what building for CUDA and the audit need beyond Rust.

use std::error::Error;
use std::process::{Command, ExitCode};

/// Runs the script, which does only what is missing and says what it did.
pub fn run() -> Result<ExitCode, Box<dyn Error>> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/provision.sh");
    let status = Command::new("bash").arg(script).status();
    let status = status.map_err(|error| format!("bash {script}: {error}"))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
