//! From patches to the language model's tokens.

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor, activation::gelu};

use crate::config::{AdapterType, DotsVitConfig};
use crate::grid::GridThw;

/// Either adapter of the Dots towers.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)] // One per tower: boxing would save nothing.
pub enum DotsAdapter {
    /// For tokens grouped by the merged square.
    PatchMerger(PatchMerger),
    /// For row-major tokens.
    PixelShuffle(PixelShuffleMlp),
}

impl DotsAdapter {
    /// Fresh weights for a validated `config`.
    pub(crate) fn new(config: &DotsVitConfig, device: &Device) -> Self {
        let merged = config.embed_dim * config.adapter_merge_size * config.adapter_merge_size;
        let out = config.adapter_out_dim;
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        match config.adapter_type {
            AdapterType::PatchMerger => Self::PatchMerger(PatchMerger {
                ln_q: LayerNormConfig::new(config.embed_dim).with_epsilon(1e-6).init(device),
                fc1: linear(merged, merged),
                fc2: linear(merged, out),
            }),
            AdapterType::PixelShuffleMlp => Self::PixelShuffle(PixelShuffleMlp {
                norm: LayerNormConfig::new(merged).init(device),
                fc1: linear(merged, out),
                fc2: linear(out, out),
            }),
        }
    }

    /// Merges the tokens of `grids`, which the caller has checked against `x`.
    pub(crate) fn forward(&self, x: Tensor<2>, grids: &[GridThw]) -> Tensor<2> {
        match self {
            Self::PatchMerger(adapter) => adapter.forward(x),
            Self::PixelShuffle(adapter) => adapter.forward(x, grids),
        }
    }
}

/// LayerNorm on each patch, then an MLP with exact (erf) GELU on the concatenation of consecutive
/// patches. Expects tokens grouped by the merged square.
#[derive(Module, Debug)]
pub struct PatchMerger {
    /// `ln_q`, epsilon 1e-6, over one patch.
    pub ln_q: LayerNorm,
    /// `mlp.0`, `[4 * dim, 4 * dim]` for 2 x 2 squares.
    pub fc1: Linear,
    /// `mlp.2`, `[4 * dim, out]`.
    pub fc2: Linear,
}

impl PatchMerger {
    /// # Shapes
    ///
    /// - x: `[N, dim]` with N a multiple of the patches in a square
    /// - output: `[N / 4, out]` for 2 x 2 squares
    ///
    /// # Panics
    ///
    /// When `x` has another width or its tokens do not fill squares.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let [tokens, dim] = x.dims();
        let [merged, _] = self.fc1.weight.dims();
        let squares = tokens * dim / merged;
        let x = self.ln_q.forward(x).reshape([squares, merged]);
        self.fc2.forward(gelu(self.fc1.forward(x)))
    }
}

/// The legacy adapter: 2 x 2 pixel unshuffle of each row-major frame, LayerNorm, and an MLP with
/// exact (erf) GELU.
///
/// Where a frame has an odd number of rows (columns), a copy of the first is put in front, so an
/// image gives `ceil(h / 2) * ceil(w / 2)` tokens.
#[derive(Module, Debug)]
pub struct PixelShuffleMlp {
    /// `proj.0`, epsilon 1e-5, over the four patches of a square.
    pub norm: LayerNorm,
    /// `proj.1`, `[4 * dim, out]`.
    pub fc1: Linear,
    /// `proj.3`, `[out, out]`.
    pub fc2: Linear,
}

