//! The program behind `cargo xtask bench`.

use std::process::ExitCode;

use attention_bench::arguments::Bench;
use attention_bench::memory::CountingAllocator;
use attention_bench::{BenchError, plot, runner};
use clap::Parser;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[derive(Parser)]
#[command(
    name = "attention-bench",
    about = "Time, memory and arithmetic rate of the layers and operations"
)]
struct Cli {
    #[command(flatten)]
    bench: Bench,
}

fn main() -> ExitCode {
    match run(&Cli::parse().bench) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Bench) -> Result<(), BenchError> {
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
