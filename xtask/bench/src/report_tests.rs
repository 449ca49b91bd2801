#![allow(clippy::unwrap_used)]

use super::*;

fn case(layout: Layout) -> Case {
    let (operation, heads, dtype) = (Operation::Layer, Heads::new(2, 8), Dtype::F32);
    Case { operation, heads, layout, dtype, pass: Pass::Forward }
}

fn yardstick() -> Calibration {
    let (device, dtype) = ("flex".to_owned(), Dtype::F32);
    Calibration { device, threads: Some(2), dtype, gemm_gflops: 0.25, copy_gbs: Some(2.0) }
}

fn row(case: &Case, device: &str, implementation: &'static str, ms: f64) -> Row {
    let ours = device != TORCH && implementation != "burn_masked";
    let contender = Contender { device, implementation, ours, threads: Some(2) };
    let sample = Sample::new(vec![ms, ms / 2.0, 2.0 * ms], Some(1536));
    Row::new(case, contender, &sample, &yardstick(), None)
}

#[test]
fn rates_and_shares_are_of_the_median() {
    let layer = case(Layout::uniform(2, 3));
    let measured = row(&layer, "flex", "sdpa", 0.1);
    assert_eq!((measured.ms, measured.best_ms, measured.repeats), (0.1, 0.05, 3));
    let gflops = layer.flops().unwrap() / 0.1e-3 / 1e9;
    assert!((measured.gflops.unwrap() - gflops).abs() < 1e-12);
    assert!((measured.gemm_share.unwrap() - 4.0 * gflops).abs() < 1e-12);
    assert_eq!(measured.peak_ratio, Some(1536.0 / 768.0));
    assert_eq!(measured.copy_ratio, None);

    let rope = Case { operation: Operation::RopeQkNorm, ..layer };
    let measured = row(&rope, "flex", "rope_qk_norm", 0.1);
    assert_eq!((measured.gflops, measured.gemm_share), (None, None));
    let bytes = rope.moved_bytes().unwrap() as f64;
    assert!((measured.gbs.unwrap() - bytes / 0.1e-3 / 1e9).abs() < 1e-12);
    let copy_seconds = bytes / 2e9;
    assert!((measured.copy_ratio.unwrap() - 0.1e-3 / copy_seconds).abs() < 1e-9);
}

#[test]
fn rows_keep_the_contract() {
    let json =
        serde_json::to_value(row(&case(Layout::uniform(2, 3)), "flex", "sdpa", 0.1)).unwrap();
    let expected = serde_json::json!({
        "op": "layer", "device": "flex", "implementation": "sdpa", "heads": 2, "head_dim": 8,
        "segments": 2, "tokens": 6, "dtype": "f32", "backward": false, "pass": "forward", "ms": 0.1, "best_ms": 0.05,
        "peak_bytes": 1536, "threads": 2, "qk_norm": false, "gbs": null, "copy_ratio": null, "scaling": null,
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(json.get(key), Some(value), "{key}");
    }
    assert!(json["gflops"].is_f64() && json["gemm_share"].is_f64());
}

#[test]
fn the_fastest_of_each_side_are_compared_and_nothing_else() {
    let (small, large) = (case(Layout::uniform(2, 3)), case(Layout::uniform(1, 6)));
    let one_thread = Row { threads: Some(1), ..row(&small, TORCH, "torch_sdpa", 0.1) };
    let backward = Case { pass: Pass::Both, ..small.clone() };
    let rows = [
        row(&small, "flex", "sdpa", 6.0),
        row(&small, "flex", "burn_masked", 1.0),
        row(&small, TORCH, "torch_eager", 9.0),
        row(&small, "flex", "flash_attention_2", 3.0),
        row(&small, TORCH, "torch_sdpa", 4.0),
        one_thread,
        row(&large, "flex", "sdpa", 5.0),
        row(&backward, TORCH, "torch_sdpa", 5.0),
        row(&small, "ndarray", "sdpa", 8.0),
    ];
    let ratios = ratios(&rows);
    let found: Vec<_> =
        ratios.iter().map(|r| (r.device.as_str(), r.ours, r.peer, r.ratio)).collect();
    assert_eq!(
        found,
        [("flex", "flash_attention_2", "torch_sdpa", 0.75), ("ndarray", "sdpa", "torch_sdpa", 2.0)]
    );
    assert_eq!(ratios[0].best_ratio, 0.75);
}

#[test]
fn the_text_shows_every_part() {
    let case = case(Layout::pages());
    let rows = vec![row(&case, "flex", "sdpa", 6.0), row(&case, TORCH, "torch_sdpa", 4.0)];
    let skipped = |layout: Layout| Skipped {
        op: Operation::Layer,
        device: "flex".to_owned(),
        implementation: "burn_masked",
        heads: case.heads,
        layout,
        reason: "its scores would take 8.0 GiB".to_owned(),
    };
    let report = Report {
        machine: Machine::this(Some("2.0".to_owned())),
        calibrations: vec![yardstick()],
        ratios: ratios(&rows),
        rows,
        skipped: vec![skipped(Layout::pages()), skipped(Layout::uniform(1, 8))],
    };
    let text = report.to_string();
    for part in [
        "torch 2.0",
        "flex on 2 threads: f32 matrix product 0.2 GFLOP/s, memory copy 2.0 GB/s",
        "skipped layer by burn_masked on flex (2x8 pages, 2x8 1x8): its scores would take 8.0 GiB",
        "ours/torch",
        "1.50",
    ] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["skipped"][0]["heads"], "2x8");
    assert_eq!(json["skipped"][0]["layout"], "pages");
    assert_eq!(json["ratios"][0]["ratio"], 1.5);
    assert_eq!(json["machine"]["torch"], "2.0");
}

#[test]
fn a_file_that_cannot_be_written_is_an_error() {
    let machine = Machine::this(None);
    let (calibrations, rows, skipped, ratios) = (vec![], vec![], vec![], vec![]);
    let report = Report { machine, calibrations, rows, skipped, ratios };
    let message = report.write(Path::new("/no/such/folder/a.json")).unwrap_err().to_string();
    assert!(message.contains("/no/such/folder/a.json") && message.contains("--json"), "{message}");
}
