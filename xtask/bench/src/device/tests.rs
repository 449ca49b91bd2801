#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use rstest::rstest;
use serde_json::{Value, json};

use super::input::{Outcome, Step, read};
use super::*;
use crate::arguments::{Dtype, Heads, Operation, Pass};
use crate::case::Case;
use crate::layout::Layout;

const RUN: &str = include_str!("../../../device/run.sh");
const TORCH: &str = include_str!("../../torch_gpu.py");

/// `AxB` for each pair in the list that the Python program gives a name.
fn pairs_of(name: &str) -> Vec<String> {
    let line = TORCH.lines().find_map(|line| line.strip_prefix(&format!("{name} = "))).unwrap();
    let numbers = line.split(|c: char| !c.is_ascii_digit()).filter(|text| !text.is_empty());
    let numbers: Vec<&str> = numbers.collect();
    numbers.chunks(2).map(|pair| pair.join("x")).collect()
}

/// The words of the first assignment of a variable in run.sh, which is that for CUDA.
fn words_of(name: &str) -> Vec<String> {
    let line =
        RUN.lines().find_map(|line| line.trim().strip_prefix(&format!("{name}=\""))).unwrap();
    line.trim_end_matches('"').split(' ').map(str::to_owned).collect()
}

#[test]
fn the_grid_is_that_of_the_peer() {
    let (heads, layouts) = (words_of("grid_heads"), words_of("grid_layouts"));
    assert_eq!((heads.len(), layouts.len()), (4, 7));
    assert_eq!(heads, pairs_of("HEADS"));
    assert_eq!(layouts, pairs_of("LAYOUTS"));
    for text in &heads {
        assert_eq!(text.parse::<Heads>().unwrap().to_string(), *text);
    }
    for text in &layouts {
        assert_eq!(text.parse::<Layout>().unwrap().to_string(), *text);
    }
}

#[test]
fn both_count_the_same_work() {
    assert!(TORCH.contains("flops = 4 * segments * length**2 * heads * head_dim"));
    assert!(TORCH.contains("2.5 * flops / row[\"backward_ms\"]"));
    let case = |pass| Case {
        operation: Operation::AttentionVarlen,
        heads: Heads::new(12, 128),
        layout: Layout::uniform(16, 1024),
        dtype: Dtype::Bf16,
        pass,
    };
    let flops = 4.0 * 16.0 * 1024.0 * 1024.0 * 12.0 * 128.0;
    assert_eq!(case(Pass::Forward).flops(), Some(flops));
    assert_eq!(case(Pass::Backward).flops(), Some(2.5 * flops));
}

fn write(folder: &Path, name: &str, text: &str) {
    fs::write(folder.join(name), text).unwrap();
}

fn bench_row(op: &str, implementation: &str, heads: [usize; 2], layout: &str, pass: &str) -> Value {
    let attention = op == "attention_varlen";
    json!({
        "op": op, "implementation": implementation, "heads": heads[0], "head_dim": heads[1],
        "layout": layout, "dtype": "bf16", "pass": pass, "ms": 2.0,
        "gflops": attention.then_some(500_000.0), "gbs": (!attention).then_some(3_000.0),
    })
}

fn bench(rows: &[Value]) -> String {
    let skipped = |layout| {
        json!({"op": "attention_varlen", "implementation": "sdpa", "heads": "12x128",
               "layout": layout, "reason": "its scores would take 8.0 GiB"})
    };
    json!({
        "machine": {"cpu": "A CPU", "version": "0.1.0", "burn": "0.22.1"},
        "calibrations": [{"gemm_gflops": 600_000.0, "copy_gbs": 4_000.0}],
        "rows": rows, "skipped": [skipped("1x16384"), skipped("4x4096")],
    })
    .to_string()
}

