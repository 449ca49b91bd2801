//! Images in; features, a picture of what the tower saw and a summary out.

use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Tensor};
use burn_dots_vit::checkpoint::CheckpointOptions;
use burn_dots_vit::encoder::{DotsVisionEncoder, TowerStage};
use burn_dots_vit::grid::GridThw;
use burn_dots_vit::preprocess::{ImageProcessor, PixelValues, ProcessedImage};
use burn_vision_attention::{AttentionImplementation, Resolution, vision_positions};
use clap::Parser;
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use examples::output::OutputFile;
use examples::{devices, heatmap};
use image::{ImageFormat, RgbImage};
use indicatif::{ProgressBar, ProgressStyle};
use safetensors::{Dtype, tensor::TensorView};

/// Encode images with a Dots vision tower: features as safetensors, and a picture of them.
#[derive(Parser)]
#[command(name = "encode", version)]
struct Cli {
    /// PNG or JPEG files; a sample page when none is given.
    #[arg(value_name = "IMAGE")]
    images: Vec<PathBuf>,
    /// Folder with config.json, preprocessor_config.json and safetensors; a tiny tower with random
    /// weights when none is given.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Where to compute: flex, or ndarray, wgpu, cpu, cuda where built in by `--features`.
    #[arg(long, value_name = "NAME", default_value = "flex")]
    device: String,
    /// eager, eager_v2, sdpa, flash_attention_2 or flash_attention_3; the model's choice by default.
    #[arg(long, value_name = "NAME")]
    implementation: Option<AttentionImplementation>,
    /// What the tower computes in: f32, bf16 or f16.
    #[arg(long, value_name = "NAME", default_value = "f32", value_parser = dtype)]
    dtype: DType,
    /// Patches encoded in one pass at most, where more than one image is given.
    #[arg(long, value_name = "TOKENS", default_value_t = 32_768)]
    max_tokens: usize,
    /// Where the features go.
    #[arg(long, value_name = "FILE", default_value = "features.safetensors")]
    out: PathBuf,
    /// Where the picture goes.
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
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), Box<dyn Error>> {
    let images = images_or_sample(cli.images);
    let model = model_or_tiny(cli.model);
    let features_file = OutputFile::create(&cli.out)?;
    let heatmap_file = OutputFile::create(&cli.heatmap)?;
    let device = devices::open(&cli.device)?;
    if !device.supports_dtype(cli.dtype) {
        return Err(format!("{} does not compute in {}: choose another --dtype", cli.device, cli.dtype.name()).into());
    }
    let processor = ImageProcessor::from_path(&model)?;
    let mut tower = load(&model, &device, cli.dtype)?;
    if let Some(implementation) = cli.implementation {
        tower.set_implementation(implementation);
    }
    let resolution = tower.resolution(&device, cli.dtype);

    let clock = Instant::now();
    let processed = preprocess(&processor, &images)?;
    let preprocess_time = clock.elapsed();

    let clock = Instant::now();
    let encoded = encode(&tower, &processed, &device, cli.max_tokens)?;
    let encode_time = clock.elapsed();

    write_features(features_file, &encoded)?;
    write_heatmap(heatmap_file, &tower, &processed, &encoded)?;
    print_summary(&images, &processed, &encoded);
    print_run(&cli.device, &resolution, cli.dtype, preprocess_time, encode_time);
    println!("features: {}", cli.out.display());
    println!("picture:  {}", cli.heatmap.display());
    Ok(())
}

fn images_or_sample(images: Vec<PathBuf>) -> Vec<PathBuf> {
    if !images.is_empty() {
        return images;
    }
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/page.png");
    println!("no image given: encoding the sample page, this project's own README");
    vec![sample]
}

fn model_or_tiny(model: Option<PathBuf>) -> PathBuf {
    model.unwrap_or_else(|| {
        println!("no --model given: using the tiny tower of this repository, whose weights are random");
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dots_ocr_tiny")
    })
}

