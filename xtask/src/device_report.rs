//! `cargo xtask device-report`: what a device bundle's `run.sh` found, as tables.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use attention_bench::device::report;
use clap::Args;

/// Arguments of the command.
#[derive(Args)]
pub struct DeviceReport {
    /// The folder that run.sh wrote its results to.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

impl DeviceReport {
    /// Writes results.json and table.txt and prints the summary; fails where a check does not hold.
    pub fn run(self) -> Result<ExitCode, Box<dyn Error>> {
        let summary = report(&self.folder)?;
        println!("\n{summary}everything is in {}", self.folder.display());
        Ok(if summary.correct { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
