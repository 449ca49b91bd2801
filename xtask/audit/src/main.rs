//! The program behind `cargo xtask audit`.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use kernel_audit::Audit;
use kernel_audit::compile::audit;
use kernel_audit::report::Report;
use kernel_audit::selected::nothing_selected;
use kernel_audit::table::{Kind, Table};
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

/// What one compiler makes of its kernels, and the releases of the tools.
struct Audited {
    kind: Kind,
    report: Report,
    releases: String,
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
    let mut audited = vec![Audited {
        kind: Kind::Default,
        report: audit(arguments, &toolkit)?,
        releases: releases(&toolkit)?,
    }];
    let cpp = audit_cpp(arguments, &toolkit)?;
    let left_out = cpp.is_none();
    audited.extend(cpp);
    audited.retain(|audited| !audited.report.rows().is_empty());
    if audited.is_empty() {
        return Err(nothing_selected(arguments, left_out)?.into());
    }
    if left_out {
        println!(
            "skipped: kernels with a producer, which `cargo xtask provision --nvrtc` installs a compiler for"
        );
    }
    if let Some(file) = &arguments.json {
        write(&audited, file).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    let mut passed = true;
    for Audited { kind, report, releases } in audited {
        passed &= report.passed();
        if arguments.check || arguments.update {
            println!("{}", report.brief());
            let table = Table::new(kind, &report, releases);
            passed &= if arguments.update { update(kind, &table)? } else { check(kind, &table)? };
        } else {
            println!("{report}");
        }
    }
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Nothing where the compiler for kernels with a producer is missing.
#[cfg(feature = "nvrtc")]
fn audit_cpp(arguments: &Audit, toolkit: &Toolkit) -> Result<Option<Audited>, Box<dyn Error>> {
    use kernel_audit::{compile, nvrtc::Nvrtc, toolchain::ptxas};

    let found = toolkit.nvrtc().ok_or("NVRTC is missing; run `cargo xtask provision --nvrtc`")?;
    let nvrtc = Nvrtc::load(&found)?;
    let report = compile::audit_cpp(arguments, toolkit, &nvrtc)?;
    let releases = format!("{}, ptxas {}", nvrtc.release()?, ptxas(toolkit)?);
    Ok(Some(Audited { kind: Kind::Cpp, report, releases }))
}

#[cfg(not(feature = "nvrtc"))]
fn audit_cpp(_: &Audit, _: &Toolkit) -> Result<Option<Audited>, Box<dyn Error>> {
    Ok(None)
}

fn update(kind: Kind, table: &Table) -> Result<bool, Box<dyn Error>> {
    let file = kind.file();
    fs::write(file, table.to_string()).map_err(|error| format!("{file}: {error}"))?;
    println!("{file}: written");
    Ok(true)
}

fn check(kind: Kind, table: &Table) -> Result<bool, Box<dyn Error>> {
    let file = kind.file();
    let failed = |error: &dyn Error| format!("{file}: {error}");
    let old = fs::read_to_string(file).map_err(|error| failed(&error))?;
    let old = Table::read(kind, &old).map_err(|error| failed(&error))?;
    let difference = old.difference(table);
    println!("{difference}");
    Ok(difference.passed())
}

fn write(audited: &[Audited], file: &Path) -> Result<(), Box<dyn Error>> {
    let rows = audited.iter().flat_map(|audited| audited.report.rows()).collect::<Vec<_>>();
    let mut json = serde_json::to_string_pretty(&rows)?;
    json.push('\n');
    Ok(fs::write(file, json)?)
}
