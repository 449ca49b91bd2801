//! Inputs that are unusual and fine.

use std::io::Read;
use std::process::Stdio;

use image::ImageFormat;

use crate::support::{Workplace, difference, file_of, fixture, waves};

#[test]
fn names_in_any_script_with_spaces_and_breaks_work() {
    let place = Workplace::new();
    for name in ["größe 頁.png", "--page.png"] {
        place.copy_image("gray.png", name);
        let stdout = place.encode(&["--out", "Ausgabe ä", "--heatmap", "bild ü.png", "--", name]);
        assert!(stdout.contains(name), "{stdout}");
        assert_eq!(place.features("Ausgabe ä").cu_seqlens, [0, 4]);
    }
}

#[cfg(unix)]
#[test]
fn control_characters_of_names_do_not_reach_the_terminal() {
    let place = Workplace::new();
    let name = "a\nb\u{1b}[2J.png";
    place.copy_image("gray.png", name);
    let stdout = place.encode(&[name]);
    assert!(stdout.contains(r"a\nb\u{1b}[2J.png"), "{stdout}");
    place.write(name, "");
    assert_eq!(
        place.refuse(&[name]),
        r"a\nb\u{1b}[2J.png: the file is empty; copy or download it again"
    );
}

#[cfg(unix)]
#[test]
fn links_to_images_and_weights_are_followed() {
    use std::os::unix::fs::symlink;
    let place = Workplace::new();
    symlink(fixture("gray.png"), place.path("link.png")).unwrap();
    std::fs::create_dir(place.path("snapshot")).unwrap();
    // As caches of downloads lay models out.
    for entry in std::fs::read_dir(fixture("dots3_note_tiny")).unwrap() {
        let entry = entry.unwrap();
        symlink(entry.path(), place.path("snapshot").join(entry.file_name())).unwrap();
    }
    symlink("snapshot", place.path("model")).unwrap();
    place.encode(&["link.png", "--model", "model"]);
    let linked = place.features("features.safetensors");
    let direct = [fixture("gray.png"), "--model".into(), fixture("dots3_note_tiny")];
    place.encode(&direct);
    assert_eq!(linked, place.features("features.safetensors"));

    // A result never goes through a link into an input.
    symlink("link.png", place.path("again.png")).unwrap();
    let line = place.refuse(&["again.png", "--heatmap", "link.png"]);
    assert_eq!(line.split(':').next(), Some("cannot write link.png"));
}

#[test]
fn one_image_two_hundred_times_is_two_hundred_images() {
    let place = Workplace::new();
    place.copy_image("gray.png", "a.png");
    place.encode(&["a.png"]);
    let alone = place.features("features.safetensors");
    let stdout = place.encode(&["a.png"; 200]);
    assert!(stdout.contains("│ all 200 "), "{stdout}");
    let many = place.features("features.safetensors");
    assert_eq!(many.shape, [800, 96]);
    for index in 0..200 {
        assert!(difference(many.image(index), alone.image(0)) < 1e-5, "image {index}");
    }
    // 200 * 56 + 199 * 8 pixels high would be 12,792: shown in full.
    assert_eq!(place.picture("features.png").dimensions(), (120, 12_792));
}

/// More pictures than a viewer shows below each other in full are scaled down.
#[test]
fn tall_stacks_are_scaled_until_a_viewer_shows_them() {
    let place = Workplace::new();
    place.write("page.png", file_of(waves(280, 560), ImageFormat::Png));
    place.encode(&["page.png"; 40]);
    assert_eq!(place.features("features.safetensors").grids, [[1, 40, 20]; 40]);
    let (width, height) = place.picture("features.png").dimensions();
    assert!((16_000..=16_384).contains(&height), "{height}");
    // Two of 280 * 16,064 / 22,400 pixels and the gap.
    assert_eq!(width, 2 * 200 + 8);
}

/// `encode .. | head` is no failure: the files are what matters.
#[test]
fn a_reader_that_leaves_early_does_no_harm() {
    let place = Workplace::new();
    place.copy_image("gray.png", "a.png");
    let mut command = place.command(&["a.png"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert!(child.wait().unwrap().success(), "{stderr}");
    assert_eq!(stderr, "");
    assert_eq!(place.features("features.safetensors").shape, [4, 96]);
}

/// What stands in a file decides, not its name's ending.
#[test]
fn endings_of_names_do_not_matter() {
    let place = Workplace::new();
    place.write("a.txt", file_of(waves(56, 56), ImageFormat::Jpeg));
    place.copy_image("gray.png", "b.jpg");
    place.encode(&["a.txt", "b.jpg", "--out", "features.png", "--heatmap", "features.safetensors"]);
    assert_eq!(place.features("features.png").shape, [8, 96]);
}
