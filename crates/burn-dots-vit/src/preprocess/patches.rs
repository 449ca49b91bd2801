//! Normalisation and the cut into patches.

use image::RgbImage;
use rayon::prelude::*;

use super::PreprocessorConfig;
use crate::grid::GridThw;

const CHANNELS: usize = 3;

/// Position in the patch grid of row `index` of a frame of `grid`, as `(patch row, patch column)`.
///
/// Merge-grouped order walks `merge_size * merge_size` squares in row-major order, and each square in
/// row-major order.
pub(super) fn patch_position(
    index: usize,
    grid: GridThw,
    merge_size: usize,
    grouped: bool,
) -> (usize, usize) {
    if !grouped {
        return (index / grid.w, index % grid.w);
    }
    let (group, member) = (index / (merge_size * merge_size), index % (merge_size * merge_size));
    let groups_across = grid.w / merge_size;
    (
        group / groups_across * merge_size + member / merge_size,
        group % groups_across * merge_size + member % merge_size,
    )
}

/// Value of every level of every channel: `(x * rescale_factor - mean) / std`.
///
/// The product is rounded from `f64` to `f32` and the rest is `f32`, as numpy does it in the reference.
pub(super) fn value_table(config: &PreprocessorConfig) -> [[f32; 256]; CHANNELS] {
    std::array::from_fn(|channel| {
        std::array::from_fn(|level| {
            let level = level as f64;
            let value = if config.do_rescale {
                (level * config.rescale_factor) as f32
            } else {
                level as f32
            };
            if config.do_normalize {
                (value - config.image_mean[channel]) / config.image_std[channel]
            } else {
                value
            }
        })
    })
}

/// Pixel rows of `frames` in order, `[t * h * w, 3 * temporal_patch_size * patch_size^2]`.
///
/// Each row is channel-major, then frame, then pixel row, then pixel column. `frames` holds
/// `grid.t * temporal_patch_size` images that the grid tiles exactly.
pub(super) fn pixel_rows(
    frames: &[&RgbImage],
    grid: GridThw,
    config: &PreprocessorConfig,
    values: &[[f32; 256]; CHANNELS],
) -> Vec<f32> {
    let patch = config.patch_size;
    let row_len = config.row_len();
    let per_frame = grid.h * grid.w;
    let stride = grid.w * patch * CHANNELS;
    let mut rows = vec![0f32; grid.tokens() * row_len];
    rows.par_chunks_exact_mut(row_len).with_min_len(64).enumerate().for_each(|(index, row)| {
        let (row_y, row_x) =
            patch_position(index % per_frame, grid, config.merge_size, config.pre_pixel_shuffle);
        let first = index / per_frame * config.temporal_patch_size;
        let corner = row_y * patch * stride + row_x * patch * CHANNELS;
        // One line of `patch` values per (channel, frame, pixel row).
        for (line_index, line) in row.chunks_exact_mut(patch).enumerate() {
            let channel = line_index / (config.temporal_patch_size * patch);
            let frame = first + line_index / patch % config.temporal_patch_size;
            let start = corner + line_index % patch * stride;
            let levels = &frames[frame].as_raw()[start..][..patch * CHANNELS];
            for (value, pixel) in line.iter_mut().zip(levels.chunks_exact(CHANNELS)) {
                *value = values[channel][usize::from(pixel[channel])];
            }
        }
    });
    rows
}