fn load(
    model: &Path,
    device: &Device,
    dtype: DType,
) -> Result<DotsVisionEncoder, Box<dyn Error>> {
    let options = CheckpointOptions::default().with_dtype(dtype);
    let (tower, report) = DotsVisionEncoder::from_pretrained_with(model, &options, device)?;
    if !report.unused.is_empty() {
        log::warn!("{}: {report}", model.display());
    }
    Ok(tower)
}

fn bar(length: usize, what: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:<8} {bar:32} {pos}/{len} {elapsed}");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(length as u64).with_style(style).with_message(what)
}

fn preprocess(
    processor: &ImageProcessor,
    images: &[PathBuf],
) -> Result<Vec<ProcessedImage>, Box<dyn Error>> {
    let bar = bar(images.len(), "images");
    let mut processed = Vec::with_capacity(images.len());
    for image in images {
        processed.push(processor.process_file(image)?);
        bar.inc(1);
    }
    bar.finish();
    Ok(processed)
}

/// One image's part of the results.
struct Encoded {
    grid: GridThw,
    /// `[merged tokens, out]`, f32.
    features: Tensor<2>,
    /// `[patches, embed_dim]`, before the adapter.
    hidden_states: Tensor<2>,
}

/// Encodes all images, packing as many into a pass as `max_tokens` allows.
fn encode(
    tower: &DotsVisionEncoder,
    processed: &[ProcessedImage],
    device: &Device,
    max_tokens: usize,
) -> Result<Vec<Encoded>, Box<dyn Error>> {
    let packs = packs(processed.iter().map(|image| image.grid.tokens()), max_tokens);
    let bar = bar(packs.len() * tower.blocks.len(), "layers");
    let merge = tower.config().adapter_merge_size;
    let mut encoded = Vec::with_capacity(processed.len());
    for pack in packs {
        let parts = processed[pack].iter().map(|image| image.pixel_values.clone()).collect();
        let pixels = PixelValues::concat(parts);
        let mut hidden_states = None;
        let features = tower.forward_with(pixels.to_tensor(device), &pixels.grids, &mut |stage, x| {
            hidden_states = Some(x.clone());
            if matches!(stage, TowerStage::Block(_)) {
                // A device that computes asynchronously has only queued the layer so far.
                let _ = device.sync();
                bar.inc(1);
            }
        })?;
        let hidden_states = hidden_states.ok_or("the tower showed no hidden states")?;
        let (mut patch, mut token) = (0, 0);
        for &grid in &pixels.grids {
            let (patches, tokens) = (grid.tokens(), grid.merged_tokens(merge));
            encoded.push(Encoded {
                grid,
                features: features.clone().narrow(0, token, tokens).cast(DType::F32),
                hidden_states: hidden_states.clone().narrow(0, patch, patches),
            });
            patch += patches;
            token += tokens;
        }
    }
    device.sync()?;
    bar.finish();
    Ok(encoded)
}

/// Consecutive images whose tokens sum to at most `max_tokens`; a larger image runs alone.
fn packs(tokens: impl Iterator<Item = usize>, max_tokens: usize) -> Vec<Range<usize>> {
    let mut packs: Vec<Range<usize>> = Vec::new();
    let mut sum = 0;
    for (image, tokens) in tokens.enumerate() {
        match packs.last_mut() {
            Some(pack) if sum + tokens <= max_tokens => pack.end = image + 1,
            _ => {
                packs.push(image..image + 1);
                sum = 0;
            }
        }
        sum += tokens;
    }
    packs
}

