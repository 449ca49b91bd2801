//! What the program leaves behind: two files and a table.

use std::error::Error;
use std::path::PathBuf;

use burn::tensor::{DType, Tensor};
use burn_dots_vit::config::DotsVitConfig;
use burn_vision_attention::vision_positions;
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use examples::heatmap;
use examples::output::{OutputFile, StagedFile};
use examples::terminal::printable;
use image::{ImageFormat, RgbImage, imageops};
use safetensors::{Dtype, tensor::TensorView};

use crate::tower::EncodedImage;

/// Refuses features that no model can use.
///
/// # Errors
///
/// A sentence that names the first image with NaN or infinity.
pub fn check_finite(
    images: &[PathBuf],
    encoded: &[EncodedImage],
    dtype: DType,
) -> Result<(), String> {
    let finite = |encoded: &EncodedImage| encoded.features.iter().all(|value| value.is_finite());
    let Some(index) = encoded.iter().position(|encoded| !finite(encoded)) else {
        return Ok(());
    };
    let remedy = match dtype {
        DType::F16 => "its numbers may be beyond the range of f16, use --dtype bf16 or f32",
        _ => "the model's weights are damaged, fetch them again",
    };
    Err(format!("{}: its features hold NaN or infinity; {remedy}", images[index].display()))
}

/// Writes `features`, `grid_thw` and `cu_seqlens`.
pub fn stage_features(
    file: OutputFile,
    encoded: &[EncodedImage],
) -> Result<StagedFile, Box<dyn Error>> {
    let count = encoded.len();
    let mut offsets = vec![0];
    for image in encoded {
        offsets.push(offsets[offsets.len() - 1] + i32::try_from(image.shape[0])?);
    }
    let shape = vec![offsets[count] as usize, encoded[0].shape[1]];
    let features = bytes(encoded.iter().flat_map(|image| &image.features).map(|x| x.to_le_bytes()));
    let grids = encoded.iter().flat_map(|image| [image.grid.t, image.grid.h, image.grid.w]);
    let grids = bytes(grids.map(|side| (side as i64).to_le_bytes()));
    let offsets = bytes(offsets.into_iter().map(i32::to_le_bytes));
    let tensors = [
        ("features", TensorView::new(Dtype::F32, shape, &features)?),
        ("grid_thw", TensorView::new(Dtype::I64, vec![count, 3], &grids)?),
        ("cu_seqlens", TensorView::new(Dtype::I32, vec![count + 1], &offsets)?),
    ];
    let serialised = safetensors::serialize(tensors, None)?;
    Ok(file.stage(|writer| writer.write_all(&serialised))?)
}

fn bytes<const N: usize>(values: impl Iterator<Item = [u8; N]>) -> Vec<u8> {
    values.flatten().collect()
}

/// Paints every image beside what the tower saw in it, one below the other.
pub fn stage_picture(
    file: OutputFile,
    config: &DotsVitConfig,
    resized: &[RgbImage],
    encoded: &[EncodedImage],
) -> Result<StagedFile, Box<dyn Error>> {
    let hidden_states = encoded.iter().map(|image| image.hidden_states.clone()).collect();
    let mut colours = heatmap::principal_colours(Tensor::cat(hidden_states, 0));
    let sizes: Vec<(u32, u32)> = resized.iter().map(RgbImage::dimensions).collect();
    let sizes = heatmap::fit(&sizes);
    let mut pictures = Vec::with_capacity(encoded.len());
    for ((image, (width, height)), EncodedImage { grid, .. }) in
        resized.iter().zip(sizes).zip(encoded)
    {
        let rest = colours.split_off(grid.tokens());
        let tokens = std::mem::replace(&mut colours, rest);
        // Tokens may stand in groups: bring their colours into reading order.
        let mut placed = vec![[0; 3]; tokens.len()];
        let positions = vision_positions(grid.h, grid.w, config.position_order())?;
        for ([row, column], colour) in positions.into_iter().zip(tokens) {
            placed[row as usize * grid.w + column as usize] = colour;
        }
        let beside = |image: &RgbImage| heatmap::beside(image, &placed, grid.h, grid.w);
        pictures.push(if image.dimensions() == (width, height) {
            beside(image)
        } else {
            beside(&imageops::thumbnail(image, width, height))
        });
    }
    let picture = heatmap::stack(&pictures);
    Ok(file.stage(|writer| {
        let mut encoded = std::io::Cursor::new(Vec::new());
        picture.write_to(&mut encoded, ImageFormat::Png).map_err(std::io::Error::other)?;
        writer.write_all(encoded.get_ref())
    })?)
}

/// A row for each image, and for several one of sums.
pub fn table(images: &[PathBuf], resized: &[RgbImage], encoded: &[EncodedImage]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header(["image", "resized to", "segments", "patches", "tokens"]);
    for ((path, image), encoded) in images.iter().zip(resized).zip(encoded) {
        let (width, height) = image.dimensions();
        let [tokens, dim] = encoded.shape;
        table.add_row([
            printable(&path.file_name().unwrap_or(path.as_os_str()).to_string_lossy()),
            format!("{width} x {height}"),
            encoded.grid.t.to_string(),
            encoded.grid.tokens().to_string(),
            format!("{tokens} x {dim}"),
        ]);
    }
    if encoded.len() > 1 {
        let sum = |count: fn(&EncodedImage) -> usize| encoded.iter().map(count).sum::<usize>();
        table.add_row([
            format!("all {}", encoded.len()),
            String::new(),
            sum(|image| image.grid.t).to_string(),
            sum(|image| image.grid.tokens()).to_string(),
            format!("{} x {}", sum(|image| image.shape[0]), encoded[0].shape[1]),
        ]);
    }
    for column in 1..5 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}
