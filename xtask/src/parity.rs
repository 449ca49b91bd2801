//! `cargo xtask parity`: golden data on every device by every implementation.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use burn_vision_attention::AttentionImplementation;
use clap::Args;
use vision_attention_tests::devices::{self, NamedDevice};
use vision_attention_tests::fixtures;
use vision_attention_tests::parity::{Outcome, Request, run};

/// Arguments of the command.
#[derive(Args)]
pub struct Parity {
    /// Folder with manifest.json and preprocess.json.
    #[arg(long, value_name = "DIR", default_value_os_t = fixtures::directory())]
    fixtures: PathBuf,
    /// Device to run on, repeatable: flex, ndarray, wgpu; cpu and cuda where built in.
    #[arg(long = "device", value_name = "NAME", default_values_t = ["flex".to_owned(), "ndarray".to_owned()])]
    devices: Vec<String>,
    /// Implementation to run, repeatable; all five by default.
    #[arg(long = "implementation", value_name = "NAME", default_values_t = AttentionImplementation::ALL)]
    implementations: Vec<AttentionImplementation>,
    /// Compare gradients instead of outputs.
    #[arg(long)]
    gradients: bool,
}

impl Parity {
    /// Prints a line per case and the count; fails on any failure and when no case ran.
    pub fn run(self) -> Result<ExitCode, Box<dyn Error>> {
        let devices = self.devices.iter().map(|name| devices::device(name));
        let devices = devices.collect::<Result<Vec<NamedDevice>, _>>()?;
        let request =
            Request { devices, implementations: self.implementations, gradients: self.gradients };
        let (mut passed, mut failed, mut skipped) = (0, 0, 0);
        run(&self.fixtures, &request, &mut |outcome: Outcome| {
            println!("{outcome}");
            match (outcome.skipped(), outcome.passed()) {
                (true, _) => skipped += 1,
                (false, true) => passed += 1,
                (false, false) => failed += 1,
            }
        })?;
        if passed + failed == 0 {
            println!("no case ran");
        }
        // The count stands alone on the last line; scripts read it.
        if skipped > 0 {
            println!("{skipped} skipped for the reasons above");
        }
        println!("{passed} passed, {failed} failed");
        Ok(if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
