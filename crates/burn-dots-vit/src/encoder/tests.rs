#![allow(clippy::unwrap_used)]

use burn::tensor::{Distribution, Tolerance};
use proptest::prelude::*;
use rstest::rstest;

use super::*;

fn small(adapter: AdapterType) -> DotsVitConfig {
    let mut config = match adapter {
        AdapterType::PatchMerger => DotsVitConfig::dots_vit(),
        AdapterType::PixelShuffleMlp => DotsVitConfig::dots_moe_vit(),
    };
    (config.embed_dim, config.num_attention_heads, config.num_hidden_layers) = (32, 2, 2);
    (config.intermediate_size, config.moe_intermediate_size) = (48, 24);
    (config.patch_size, config.adapter_out_dim) = (4, 40);
    if adapter == AdapterType::PixelShuffleMlp {
        config.pyramid_num_routed = vec![0, 4];
    }
    config
}

fn pixels(rows: usize, config: &DotsVitConfig) -> Tensor<2> {
    Tensor::random([rows, config.pixel_row_len()], Distribution::Normal(0.0, 1.0), &Device::flex())
}

fn assert_close(a: Tensor<2>, b: Tensor<2>) {
    a.into_data().assert_approx_eq::<f32>(&b.into_data(), Tolerance::rel_abs(1e-3, 1e-4));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Images do not see each other: a batch encodes as its images do one by one, frames of a clip
    /// included.
    #[test]
    fn a_batch_is_its_images(
        sides in prop::collection::vec((1usize..3, 1usize..4, 1usize..4), 1..4),
        shuffle in any::<bool>(),
    ) {
        let adapter = if shuffle { AdapterType::PixelShuffleMlp } else { AdapterType::PatchMerger };
        let config = small(adapter);
        let tower = DotsVisionEncoder::new(&config, &Device::flex()).unwrap();
        let grow = if shuffle { 1 } else { 2 };
        let grids: Vec<_> = sides.iter().map(|&(t, h, w)| GridThw::new(t, grow * h, grow * w)).collect();
        let rows = grids.iter().map(GridThw::tokens).sum();
        let pixel_values = pixels(rows, &config);
        let together = tower.forward(pixel_values.clone(), &grids).unwrap();
        let mut start = 0;
        let mut apart = Vec::new();
        for grid in &grids {
            for _ in 0..grid.t {
                let frame = GridThw::new(1, grid.h, grid.w);
                let rows = pixel_values.clone().narrow(0, start, frame.tokens());
                let tokens = tower.forward(rows, &[frame]).unwrap();
                prop_assert_eq!(tokens.dims()[0], frame.merged_tokens(2));
                apart.push(tokens);
                start += frame.tokens();
            }
        }
        assert_close(together, Tensor::cat(apart, 0));
    }
}

#[rstest]
#[case(&[], 4, "grid_thw is empty")]
#[case(&[GridThw::new(1, 2, 2)], 5, "pixel_values has 5 rows")]
#[case(&[GridThw::new(1, 2, 0)], 4, "holds no patch")]
#[case(&[GridThw::new(1, 2, 3)], 6, "2 x 2 groups")]
fn bad_grids_are_errors(#[case] grids: &[GridThw], #[case] rows: usize, #[case] needle: &str) {
    let config = small(AdapterType::PatchMerger);
    let tower = DotsVisionEncoder::new(&config, &Device::flex()).unwrap();
    let error = tower.forward(pixels(rows, &config), grids).unwrap_err();
    assert!(matches!(error, EncoderError::Grid(_)));
    assert!(error.to_string().contains(needle), "{error}");
}

/// A merger over row-major tokens takes no odd grid either, though its positions would.
#[test]
fn row_major_merger_still_needs_even_grids() {
    let mut config = small(AdapterType::PatchMerger);
    config.pre_pixel_shuffle = false;
    let tower = DotsVisionEncoder::new(&config, &Device::flex()).unwrap();
    let error = tower.forward(pixels(12, &config), &[GridThw::new(1, 3, 4)]).unwrap_err();
    assert!(matches!(error, EncoderError::Grid(GridError::NotDivisible { .. })), "{error}");
}

