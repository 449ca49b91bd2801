//! The programs of a bundle, by cargo.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::BundleError;

/// The CUDA release whose driver interface the programs use. Later drivers have it, too; cargo's default
/// would be the latest that the bindings know.
const CUDA_VERSION: [&str; 2] = ["CUDARC_CUDA_VERSION", "12080"];

/// What is built: parity, gradients, measurements and the report; the kernels against plain Rust.
const PROGRAMS: [&str; 2] = ["xtask", "conformance"];

/// A program and the name that it has in the bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// Where cargo put it.
    pub path: PathBuf,
}

/// What cargo built.
#[derive(Clone, Debug)]
pub struct Built {
    /// What `run.sh` runs.
    pub programs: Vec<Program>,
    /// The features that they are built with.
    pub features: Vec<String>,
    /// Where cargo builds.
    pub folder: PathBuf,
}

/// Builds release programs that have these features, and the tests of the kernels.
///
/// # Errors
///
/// When cargo cannot be started, fails, or builds something else.
pub fn build(features: &[&str]) -> Result<Built, BundleError> {
    let mut arguments: Vec<String> =
        ["build", "--bins", "--no-default-features", "--package", "xtask"]
            .map(str::to_owned)
            .into();
    arguments.extend(["--features".to_owned(), features.join(",")]);
    let programs = programs(&cargo(&arguments)?, "bin");

    // Without Burn, of which the tests need nothing. They bring wgpu themselves.
    let runtimes = ["cuda", super::CUDA_CPP, "cpu"];
    let runtimes = features.iter().copied().filter(|name| runtimes.contains(name));
    let of_tests: Vec<&str> = ["conformance"].into_iter().chain(runtimes).collect();
    let tests = ["test", "--no-run", "--package", "kernels-cubecl", "--test", "conformance"];
    let mut arguments: Vec<String> = tests.map(str::to_owned).into();
    arguments.extend(["--features".to_owned(), of_tests.join(",")]);
    let tests = self::programs(&cargo(&arguments)?, "test");

    let missing = |what| BundleError::Failed {
        program: "cargo",
        reason: format!("it built {what} of the {} programs", PROGRAMS.len()),
    };
    let programs: Vec<Program> = programs.into_iter().chain(tests).collect();
    let built: Vec<&str> = programs.iter().map(|program| program.name.as_str()).collect();
    // target/release/xtask is in target/release, which is in target.
    let folder = programs.iter().find(|program| program.name == "xtask");
    let folder = folder.and_then(|program| program.path.parent().and_then(Path::parent));
    match folder {
        Some(folder) if built == PROGRAMS => Ok(Built {
            folder: folder.to_owned(),
            features: features.iter().map(|&name| name.to_owned()).collect(),
            programs,
        }),
        _ => Err(missing(built.len())),
    }
}

/// What cargo says when it builds with these arguments, a JSON object a line.
fn cargo(arguments: &[String]) -> Result<String, BundleError> {
    let program = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let [variable, version] = CUDA_VERSION;
    let output = Command::new(program)
        .current_dir(super::repository())
        .args(arguments)
        .args(["--release", "--locked", "--message-format=json-render-diagnostics"])
        .env(variable, env::var(variable).unwrap_or_else(|_| version.to_owned()))
        .stderr(Stdio::inherit())
        .output()
        .map_err(|source| BundleError::Tool { program: "cargo", source })?;
    if !output.status.success() {
        return Err(BundleError::Failed { program: "cargo", reason: output.status.to_string() });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The programs of a kind of target in what cargo said, in the order of their names.
fn programs(messages: &str, kind: &str) -> Vec<Program> {
    let program = |line: &str| {
        let message: Value = serde_json::from_str(line).ok()?;
        let target = &message["target"];
        let kinds = target["kind"].as_array()?;
        kinds.iter().any(|found| found == kind).then_some(())?;
        let path = message["executable"].as_str()?.into();
        Some(Program { name: target["name"].as_str()?.to_owned(), path })
    };
    let mut programs: Vec<Program> = messages.lines().filter_map(program).collect();
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    programs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_what_cargo_says() {
        let line = |kind: &str, name: &str, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","target":{{"kind":["{kind}"],"name":"{name}"}},"executable":{executable}}}"#
            )
        };
        let messages = [
            line("lib", "kernels_cubecl", "null"),
            line("test", "rope_qk_norm", r#""/t/release/deps/rope_qk_norm-12""#),
            line("test", "attention_varlen", r#""/t/release/deps/attention_varlen-34""#),
            line("bin", "xtask", r#""/t/release/xtask""#),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ]
        .join("\n");
        let found = |kind| {
            let programs = programs(&messages, kind);
            programs.into_iter().map(|program| program.name).collect::<Vec<_>>()
        };
        assert_eq!(found("test"), ["attention_varlen", "rope_qk_norm"]);
        assert_eq!(found("bin"), ["xtask"]);
        let path = &programs(&messages, "bin")[0].path;
        assert_eq!(path, Path::new("/t/release/xtask"));
        assert!(found("example").is_empty());
    }
}
