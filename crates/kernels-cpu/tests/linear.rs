//! Projections against their definition in f64, on every instruction set of this machine.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Float, Order, Random, Tensor, assert_close, instruction_sets};
use half::{bf16, f16};
use kernels_cpu::linear::{Linear, forward, forward_with};
use kernels_cpu::{View, ViewMut};
use rstest::rstest;

fn check<T: Float>([tokens, inputs, outputs]: [usize; 3], orders: [Order; 2], biased: bool) {
    let mut random = Random(7 + outputs as u64);
    let x = Tensor::<T>::random([tokens, 1, inputs], &mut random, orders[0]);
    let weight = Tensor::<T>::random([inputs, 1, outputs], &mut random, orders[1]);
    let bias: Option<Vec<_>> = biased.then(|| (0..outputs).map(|_| T::of(random.next())).collect());
    let mut expected = Vec::new();
    for token in 0..tokens {
        for output in 0..outputs {
            let products = (0..inputs).map(|i| x.at(token, 0, i) * weight.at(i, 0, output));
            let bias = bias.as_ref().map_or(0.0, |bias| bias[output].value());
            expected.push(products.sum::<f64>() + bias);
        }
    }
    for set in instruction_sets() {
        // Rows with something between them, which has to stay as it is.
        let (stride, untouched) = (outputs + 3, T::of(7.0));
        let mut out = vec![untouched; tokens * stride];
        let linear = Linear { weight: weight.view(), bias: bias.as_deref() };
        let view = ViewMut::new(&mut out, 0, [tokens, 1, outputs], [stride, outputs]);
        forward_with(set, &x.view(), &linear, view);
        let found: Vec<_> = out.chunks(stride).flat_map(|row| row[..outputs].to_vec()).collect();
        assert!(out.chunks(stride).all(|row| row[outputs..].iter().all(|&x| x == untouched)));
        assert_close(&format!("{set:?}"), &found, &expected, 4.0 * T::EPSILON);
    }
}

#[rstest]
#[case::one([1, 1, 1])]
#[case::tiles([24, 64, 64])]
#[case::ragged([37, 70, 45])]
#[case::wide([3, 130, 200])]
// Several blocks of rows, over threads.
#[case::tall([205, 33, 96])]
#[case::no_tokens([0, 8, 8])]
#[case::no_inputs([5, 0, 8])]
fn products_are_those_of_the_definition(
    #[case] shape: [usize; 3],
    #[values(
        [Order::Contiguous, Order::Contiguous],
        [Order::Gaps, Order::Transposed],
        [Order::Flipped, Order::Flipped]
    )]
    orders: [Order; 2],
    #[values(false, true)] biased: bool,
) {
    check::<f32>(shape, orders, biased);
    check::<f64>(shape, orders, biased);
}

#[rstest]
fn halves_are_rounded_once(#[values(false, true)] biased: bool) {
    let orders = [Order::Contiguous, Order::Transposed];
    check::<f16>([19, 40, 50], orders, biased);
    check::<bf16>([19, 40, 50], orders, biased);
}

#[test]
fn a_nan_reaches_its_row_alone() {
    let mut random = Random(1);
    let mut x: Vec<f32> = (0..30 * 20).map(|_| random.next() as f32).collect();
    x[11 * 20 + 3] = f32::NAN;
    let weight = vec![1.0; 20 * 40];
    let mut out = vec![0.0; 30 * 40];
    let linear = Linear { weight: View::contiguous(&weight, [20, 1, 40]), bias: None };
    forward(
        &View::contiguous(&x, [30, 1, 20]),
        &linear,
        ViewMut::contiguous(&mut out, [30, 1, 40]),
    );
    for (token, row) in out.chunks(40).enumerate() {
        assert!(row.iter().all(|x| x.is_nan() == (token == 11)), "row {token}");
    }
}

#[test]
#[should_panic(expected = "x: expected 4 inputs, got 5")]
fn rows_of_another_width_panic() {
    let (x, weight, mut out) = ([0.0f32; 10], [0.0; 12], [0.0; 6]);
    let linear = Linear { weight: View::contiguous(&weight, [4, 1, 3]), bias: None };
    forward(&View::contiguous(&x, [2, 1, 5]), &linear, ViewMut::contiguous(&mut out, [2, 1, 3]));
}

#[test]
#[should_panic(expected = "bias: expected 3 elements")]
fn a_bias_of_another_width_panics() {
    let (x, weight, mut out) = ([0.0f32; 8], [0.0; 12], [0.0; 6]);
    let linear = Linear { weight: View::contiguous(&weight, [4, 1, 3]), bias: Some(&[0.0; 4]) };
    forward(&View::contiguous(&x, [2, 1, 4]), &linear, ViewMut::contiguous(&mut out, [2, 1, 3]));
}
