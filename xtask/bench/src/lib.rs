//! Time, memory and arithmetic rate of the layers and operations of the workspace, beside Burn's own
//! attention and PyTorch. `cargo xtask bench` builds and runs the program of this package.
//!
//! | room | holds |
//! |---|---|
//! | [`arguments`] | what can be asked for |
//! | [`layout`] | the mixes of image sizes |
//! | [`case`] | one thing to measure, and what it costs in theory |
//! | [`workload`] | the same as a function to call |
//! | [`measure`], [`memory`] | time and memory of a call |
//! | [`machine`] | what the machine itself reaches: the rate of a large matrix product and of a copy |
//! | [`peer`] | the same layers in PyTorch |
//! | [`plan`] | which cases the arguments ask for |
//! | [`runner`] | everything asked for, one after another |
//! | [`report`], [`plot`] | the results as rows, tables and pictures |
//! | [`device`] | what the device bundle found on a GPU, beside PyTorch |

pub mod arguments;
pub mod case;
pub mod device;
mod error;
pub mod layout;
pub mod machine;
pub mod measure;
pub mod memory;
pub mod peer;
pub mod plan;
pub mod plot;
pub mod report;
pub mod results;
pub mod runner;
pub mod workload;

pub use error::BenchError;

use arguments::Bench;

/// Measures what the arguments ask for, prints it, and writes the files that they name.
///
/// # Errors
///
/// As [`runner::run`], and when a file cannot be written.
pub fn run(arguments: &Bench) -> Result<(), BenchError> {
    let report = runner::run(arguments, &mut |line| eprintln!("{line}"))?;
    println!("{report}");
    if let Some(file) = &arguments.json {
        report.write(file)?;
    }
    if let Some(file) = &arguments.plot {
        plot::write(&report, file)?;
    }
    Ok(())
}
