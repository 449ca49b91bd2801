//! Norm and rotation against their definition in f64, on every instruction set of this machine.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Float, Order, Random, Tensor, assert_close, instruction_sets};
use half::{bf16, f16};
use kernels_cpu::rope_qk_norm::{
    GradientBuffers, NormWeight, RmsNorm, RotaryTables, backward_with, forward, forward_with,
};
use kernels_cpu::{View, ViewMut};
use rstest::rstest;

const EPSILON: f64 = 1e-5;

/// One call.
struct Case<T> {
    x: Tensor<T>,
    d_out: Tensor<T>,
    weight: Option<Vec<T>>,
    weight_f32: Option<Vec<f32>>,
    tables: Option<[Vec<f32>; 2]>,
}

impl<T: Float> Case<T> {
    fn new(shape: [usize; 3], order: Order, norm: Norm, rotates: bool) -> Self {
        let mut random = Random(shape[2] as u64);
        let [tokens, _, dim] = shape;
        let x = Tensor::random(shape, &mut random, order);
        let d_out = Tensor::random(shape, &mut random, order);
        let weight: Vec<_> = (0..dim).map(|_| 1.0 + 0.5 * random.next()).collect();
        let angles: Vec<_> = (0..tokens * dim / 2).map(|_| 3.0 * random.next()).collect();
        let table = |f: fn(f64) -> f64| angles.iter().map(|&angle| f(angle) as f32).collect();
        Self {
            x,
            d_out,
            weight: (norm == Norm::Input).then(|| weight.iter().map(|&w| T::of(w)).collect()),
            weight_f32: (norm == Norm::F32).then(|| weight.iter().map(|&w| w as f32).collect()),
            tables: rotates.then(|| [table(f64::cos), table(f64::sin)]),
        }
    }

