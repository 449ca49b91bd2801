//! What the program writes and prints when all is well.

use std::ffi::OsString;
use std::path::PathBuf;

use burn::tensor::{DType, Device};
use burn_dots_vit::config::DotsVitConfig;
use burn_vision_attention::{
    AttentionImplementation, KernelRequirements, resolve_attn_implementation,
};
use image::imageops;
use rstest::rstest;

use crate::support::{IMAGES, Workplace, difference, fixture};

fn images() -> Vec<PathBuf> {
    IMAGES.iter().map(|name| fixture(name)).collect()
}

/// `images` followed by options.
fn arguments(images: &[PathBuf], options: &[&str]) -> Vec<OsString> {
    let images = images.iter().map(|image| image.clone().into_os_string());
    images.chain(options.iter().map(OsString::from)).collect()
}

/// Images are encoded in one pass, in several, and each alone, with the same features.
#[rstest]
#[case::dots_ocr("dots_ocr_tiny")]
#[case::dots3_note("dots3_note_tiny")]
fn packed_images_give_what_each_gives_alone(#[case] model: &str) {
    let place = Workplace::new();
    let model = fixture(model).into_os_string().into_string().unwrap();
    place.encode(&arguments(&images(), &["--model", &model]));
    let packed = place.features("features.safetensors");
    assert_eq!(packed.shape, [59, 96]);
    assert_eq!(packed.cu_seqlens, [0, 4, 10, 16, 36, 42, 53, 59]);
    let grids = [[4, 4], [4, 6], [6, 4], [8, 10], [4, 6], [22, 2], [4, 6]];
    assert_eq!(packed.grids, grids.map(|[h, w]| [1, h, w]));

    place.encode(&arguments(&images(), &["--model", &model, "--max-tokens", "50"]));
    let passes = place.features("features.safetensors");
    assert_eq!((&passes.grids, &passes.cu_seqlens), (&packed.grids, &packed.cu_seqlens));
    for (index, image) in images().into_iter().enumerate() {
        place.encode(&arguments(&[image], &["--model", &model]));
        let alone = place.features("features.safetensors");
        assert_eq!(alone.grids, [packed.grids[index]]);
        for together in [&packed, &passes] {
            let difference = difference(together.image(index), alone.image(0));
            assert!(difference < 1e-5, "{}: {difference}", IMAGES[index]);
        }
    }
}

/// The pictures of golden images beside cells of one colour a patch, one below the other.
#[test]
fn the_picture_shows_every_image_beside_its_patches() {
    let place = Workplace::new();
    place.encode(&arguments(&images(), &["--heatmap", "seen.png", "--out", "features"]));
    assert_eq!(place.files().len(), 2);
    let picture = place.picture("seen.png");
    // resize_down.png is the widest, 140; seven heights with gaps of 8 between them.
    let heights = [56, 56, 84, 112, 56, 308, 56];
    assert_eq!(picture.dimensions(), (2 * 140 + 8, heights.iter().sum::<u32>() + 6 * 8));

    // no_resize.png, 84 x 56, keeps its pixels.
    let top = 56 + 8;
    let left = imageops::crop_imm(&picture, 0, top, 84, 56).to_image();
    assert_eq!(left, image::open(fixture("no_resize.png")).unwrap().into_rgb8());
    let cells = imageops::crop_imm(&picture, 84 + 8, top, 84, 56).to_image();
    for (x, y, colour) in cells.enumerate_pixels() {
        assert_eq!(colour, cells.get_pixel(x / 14 * 14, y / 14 * 14), "{x}, {y}");
    }
    let mut colours: Vec<_> = cells.pixels().collect();
    colours.sort_by_key(|colour| colour.0);
    colours.dedup();
    assert!(colours.len() > 4, "a gradient has many colours, not {}", colours.len());
}

