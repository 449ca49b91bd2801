//! Options that name nothing, contradict each other, or ask for folders that cannot be.

use rstest::rstest;

use crate::support::Workplace;

#[rstest]
#[case::device(&["--device", "tpu"], "unknown device `tpu`: expected one of flex, ndarray, wgpu, cpu, cuda")]
#[case::numbered(&["--device", "flex:7"],
    "device `flex:7`: expected a number under 1, that of flex devices here")]
#[case::kinds(&["--device", "flex,cuda"], "--device flex and cuda: devices of a run are of one kind")]
#[case::lonely(&["--strategy", "multi"],
    "--strategy needs several devices: name each after --device, as in cuda:0,cuda:1")]
#[case::crowded(&["--strategy", "single", "--device", "flex,flex"],
    "--strategy single takes one --device, got 2")]
#[case::ddp(&["--strategy", "ddp", "--device", "flex,flex"],
    "--strategy ddp: Burn has collective operations for cuda alone, not flex; use multi")]
#[case::strategy(&["--strategy", "all"],
    "invalid value 'all' for '--strategy <STRATEGY>'; [possible values: single, multi, sharded, ddp]; see --help")]
#[case::implementation(&["--implementation", "flash"],
    "invalid value 'flash' for '--implementation <NAME>': unknown attention implementation `flash`: \
     expected eager, eager_v2, sdpa, flash_attention_2 or flash_attention_3; see --help")]
#[case::epochs(&["--epochs", "0"],
    "invalid value '0' for '--epochs <COUNT>': expected a whole number, at least 1; see --help")]
#[case::digits(&["--digits", "1200"],
    "invalid value '1200' for '--digits <COUNT>': expected a whole number from 1 to 1199; see --help")]
#[case::batch(&["--batch-size", "many"],
    "invalid value 'many' for '--batch-size <COUNT>': expected a whole number, at least 1; see --help")]
#[case::rate(&["--learning-rate", "nan"],
    "invalid value 'nan' for '--learning-rate <RATE>': expected a number from 1e-9 to 1; see --help")]
#[case::seed_of_a_resumed_run(&["--resume", "--seed", "7"],
    "the argument '--resume' cannot be used with '--seed <NUMBER>'; see --help")]
#[case::nothing_to_resume(&["--resume"],
    "digits-run/run.json: no run to resume (No such file or directory (os error 2)); \
     run without --resume, or pass its --out")]
#[case::below_a_file(&["--out", "note.txt/run"],
    "cannot write note.txt/run: Not a directory (os error 20); choose another --out")]
#[case::damaged_settings(&["--resume", "--out", "damaged"],
    "damaged/run.json: expected ident at line 1 column 2; restore it, or start anew with another --out")]
#[case::earlier_run(&["--out", "damaged"],
    "damaged holds an earlier run: pass --resume to continue it, or another --out")]
fn bad_arguments_are_refused(#[case] arguments: &[&str], #[case] expected: &str) {
    let place = Workplace::new();
    place.write("note.txt", "a file");
    std::fs::create_dir(place.path("damaged")).unwrap();
    place.write("damaged/run.json", "no settings");
    assert_eq!(place.refuse(arguments), expected);
    assert_eq!(place.names("."), ["damaged", "note.txt"]);
}
