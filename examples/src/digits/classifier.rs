//! The tower that tells digits apart.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Device, IndexingUpdateOp, Int, Tensor, TensorData};
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use burn_dots_vit::config::{AdapterType, ConfigError, DotsVitConfig};
use burn_dots_vit::preprocess::PreprocessorConfig;
use burn_dots_vit::{DotsVisionEncoder, EncoderError, GridThw};
use burn_vision_attention::{AttentionImplementation, Segments};

use super::batch::DigitBatch;

/// How many digits there are to tell apart.
pub const CLASSES: usize = 10;

/// A small Dots tower: all of the released ones' parts (2D rotary embedding, q/k norm, SwiGLU, patch
/// merger) at a width of 64. Its adapter's output tokens are scores of the ten digits.
pub fn config() -> DotsVitConfig {
    DotsVitConfig {
        embed_dim: 64,
        hidden_size: CLASSES,
        num_attention_heads: 4,
        num_hidden_layers: 3,
        intermediate_size: 160,
        patch_size: 4,
        attn_implementation: AttentionImplementation::FlashAttention2,
        adapter_type: AdapterType::PatchMerger,
        adapter_out_dim: CLASSES,
        pre_pixel_shuffle: true,
        ..DotsVitConfig::dots_moe_vit()
    }
}

/// What turns images into the rows that [`config`]'s tower takes.
///
/// Images are resized to sides that are multiples of 8 pixels and an area of at most 24 x 24: there
/// a digit is as large as those that the tower learns from.
pub fn preprocessing() -> PreprocessorConfig {
    PreprocessorConfig {
        patch_size: 4,
        min_pixels: 16 * 16,
        max_pixels: 24 * 24,
        image_mean: [0.25; 3],
        image_std: [0.35; 3],
        ..PreprocessorConfig::default()
    }
}

/// A tower whose tokens, averaged over each image, are the logits of the ten digits.
///
/// The last layer of the tower's adapter is linear, so that averaging its tokens is averaging the
/// features before it: mean pooling and a classifier, without a parameter beyond the tower's.
#[derive(Module, Debug)]
pub struct DigitClassifier {
    /// With an `adapter_out_dim` of [`CLASSES`].
    pub tower: DotsVisionEncoder,
}

impl DigitClassifier {
    /// A classifier of [`config`] whose weights on `device` follow from the `seed`.
    ///
    /// # Errors
    ///
    /// As [`DotsVisionEncoder::new`].
    pub fn new(seed: u64, device: &Device) -> Result<Self, ConfigError> {
        device.seed(seed);
        let classifier = Self { tower: DotsVisionEncoder::new(&config(), device)? };
        // Weights are drawn when first used: use them in an order that is always the same.
        classifier.visit(&mut Initialise);
        Ok(classifier)
    }

    /// The logits of packed images.
    ///
    /// # Shapes
    ///
    /// - pixel_values: `[patches of all images, 48]`
    /// - grids: one an image
    /// - output: `[images, 10]`
    ///
    /// # Errors
    ///
    /// As [`DotsVisionEncoder::forward`].
    pub fn forward(
        &self,
        pixel_values: Tensor<2>,
        grids: &[GridThw],
    ) -> Result<Tensor<2>, EncoderError> {
        let tokens = self.tower.forward(pixel_values, grids)?;
        let merge = self.tower.config().adapter_merge_size;
        let lengths = grids.iter().map(|grid| grid.merged_tokens(merge));
        let segments = Segments::from_lengths(lengths).expect("merging only makes a batch smaller");
        Ok(mean_pool(tokens, &segments))
    }

    /// Logits, loss and targets of a batch.
    ///
    /// # Panics
    ///
    /// When the batch is for another tower.
    pub fn classify(&self, batch: DigitBatch) -> ClassificationOutput {
        let DigitBatch { pixel_values, grids, targets } = batch;
        let logits = self.forward(pixel_values, &grids).expect("batches are made for this tower");
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        let loss = loss.forward(logits.clone(), targets.clone());
        ClassificationOutput::new(loss, logits, targets)
    }
}

impl TrainStep for DigitClassifier {
    type Input = DigitBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitBatch) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for DigitClassifier {
    type Input = DigitBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitBatch) -> ClassificationOutput {
        self.classify(batch)
    }
}

struct Initialise;

impl burn::module::ModuleVisitor for Initialise {
    fn visit_float<const D: usize>(&mut self, parameter: &burn::module::Param<Tensor<D>>) {
        parameter.val();
    }
}