/// All five names give the same features, and the summary says what ran instead and why.
#[rstest]
#[case::dots_ocr("dots_ocr_tiny")]
#[case::dots3_note("dots3_note_tiny")]
fn implementations_agree(#[case] model: &str) {
    let place = Workplace::new();
    let folder = fixture(model).into_os_string().into_string().unwrap();
    let head_dim = DotsVitConfig::from_file(&folder).unwrap().head_dim();
    let mut expected = None;
    for implementation in AttentionImplementation::ALL {
        let options = ["--model", &folder, "--implementation", implementation.name()];
        let stdout = place.encode(&arguments(&images(), &options));
        let resolution = resolve_attn_implementation(
            implementation,
            &Device::flex(),
            &KernelRequirements { dtype: DType::F32, head_dim, value_dim: head_dim },
            AttentionImplementation::Sdpa,
        );
        assert!(stdout.contains(&format!("attention: {resolution}\n")), "{stdout}");
        let falls_back = implementation == AttentionImplementation::FlashAttention3;
        // No CPU has asynchronous copies and matrix units.
        assert!(!falls_back || stdout.contains("(flash_attention_3 cannot run: "), "{stdout}");
        let features = place.features("features.safetensors");
        let expected = expected.get_or_insert(features.values.clone());
        let difference = difference(&features.values, expected);
        assert!(difference < 1e-4, "{implementation}: {difference}");
    }
}

/// Half precision is near f32: two units of the last place of its 8 or 11 bits after a few layers.
#[rstest]
#[case::bf16("bf16", 3e-2)]
#[case::f16("f16", 4e-3)]
fn half_precision_is_near(#[case] dtype: &str, #[case] bound: f32) {
    let place = Workplace::new();
    place.encode(&arguments(&images(), &["--out", "f32"]));
    let stdout = place.encode(&arguments(&images(), &["--dtype", dtype, "--out", dtype]));
    assert!(stdout.contains(&format!("device:    flex, {dtype}\n")), "{stdout}");
    let difference = difference(&place.features(dtype).values, &place.features("f32").values);
    assert!(0.0 < difference && difference < bound, "{difference}");
}

#[test]
fn the_summary_lists_images_and_sums() {
    let place = Workplace::new();
    let images = [fixture("gray.png"), fixture("tall.png")];
    let stdout =
        place.encode(&arguments(&images, &["--model", fixture("dots_ocr_tiny").to_str().unwrap()]));
    let lines: Vec<&str> = stdout.lines().collect();
    let cells = |line: &str| -> Vec<String> {
        line.split(['│', '┆'])
            .map(|cell| cell.trim().to_owned())
            .filter(|cell| !cell.is_empty())
            .collect()
    };
    assert_eq!(cells(lines[1]), ["image", "resized to", "segments", "patches", "tokens"]);
    assert_eq!(cells(lines[3]), ["gray.png", "56 x 56", "1", "16", "4 x 96"]);
    assert_eq!(cells(lines[4]), ["tall.png", "28 x 308", "1", "44", "11 x 96"]);
    assert_eq!(cells(lines[5]), ["all 2", "2", "60", "15 x 96"]);
    assert!(
        stdout.contains("\nfeatures:  features.safetensors\npicture:   features.png\n"),
        "{stdout}"
    );
    assert!(stdout.contains(" s in the tower\n"), "{stdout}");
    assert!(!stdout.contains("weights are random"), "{stdout}");
}

#[test]
fn without_arguments_the_sample_page_goes_through_the_tiny_tower() {
    let place = Workplace::new();
    let stdout = place.encode::<&str>(&[]);
    assert!(stdout.contains("no image given: encoding the sample page"), "{stdout}");
    assert!(stdout.contains("no --model given: using the tiny tower"), "{stdout}");
    assert!(stdout.contains(" page.png "), "{stdout}");
    assert_eq!(place.features("features.safetensors").grids.len(), 1);
}

/// A setting that has no effect is said once, however many threads and layers run into it.
#[test]
fn unknown_instruction_sets_are_warned_of() {
    let place = Workplace::new();
    let mut command = place.command(&[fixture("gray.png")]);
    let output = command.env("VISION_ATTENTION_CPU_SIMD", "wrong").output().unwrap();
    assert!(output.status.success());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.contains("VISION_ATTENTION_CPU_SIMD: instruction set \"wrong\""), "{stderr}");
}

#[test]
fn help_explains_the_results() {
    let place = Workplace::new();
    let stdout = place.encode(&["--help"]);
    for word in
        ["Usage: encode", "IMAGE", "--model <DIR>", "cu_seqlens", "flash_attention_3", "bf16"]
    {
        assert!(stdout.contains(word), "{word}: {stdout}");
    }
    assert_eq!(place.files().len(), 0);
}
