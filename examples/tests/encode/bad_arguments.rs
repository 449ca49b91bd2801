//! Options that name nothing, and results that can go nowhere.

use rstest::rstest;

use crate::support::Workplace;

#[rstest]
#[case::device(&["--device", "tpu"], "unknown device `tpu`: expected one of flex, ndarray, wgpu, cpu, cuda")]
#[case::implementation(&["--implementation", "flash"],
    "invalid value 'flash' for '--implementation <NAME>': unknown attention implementation `flash`: \
     expected eager, eager_v2, sdpa, flash_attention_2 or flash_attention_3; see --help")]
#[case::dtype(&["--dtype", "f64"],
    "invalid value 'f64' for '--dtype <NAME>': expected f32, bf16 or f16; see --help")]
#[case::no_patches(&["--max-tokens", "0"],
    "invalid value '0' for '--max-tokens <PATCHES>': expected a whole number, at least 1; see --help")]
#[case::text_for_a_number(&["--max-tokens", "many"],
    "invalid value 'many' for '--max-tokens <PATCHES>': expected a whole number, at least 1; see --help")]
#[case::misspelled(&["--modle", "x"],
    "unexpected argument '--modle' found; tip: a similar argument exists: '--model'; see --help")]
#[case::no_value(&["--out"], "a value is required for '--out <FILE>' but none was supplied; see --help")]
#[case::out_in_a_missing_folder(&["--out", "no/where"],
    "cannot write no/where: there is no folder no; choose another path")]
#[case::out_is_a_folder(&["--out", "folder"], "cannot write folder: it is a folder; choose another path")]
#[case::heatmap_below_a_file(&["--heatmap", "note.txt/a.png"],
    "cannot write note.txt/a.png: there is no folder note.txt; choose another path")]
#[case::heatmap_is_a_folder(&["--heatmap", "folder/"],
    "cannot write folder/: it is a folder; choose another path")]
#[case::one_path_for_both(&["--out", "same", "--heatmap", "same"],
    "cannot write same: another result goes there; choose another path")]
#[case::one_path_in_two_spellings(&["--out", "same", "--heatmap", "folder/../same"],
    "cannot write folder/../same: another result goes there; choose another path")]
#[case::over_an_image(&["--heatmap", "folder/../page.png"],
    "cannot write folder/../page.png: it would replace the input page.png; choose another path")]
#[case::among_the_weights(&["--out", "model/features.safetensors", "--model", "model"],
    "cannot write model/features.safetensors: it lies in the model's folder; choose another path")]
fn bad_arguments_are_refused(#[case] options: &[&str], #[case] expected: &str) {
    let place = Workplace::new();
    place.copy_image("gray.png", "page.png");
    place.copy_model("dots_ocr_tiny");
    place.write("note.txt", "a file");
    std::fs::create_dir(place.path("folder")).unwrap();
    assert_eq!(place.refuse(&[&["page.png"], options].concat()), expected);
}

#[rstest]
#[cfg_attr(not(feature = "ndarray"), case("ndarray"))]
#[cfg_attr(not(feature = "wgpu"), case("wgpu"))]
#[cfg_attr(not(feature = "cpu"), case("cpu"))]
#[cfg_attr(not(feature = "cuda"), case("cuda"))]
fn devices_that_are_not_built_in_are_refused(#[case] device: &str) {
    let place = Workplace::new();
    place.copy_image("gray.png", "page.png");
    assert_eq!(
        place.refuse(&["page.png", "--device", device]),
        format!("device `{device}` is not built in: run with `--features {device}`")
    );
}

/// Results of an earlier run stay until new ones are complete, and are replaced then.
#[test]
fn earlier_results_are_replaced_only_by_whole_ones() {
    let place = Workplace::new();
    place.copy_image("gray.png", "page.png");
    place.write("features.safetensors", "earlier");
    place.write("features.png", "earlier");
    place.write("bad.png", "text");
    place.refuse(&["page.png", "bad.png"]);
    place.encode(&["page.png"]);
    assert_eq!(place.features("features.safetensors").cu_seqlens, [0, 4]);
    assert_eq!(place.picture("features.png").dimensions(), (120, 56));
    assert_eq!(place.files().len(), 4);
}

#[cfg(unix)]
#[test]
fn devices_are_not_replaced_by_files() {
    let place = Workplace::new();
    place.copy_image("gray.png", "page.png");
    for option in ["--out", "--heatmap"] {
        assert_eq!(
            place.refuse(&["page.png", option, "/dev/null"]),
            "cannot write /dev/null: it is not a regular file; choose another path"
        );
    }
}