/// The mean of each segment's rows; differentiable, and linear in the number of rows.
///
/// # Shapes
///
/// - x: `[tokens, dim]`
/// - segments: over `tokens` tokens, none of them empty
/// - output: `[segments, dim]`
///
/// # Panics
///
/// When the segments are over another number of tokens, or one is empty and so has no mean.
pub fn mean_pool(x: Tensor<2>, segments: &Segments) -> Tensor<2> {
    let [tokens, dim] = x.dims();
    let total = segments.total();
    assert_eq!(tokens, total, "x: expected {total} tokens as in segments, got {tokens}");
    let device = x.device();
    let mut owners = Vec::with_capacity(tokens);
    let mut shares = Vec::with_capacity(segments.len());
    for (segment, length) in segments.lengths().enumerate() {
        assert!(length > 0, "segments: expected at least one token in each, got none in {segment}");
        owners.extend(std::iter::repeat_n(segment as i32, length));
        shares.push(1.0 / length as f32);
    }
    let owners = Tensor::<1, Int>::from_data(TensorData::new(owners, [tokens]), &device);
    let shares = TensorData::new(shares, [segments.len(), 1]);
    let shares = Tensor::<2>::from_data(shares, (&device, x.dtype()));
    let sums = Tensor::zeros([segments.len(), dim], (&device, x.dtype()));
    sums.select_assign(0, owners, x, IndexingUpdateOp::Add) * shares
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use burn::tensor::{Distribution, Tolerance};

    use super::*;
    use crate::digits::{DigitLoader, Order, bundled};

    fn batch(count: usize, device: &Device) -> DigitBatch {
        let digits = bundled().unwrap()[..count].into();
        let loader = DigitLoader::new(digits, Order::Fixed { seed: 1 }, count);
        loader.batches(device).next().unwrap()
    }

    #[test]
    fn means_and_their_gradients_stay_in_their_segment() {
        let device = Device::flex().autodiff();
        let x = Tensor::<2>::from_data([[1., 2.], [3., 6.], [5., 5.], [-1., 0.]], &device);
        let x = x.require_grad();
        let segments = Segments::from_lengths([2, 1, 1]).unwrap();
        let pooled = mean_pool(x.clone(), &segments);
        let expected = TensorData::from([[2f32, 4.], [5., 5.], [-1., 0.]]);
        pooled.clone().into_data().assert_approx_eq::<f32>(&expected, Tolerance::absolute(1e-6));

        let weights = Tensor::from_data([[1., 10.], [2., 20.], [3., 30.]], &device);
        let gradients = (pooled * weights).sum().backward();
        let expected = TensorData::from([[0.5f32, 5.], [0.5, 5.], [2., 20.], [3., 30.]]);
        let found = x.grad(&gradients).unwrap().into_data();
        found.assert_approx_eq::<f32>(&expected, Tolerance::absolute(1e-6));
    }

    #[test]
    fn means_are_those_of_each_segment_alone() {
        let device = Device::flex();
        let segments = Segments::from_lengths([7, 1, 30, 2]).unwrap();
        let x = Tensor::<2>::random([40, 5], Distribution::Default, &device);
        let alone = segments
            .ranges()
            .map(|range| x.clone().narrow(0, range.start, range.len()).mean_dim(0))
            .collect();
        let expected = Tensor::cat(alone, 0).into_data();
        mean_pool(x, &segments)
            .into_data()
            .assert_approx_eq::<f32>(&expected, Tolerance::absolute(1e-6));
    }

    #[test]
    #[should_panic(expected = "segments: expected at least one token in each, got none in 1")]
    fn an_empty_segment_has_no_mean() {
        let segments = Segments::from_lengths([2, 0]).unwrap();
        mean_pool(Tensor::zeros([2, 3], &Device::flex()), &segments);
    }

    #[test]
    fn packing_gives_what_each_image_gives_alone() {
        let device = Device::flex();
        let classifier = DigitClassifier::new(3, &device).unwrap();
        let DigitBatch { pixel_values, grids, .. } = batch(12, &device);
        let sizes: std::collections::HashSet<_> = grids.iter().map(GridThw::tokens).collect();
        assert!(sizes.len() > 3, "{sizes:?}");
        let packed = classifier.forward(pixel_values.clone(), &grids).unwrap();
        let mut first = 0;
        let mut alone = Vec::new();
        for &grid in &grids {
            let rows = pixel_values.clone().narrow(0, first, grid.tokens());
            alone.push(classifier.forward(rows, &[grid]).unwrap());
            first += grid.tokens();
        }
        let alone = Tensor::cat(alone, 0).into_data();
        packed.into_data().assert_approx_eq::<f32>(&alone, Tolerance::absolute(1e-4));
    }

    #[test]
    fn seeds_decide_the_weights() {
        let logits = |seed| {
            let device = Device::flex();
            let classifier = DigitClassifier::new(seed, &device).unwrap();
            classifier.classify(batch(3, &device)).output.into_data()
        };
        assert_eq!(logits(1), logits(1));
        assert_ne!(logits(1), logits(2));
    }

    #[test]
    fn the_preprocessing_is_the_towers() {
        preprocessing().validate().unwrap();
        preprocessing().check_tower(&config()).unwrap();
    }
}
