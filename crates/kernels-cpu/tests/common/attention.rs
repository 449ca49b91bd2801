//! Attention cases, and attention as its definition says, in f64.
#![allow(dead_code)]

use kernels_cpu::attention_varlen::{backward_with, forward_with};
use kernels_cpu::{Attention, AttentionOptions, Gradients, InstructionSet, OutputGradient};

use super::{Float, Order, Random, Tensor, assert_close};

/// Shapes and options of one call.
#[derive(Clone, Debug)]
pub struct Case {
    /// Queries and keys of each segment.
    pub lengths: Vec<(usize, usize)>,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub options: AttentionOptions,
    pub order: Order,
    pub d_lse: bool,
}

impl Case {
    pub fn new(lengths: &[(usize, usize)], head_dim: usize) -> Self {
        Self {
            lengths: lengths.to_vec(),
            heads: 2,
            kv_heads: 2,
            head_dim,
            value_dim: head_dim,
            options: AttentionOptions::new(1.5 / (head_dim as f64).sqrt()),
            order: Order::Contiguous,
            d_lse: false,
        }
    }

    pub fn data<T: Float>(&self) -> Data<T> {
        let mut random = Random(self.head_dim as u64 * 31 + self.lengths.len() as u64);
        let tokens_q = self.lengths.iter().map(|lengths| lengths.0).sum();
        let tokens_k = self.lengths.iter().map(|lengths| lengths.1).sum();
        let q_shape = [tokens_q, self.heads, self.head_dim];
        let mut tensor = |shape| Tensor::random(shape, &mut random, self.order);
        let q = tensor(q_shape);
        let k = tensor([tokens_k, self.kv_heads, self.head_dim]);
        let v = tensor([tokens_k, self.kv_heads, self.value_dim]);
        let d_out = tensor([tokens_q, self.heads, self.value_dim]);
        let d_lse = (0..tokens_q * self.heads).map(|_| random.next() as f32).collect();
        Data { case: self.clone(), q, k, v, d_out, d_lse, offsets: self.offsets() }
    }

    fn offsets(&self) -> [Vec<i32>; 2] {
        let offsets = |length: fn(&(usize, usize)) -> usize| {
            let mut offsets = vec![0];
            for lengths in &self.lengths {
                offsets.push(offsets[offsets.len() - 1] + length(lengths) as i32);
            }
            offsets
        };
        [offsets(|lengths| lengths.0), offsets(|lengths| lengths.1)]
    }

    fn sees(&self, (queries, keys): (usize, usize), query: usize, key: usize) -> bool {
        let distance = key as i64 - (query as i64 + keys as i64 - queries as i64);
        let (left, right) = self.options.window;
        let right = if self.options.is_causal { Some(0) } else { right };
        left.is_none_or(|left| distance >= -(left as i64))
            && right.is_none_or(|right| distance <= right as i64)
    }
}

/// The tensors of a case.
pub struct Data<T> {
    pub case: Case,
    pub q: Tensor<T>,
    pub k: Tensor<T>,
    pub v: Tensor<T>,
    pub d_out: Tensor<T>,
    pub d_lse: Vec<f32>,
    pub offsets: [Vec<i32>; 2],
}

/// Everything in f64.
#[derive(Default)]
pub struct Expected {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub d_q: Vec<f64>,
    pub d_k: Vec<f64>,
    pub d_v: Vec<f64>,
}

