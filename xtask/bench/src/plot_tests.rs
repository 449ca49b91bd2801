#![allow(clippy::unwrap_used)]

use super::*;
use crate::arguments::{Dtype, Pass};
use crate::case::Case;
use crate::layout::Layout;
use crate::machine::{Calibration, Machine};
use crate::measure::Sample;
use crate::report::{Contender, TORCH};
use rstest::rstest;

/// A report of times that a formula gives.
fn report(scaling: &[Scaling]) -> Report {
    let (device, dtype) = ("flex".to_owned(), Dtype::F32);
    let yardstick =
        Calibration { device, threads: Some(2), dtype, gemm_gflops: 100.0, copy_gbs: Some(10.0) };
    let contenders = [
        ("flex", "flash_attention_2", 1.0),
        ("flex", "sdpa", 2.0),
        ("flex", "burn_masked", 9.0),
        (TORCH, "torch_sdpa", 1.5),
    ];
    let mut rows = Vec::new();
    let mut add = |case: &Case, threads, scaling| {
        for (device, implementation, factor) in contenders {
            let contender =
                Contender { device, implementation, ours: true, threads: Some(threads) };
            let ms = factor * case.flops().unwrap() / 1e8 / threads as f64;
            let sample = Sample::new(vec![ms], None);
            rows.push(Row::new(case, contender, &sample, &yardstick, scaling));
        }
    };
    let case =
        |operation, heads, layout| Case { operation, heads, layout, dtype, pass: Pass::Forward };
    for heads in [Heads::new(24, 64), Heads::new(12, 128)] {
        for layout in [Layout::uniform(1, 4096), Layout::uniform(64, 64), Layout::pages()] {
            add(&case(Operation::Layer, heads, layout), 2, None);
        }
    }
    for &axis in scaling {
        for step in 0..4 {
            let (layout, threads) = match axis {
                Scaling::Tokens => (Layout::uniform(1, 1024 << step), 2),
                Scaling::Segments => (Layout::uniform(10_usize.pow(step), 64), 2),
                Scaling::Threads => (Layout::uniform(1, 4096), 1 << step),
            };
            let case = case(Operation::AttentionVarlen, Heads::new(12, 128), layout);
            add(&case, threads, Some(axis));
        }
    }
    let machine = Machine::this(None);
    Report { machine, calibrations: vec![], rows, skipped: vec![], ratios: vec![] }
}

/// How many pixels have a colour.
fn count(picture: &RgbImage, RGBColor(r, g, b): RGBColor) -> usize {
    picture.pixels().filter(|pixel| pixel.0 == [r, g, b]).count()
}

#[rstest]
#[case(&[], 2)]
#[case(&[Scaling::Tokens, Scaling::Segments, Scaling::Threads], 3)]
fn every_series_is_drawn_in_its_colour(#[case] scaling: &[Scaling], #[case] columns: u32) {
    let picture = draw(&report(scaling)).unwrap();
    assert_eq!(picture.width(), columns * PANEL.0);
    let lines = if scaling.is_empty() { 1 } else { 2 };
    assert!(picture.height() > lines * PANEL.1);
    // A swatch of 16 x 16 pixels, and more in the panels.
    for colour in &COLOURS[..4] {
        assert!(count(&picture, *colour) > 1000, "{colour:?}");
    }
    assert_eq!(count(&picture, COLOURS[5]), 0);
}

#[test]
fn longer_bars_take_longer() {
    let picture = draw(&report(&[])).unwrap();
    let [flash, sdpa, masked] = [0, 1, 2].map(|series| count(&picture, COLOURS[series]));
    assert!(flash < sdpa && sdpa < masked, "{flash} {sdpa} {masked}");
}

#[test]
fn the_file_is_a_png() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bench.png");
    write(&report(&[Scaling::Tokens]), &file).unwrap();
    let read = image::open(&file).unwrap();
    assert_eq!(read.width(), 3 * PANEL.0);
    let message = write(&report(&[]), Path::new("/no/such/folder/a.png")).unwrap_err().to_string();
    assert!(message.contains("/no/such/folder/a.png") && !message.contains('\n'), "{message}");
}

#[test]
fn nothing_to_draw_is_an_error() {
    let empty = Report { rows: vec![], ..report(&[]) };
    assert!(draw(&empty).unwrap_err().to_string().contains("nothing to draw"));
}

#[rstest]
#[case(1234.5, "1234")]
#[case(56.78, "56.8")]
#[case(5.678, "5.68")]
#[case(0.1234, "0.123")]
fn numbers_have_three_figures(#[case] value: f64, #[case] text: &str) {
    assert_eq!(number(value), text);
}

#[rstest]
#[case(1000.0, "1000")]
#[case(1.0, "1")]
#[case(0.1, "0.1")]
#[case(0.01, "0.01")]
fn ticks_are_powers_of_ten(#[case] value: f64, #[case] text: &str) {
    assert_eq!(tick(value), text);
}