    fn norm(&self) -> Option<RmsNorm<'_, T>> {
        let input = self.weight.as_deref().map(NormWeight::Input);
        let weight = input.or(self.weight_f32.as_deref().map(NormWeight::F32))?;
        Some(RmsNorm { weight, epsilon: EPSILON })
    }

    fn tables(&self) -> Option<RotaryTables<'_>> {
        self.tables.as_ref().map(|[cos, sin]| RotaryTables { cos, sin })
    }

    fn weights(&self) -> Option<Vec<f64>> {
        let input = self.weight.as_ref().map(|weight| weight.iter().map(|w| w.value()).collect());
        input.or(self.weight_f32.as_ref().map(|weight| weight.iter().map(|&w| w.into()).collect()))
    }

    /// The output in f64, rounded where the definition rounds.
    fn expected(&self) -> Vec<f64> {
        let [_, heads, dim] = self.x.shape;
        let half = dim / 2;
        let mut out = Vec::new();
        for (row, x) in self.x.values.chunks(dim).enumerate() {
            let mut y = x.to_vec();
            if let Some(weights) = self.weights() {
                let mean = x.iter().map(|x| x * x).sum::<f64>() / dim as f64;
                for (y, weight) in y.iter_mut().zip(weights) {
                    *y = T::of(*y / (mean + EPSILON).sqrt()).value() * weight;
                    if self.weight.is_some() {
                        *y = T::of(*y).value();
                    }
                }
            }
            if let Some([cos, sin]) = &self.tables {
                let at = row / heads * half;
                let unturned = y.clone();
                for i in 0..half {
                    let (cos, sin) = (f64::from(cos[at + i]), f64::from(sin[at + i]));
                    y[i] = unturned[i] * cos - unturned[half + i] * sin;
                    y[half + i] = unturned[half + i] * cos + unturned[i] * sin;
                }
            }
            out.extend(y);
        }
        out
    }

    /// Gradients of x and of the weight in f64.
    fn expected_gradients(&self) -> (Vec<f64>, Vec<f64>) {
        let [_, heads, dim] = self.x.shape;
        let half = dim / 2;
        let (mut d_x, mut d_weight) = (Vec::new(), vec![0.0; dim]);
        for (row, (x, d_out)) in
            self.x.values.chunks(dim).zip(self.d_out.values.chunks(dim)).enumerate()
        {
            let mut g = d_out.to_vec();
            if let Some([cos, sin]) = &self.tables {
                let at = row / heads * half;
                for i in 0..half {
                    let (cos, sin) = (f64::from(cos[at + i]), f64::from(sin[at + i]));
                    g[i] = d_out[i] * cos + d_out[half + i] * sin;
                    g[half + i] = d_out[half + i] * cos - d_out[i] * sin;
                }
            }
            if let Some(weights) = self.weights() {
                let r = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / dim as f64 + EPSILON).sqrt();
                let products = (0..dim).map(|i| g[i] * weights[i] * x[i] * r);
                let mean = products.sum::<f64>() / dim as f64;
                for i in 0..dim {
                    d_weight[i] += g[i] * x[i] * r;
                    g[i] = r * (g[i] * weights[i] - x[i] * r * mean);
                }
            }
            d_x.extend(g);
        }
        (d_x, if self.weights().is_some() { d_weight } else { Vec::new() })
    }

    fn check(&self) {
        let shape = self.x.shape;
        let expected = self.expected();
        let (expected_d_x, expected_d_weight) = self.expected_gradients();
        let bound = if T::EPSILON < 1e-10 { 1e-13 } else { 1e-6 + T::EPSILON };
        for set in instruction_sets() {
            let (norm, tables) = (self.norm(), self.tables());
            let poison = || vec![T::of(f64::NAN); expected.len()];
            let mut out = poison();
            let target = ViewMut::contiguous(&mut out, shape);
            forward_with(set, &self.x.view(), norm.as_ref(), tables.as_ref(), target);
            assert_close(&format!("out {set:?} {shape:?}"), &out, &expected, bound);

            let mut d_x = poison();
            let gradients = GradientBuffers::Separate {
                d_out: self.d_out.view(),
                d_input: ViewMut::contiguous(&mut d_x, shape),
            };
            let x = self.x.view();
            let d_weight = backward_with(set, &x, norm.as_ref(), tables.as_ref(), gradients);
            let scale = shape[0] as f64 * shape[1] as f64;
            assert_close(&format!("d_x {set:?} {shape:?}"), &d_x, &expected_d_x, bound);
            let d_weight: Vec<_> = d_weight.iter().map(|&w| w.into()).collect();
            assert_close("d_weight", &d_weight, &expected_d_weight, 1e-6 * scale.sqrt());
            self.check_in_place(set, &d_x);
        }
    }

    /// The k slot of a packed gradient, its neighbours left alone.
    fn check_in_place(&self, set: kernels_cpu::InstructionSet, expected: &[T]) {
        let [tokens, heads, dim] = self.x.shape;
        let width = heads * dim;
        let mut packed = vec![T::of(7.0); tokens * 3 * width];
        for (token, row) in packed.chunks_mut(3 * width).enumerate() {
            for (i, slot) in row[width..2 * width].iter_mut().enumerate() {
                *slot = T::of(self.d_out.values[token * width + i]);
            }
        }
        let slot = ViewMut::new(&mut packed, width, self.x.shape, [3 * width, dim]);
        let (norm, tables) = (self.norm(), self.tables());
        let gradients = GradientBuffers::InPlace(slot);
        backward_with(set, &self.x.view(), norm.as_ref(), tables.as_ref(), gradients);
        for (row, expected) in packed.chunks(3 * width).zip(expected.chunks(width)) {
            assert!(row[..width].iter().chain(&row[2 * width..]).all(|&x| x == T::of(7.0)));
            assert_eq!(&row[width..2 * width], expected, "{set:?}");
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Norm {
    Absent,
    Input,
    F32,
}

#[rstest]
fn every_head_dim(
    #[values(2, 6, 14, 40, 64, 72, 80, 128, 256)] dim: usize,
    #[values(Norm::Absent, Norm::Input)] norm: Norm,
) {
    Case::<f32>::new([5, 3, dim], Order::Contiguous, norm, true).check();
}

#[rstest]
fn odd_head_dims_without_rotation(#[values(1, 7, 33)] dim: usize) {
    Case::<f32>::new([5, 3, dim], Order::Contiguous, Norm::Input, false).check();
}

#[rstest]
fn every_type_and_order(
    #[values(Order::Contiguous, Order::Gaps, Order::Transposed, Order::Flipped)] order: Order,
    #[values(Norm::Absent, Norm::Input, Norm::F32)] norm: Norm,
    #[values(false, true)] rotates: bool,
    // Some together and one left over.
    #[values(2, 5)] heads: usize,
) {
    let shape = [6, heads, 24];
    Case::<f32>::new(shape, order, norm, rotates).check();
    Case::<f64>::new(shape, order, norm, rotates).check();
    Case::<f16>::new(shape, order, norm, rotates).check();
    Case::<bf16>::new(shape, order, norm, rotates).check();
}

/// Many chunks of tokens, over several threads; and none.
#[rstest]
fn every_length(#[values(0, 1, 700)] tokens: usize) {
    Case::<f32>::new([tokens, 4, 64], Order::Contiguous, Norm::Input, true).check();
}

#[test]
fn rows_without_elements_are_none() {
    let x = View::<f32>::contiguous(&[], [3, 2, 0]);
    for set in instruction_sets() {
        forward_with(set, &x, None, None, ViewMut::contiguous(&mut [], [3, 2, 0]));
        let d_input = ViewMut::contiguous(&mut [], [3, 2, 0]);
        let gradients = GradientBuffers::Separate { d_out: x, d_input };
        assert!(backward_with(set, &x, None, None, gradients).is_empty());
    }
}

/// Every head is the same one, of stride 0.
#[test]
fn expanded_heads_are_read_in_place() {
    let case = Case::<f32>::new([2, 1, 24], Order::Contiguous, Norm::Input, true);
    let (norm, tables, one) = (case.norm(), case.tables(), case.expected());
    let x: Vec<f32> = case.x.values.iter().map(|&x| x as f32).collect();
    let x = View::new(&x, 0, [2, 5, 24], [24, 0, 1]);
    for set in instruction_sets() {
        let mut out = vec![f32::NAN; 2 * 5 * 24];
        let target = ViewMut::contiguous(&mut out, [2, 5, 24]);
        forward_with(set, &x, norm.as_ref(), tables.as_ref(), target);
        for (row, found) in out.chunks(24).enumerate() {
            assert_close("out", found, &one[row / 5 * 24..][..24], 1e-6);
        }
    }
}

/// The gradient of a sum or a mean: one number for all.
#[rstest]
fn expanded_gradients_are_those_of_copies(
    #[values([0, 0, 0], [24, 0, 1])] strides: [isize; 3],
    #[values(Norm::Absent, Norm::Input)] norm: Norm,
) {
    let case = Case::<f32>::new([2, 5, 24], Order::Contiguous, norm, true);
    let numbers: Vec<f32> = (0..48).map(|i| 0.1 * i as f32 - 2.0).collect();
    let shape = case.x.shape;
    let place =
        |token: usize, i: usize| numbers[token * strides[0] as usize + i * strides[2] as usize];
    let copies: Vec<f32> = (0..240).map(|i| place(i / 120, i % 24)).collect();
    for set in instruction_sets() {
        let run = |d_out| {
            let mut d_x = vec![f32::NAN; 240];
            let d_input = ViewMut::contiguous(&mut d_x, shape);
            let gradients = GradientBuffers::Separate { d_out, d_input };
            let (norm, tables) = (case.norm(), case.tables());
            let d_weight =
                backward_with(set, &case.x.view(), norm.as_ref(), tables.as_ref(), gradients);
            (d_x, d_weight)
        };
        let expanded = run(View::new(&numbers, 0, shape, strides));
        assert_eq!(expanded, run(View::contiguous(&copies, shape)), "{set:?}");
    }
}

#[test]
fn the_weight_gradient_is_the_same_with_any_number_of_threads() {
    let case = Case::<f32>::new([900, 4, 64], Order::Contiguous, Norm::Input, true);
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut d_x = vec![0.0; case.x.values.len()];
        let gradients = GradientBuffers::Separate {
            d_out: case.d_out.view(),
            d_input: ViewMut::contiguous(&mut d_x, case.x.shape),
        };
        let (norm, tables) = (case.norm(), case.tables());
        pool.install(|| {
            kernels_cpu::rope_qk_norm::backward(
                &case.x.view(),
                norm.as_ref(),
                tables.as_ref(),
                gradients,
            )
        })
    };
    assert_eq!(run(1), run(3));
}

#[test]
#[should_panic(expected = "cos: expected [3, 4]")]
fn a_table_of_other_tokens_panics() {
    let tables = RotaryTables { cos: &[0.0; 8], sin: &[0.0; 12] };
    let mut out = [0.0f32; 24];
    let out = ViewMut::contiguous(&mut out, [3, 1, 8]);
    forward(&View::contiguous(&[0.0; 24], [3, 1, 8]), None, Some(&tables), out);
}