fn write_features(file: OutputFile, encoded: &[Encoded]) -> Result<(), Box<dyn Error>> {
    let features = Tensor::cat(encoded.iter().map(|image| image.features.clone()).collect(), 0);
    let shape = features.dims().to_vec();
    let features: Vec<u8> = bytes(features.into_data().iter::<f32>().map(f32::to_le_bytes));
    let grids = encoded.iter().flat_map(|image| [image.grid.t, image.grid.h, image.grid.w]);
    let grids: Vec<u8> = bytes(grids.map(|side| (side as i64).to_le_bytes()));
    let mut offset = 0;
    let offsets = encoded.iter().map(|image| {
        offset += image.features.dims()[0] as i32;
        offset
    });
    let offsets: Vec<u8> = bytes(std::iter::once(0).chain(offsets).map(i32::to_le_bytes));
    let count = encoded.len();
    let tensors = [
        ("features", TensorView::new(Dtype::F32, shape, &features)?),
        ("grid_thw", TensorView::new(Dtype::I64, vec![count, 3], &grids)?),
        ("cu_seqlens", TensorView::new(Dtype::I32, vec![count + 1], &offsets)?),
    ];
    let serialised = safetensors::serialize(tensors, None)?;
    file.write(|writer| writer.write_all(&serialised))?;
    Ok(())
}

fn bytes<const N: usize>(values: impl Iterator<Item = [u8; N]>) -> Vec<u8> {
    values.flatten().collect()
}

fn write_heatmap(
    file: OutputFile,
    tower: &DotsVisionEncoder,
    processed: &[ProcessedImage],
    encoded: &[Encoded],
) -> Result<(), Box<dyn Error>> {
    let hidden_states = encoded.iter().map(|image| image.hidden_states.clone()).collect();
    let mut colours = heatmap::principal_colours(Tensor::cat(hidden_states, 0));
    let mut pictures = Vec::with_capacity(encoded.len());
    for (image, Encoded { grid, .. }) in processed.iter().zip(encoded) {
        let rest = colours.split_off(grid.tokens());
        let tokens = std::mem::replace(&mut colours, rest);
        // Tokens may stand in groups: bring their colours into reading order.
        let mut placed = vec![[0; 3]; tokens.len()];
        let positions = vision_positions(grid.h, grid.w, tower.config().position_order())?;
        for ([row, column], colour) in positions.into_iter().zip(tokens) {
            placed[row as usize * grid.w + column as usize] = colour;
        }
        pictures.push(heatmap::beside(&image.resized, &placed, grid.h, grid.w));
    }
    let picture: RgbImage = heatmap::stack(&pictures);
    file.write(|writer| {
        let mut encoded = std::io::Cursor::new(Vec::new());
        picture.write_to(&mut encoded, ImageFormat::Png).map_err(std::io::Error::other)?;
        writer.write_all(encoded.get_ref())
    })?;
    Ok(())
}

fn print_summary(images: &[PathBuf], processed: &[ProcessedImage], encoded: &[Encoded]) {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header(["image", "resized to", "segments", "patches", "features"]);
    for ((path, image), encoded) in images.iter().zip(processed).zip(encoded) {
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let (width, height) = image.resized.dimensions();
        let [tokens, dim] = encoded.features.dims();
        table.add_row([
            name,
            format!("{width} x {height}"),
            encoded.grid.t.to_string(),
            encoded.grid.tokens().to_string(),
            format!("{tokens} x {dim}"),
        ]);
    }
    for column in 1..5 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    println!("{table}");
    if encoded.len() > 1 {
        let patches: usize = encoded.iter().map(|image| image.grid.tokens()).sum();
        let segments: usize = encoded.iter().map(|image| image.grid.t).sum();
        println!("in all {} images, {segments} segments, {patches} patches", encoded.len());
    }
}

fn print_run(
    device: &str,
    resolution: &Resolution,
    dtype: DType,
    preprocess: Duration,
    encode: Duration,
) {
    println!("attention: {resolution}");
    println!("device:    {device}, {}", dtype.name());
    println!(
        "time:      {:.2} s preprocessing, {:.2} s in the tower",
        preprocess.as_secs_f64(),
        encode.as_secs_f64()
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packs_hold_what_fits_and_giants_run_alone() {
        assert_eq!(packs([4, 4, 4].into_iter(), 8), [0..2, 2..3]);
        assert_eq!(packs([9, 1, 1, 9].into_iter(), 4), [0..1, 1..3, 3..4]);
        assert!(packs(std::iter::empty(), 4).is_empty());
    }
}
