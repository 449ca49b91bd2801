//! Images in; features, a picture of what the tower saw and a summary out.

mod results;
mod tower;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::tensor::DType;
use burn_dots_vit::config::DotsVitConfig;
use burn_dots_vit::preprocess::{ImageProcessor, PreprocessorConfig};
use burn_vision_attention::AttentionImplementation;
use clap::Parser;
use examples::devices;
use examples::output::OutputFile;
use examples::terminal::{arguments, complain, positive, say, show_warnings};

/// Encode images with a Dots vision tower: their features in a file, and a picture of them.
#[derive(Parser)]
#[command(
    name = "encode",
    version,
    after_help = "\
Features (safetensors):
  features    f32 [tokens of all images, width]
  grid_thw    i64 [images, 3]    frames, rows and columns of patches of each image
  cu_seqlens  i32 [images + 1]   image i has rows cu_seqlens[i]..cu_seqlens[i + 1] of features
Picture (PNG):
  every image beside its patches; patches that the tower finds alike have like colours"
)]
struct Cli {
    /// PNG or JPEG files [default: a sample page]
    #[arg(value_name = "IMAGE")]
    images: Vec<PathBuf>,
    /// Folder of a downloaded model [default: a tiny tower with random weights]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// flex (the CPU) or, where cargo was given `--features NAME`: ndarray, wgpu, cpu, cuda
    #[arg(long, value_name = "NAME", default_value = "flex")]
    device: String,
    /// Attention: eager, eager_v2, sdpa, flash_attention_2, flash_attention_3 [default: the model's]
    #[arg(long, value_name = "NAME")]
    implementation: Option<AttentionImplementation>,
    /// What the tower computes in: f32, bf16 or f16
    #[arg(long, value_name = "NAME", default_value = "f32", value_parser = dtype)]
    dtype: DType,
    /// How many patches to encode in one pass; a larger image has its own
    #[arg(long, value_name = "PATCHES", default_value = "32768", value_parser = positive)]
    max_tokens: usize,
    /// Where the features go
    #[arg(long, value_name = "FILE", default_value = "features.safetensors")]
    out: PathBuf,
    /// Where the picture goes
    #[arg(long, value_name = "FILE", default_value = "features.png")]
    heatmap: PathBuf,
}

fn dtype(name: &str) -> Result<DType, String> {
    match name {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        _ => Err("expected f32, bf16 or f16".to_owned()),
    }
}

fn main() -> ExitCode {
    show_warnings();
    let cli = match arguments::<Cli>() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(error);
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), Box<dyn Error>> {
    let images = images_or_sample(cli.images);
    let model = model_or_tiny(cli.model);
    let [features_file, picture_file] = outputs([&cli.out, &cli.heatmap], &images, &model)?;
    let device = devices::device(&cli.device)?.device;
    if !device.supports_dtype(cli.dtype) {
        let dtype = cli.dtype.name();
        return Err(
            format!("{} does not compute in {dtype}: choose another --dtype", cli.device).into()
        );
    }
    if !model.is_dir() {
        return Err(format!(
            "--model {}: not a folder; pass the folder of a downloaded model",
            model.display()
        )
        .into());
    }
    let config = DotsVitConfig::from_file(&model)?;
    let processor = ImageProcessor::from_path(&model)?;
    if let Err(error) = processor.config().check_tower(&config) {
        return Err(
            format!("{}: {error}", model.join(PreprocessorConfig::FILE_NAME).display()).into()
        );
    }

    let prepared = tower::prepare(&processor, &images)?;
    let mut tower = tower::load(&config, &model, &device, cli.dtype)?;
    if let Some(implementation) = cli.implementation {
        tower.set_implementation(implementation);
    }
    let resolution = tower.resolution(&device, cli.dtype);
    let encoded = tower::encode(&tower, prepared.pixel_values, &device, cli.max_tokens)?;
    results::check_finite(&images, &encoded.images, cli.dtype)?;

    let features_file = results::stage_features(features_file, &encoded.images)?;
    let picture_file =
        results::stage_picture(picture_file, &config, &prepared.resized, &encoded.images)?;
    features_file.publish()?;
    picture_file.publish()?;
    say(results::table(&images, &prepared.resized, &encoded.images));
    say(format_args!("attention: {resolution}"));
    say(format_args!("device:    {}, {}", cli.device, cli.dtype.name()));
    say(format_args!(
        "time:      {:.2} s preprocessing, {:.2} s in the tower",
        prepared.time.as_secs_f64(),
        encoded.time.as_secs_f64()
    ));
    say(format_args!("features:  {}", cli.out.display()));
    say(format_args!("picture:   {}", cli.heatmap.display()));
    Ok(())
}

fn images_or_sample(images: Vec<PathBuf>) -> Vec<PathBuf> {
    if !images.is_empty() {
        return images;
    }
    say("no image given: encoding the sample page, this project's own README");
    vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/page.png")]
}

fn model_or_tiny(model: Option<PathBuf>) -> PathBuf {
    model.unwrap_or_else(|| {
        say("no --model given: using the tiny tower of this repository, whose weights are random");
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dots_ocr_tiny")
    })
}

/// Places for the results that can be written and harm no input.
fn outputs(
    paths: [&Path; 2],
    images: &[PathBuf],
    model: &Path,
) -> Result<[OutputFile; 2], Box<dyn Error>> {
    let [features, picture] = paths.map(OutputFile::create);
    let outputs = [features?, picture?];
    outputs[1].differ_from(&outputs[0])?;
    for output in &outputs {
        for image in images {
            output.keep_off(image)?;
        }
        // A features file there would be taken for weights by the next run.
        output.keep_out_of(model)?;
    }
    Ok(outputs)
}