#[test]
fn pixel_rows_of_another_length_are_an_error() {
    let config = small(AdapterType::PatchMerger);
    let tower = DotsVisionEncoder::new(&config, &Device::flex()).unwrap();
    let rows = Tensor::<2>::zeros([4, 588], &Device::flex());
    let error = tower.forward(rows, &[GridThw::new(1, 2, 2)]).unwrap_err();
    assert!(error.to_string().contains("rows of 588 values, the tower takes 48"), "{error}");
}

#[test]
fn invalid_configs_build_no_tower() {
    let mut config = small(AdapterType::PatchMerger);
    config.num_attention_heads = 5;
    assert!(matches!(
        DotsVisionEncoder::new(&config, &Device::flex()),
        Err(ConfigError::Field { .. })
    ));
}

/// Of the frames in a pixel row the first is embedded.
#[test]
fn first_temporal_slice_only() {
    let mut config = small(AdapterType::PatchMerger);
    let one = DotsVisionEncoder::new(&config, &Device::flex()).unwrap();
    config.temporal_patch_size = 2;
    let mut two = DotsVisionEncoder::new(&config, &Device::flex()).unwrap();
    two.patch_embed.proj = one.patch_embed.proj.clone();
    let area = 16;
    let first = pixels(4, one.config()).reshape([4, 3, 1, area]);
    let second = first.random_like(Distribution::Default);
    let rows = Tensor::cat(vec![first.clone(), second], 2).reshape([4, 6 * area]);
    let expected = one.patch_embed.forward(first.reshape([4, 3 * area]));
    assert_close(two.patch_embed.forward(rows), expected);
}

#[rstest]
#[case::plain(Device::flex())]
#[case::autodiff(Device::flex().autodiff())]
fn bf16_tables_round_angles_and_little_else(#[case] device: Device) {
    let mut config = small(AdapterType::PatchMerger);
    config.rope_table_dtype = RopeTableDtype::Bfloat16;
    let tower = DotsVisionEncoder::new(&config, &device).unwrap();
    // 257 needs nine bits: bf16 keeps eight.
    let rope = tower.rope(&[[1, 0], [257, 3]], &device);
    let cos: Vec<f32> = rope.cos.into_data().try_to_vec().unwrap();
    assert_eq!(cos[0], 1f32.cos());
    assert!((cos[8] - 256f32.cos()).abs() < 1e-5, "{} is not cos(256)", cos[8]);
}

#[test]
fn implementation_can_be_changed_after_building() {
    let config = small(AdapterType::PatchMerger);
    let mut tower = DotsVisionEncoder::new(&config, &Device::flex()).unwrap();
    let resolved = |tower: &DotsVisionEncoder| tower.resolution(&Device::flex(), DType::F32);
    assert_eq!(resolved(&tower).requested, AttentionImplementation::FlashAttention2);
    tower.set_implementation(AttentionImplementation::EagerV2);
    tower.set_eager_fallback(AttentionImplementation::Eager);
    let resolution = resolved(&tower);
    assert_eq!(resolution.requested, AttentionImplementation::EagerV2);
    assert_eq!(resolution.implementation, AttentionImplementation::EagerV2);
    assert_eq!(tower.config().attn_implementation, AttentionImplementation::EagerV2);
    assert_eq!(tower.config().eager_fallback, AttentionImplementation::Eager);
}

#[test]
fn features_are_what_the_adapter_sees() {
    let config = small(AdapterType::PixelShuffleMlp);
    let tower = DotsVisionEncoder::new(&config, &Device::flex()).unwrap();
    let (grids, pixel_values) = ([GridThw::new(1, 3, 5)], pixels(15, &config));
    let mut stages = Vec::new();
    let mut last = None;
    let out = tower
        .forward_with(pixel_values.clone(), &grids, &mut |stage, hidden| {
            stages.push(stage);
            last = Some(hidden.clone());
        })
        .unwrap();
    use TowerStage::{Block, PatchEmbed, PostNorm};
    assert_eq!(stages, [PatchEmbed, Block(0), Block(1), PostNorm]);
    assert_eq!(out.dims(), [6, 40]);
    let features = tower.forward_features(pixel_values, &grids).unwrap();
    assert_eq!(features.dims(), [15, 32]);
    assert_close(features, last.unwrap());
}

