//! Development commands: `cargo xtask parity`, `bench`, `devices`, `checkpoint`, `audit`,
//! `device-bundle`, `device-report`, `provision`.

mod audit;
mod bench;
mod checkpoint;
mod device_bundle;
mod device_report;
mod devices;
mod parity;
mod provision;

use std::ffi::OsString;
use std::process::ExitCode;

use attention_bench::memory::CountingAllocator;
use clap::{Parser, Subcommand};

/// For `bench`.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Development commands of the vision attention workspace")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run every golden case and compare with the reference.
    Parity(parity::Parity),
    /// Measure layers and operations in a release build: time, memory, arithmetic rate.
    Bench(Box<attention_bench::arguments::Bench>),
    /// Write a model folder with random weights, to time a tower of any size.
    Checkpoint(checkpoint::Checkpoint),
    /// List each device that answers, what a request resolves to on it, and the kernels that run there.
    Devices(devices::Devices),
    /// Compile kernels without a GPU; fail if one needs local memory or differs from the table.
    Audit(kernel_audit::Audit),
    /// Build one archive that checks and measures the kernels on another machine's GPU.
    DeviceBundle(device_bundle::DeviceBundle),
    /// Sum up what a device bundle's run.sh found; run.sh does so itself.
    DeviceReport(device_report::DeviceReport),
    /// Install what building for CUDA and `audit` need: LLVM, ptxas, nvdisasm, libdevice.
    Provision(provision::Provision),
}

/// What stands on the command line after the command, for a program of its own that reads it again.
fn arguments() -> impl Iterator<Item = OsString> {
    std::env::args_os().skip(2)
}

fn main() -> ExitCode {
    // Fallbacks are part of what the commands print; a setting that has no effect is not.
    let log = env_logger::Env::default().default_filter_or("off,kernels_cpu=warn");
    env_logger::Builder::from_env(log).init();
    let result = match Cli::parse().command {
        Command::Parity(parity) => parity.run(),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Checkpoint(checkpoint) => checkpoint.run(),
        Command::Devices(devices) => devices.run(),
        Command::Audit(_) => audit::run(),
        Command::DeviceBundle(bundle) => bundle.run(),
        Command::DeviceReport(report) => report.run(),
        Command::Provision(provision) => provision.run(),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}
