//! What is compared computes the same. A device has one source of random numbers, which the test seeds:
//! it must be alone in its process.
#![allow(clippy::unwrap_used)]

use std::any::Any;

use attention_bench::arguments::{Dtype, Heads, Implementation, Operation, Pass};
use attention_bench::case::Case;
use attention_bench::layout::Layout;
use attention_bench::results::Outputs;
use attention_bench::workload::{Candidate, prepare};
use burn::tensor::{Device, Tensor, TensorData, Tolerance};
use burn_vision_attention::AttentionImplementation;

const EAGER: Candidate = Candidate::Attention(Implementation::Ours(AttentionImplementation::Eager));
const BURN: Candidate = Candidate::Attention(Implementation::BurnMasked);

/// The outputs of a forward pass.
fn outputs<const D: usize>(
    operation: Operation,
    heads: Heads,
    candidate: Candidate,
) -> Vec<TensorData> {
    let (layout, dtype, pass) = (Layout::uniform(3, 4), Dtype::F32, Pass::Forward);
    let device = Device::flex();
    device.seed(7);
    let work = prepare(&Case { operation, heads, layout, dtype, pass }, candidate, &device);
    let results: Box<dyn Any> = work()();
    let Outputs::<D>(outputs) = *results.downcast().unwrap();
    outputs.into_iter().map(Tensor::into_data).collect()
}

#[test]
fn what_is_compared_computes_the_same() {
    let with_norm = Heads::new(24, 64);
    for heads in [Heads::new(2, 8), with_norm] {
        let pairs = [
            [EAGER, BURN].map(|by| outputs::<3>(Operation::AttentionVarlen, heads, by)),
            [EAGER, BURN].map(|by| outputs::<2>(Operation::Layer, heads, by)),
            [Candidate::RopeQkNorm, Candidate::Composed]
                .map(|by| outputs::<3>(Operation::RopeQkNorm, heads, by)),
        ];
        for [left, right] in pairs {
            assert!(!left.is_empty() && left.len() == right.len());
            for (left, right) in left.iter().zip(&right) {
                left.assert_approx_eq::<f32>(right, Tolerance::absolute(1e-4));
            }
        }
    }
}
