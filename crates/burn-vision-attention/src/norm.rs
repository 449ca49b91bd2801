//! RMS normalisation with the reference's order of rounding.

use burn::config::Config;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay, Param};
use burn::nn::Initializer;
use burn::tensor::{DType, Device, Tensor, assert_shape};

/// Configuration of a [`VisionRmsNorm`].
#[derive(Config, Debug)]
pub struct VisionRmsNormConfig {
    /// The size of the normalised (last) dimension.
    pub dim: usize,
    /// Added to the mean square.
    #[config(default = 1e-5)]
    pub epsilon: f64,
}

impl VisionRmsNormConfig {
    /// A norm whose weight is one.
    ///
    /// # Panics
    ///
    /// When `epsilon` is not positive.
    pub fn init(&self, device: &Device) -> VisionRmsNorm {
        assert!(self.epsilon > 0.0, "epsilon: expected a positive number, got {}", self.epsilon);
        VisionRmsNorm { weight: Initializer::Ones.init([self.dim], device), epsilon: self.epsilon }
    }
}

/// `x / sqrt(mean(x^2) + epsilon) * weight` over the last dimension.
///
/// The whole quotient is computed in f32 and cast back to the dtype of `x` before the weight is
/// applied, as in the reference (`VisionRMSNorm` of vLLM's `dots3_note`). Burn's own `RmsNorm`
/// rounds the root mean square first, which differs in f16 and bf16.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct VisionRmsNorm {
    /// Scale of each channel, `[dim]`.
    pub weight: Param<Tensor<1>>,
    /// Added to the mean square.
    pub epsilon: f64,
}

impl VisionRmsNorm {
    /// Normalises `x`.
    ///
    /// # Shapes
    ///
    /// - x: `[..., dim]`, any float dtype
    /// - output: as x; a weight of another dtype is applied in f32 and the result cast back
    ///
    /// # Panics
    ///
    /// When the last dimension is not `dim`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        rms_norm(x, self.weight.val(), self.epsilon)
    }
}

/// The function of [`VisionRmsNorm`] on plain tensors; `x`: `[..., dim]`, `weight`: `[dim]`.
pub(crate) fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, epsilon: f64) -> Tensor<D> {
    let [dim] = weight.dims();
    assert_shape!(x, [.., dim]);
    let dtype = x.dtype();
    let x = to_compute_dtype(x);
    let mean_square = x.clone().square().mean_dim(D - 1);
    let normed = (x / (mean_square + epsilon).sqrt()).cast(dtype);
    let weight = weight.unsqueeze();
    if weight.dtype() == dtype {
        normed * weight
    } else {
        (to_compute_dtype(normed) * to_compute_dtype(weight)).cast(dtype)
    }
}

/// f32, or f64 for tensors that are f64 already.
pub(crate) fn to_compute_dtype<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    match x.dtype() {
        DType::F64 | DType::F32 => x,
        _ => x.cast(DType::F32),
    }
}

impl ModuleDisplay for VisionRmsNorm {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [dim] = self.weight.shape().dims();
        content.add("dim", &dim).add("epsilon", &self.epsilon).optional()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{TensorData, Tolerance};

    #[test]
    fn normalises_the_last_dimension_and_scales() {
        let device = Device::flex();
        let mut norm = VisionRmsNormConfig::new(2).with_epsilon(1e-12).init(&device);
        norm.weight = Param::from_data([1.0, -2.0], &device);
        let y = norm.forward(Tensor::<2>::from_data([[3.0, 4.0], [-1.0, 1.0]], &device));
        // Root mean squares: sqrt(12.5) and 1.
        let expected = TensorData::from([[0.848_528_1, -2.262_741_7], [-1.0, -2.0]]);
        y.into_data().assert_approx_eq::<f32>(&expected, Tolerance::absolute(1e-6));
    }

    #[test]
    fn low_precision_is_rounded_once_before_the_weight() {
        let device = Device::flex();
        let norm = VisionRmsNormConfig::new(3).init(&device);
        let x = Tensor::<1>::from_data([1.0, 2.0, 300.0], &device).cast(DType::BF16);
        let y = norm.forward(x);
        assert_eq!(y.dtype(), DType::BF16);
        let expected =
            TensorData::from([0.005_773_3_f32, 0.011_546_6, 1.731_99]).convert_dtype(DType::BF16);
        y.into_data().assert_eq(&expected, true);
    }

    #[test]
    #[should_panic(expected = "axis 1 expected 3, got 4")]
    fn another_width_panics() {
        let device = Device::flex();
        VisionRmsNormConfig::new(3).init(&device).forward(Tensor::<2>::zeros([2, 4], &device));
    }
}