/// A run on a GPU, complete but for 24x64.
fn run(folder: &Path) {
    write(
        folder,
        "facts.tsv",
        "device\tcuda\ndtype\tbf16\ngpu\tA GPU\ncompiler\tLLVM\nseconds\t400\n",
    );
    write(
        folder,
        "steps.tsv",
        "check\tparity\t0\t30\t60\t97 passed, 0 failed\nmeasure\ttorch\t1\t3\t60\tout of memory\n",
    );
    let row = |heads, layout, pass| {
        bench_row("attention_varlen", "flash_attention_2", heads, layout, pass)
    };
    let rows = [
        row([12, 128], "1x16384", "forward"),
        row([12, 128], "1x16384", "backward"),
        row([12, 128], "256x64", "forward"),
    ];
    write(folder, "attention.json", &bench(&rows));
    let rope = |name, layout| bench_row("rope_qk_norm", name, [12, 128], layout, "forward");
    let rows = [rope("rope_qk_norm", "1x16384"), rope("composed", "1x16384")];
    write(folder, "rope_qk_norm.json", &bench(&rows));
    let row = |layout, variant, forward: f64, backward: Option<f64>| {
        json!({"heads": 12, "head_dim": 128, "layout": layout, "variant": variant,
               "forward_ms": forward, "backward_ms": backward})
    };
    let torch = json!({
        "torch": "2.10", "device": "A GPU", "matmul_tflops": 800.0, "copy_gbs": 3_750.0,
        "rows": [row("1x16384", "loop", 0.1, None), row("1x16384", "varlen", 1.8, Some(1.5)),
                 row("256x64", "varlen", 1.9, None)],
    });
    write(folder, "torch.json", &torch.to_string());
}

#[test]
fn figures_become_shares_and_targets() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path());
    let summary = report(folder.path()).unwrap();
    assert!(summary.correct);
    let attention = &summary.attention[0];
    assert_eq!(attention.tflops, Some(500.0));
    // The higher of both products is what the device can do.
    assert_eq!(attention.of_matmul, Some(500.0 / 800.0));
    assert_eq!((attention.varlen_ms, attention.of_varlen), (Some(1.8), Some(0.9)));
    assert_eq!(summary.rope_qk_norm.len(), 1);
    let rope = &summary.rope_qk_norm[0];
    assert_eq!((rope.of_copy, rope.composed_ms), (Some(0.75), Some(2.0)));

    let met =
        |figure: &str| summary.targets.iter().find(|target| target.figure == figure).unwrap().met;
    assert_eq!(summary.targets.len(), 2 * 3 * 2 + 2);
    assert_eq!(met("forward 12x128 1x16384"), Some(true));
    assert_eq!(met("forward 12x128 256x64"), Some(false));
    assert_eq!(met("backward 12x128 1x16384"), Some(false));
    assert_eq!(met("backward 12x128 256x64"), None);
    assert_eq!(met("rope_qk_norm 12x128 1x16384"), Some(false));
    assert_eq!(met("forward 24x64 1x16384"), None);
}

/// As [`run`], with the other kernel beside the first.
fn run_both(folder: &Path) {
    run(folder);
    let row = |layout, ms: f64| {
        let mut row =
            bench_row("attention_varlen", "flash_attention_3", [12, 128], layout, "forward");
        row["ms"] = ms.into();
        row
    };
    write(folder, "attention-async.json", &bench(&[row("1x16384", 1.5), row("256x64", 4.0)]));
}

/// Rows of both kernels are told apart, and a target of one is not met by the other.
#[test]
fn implementations_have_rows_and_targets_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    run_both(folder.path());
    let summary = report(folder.path()).unwrap();
    assert_eq!(summary.attention.len(), 5);
    let share = |figure: &str| {
        let target = summary.targets.iter().find(|target| target.figure == figure).unwrap();
        (target.measured, target.met)
    };
    assert_eq!(summary.targets.len(), 2 * 3 * 3 + 2);
    assert_eq!(share("forward 12x128 1x16384"), (Some(0.9), Some(true)));
    assert_eq!(share("flash_attention_3 12x128 1x16384"), (Some(1.2), Some(true)));
    assert_eq!(share("flash_attention_3 12x128 256x64"), (Some(0.475), Some(false)));
    assert_eq!(share("flash_attention_3 24x64 256x64"), (None, None));
    let table = fs::read_to_string(folder.path().join("table.txt")).unwrap();
    let of = |implementation: &str| {
        let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        rows.filter(|words| words.first() == Some(&implementation))
            .map(|words| words[1..4].join(" "))
            .collect::<Vec<_>>()
    };
    assert_eq!(of("flash_attention_2").len(), 3);
    assert_eq!(of("flash_attention_3"), ["12x128 1x16384 forward", "12x128 256x64 forward"]);
    let json = fs::read_to_string(folder.path().join("results.json")).unwrap();
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["attention"][4]["implementation"], "flash_attention_3");
}

#[test]
fn targets_are_of_the_grid() {
    let folder = tempfile::tempdir().unwrap();
    run_both(folder.path());
    let summary = report(folder.path()).unwrap();
    let (heads, layouts) = (words_of("grid_heads"), words_of("grid_layouts"));
    for target in &summary.targets {
        let words: Vec<String> = target.figure.split(' ').map(str::to_owned).collect();
        assert!(heads.contains(&words[1]) && layouts.contains(&words[2]), "{}", target.figure);
    }
}

