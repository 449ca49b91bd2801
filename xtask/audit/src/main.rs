//! The program behind `cargo xtask audit`.

use std::error::Error;
use std::fs;
use std::process::ExitCode;

use clap::Parser;
use kernel_audit::Audit;
use kernel_audit::compile::audit;
use kernel_audit::report::Report;
use kernel_audit::table::{FILE, Table};
use kernel_audit::toolchain::{Toolkit, releases};

#[derive(Parser)]
#[command(
    name = "kernel-audit",
    about = "Registers, shared memory and spills of every kernel, without a GPU"
)]
struct Cli {
    #[command(flatten)]
    audit: Audit,
}

fn main() -> ExitCode {
    run(&Cli::parse().audit).unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

fn run(arguments: &Audit) -> Result<ExitCode, Box<dyn Error>> {
    let toolkit = Toolkit::find()?;
    // SAFETY: no other thread runs yet. The compiler finds libdevice by this variable alone.
    unsafe { std::env::set_var("CUDA_PATH", toolkit.root()) };
    let report = audit(arguments, &toolkit)?;
    if let Some(file) = &arguments.json {
        write(&report, file).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    let mut passed = report.passed();
    if arguments.check || arguments.update {
        println!("{}", report.brief());
        let table = Table::new(&report, releases(&toolkit)?);
        let failed = |error: &dyn Error| format!("{FILE}: {error}");
        if arguments.update {
            fs::write(FILE, table.to_string()).map_err(|error| failed(&error))?;
            println!("{FILE}: written");
        } else {
            let old = fs::read_to_string(FILE).map_err(|error| failed(&error))?;
            let old = Table::read(&old).map_err(|error| failed(&error))?;
            let difference = old.difference(&table);
            println!("{difference}");
            passed &= difference.passed();
        }
    } else {
        println!("{report}");
    }
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn write(report: &Report, file: &std::path::Path) -> Result<(), Box<dyn Error>> {
    let mut json = serde_json::to_string_pretty(report.rows())?;
    json.push('\n');
    Ok(fs::write(file, json)?)
}