impl PixelShuffleMlp {
    /// # Shapes
    ///
    /// - x: `[N, dim]`, row-major tokens of `grids` in order
    /// - output: `[sum t * ceil(h / 2) * ceil(w / 2), out]`
    ///
    /// # Panics
    ///
    /// When `x` has another width or another number of tokens than `grids`.
    pub fn forward(&self, x: Tensor<2>, grids: &[GridThw]) -> Tensor<2> {
        let lengths: Vec<usize> = grids.iter().map(GridThw::tokens).collect();
        let merged = if let [grid] = grids {
            pixel_unshuffle(x, *grid)
        } else {
            let images = x.split_with_sizes(lengths, 0);
            let merged =
                images.into_iter().zip(grids).map(|(image, grid)| pixel_unshuffle(image, *grid));
            Tensor::cat(merged.collect(), 0)
        };
        self.fc2.forward(gelu(self.fc1.forward(self.norm.forward(merged))))
    }
}

/// `[t * h * w, C]` row-major to `[t * ceil(h/2) * ceil(w/2), 4 * C]` with channels ordered
/// (row in square, column in square, channel).
fn pixel_unshuffle(image: Tensor<2>, grid: GridThw) -> Tensor<2> {
    let [_, channels] = image.dims();
    let GridThw { t, h, w } = grid;
    let mut image = image.reshape([t, h, w, channels]);
    if h % 2 == 1 {
        image = Tensor::cat(vec![image.clone().narrow(1, 0, 1), image], 1);
    }
    if w % 2 == 1 {
        image = Tensor::cat(vec![image.clone().narrow(2, 0, 1), image], 2);
    }
    let (rows, columns) = (h.div_ceil(2), w.div_ceil(2));
    image
        .reshape([t, rows, 2, columns, 2, channels])
        .permute([0, 1, 3, 2, 4, 5])
        .reshape([t * rows * columns, 4 * channels])
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use burn::tensor::{TensorData, Tolerance};
    use rstest::rstest;

    use super::*;
    use crate::grid;

    fn numbered(tokens: usize, channels: usize) -> Tensor<2> {
        let values: Vec<f32> = (0..tokens * channels).map(|i| i as f32).collect();
        Tensor::from_data(TensorData::new(values, [tokens, channels]), &Device::flex())
    }

    #[rstest]
    // Each square lists its patches (0,0), (0,1), (1,0), (1,1).
    #[case(GridThw::new(1, 2, 4), &[[0, 1, 4, 5], [2, 3, 6, 7]])]
    // A copy of row 0 and of column 0 goes in front.
    #[case(GridThw::new(1, 3, 3), &[[0, 0, 0, 0], [1, 2, 1, 2], [3, 3, 6, 6], [4, 5, 7, 8]])]
    #[case(GridThw::new(2, 1, 2), &[[0, 1, 0, 1], [2, 3, 2, 3]])]
    fn unshuffle_gathers_squares(#[case] grid: GridThw, #[case] expected: &[[usize; 4]]) {
        let out = pixel_unshuffle(numbered(grid.tokens(), 1), grid).into_data();
        let expected: Vec<f32> = expected.iter().flatten().map(|&v| v as f32).collect();
        assert_eq!(out.try_to_vec::<f32>().unwrap(), expected);
        assert_eq!(out.shape()[0], grid.merged_tokens(2));
    }

    /// On even grids both adapters see the same squares: row-major unshuffled equals grouped and
    /// concatenated.
    #[test]
    fn unshuffle_equals_grouped_order() {
        let grid = GridThw::new(2, 4, 6);
        let order = burn_vision_attention::PositionOrder::MergeGrouped(2);
        let positions = grid::positions(&[grid], order).unwrap();
        let frame = grid.h * grid.w;
        let indices: Vec<i64> = positions
            .iter()
            .enumerate()
            .map(|(token, [h, w])| {
                ((token / frame * grid.h + *h as usize) * grid.w + *w as usize) as i64
            })
            .collect();
        let x = numbered(grid.tokens(), 3);
        let indices = Tensor::from_data(TensorData::new(indices, [grid.tokens()]), &x.device());
        let grouped = x.clone().select(0, indices).reshape([grid.tokens() / 4, 12]);
        pixel_unshuffle(x, grid)
            .into_data()
            .assert_approx_eq::<f32>(&grouped.into_data(), Tolerance::default());
    }
}