#[test]
fn the_texts_show_every_part() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path());
    let brief = report(folder.path()).unwrap().to_string();
    let parts = [
        "A GPU as cuda, kernels by LLVM, burn-vision-attention 0.1.0, burn 0.22.1, torch 2.10",
        "matrix product: 600.0 TFLOP/s by Burn, 800.0 TFLOP/s by PyTorch",
        "30 of  60 s  97 passed, 0 failed",
        "FAILED (1)",
        "met     forward 12x128 1x16384                   0.90 of varlen_attn, at least 0.9",
        "MISSED  rope_qk_norm 12x128 1x16384",
        "attention_varlen by sdpa was not measured on 12x128 1x16384 and 3 more: its scores",
        "every check holds, 400 s in all",
    ];
    let table = fs::read_to_string(folder.path().join("table.txt")).unwrap();
    for part in parts {
        assert!(brief.contains(part), "{part} is missing in\n{brief}");
        assert!(table.contains(part), "{part} is missing in\n{table}");
    }
    assert!(brief.lines().count() <= 40, "{brief}");
    assert!(table.contains("of varlen_attn") && table.contains("62%"), "{table}");
    let json = fs::read_to_string(folder.path().join("results.json")).unwrap();
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["steps"][1]["outcome"]["failed"], 1);
    assert_eq!(json["torch"]["rows"].as_array().unwrap().len(), 3);
    assert_eq!(json["targets"][0]["met"], true);
}

#[test]
fn a_run_without_figures_has_a_report() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "facts.tsv", "device\tflex\ndtype\tf32\n");
    write(folder.path(), "steps.tsv", "check\tparity\t1\t30\t60\terror: no device\n");
    write(folder.path(), "attention.json", "{\"machine\": {");
    let summary = report(folder.path()).unwrap();
    assert!(!summary.correct && summary.targets.is_empty());
    let text = summary.to_string();
    assert!(text.contains("attention.json is not whole"), "{text}");
    assert!(
        text.contains("NOT every check holds") && text.contains("copy: not measured"),
        "{text}"
    );
}

#[rstest]
#[case("check", "0", Outcome::Ok, false)]
#[case("check", "1", Outcome::Failed(1), true)]
#[case("check", "124", Outcome::RanOut, true)]
#[case("check", "137", Outcome::RanOut, true)]
#[case("check", "139", Outcome::Failed(139), true)]
#[case("check", "-", Outcome::LeftOut, true)]
#[case("extra", "-", Outcome::LeftOut, false)]
#[case("extra", "124", Outcome::RanOut, false)]
#[case("extra", "101", Outcome::Failed(101), true)]
#[case("measure", "1", Outcome::Failed(1), false)]
fn only_checks_speak_against_the_kernels(
    #[case] kind: &str,
    #[case] code: &str,
    #[case] outcome: Outcome,
    #[case] bad: bool,
) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "facts.tsv", "");
    write(folder.path(), "steps.tsv", &format!("{kind}\tname\t{code}\t60\t60\tlast words\n"));
    let steps: Vec<Step> = read(folder.path()).unwrap().steps;
    assert_eq!((steps[0].outcome, steps[0].is_bad()), (outcome, bad));
}

/// 137 is also what a program has that something else killed.
#[test]
fn a_program_that_was_killed_early_has_failed() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "facts.tsv", "");
    write(folder.path(), "steps.tsv", "check\tname\t137\t3\t60\t\n");
    assert_eq!(read(folder.path()).unwrap().steps[0].outcome, Outcome::Failed(137));
}

#[rstest]
#[case("check\tname\t0\t1\t2\n", "steps.tsv line 1: expected 6 fields, got 5")]
#[case("check\ta\t0\t1\t2\t\nfoo\tname\t0\t1\t2\t\n", "line 2: `foo` is no kind of step")]
#[case("check\tname\tx\t1\t2\t\n", "`x` is no status")]
#[case("check\tname\t0\t-1\t2\t\n", "`-1` is no number")]
fn foreign_files_are_errors(#[case] steps: &str, #[case] message: &str) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "facts.tsv", "");
    write(folder.path(), "steps.tsv", steps);
    let error = report(folder.path()).unwrap_err().to_string();
    assert!(error.contains(message) && !error.contains('\n'), "{error}");
}

#[test]
fn a_folder_of_no_run_is_an_error() {
    let error = report(Path::new("/no/such/folder")).unwrap_err().to_string();
    assert!(error.contains("/no/such/folder/facts.tsv"), "{error}");
}
