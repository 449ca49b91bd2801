//! From files to features.

use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Tensor};
use burn_dots_vit::checkpoint::CheckpointOptions;
use burn_dots_vit::config::DotsVitConfig;
use burn_dots_vit::encoder::{DotsVisionEncoder, TowerStage};
use burn_dots_vit::grid::GridThw;
use burn_dots_vit::preprocess::{ImageProcessor, PixelValues};
use examples::terminal::printable;
use image::RgbImage;
use indicatif::{ProgressBar, ProgressStyle};

/// All images, ready for the tower.
pub struct Prepared {
    /// Pixel rows, one entry an image.
    pub pixel_values: Vec<PixelValues>,
    /// What the pixel rows were cut from.
    pub resized: Vec<RgbImage>,
    /// How long it took.
    pub time: Duration,
}

/// One image's part of the results.
pub struct EncodedImage {
    /// Its patches.
    pub grid: GridThw,
    /// Merged tokens and their width.
    pub shape: [usize; 2],
    /// The tokens, row by row.
    pub features: Vec<f32>,
    /// `[patches, embed_dim]`, before the adapter.
    pub hidden_states: Tensor<2>,
}

/// All images' results.
pub struct Encoded {
    /// One entry an image.
    pub images: Vec<EncodedImage>,
    /// How long it took.
    pub time: Duration,
}

/// Reads, resizes and cuts all images.
pub fn prepare(processor: &ImageProcessor, images: &[PathBuf]) -> Result<Prepared, Box<dyn Error>> {
    let clock = Instant::now();
    let bar = bar(images.len(), "images");
    let (mut pixel_values, mut resized) = (Vec::new(), Vec::new());
    for image in images {
        let processed = processor.process_file(image)?;
        pixel_values.push(processed.pixel_values);
        resized.push(processed.resized);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(Prepared { pixel_values, resized, time: clock.elapsed() })
}

/// Loads the tower of `model`, and warns of tensors that it has no use for.
pub fn load(
    config: &DotsVitConfig,
    model: &Path,
    device: &Device,
    dtype: DType,
) -> Result<DotsVisionEncoder, Box<dyn Error>> {
    let options = CheckpointOptions::default().with_dtype(dtype);
    let (tower, report) = DotsVisionEncoder::load(config, model, &options, device)?;
    if !report.unused.is_empty() {
        let (model, loaded, unused) = (model.display(), report.loaded, report.summary());
        // Keys are what somebody else wrote into the file.
        log::warn!("{}", printable(&format!("{model}: loaded {loaded} parameters; {unused}")));
    }
    Ok(tower)
}

/// Encodes all images, packing as many into a pass as `max_tokens` allows.
pub fn encode(
    tower: &DotsVisionEncoder,
    pixel_values: Vec<PixelValues>,
    device: &Device,
    max_tokens: usize,
) -> Result<Encoded, Box<dyn Error>> {
    let clock = Instant::now();
    let packs = packs(pixel_values.iter().map(|image| image.rows), max_tokens);
    let bar = bar(packs.len() * tower.blocks.len(), "layers");
    let mut pixel_values = pixel_values.into_iter();
    let mut images = Vec::with_capacity(pixel_values.len());
    for pack in packs {
        let pixels = PixelValues::concat(pixel_values.by_ref().take(pack.len()).collect());
        let (features, hidden_states) = pass(tower, &pixels, device, &mut || {
            // A device that computes asynchronously has only queued the layer so far.
            device.sync()?;
            bar.inc(1);
            Ok(())
        })?;
        // The adapter's failure, too, is an error here rather than a panic where values are read.
        device.sync()?;
        split(tower, &pixels.grids, features, hidden_states, &mut images);
    }
    bar.finish_and_clear();
    Ok(Encoded { images, time: clock.elapsed() })
}

/// Features and hidden states of one pass. `layer_done` runs after each block until it first fails,
/// which fails the pass.
fn pass(
    tower: &DotsVisionEncoder,
    pixels: &PixelValues,
    device: &Device,
    layer_done: &mut impl FnMut() -> Result<(), Box<dyn Error>>,
) -> Result<(Tensor<2>, Tensor<2>), Box<dyn Error>> {
    let mut hidden_states = None;
    let mut layers = Ok(());
    let features = tower.forward_with(pixels.to_tensor(device), &pixels.grids, &mut |stage, x| {
        hidden_states = Some(x.clone());
        if layers.is_ok() && matches!(stage, TowerStage::Block(_)) {
            layers = layer_done();
        }
    });
    layers?;
    Ok((features?, hidden_states.ok_or("the tower showed no hidden states")?))
}

/// Gives every image of a pass its own part.
fn split(
    tower: &DotsVisionEncoder,
    grids: &[GridThw],
    features: Tensor<2>,
    hidden_states: Tensor<2>,
    images: &mut Vec<EncodedImage>,
) {
    let width = features.dims()[1];
    let values: Vec<f32> = features.cast(DType::F32).into_data().iter::<f32>().collect();
    let mut values = values.into_iter();
    let mut patch = 0;
    for &grid in grids {
        let tokens = grid.merged_tokens(tower.config().adapter_merge_size);
        images.push(EncodedImage {
            grid,
            shape: [tokens, width],
            features: values.by_ref().take(tokens * width).collect(),
            hidden_states: hidden_states.clone().narrow(0, patch, grid.tokens()),
        });
        patch += grid.tokens();
    }
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

fn bar(length: usize, what: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:<8} {bar:32} {pos}/{len} {elapsed}");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(length as u64).with_style(style).with_message(what)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_device_that_fails_in_a_layer_fails_the_pass() {
        let mut config = DotsVitConfig::dots_vit();
        (config.embed_dim, config.num_attention_heads, config.num_hidden_layers) = (32, 2, 3);
        (config.intermediate_size, config.adapter_out_dim) = (48, 40);
        let device = Device::flex();
        let tower = DotsVisionEncoder::new(&config, &device).unwrap();
        let (rows, row_len) = (4, config.pixel_row_len());
        let grids = vec![GridThw::new(1, 2, 2)];
        let pixels = PixelValues { data: vec![0.5; rows * row_len], rows, row_len, grids };

        let mut layers = 0;
        let mut until = |last: usize| {
            layers = 0;
            let result = pass(&tower, &pixels, &device, &mut || {
                layers += 1;
                if layers == last { Err("device lost".into()) } else { Ok(()) }
            });
            (result.map(|(features, _)| features.dims()).map_err(|e| e.to_string()), layers)
        };
        assert_eq!(until(2), (Err("device lost".to_owned()), 2));
        assert_eq!(until(4), (Ok([1, 40]), 3));
    }

    #[test]
    fn packs_hold_what_fits_and_giants_run_alone() {
        assert_eq!(packs([4, 4, 4].into_iter(), 8), [0..2, 2..3]);
        assert_eq!(packs([9, 1, 1, 9].into_iter(), 4), [0..1, 1..3, 3..4]);
        assert!(packs(std::iter::empty(), 4).is_empty());
    }
}
