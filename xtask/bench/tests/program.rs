//! The program as it is called, on small batches.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Output};

use rstest::rstest;
use serde_json::Value;

fn bench(arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_attention-bench"));
    command.args(arguments.split_whitespace()).args(["--gemm", "32", "--repeats", "2"]);
    command.output().unwrap()
}

fn json(arguments: &str) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bench.json");
    let output = bench(&format!("{arguments} --json {}", file.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

fn names<'a>(rows: &'a Value, key: &str) -> Vec<&'a str> {
    rows.as_array().unwrap().iter().map(|row| row[key].as_str().unwrap()).collect()
}

#[rstest]
#[case("", false)]
#[case("--backward", true)]
fn every_operation_gives_rows(#[case] extra: &str, #[case] backward: bool) {
    let report = json(&format!(
        "--op layer --op attention_varlen --op rope_qk_norm --layout 2x16 --heads 24x64 --heads 2x16 {extra}"
    ));
    let rows = report["rows"].as_array().unwrap();
    for op in ["layer", "attention_varlen", "rope_qk_norm"] {
        let of_op = rows.iter().filter(|row| row["op"] == op && row["heads"] == 24);
        let of_op: Vec<_> = of_op.map(|row| row["implementation"].as_str().unwrap()).collect();
        let rope = ["rope_qk_norm", "composed"];
        let others = ["sdpa", "eager_v2", "eager", "burn_masked"];
        let expected = if op == "rope_qk_norm" { &rope[..] } else { &others[..] };
        for name in expected {
            assert!(of_op.contains(name), "{op} by {name} is missing among {of_op:?}");
        }
    }
    for row in rows {
        assert_eq!(row["device"], "flex");
        assert_eq!((row["segments"].as_u64(), row["tokens"].as_u64()), (Some(2), Some(32)));
        assert_eq!(
            (row["dtype"].as_str(), row["backward"].as_bool()),
            (Some("f32"), Some(backward))
        );
        assert!(row["ms"].as_f64().unwrap() >= row["best_ms"].as_f64().unwrap());
        assert!(row["best_ms"].as_f64().unwrap() > 0.0);
        let has_norm = row["op"] != "attention_varlen" && row["heads"] == 24;
        assert_eq!(row["qk_norm"], has_norm);
        assert_eq!(row["gflops"].is_null(), row["op"] == "rope_qk_norm");
        assert_eq!(row["copy_ratio"].is_null(), row["op"] != "rope_qk_norm");
        // The output alone, of a width of at least 32 numbers for 32 tokens.
        assert!(row["peak_bytes"].as_u64().unwrap() >= 4 * 32 * 32, "{row}");
    }
    assert!(report["calibrations"][0]["gemm_gflops"].as_f64().unwrap() > 0.0);
    assert_eq!(report["ratios"].as_array().unwrap().len(), 0);
}

#[test]
fn curves_stop_where_a_call_would_take_too_long() {
    let report = json(
        "--scaling tokens --scaling segments --scaling threads --threads 2 --layout 2x16 --heads 1x4 \
         --implementation sdpa --max-seconds 0.000001",
    );
    let rows = report["rows"].as_array().unwrap();
    let of = |axis: &str| rows.iter().filter(|row| row["scaling"] == axis).collect::<Vec<_>>();
    assert_eq!(of("tokens")[0]["tokens"], 1024);
    assert_eq!(of("segments")[0]["tokens"], 64);
    assert_eq!(of("threads")[0]["threads"], 1);
    assert!(rows.iter().all(|row| row["repeats"] == 1));
    let skipped = report["skipped"].as_array().unwrap();
    assert_eq!(rows.len() + skipped.len(), 7 + 7 + 2);
    assert!(skipped.iter().all(|skip| skip["reason"].as_str().unwrap().contains("--max-seconds")));
}

#[test]
fn what_is_left_out_is_said() {
    let report = json("--op tower --layout 1x9 --implementation sdpa");
    assert_eq!(names(&report["skipped"], "op"), ["tower"]);
    assert_eq!(names(&report["skipped"], "reason").len(), 1);
}

#[rstest]
#[case("--device gpu", "unknown device `gpu`")]
#[case("--device flex --peer torch --python /no/such/python", "cannot start `/no/such/python`")]
#[case("--layout 2x", "layout `2x`")]
#[case("--op layer --layout 2x16 --json /no/such/folder/a.json", "/no/such/folder/a.json")]
#[case("--op tower --layout 1x9 --plot a.png", "nothing to draw")]
fn wrong_arguments_are_said_in_a_line(#[case] arguments: &str, #[case] message: &str) {
    let output = bench(&format!("{arguments} --heads 1x4 --implementation sdpa"));
    assert!(!output.status.success());
    let text = String::from_utf8(output.stderr).unwrap();
    let errors: Vec<_> = text.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(errors.len() == 1 && errors[0].contains(message), "{text}");
}

/// Stands in for a Python with torch: answers every request with the same times.
#[cfg(unix)]
fn stand_in(folder: &Path, hello: &str) -> std::path::PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let file = folder.join("python");
    let script = format!(
        "#!/bin/sh\necho '{hello}'\nwhile read -r line; do echo '{{\"times_ms\": [1e9, 2e9]}}'; done\n"
    );
    std::fs::write(&file, script).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    file
}

#[cfg(unix)]
#[test]
fn a_peer_is_compared_with() {
    let folder = tempfile::tempdir().unwrap();
    let python = stand_in(folder.path(), "{\"torch\": \"0.0\"}");
    let plot = folder.path().join("bench.png");
    let report = json(&format!(
        "--op layer --op rope_qk_norm --layout 2x16 --heads 2x16 --peer torch --python {} --plot {}",
        python.display(),
        plot.display()
    ));
    assert_eq!(report["machine"]["torch"], "0.0");
    let rows = report["rows"].as_array().unwrap();
    let torch: Vec<_> = rows.iter().filter(|row| row["device"] == "torch").collect();
    assert_eq!(torch.len(), 4);
    assert!(torch.iter().all(|row| row["ms"] == 1.5e9 && row["peak_bytes"].is_null()));
    let ratios = report["ratios"].as_array().unwrap();
    assert_eq!(ratios.len(), 2);
    let ratio = |ratio: &Value| {
        ratio["ours_ms"].as_f64().unwrap() / ratio["peer_ms"].as_f64().unwrap()
            - ratio["ratio"].as_f64().unwrap()
    };
    assert!(ratios.iter().all(|line| ratio(line).abs() < 1e-12));
    assert!(image::open(plot).unwrap().width() > 600);
}

#[cfg(unix)]
#[test]
fn a_python_without_torch_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let python = stand_in(folder.path(), "{\"error\": \"No module named torch\"}");
    let output = bench(&format!("--peer torch --python {}", python.display()));
    assert!(!output.status.success());
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("cannot import torch (No module named torch)"), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
}
