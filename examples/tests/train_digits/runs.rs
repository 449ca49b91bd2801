//! Short runs from end to end.

use std::fs;
use std::sync::LazyLock;

use rstest::rstest;

use crate::support::{Workplace, copy, epochs};

/// Few digits and steps.
const SHORT: [&str; 8] =
    ["--digits", "40", "--batch-size", "10", "--learning-rate", "0.01", "--seed", "3"];

/// A run of three epochs in the folder `run`, and what it printed.
static RUN: LazyLock<(Workplace, String)> = LazyLock::new(|| {
    let place = Workplace::new();
    let stdout = place.train(&[&SHORT[..], &["--epochs", "3", "--out", "run"]].concat());
    (place, stdout)
});

/// A copy of that run.
fn run() -> Workplace {
    let place = Workplace::new();
    copy(&RUN.0.path("run"), &place.path("run"));
    place
}

#[test]
fn a_run_leaves_model_curves_samples_and_checkpoints() {
    let (place, stdout) = &*RUN;
    let lines = epochs(stdout);
    let numbers: Vec<(usize, usize)> = lines.iter().map(|line| (line.0, line.1)).collect();
    assert_eq!(numbers, [(1, 3), (2, 3), (3, 3)], "{stdout}");
    for (_, _, [loss, accuracy, valid_loss, valid_accuracy]) in &lines {
        assert!(*loss > 0.0 && *valid_loss > 0.0, "{stdout}");
        assert!((0.0..=100.0).contains(accuracy) && (0.0..=100.0).contains(valid_accuracy));
    }
    assert!(lines[2].2[0] < lines[0].2[0], "the training loss falls: {stdout}");
    assert!(stdout.contains("40 to learn from, 40 to watch, 40 held out"), "{stdout}");
    assert!(stdout.contains("attention: "), "{stdout}");
    assert!(stdout.contains(" of 40\n"), "{stdout}");

    let picture = image::open(place.path("run/curves.png")).unwrap().into_rgb8();
    assert_eq!(picture.dimensions(), (1200, 480));
    assert!(picture.pixels().any(|pixel| pixel.0 == [30, 90, 180]), "there is a curve");
    let model = ["config.json", "model.safetensors", "preprocessor_config.json"];
    assert_eq!(place.names("run/model"), model);
    assert!(place.names("run/samples").iter().all(|name| name.ends_with(".png")));
    let kept = ["model-2.bpk", "model-3.bpk", "optim-2.bpk", "optim-3.bpk", "scheduler-2.bpk"];
    assert_eq!(place.names("run/checkpoint")[..5], kept);
}

#[test]
fn a_seed_gives_the_same_run_again_and_another_gives_another() {
    let place = Workplace::new();
    let short = [&SHORT[..6], &["--epochs", "1"]].concat();
    for (seed, out) in [("3", "first"), ("3", "again"), ("4", "other")] {
        place.train(&[&short[..], &["--seed", seed, "--out", out]].concat());
    }
    let model = |run: &str| place.bytes(&format!("{run}/model/model.safetensors"));
    assert!(model("first") == model("again"));
    assert!(model("first") != model("other"));
}

/// A run that was stopped in its third epoch ends, resumed, as if it had not been.
#[test]
fn resuming_continues_to_the_same_end() {
    let place = run();
    for part in ["model", "optim"] {
        fs::remove_file(place.path(&format!("run/checkpoint/{part}-3.bpk"))).unwrap();
    }
    // Cut short as it was written.
    fs::write(place.path("run/checkpoint/model-3.bpk"), "BURN").unwrap();
    fs::remove_dir_all(place.path("run/model")).unwrap();
    let stdout = place.train(&["--resume", "--out", "run"]);
    let (resumed, whole) = (epochs(&stdout), epochs(&RUN.1));
    assert_eq!(resumed, whole[2..]);
    let weights = "run/model/model.safetensors";
    assert!(place.bytes(weights) == RUN.0.bytes(weights));
    // The curves show the epochs before, too.
    assert!(place.bytes("run/curves.png") == RUN.0.bytes("run/curves.png"));
}

#[test]
fn more_epochs_may_be_asked_for_and_fewer_may_not() {
    let place = run();
    let expected = "run is trained for 3 epochs already: ask for more with --epochs";
    assert_eq!(place.refuse(&["--resume", "--out", "run"]), expected);
    assert_eq!(place.refuse(&["--resume", "--out", "run", "--epochs", "2"]), expected);
    let stdout = place.train(&["--resume", "--out", "run", "--epochs", "4", "--plain"]);
    let numbers: Vec<(usize, usize)> =
        epochs(&stdout).iter().map(|line| (line.0, line.1)).collect();
    assert_eq!(numbers, [(4, 4)], "{stdout}");
    assert!(place.refuse(&["--resume", "--out", "run"]).contains("trained for 4 epochs already"));
}

#[rstest]
#[case("multi")]
#[case("sharded")]
fn two_devices_share_the_work(#[case] strategy: &str) {
    let place = Workplace::new();
    let devices = ["--device", "flex,flex", "--strategy", strategy];
    let short = ["--digits", "40", "--batch-size", "5", "--learning-rate", "0.003"];
    let stdout = place.train(&[&short[..], &devices, &["--epochs", "6", "--out", "run"]].concat());
    let lines = epochs(&stdout);
    assert_eq!(lines.len(), 6, "{stdout}");
    assert!(lines[5].2[0] < lines[0].2[0], "the training loss falls: {stdout}");
    assert!(stdout.contains("device:    flex, flex"), "{stdout}");
    assert_eq!(place.names("run/model").len(), 3);
}
