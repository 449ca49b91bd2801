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

/// What a device answers: the first has no kernel of `flash_attention_3`, the last has.
const DEVICES: &str = "\
flex (Flex)
  f16, heads of 64:
    flash_attention_3  -> sdpa (flash_attention_3 cannot run: no copies (here); flash_attention_2 cannot run: no f16)
wgpu (Wgpu)
device `ndarray` is not built in
cuda (Cuda)
  bf16, heads of 64:
    flash_attention_3  -> flash_attention_3
    kernel of flash_attention_3: attention_varlen mma-async
";

/// A bundle of which every program is content, but for what `parity` does; the report is the real one.
fn bundle(parity: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/device/run.sh"), root.join("run.sh")).unwrap();
    let script = format!(
        "case $1 in\n\
         devices) cat \"$(dirname \"$0\")/../devices\" ;;\n\
         device-report) exec '{}' \"$@\" ;;\n\
         parity) {parity} ;;\n\
         bench) echo \"$@\" ;;\n\
         esac",
        env!("CARGO_BIN_EXE_xtask")
    );
    program(&root.join("bin/xtask"), &script);
    fs::write(root.join("devices"), DEVICES).unwrap();
    let conformance =
        "echo \"$VISION_ATTENTION_TEST_DEVICE $VISION_ATTENTION_REQUIRE_ASYNC_COPIES\"";
    program(&root.join("bin/conformance"), conformance);
    folder
}

fn run(bundle: &TempDir, device: &str, budget: &str) -> Output {
    command(bundle, device, budget).output().unwrap()
}

fn command(bundle: &TempDir, device: &str, budget: &str) -> Command {
    let mut command = Command::new(bundle.path().join("run.sh"));
    command.env("DEVICE", device).env("BUDGET", budget).env("OUT", bundle.path().join("out"));
    command.current_dir(bundle.path());
    command
}

/// As [`run`] on a machine with a GPU of this compute capability, and a toolkit with these files.
fn run_on_gpu(bundle: &TempDir, capability: &str, toolkit: &[&str]) -> Output {
    let root = bundle.path();
    let answer = format!(
        "case $* in *compute_cap*) echo {capability} ;; *) echo 'A GPU, 570.1, 80 GiB, 700 W' ;; esac"
    );
    program(&root.join("path/nvidia-smi"), &answer);
    // No library of the machine is found, and no Python that has torch.
    program(&root.join("path/ldconfig"), "");
    program(&root.join("path/python3"), "exit 1");
    for file in toolkit {
        let file = root.join("toolkit").join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, "").unwrap();
    }
    let path = format!("{}:{}", root.join("path").display(), std::env::var("PATH").unwrap());
    let mut command = command(bundle, "cuda", "460");
    command.env("PATH", path).env("CUDA_PATH", root.join("toolkit")).output().unwrap()
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
    assert_eq!(step(&results, "conformance")["detail"], "wgpu 0");
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

const HEADERS: [&str; 2] = ["include/cuda_fp16.h", "include/cccl/cuda/barrier"];

#[test]
fn the_kernel_with_copies_is_checked_and_measured_where_it_runs() {
    let bundle = bundle("echo '3 passed, 0 failed'");
    fs::write(bundle.path().join("features"), "cuda\ncuda-cpp\nflex\n").unwrap();
    let toolkit = [HEADERS[0], HEADERS[1], "lib64/libnvrtc.so.13"];
    let output = run_on_gpu(&bundle, "9.0", &toolkit);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let results = results(&bundle);
    for name in ["parity-async", "gradients-async"] {
        let step = step(&results, name);
        assert_eq!((&step["kind"], &step["outcome"]), (&"check".into(), &"ok".into()), "{name}");
    }
    assert_eq!(step(&results, "conformance")["detail"], "cuda 1");
    assert_eq!(results["facts"]["compiler"], "C++ and libnvrtc.so.13");
    let log = fs::read_to_string(bundle.path().join("out/attention-async.log")).unwrap();
    assert!(log.contains("--implementation flash_attention_3 --pass forward"), "{log}");
    assert!(!log.contains("backward"), "{log}");
    // A name that the programs look for.
    let link = fs::read_link(bundle.path().join("out/lib/libnvrtc.so")).unwrap();
    assert_eq!(link, bundle.path().join("toolkit/lib64/libnvrtc.so.13"));
}

/// A GPU that has to run it and denies it fails the check; others leave it out with what they say.
#[rstest]
#[case::has_to("cuda-cpp", "9.0", true)]
#[case::too_old("cuda-cpp", "8.6", false)]
#[case::by_llvm("cuda", "9.0", false)]
fn a_device_without_the_kernel(
    #[case] features: &str,
    #[case] capability: &str,
    #[case] expected: bool,
) {
    let bundle = bundle("[[ $* != *flash_attention_3* ]] || { echo 'no case ran'; exit 1; }");
    let root = bundle.path();
    fs::write(root.join("features"), format!("{features}\n")).unwrap();
    let kept = DEVICES.lines().take(3).collect::<Vec<_>>().join("\n");
    fs::write(root.join("devices"), kept.replace("flex (Flex)", "cuda (Cuda)")).unwrap();
    let toolkit = [HEADERS[0], HEADERS[1], "lib/libnvrtc.so", "nvvm/libdevice/libdevice.10.bc"];
    let output = run_on_gpu(&bundle, capability, &toolkit);
    let results = results(&bundle);
    if expected {
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(step(&results, "parity-async")["detail"], "no case ran");
    } else {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        let step = step(&results, "flash_attention_3");
        assert_eq!(step["outcome"], "left_out");
        assert_eq!(step["detail"], "no copies (here)");
    }
}

/// What the C++ compiler needs is looked for before anything runs.
#[rstest]
#[case::no_library(&HEADERS, "missing: NVRTC: ")]
#[case::until_cuda_13(&["include/cuda_fp16.h", "include/cuda/barrier"], "missing: NVRTC: ")]
fn what_compiles_cpp_is_looked_for(#[case] toolkit: &[&str], #[case] expected: &str) {
    let bundle = bundle("exit 1");
    fs::write(bundle.path().join("features"), "cuda-cpp\n").unwrap();
    let output = run_on_gpu(&bundle, "9.0", toolkit);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.starts_with(expected), "{text}");
    assert_eq!(text.lines().count(), 2, "{text}");
}