/// The released towers, whose weights nobody allocates before they are loaded, have the parameters
/// that the checkpoints hold.
#[test]
fn released_sizes() {
    let device = Device::flex();
    let dense = DotsVisionEncoder::new(&DotsVitConfig::dots_vit(), &device).unwrap();
    assert_eq!(dense.num_params(), 1_262_091_264);

    let mut config = DotsVitConfig::dots_moe_vit();
    config.pyramid_num_routed = vec![-1; 25];
    config.pyramid_num_routed.extend((4..=64).step_by(4));
    config.pyramid_num_routed.push(64);
    (config.adapter_out_dim, config.adapter_type) = (5120, AdapterType::PatchMerger);
    config.pre_pixel_shuffle = true;
    let moe = DotsVisionEncoder::new(&config, &device).unwrap();
    let router_biases = 608;
    assert_eq!(moe.num_params() - router_biases, 6_871_277_312);
}

/// Gradients of the pixel rows and of every trainable parameter, by name.
#[cfg(feature = "autodiff")]
fn gradients(
    tower: &DotsVisionEncoder,
    pixels: &Tensor<2>,
    grids: &[GridThw],
) -> Vec<(String, Vec<f32>)> {
    use crate::checkpoint::{ParameterVisitor, StoredParameter};
    use burn::module::Param;
    use burn::tensor::Gradients;

    struct Collect<'a>(&'a Gradients, Vec<(String, Vec<f32>)>);
    impl ParameterVisitor for Collect<'_> {
        fn visit<const D: usize>(
            &mut self,
            stored: &StoredParameter,
            parameter: &Param<Tensor<D>>,
        ) {
            if let Some(gradient) = parameter.val().grad(self.0) {
                self.1.push((stored.name.clone(), gradient.into_data().iter::<f32>().collect()));
            }
        }
    }
    let pixels = pixels.clone().require_grad();
    let tokens = tower.forward(pixels.clone(), grids).unwrap();
    let gradients = (tokens.clone() * tokens).sum().backward();
    let first = pixels.grad(&gradients).unwrap().into_data().iter::<f32>().collect();
    let mut collected = Collect(&gradients, vec![("pixel_values".to_owned(), first)]);
    tower.visit_parameters(&mut collected);
    collected.1
}

/// Blocks computed anew give the gradients of blocks that were kept, router and experts included.
#[cfg(feature = "autodiff")]
#[rstest]
fn gradient_checkpointing_changes_no_gradient(
    #[values(AdapterType::PatchMerger, AdapterType::PixelShuffleMlp)] adapter: AdapterType,
    #[values(true, false)] balanced: bool,
) {
    let device = Device::flex().autodiff();
    let device = if balanced { device.gradient_checkpointing() } else { device };
    let config = small(adapter);
    let mut tower = DotsVisionEncoder::new(&config, &device).unwrap();
    let grids = [GridThw::new(1, 4, 6), GridThw::new(2, 2, 2)];
    let rows = grids.iter().map(GridThw::tokens).sum();
    let pixels = Tensor::from_data(pixels(rows, &config).into_data(), &device);
    let kept = gradients(&tower, &pixels, &grids);
    tower.set_gradient_checkpointing(true);
    let recomputed = gradients(&tower, &pixels, &grids);
    assert!(kept.len() > 10);
    for ((name, kept), (other, recomputed)) in kept.iter().zip(&recomputed) {
        assert_eq!(name, other);
        assert_eq!(kept, recomputed, "{name}");
    }
    assert_eq!(kept.len(), recomputed.len());
}

/// What does not learn stays without a gradient, and the rest learns around it.
#[cfg(feature = "autodiff")]
#[test]
fn gradient_checkpointing_leaves_frozen_parameters_alone() {
    let device = Device::flex().autodiff();
    let config = small(AdapterType::PatchMerger);
    let mut tower = DotsVisionEncoder::new(&config, &device).unwrap();
    tower.set_gradient_checkpointing(true);
    tower.patch_embed = tower.patch_embed.no_grad();
    tower.blocks[0].attn = tower.blocks[0].attn.clone().no_grad();
    let rows = Tensor::from_data(pixels(24, &config).into_data(), &device);
    let tokens = tower.forward(rows, &[GridThw::new(1, 4, 6)]).unwrap();
    let gradients = tokens.sum().backward();
    assert!(tower.blocks[0].attn.qkv.weight.grad(&gradients).is_none());
    assert!(tower.blocks[0].norm_2.weight.grad(&gradients).is_some());
    assert!(tower.blocks[1].attn.qkv.weight.grad(&gradients).is_some());
}
