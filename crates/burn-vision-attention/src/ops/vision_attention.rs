//! The forward pass of a whole attention layer, on devices that have a kernel for it.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, DispatchDevice, ExtensionType, backend_extension};
use burn::nn::Linear;
use burn::tensor::Tensor;

use super::attention_varlen::{AttentionError, AttentionOptions};
use super::backend::{Norm, Rotation};
use super::rope_qk_norm::{self, QkNorm};
use crate::{RotaryPositionEmbedding, Segments};

/// Below this many tokens the kernel is no faster than one operation after another: bringing the weights
/// into its order is not worth it. At widths of 1152 to 1536 it takes 1.3 to 1.4 times as long for 64 tokens,
/// 1.2 for 128, 1.1 for 256, as long for 512 to 1024, and 0.9 times for 4096 (two AVX-512 cores, f32).
/// Development builds have a lower bound, for golden layers have little more than a hundred tokens.
const FEW_TOKENS: usize = if cfg!(debug_assertions) { 128 } else { 512 };

/// Kernels of a backend for a layer without gradients, on arguments that have been checked. Everywhere
/// else a layer is one operation after another.
#[backend_extension(Flex: cfg(feature = "flex"))]
pub trait VisionAttentionBackend: Backend {
    /// Output `[tokens, outputs]` for `x` `[tokens, width]`.
    #[allow(clippy::too_many_arguments)] // the extension takes tensors one by one
    fn vision_attention(
        x: FloatTensor<Self>,
        qkv: FloatTensor<Self>,
        proj: FloatTensor<Self>,
        #[extension_type] biases: Biases<Self>,
        #[extension_type] rotation: Rotation<Self>,
        #[extension_type] norm: Norm<Self>,
        heads: usize,
        segments: Segments,
        options: AttentionOptions,
    ) -> FloatTensor<Self>;
}

/// The biases of both projections, where they have some.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub enum Biases<B: Backend> {
    /// No biases.
    Absent,
    /// Both.
    Present {
        /// Of q, k and v.
        qkv: FloatTensor<B>,
        /// Of the output.
        proj: FloatTensor<B>,
    },
}

/// A layer's parts.
pub(crate) struct Layer<'a> {
    pub(crate) qkv: &'a Linear,
    pub(crate) proj: &'a Linear,
    pub(crate) heads: usize,
    pub(crate) norms: Option<&'a QkNorm>,
    pub(crate) rope: Option<&'a RotaryPositionEmbedding>,
}

impl Layer<'_> {
    /// The output for `x` `[tokens, width]`, where the device has a kernel that serves all of it.
    ///
    /// # Errors
    ///
    /// When an option is out of range.
    pub(crate) fn forward(
        &self,
        x: &Tensor<2>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> Result<Option<Tensor<2>>, AttentionError> {
        let (Some(biases), true) = (self.biases(), self.is_served(x)) else { return Ok(None) };
        options.check()?;
        let out = Dispatch::vision_attention(
            x.clone().into_dispatch(),
            self.qkv.weight.val().into_dispatch(),
            self.proj.weight.val().into_dispatch(),
            biases,
            rope_qk_norm::rotation(self.rope),
            rope_qk_norm::norm(self.norms),
            self.heads,
            segments.clone(),
            *options,
        );
        Ok(Some(Tensor::from_dispatch(out)))
    }

    /// The biases of both projections or of none.
    fn biases(&self) -> Option<Biases<Dispatch>> {
        match (&self.qkv.bias, &self.proj.bias) {
            (None, None) => Some(Biases::Absent),
            (Some(qkv), Some(proj)) => {
                let [qkv, proj] = [qkv, proj].map(|bias| bias.val().into_dispatch());
                Some(Biases::Present { qkv, proj })
            }
            _ => None,
        }
    }

    fn is_served(&self, x: &Tensor<2>) -> bool {
        let (device, dtype) = (x.device(), x.dtype());
        let [tokens, width] = x.dims();
        let is_flex = match device.as_dispatch() {
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(_) => !device.is_autodiff(),
            #[allow(unreachable_patterns)] // where Flex is the only backend of the build
            _ => false,
        };
        let linears = [self.qkv, self.proj];
        let weights = linears.iter().all(|linear| {
            linear.weight.dtype() == dtype
                && linear.bias.as_ref().is_none_or(|bias| bias.dtype() == dtype)
        });
        let shape = [tokens, self.heads, width / self.heads];
        let plain = self.rope.is_none() && self.norms.is_none();
        is_flex
            && weights
            && tokens >= FEW_TOKENS
            && super::flex::supports_attention(dtype).is_ok()
            && (plain
                || rope_qk_norm::kernel_serves(&device, dtype, [shape; 2], self.rope, self.norms))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::{AttentionImplementation, VisionAttentionConfig, VisionRotaryEmbedding};
    use burn::tensor::{Device, Distribution, Tolerance};
    use rstest::rstest;

    #[rstest]
    fn the_kernel_of_the_layer_gives_what_its_operations_give(
        #[values(false, true)] bias: bool,
        #[values(false, true)] use_qk_norm: bool,
        #[values(false, true)] is_causal: bool,
        #[values(false, true)] transposed: bool,
    ) {
        let device = Device::flex();
        let config = VisionAttentionConfig::new(48, 3)
            .with_bias(bias)
            .with_use_qk_norm(use_qk_norm)
            .with_is_causal(is_causal);
        let mut attention = config.init(&device);
        if transposed {
            // As a checkpoint of the reference is read: outputs by inputs.
            attention.qkv.weight = attention
                .qkv
                .weight
                .map(|weight| weight.transpose().reshape([144, 48]).transpose());
        }
        let segments = Segments::from_lengths([FEW_TOKENS - 20, 0, 1, 109]).unwrap();
        let tokens = FEW_TOKENS + 90;
        let positions: Vec<_> = (0..tokens as u32).map(|token| [token / 7, token % 7]).collect();
        let rope = VisionRotaryEmbedding::new(8).prepare(&positions, &device);
        let x = Tensor::random([tokens, 48], Distribution::Normal(0.0, 1.0), &device);
        let [found, expected] =
            [AttentionImplementation::FlashAttention2, AttentionImplementation::Eager].map(
                |implementation| {
                    attention.set_implementation(implementation);
                    attention.forward(x.clone(), &segments, Some(&rope)).into_data()
                },
            );
        found.assert_approx_eq::<f32>(&expected, Tolerance::absolute(2e-5));
    }
}
