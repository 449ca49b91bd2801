//! The device bundle's run.sh with stand-ins for its programs, on a device without a GPU.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use rstest::rstest;
use serde_json::Value;
use tempfile::TempDir;

fn program(path: &Path, script: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, format!("#!/usr/bin/env bash\n{script}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// A bundle of which every program is content, but for what `parity` does; the report is the real one.
fn bundle(parity: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/device/run.sh"), root.join("run.sh")).unwrap();
    let script = format!(
        "case $1 in\n\
         devices) echo 'flex (Flex)'; echo 'wgpu (Wgpu)'; echo 'device `cuda` is not built in' ;;\n\
         device-report) exec '{}' \"$@\" ;;\n\
         parity) {parity} ;;\n\
         bench) echo \"$@\" ;;\n\
         esac",
        env!("CARGO_BIN_EXE_xtask")
    );
    program(&root.join("bin/xtask"), &script);
    program(&root.join("bin/conformance"), "echo \"$VISION_ATTENTION_TEST_DEVICE\"");
    folder
}

fn run(bundle: &TempDir, device: &str, budget: &str) -> Output {
    let mut command = Command::new(bundle.path().join("run.sh"));
    command.env("DEVICE", device).env("BUDGET", budget).env("OUT", bundle.path().join("out"));
    command.current_dir(bundle.path()).output().unwrap()
}

fn results(bundle: &TempDir) -> Value {
    serde_json::from_str(&fs::read_to_string(bundle.path().join("out/results.json")).unwrap())
        .unwrap()
}

fn step<'a>(results: &'a Value, name: &str) -> &'a Value {
    let steps = results["steps"].as_array().unwrap();
    steps.iter().find(|step| step["name"] == name).unwrap_or_else(|| panic!("no step {name}"))
}

#[test]
fn every_step_runs_and_is_recorded() {
    let bundle = bundle("echo '3 passed, 0 failed'");
    let output = run(&bundle, "wgpu", "460");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("every check holds"), "{text}");
    let results = results(&bundle);
    assert_eq!(results["facts"]["device"], "wgpu");
    let names = ["parity", "gradients", "parity-composed", "gradients-composed"];
    for name in names {
        assert_eq!(step(&results, name)["outcome"], "ok");
        assert_eq!(step(&results, name)["detail"], "3 passed, 0 failed");
    }
    assert_eq!(step(&results, "conformance")["detail"], "wgpu");
    assert_eq!(step(&results, "torch")["outcome"], "left_out");
    let log = fs::read_to_string(bundle.path().join("out/attention.log")).unwrap();
    for part in ["--device wgpu", "--pass forward --pass backward", "--heads 12x128 --heads 24x64"]
    {
        assert!(log.contains(part), "{log}");
    }
    assert!(bundle.path().join("out/table.txt").exists());
}

#[rstest]
#[case::fails("echo '2 passed, 1 failed'; exit 1", "460", "failed")]
#[case::hangs("[[ $* != *flash* ]] || exec sleep 1000", "15", "ran_out")]
fn one_step_does_not_stop_the_others(
    #[case] parity: &str,
    #[case] budget: &str,
    #[case] outcome: &str,
) {
    let bundle = bundle(parity);
    let output = run(&bundle, "flex", budget);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stdout));
    let results = results(&bundle);
    let parity = &step(&results, "parity")["outcome"];
    assert!(parity == outcome || parity[outcome] == 1, "{parity}");
    assert_eq!(step(&results, "attention")["outcome"], "ok");
    assert_eq!(step(&results, "conformance")["outcome"], "left_out");
    assert_eq!(results["correct"], false);
}

#[test]
fn what_is_missing_is_said_in_a_line() {
    let bundle = bundle("exit 1");
    let output = run(&bundle, "ndarray", "460");
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.starts_with("missing: "), "{text}");
    assert!(text.ends_with("nothing was checked and nothing measured\n"), "{text}");
    assert_eq!(text.lines().count(), 2, "{text}");
}
