//! The program behind `cargo xtask bench`.

use std::process::ExitCode;

use attention_bench::arguments::Bench;
use attention_bench::memory::CountingAllocator;
use attention_bench::run;
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