impl<T: Float> Data<T> {
    pub fn attention(&self) -> Attention<'_, T> {
        Attention {
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            offsets_q: &self.offsets[0],
            offsets_k: &self.offsets[1],
            options: self.case.options,
        }
    }

    /// Output and lse, written over NaN.
    pub fn forward(&self, set: InstructionSet) -> (Vec<T>, Vec<f32>) {
        let mut out = vec![T::of(f64::NAN); self.d_out.values.len()];
        let mut lse = vec![f32::NAN; self.d_lse.len()];
        forward_with(set, &self.attention(), &mut out, &mut lse);
        (out, lse)
    }

    /// Gradients of q, k and v, written over NaN.
    pub fn backward(&self, set: InstructionSet, out: &[T], lse: &[f32]) -> [Vec<T>; 3] {
        let poison = |tensor: &Tensor<T>| vec![T::of(f64::NAN); tensor.values.len()];
        let [mut q, mut k, mut v] = [poison(&self.q), poison(&self.k), poison(&self.v)];
        let gradients = Gradients::Separate { q: &mut q, k: &mut k, v: &mut v };
        backward_with(set, &self.attention(), &self.output(out, lse), gradients);
        [q, k, v]
    }

    pub fn output<'a>(&'a self, out: &'a [T], lse: &'a [f32]) -> OutputGradient<'a, T> {
        OutputGradient {
            out: kernels_cpu::View::contiguous(out, self.d_out.shape),
            lse,
            d_out: self.d_out.view(),
            d_lse: self.case.d_lse.then_some(&self.d_lse),
        }
    }

    pub fn expected(&self) -> Expected {
        let case = &self.case;
        let len = |tensor: &Tensor<T>| tensor.values.len();
        let mut expected = Expected {
            out: vec![0.0; len(&self.d_out)],
            lse: vec![f64::NEG_INFINITY; self.d_lse.len()],
            d_q: vec![0.0; len(&self.q)],
            d_k: vec![0.0; len(&self.k)],
            d_v: vec![0.0; len(&self.v)],
        };
        for (segment, &lengths) in case.lengths.iter().enumerate() {
            let [first_q, first_k] = [0, 1].map(|i| self.offsets[i][segment] as usize);
            for query in 0..lengths.0 {
                let keys = (0..lengths.1).filter(|&key| case.sees(lengths, query, key));
                let keys: Vec<_> = keys.map(|key| first_k + key).collect();
                for head in 0..case.heads {
                    self.row(first_q + query, head, &keys, &mut expected);
                }
            }
        }
        expected
    }

    /// One query of one head.
    fn row(&self, query: usize, head: usize, keys: &[usize], expected: &mut Expected) {
        let case = &self.case;
        let (scale, kv_head) = (case.options.softmax_scale, head / (case.heads / case.kv_heads));
        let dot = |key: usize| -> f64 {
            (0..case.head_dim).map(|d| self.q.at(query, head, d) * self.k.at(key, kv_head, d)).sum()
        };
        let (mut scores, mut slopes) = (Vec::new(), Vec::new());
        for &key in keys {
            let score: f64 = scale * dot(key);
            match case.options.softcap {
                Some(cap) => {
                    let tanh = (score / cap).tanh();
                    scores.push(cap * tanh);
                    slopes.push(1.0 - tanh * tanh);
                }
                None => {
                    scores.push(score);
                    slopes.push(1.0);
                }
            }
        }
        if keys.is_empty() {
            return;
        }
        let max = scores.iter().fold(f64::NEG_INFINITY, |max, &score| max.max(score));
        let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
        let lse = max + sum.ln();
        let row = query * case.heads + head;
        expected.lse[row] = lse;
        let weights: Vec<_> = scores.iter().map(|score| (score - lse).exp()).collect();
        let d_weights: Vec<f64> = keys
            .iter()
            .map(|&key| {
                let dims = 0..case.value_dim;
                dims.map(|d| self.d_out.at(query, head, d) * self.v.at(key, kv_head, d)).sum()
            })
            .collect();
        let d_lse = if case.d_lse { f64::from(self.d_lse[row]) } else { 0.0 };
        let delta = weights.iter().zip(&d_weights).map(|(p, dp)| p * dp).sum::<f64>() - d_lse;
        for (i, &key) in keys.iter().enumerate() {
            let key_row = key * case.kv_heads + kv_head;
            for d in 0..case.value_dim {
                expected.out[row * case.value_dim + d] += weights[i] * self.v.at(key, kv_head, d);
                expected.d_v[key_row * case.value_dim + d] +=
                    weights[i] * self.d_out.at(query, head, d);
            }
            let d_score = weights[i] * (d_weights[i] - delta) * slopes[i] * scale;
            for d in 0..case.head_dim {
                expected.d_q[row * case.head_dim + d] += d_score * self.k.at(key, kv_head, d);
                expected.d_k[key_row * case.head_dim + d] += d_score * self.q.at(query, head, d);
            }
        }
    }

    /// Forward and backward of one instruction set against the definition.
    pub fn check(&self, set: InstructionSet, expected: &Expected) {
        let what = |part: &str| format!("{part} {set:?} {:?}", self.case);
        // f32 accumulation beneath every type but f64; lse is f32 in all of them.
        let wide = size_of::<T::Compute>() == 8;
        let sum = if wide { 1e-13 } else { 4e-6 };
        let bound = sum + 0.6 * T::EPSILON;
        let (out, lse) = self.forward(set);
        assert_close(&what("out"), &out, &expected.out, bound);
        assert_close(&what("lse"), &lse, &expected.lse, 1e-6);
        // delta is taken from the rounded output; lse is rounded to f32.
        let bound = 2e-6 + 2.0 * bound;
        let [q, k, v] = self.backward(set, &out, &lse);
        assert_close(&what("d_q"), &q, &expected.d_q, bound);
        assert_close(&what("d_k"), &k, &expected.d_k, bound);
        assert_close(&what("d_v"), &v, &expected.d_v, bound);
    }
}

/// [`Data::check`] on every instruction set of this machine.
pub fn check<T: Float>(case: &Case) {
    let data = case.data::<T>();
    let expected = data.expected();
    for set in super::instruction_sets() {
        data.check(set, &expected);
    }
}
