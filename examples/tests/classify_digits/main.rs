//! The program `classify_digits` as its users run it: a line an image.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use image::imageops::{self, FilterType};
use image::{DynamicImage, ImageFormat, RgbImage};
use rstest::rstest;
use tempfile::TempDir;

fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/digits")
}

fn sample(digit: usize) -> PathBuf {
    assets().join(format!("samples/{digit}.png"))
}

/// Exit code, lines of stdout and lines of stderr.
fn classify<A: AsRef<std::ffi::OsStr>>(
    place: &TempDir,
    arguments: &[A],
) -> (Option<i32>, Vec<String>, Vec<String>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_classify_digits"));
    command.args(arguments).current_dir(place.path()).env_remove("RUST_LOG");
    let Output { status, stdout, stderr } = command.output().unwrap();
    let lines = |bytes: Vec<u8>| -> Vec<String> {
        String::from_utf8(bytes).unwrap().lines().map(str::to_owned).collect()
    };
    (status.code(), lines(stdout), lines(stderr))
}

/// What a line says of its image.
fn answer(line: &str) -> usize {
    let (_, answer) = line.rsplit_once(": ").unwrap();
    answer.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn the_samples_are_told_right() {
    let place = tempfile::tempdir().unwrap();
    let (code, stdout, stderr) = classify::<&str>(&place, &[]);
    assert_eq!((code, stderr.len()), (Some(0), 0), "{stderr:?}");
    assert_eq!(stdout[0], "no image given: reading the samples that come with this package");
    assert_eq!(
        stdout[1..].iter().map(|line| answer(line)).collect::<Vec<_>>(),
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    );
    let given: Vec<PathBuf> = (0..10).map(sample).collect();
    assert_eq!(classify(&place, &given).1, stdout[1..]);
    let (percent, _) = stdout[1].rsplit_once(" %), then ").unwrap();
    let (_, percent) = percent.rsplit_once('(').unwrap();
    assert!(percent.parse::<f64>().unwrap() > 50.0, "{}", stdout[1]);
}

/// Larger, inverted, grey on grey, as JPEG, with more paper around.
#[test]
fn other_images_of_the_same_digits_are_told_right() {
    let place = tempfile::tempdir().unwrap();
    let mut files = Vec::new();
    let mut save = |name: String, image: RgbImage, format| {
        let path = place.path().join(name);
        DynamicImage::from(image).save_with_format(&path, format).unwrap();
        files.push(path);
    };
    for digit in 0..10 {
        let image = image::open(sample(digit)).unwrap().into_rgb8();
        let (width, height) = image.dimensions();
        let large = imageops::resize(&image, 9 * width, 9 * height, FilterType::CatmullRom);
        let mut inverted = large.clone();
        imageops::invert(&mut inverted);
        let pale = RgbImage::from_fn(9 * width, 9 * height, |x, y| {
            let level = u32::from(large.get_pixel(x, y).0[0]);
            image::Rgb([(210 - level * 110 / 255) as u8; 3])
        });
        save(format!("{digit}-large.png"), large, ImageFormat::Png);
        save(format!("{digit}-inverted.jpg"), inverted, ImageFormat::Jpeg);
        save(format!("{digit}-pale.png"), pale, ImageFormat::Png);
    }
    let (code, stdout, stderr) = classify(&place, &files);
    assert_eq!((code, stderr.len()), (Some(0), 0), "{stderr:?}");
    let right = stdout.iter().enumerate().filter(|(index, line)| answer(line) == index / 3).count();
    assert!(right >= 28, "{stdout:#?}");
}

#[test]
fn an_image_that_cannot_be_read_does_not_stop_the_others() {
    let place = tempfile::tempdir().unwrap();
    fs::write(place.path().join("text.png"), "no image").unwrap();
    RgbImage::from_pixel(20, 20, image::Rgb([255; 3]))
        .save(place.path().join("blank.png"))
        .unwrap();
    let files = [
        &sample(3),
        Path::new("text.png"),
        Path::new("gone.png"),
        Path::new("blank.png"),
        &sample(4),
    ];
    let (code, stdout, stderr) = classify(&place, &files);
    assert_eq!(code, Some(1));
    assert_eq!(stdout.iter().map(|line| answer(line)).collect::<Vec<_>>(), [3, 4]);
    let expected = [
        "error: text.png: not an image (its first bytes are of no known image format); pass a PNG or JPEG file",
        "error: gone.png: cannot read: No such file or directory (os error 2); check that the file exists and is readable",
        "error: blank.png: nothing is drawn in it, all its pixels are alike; pass an image of a digit",
    ];
    assert_eq!(stderr, expected);
}

#[rstest]
#[case::device(&["--device", "tpu"], 1, "unknown device `tpu`: expected one of flex, ndarray, wgpu, cpu, cuda")]
#[case::no_folder(&["--model", "gone"], 1, "--model gone: not a folder; pass one that train_digits wrote")]
#[case::option(&["--modle", "x"], 2,
    "unexpected argument '--modle' found; tip: a similar argument exists: '--model'; see --help")]
#[case::implementation(&["--implementation", "flash"], 2,
    "invalid value 'flash' for '--implementation <NAME>': unknown attention implementation `flash`: \
     expected eager, eager_v2, sdpa, flash_attention_2 or flash_attention_3; see --help")]
fn bad_arguments_are_refused(
    #[case] arguments: &[&str],
    #[case] code: i32,
    #[case] expected: &str,
) {
    let place = tempfile::tempdir().unwrap();
    let found = classify(&place, arguments);
    assert_eq!(found, (Some(code), Vec::new(), vec![format!("error: {expected}")]));
}

#[test]
fn towers_of_something_else_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dots_ocr_tiny");
    let (code, stdout, stderr) = classify(&place, &[Path::new("--model"), &model]);
    assert_eq!((code, stdout.len()), (Some(1), 0));
    let expected = format!(
        "error: {}: its tokens hold 96 scores, not those of ten digits; pass a folder that train_digits wrote",
        model.display()
    );
    assert_eq!(stderr, [expected]);
}

/// The shipped tower and preprocessing are those that `train_digits` writes today.
#[test]
fn the_shipped_model_is_of_this_version() {
    let model = assets().join("model");
    let config = burn_dots_vit::config::DotsVitConfig::from_file(&model).unwrap();
    assert_eq!(config, examples::digits::config());
    let preprocessing = burn_dots_vit::preprocess::PreprocessorConfig::from_path(&model).unwrap();
    assert_eq!(preprocessing, examples::digits::preprocessing());
    let size = fs::metadata(model.join("model.safetensors")).unwrap().len();
    assert!(size < 1_000_000, "{size} bytes");
}
