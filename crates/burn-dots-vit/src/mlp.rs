//! The gated feed-forward layer of dense blocks and experts.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, activation::silu};

/// SwiGLU: `fc2(silu(fc1 x) * fc3 x)` (Shazeer, "GLU Variants Improve Transformer", 2020), with
/// the reference's names: `fc1` gates, `fc3` goes up, `fc2` goes down.
#[derive(Module, Debug)]
pub struct DotsSwiGluFfn {
    /// Gate, `[dim, hidden]`.
    pub fc1: Linear,
    /// Down, `[hidden, dim]`.
    pub fc2: Linear,
    /// Up, `[dim, hidden]`.
    pub fc3: Linear,
}

impl DotsSwiGluFfn {
    /// Fresh weights for tokens of width `dim` and an inner width of `hidden`.
    pub fn new(dim: usize, hidden: usize, bias: bool, device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).with_bias(bias).init(device);
        Self { fc1: linear(dim, hidden), fc2: linear(hidden, dim), fc3: linear(dim, hidden) }
    }

    /// # Shapes
    ///
    /// - x: `[tokens, dim]`
    /// - output: `[tokens, dim]`
    ///
    /// # Panics
    ///
    /// When `x` has another width.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let gate = silu(self.fc1.forward(x.clone()));
        self.fc2.forward(gate * self.fc3.forward(x))
    }
}
