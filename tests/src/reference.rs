//! Attention over a packed sequence in f64 loops: slow, obvious, and independent of Burn.

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_vision_attention::{AttentionOptions, Segments};

/// A tensor `[tokens, heads, dim]` on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Heads {
    /// Values, row-major.
    pub values: Vec<f64>,
    /// Tokens.
    pub tokens: usize,
    /// Heads.
    pub heads: usize,
    /// Dimensions of a head.
    pub dim: usize,
}

impl Heads {
    /// Values in -1..1 that depend on `seed` alone.
    pub fn random(seed: u64, [tokens, heads, dim]: [usize; 3]) -> Self {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // Exactly representable in f16, so that every dtype starts from the same numbers.
            f64::from((state >> 54) as i32 - 512) / 512.0
        };
        let values = (0..tokens * heads * dim).map(|_| next()).collect();
        Self { values, tokens, heads, dim }
    }

    /// From a tensor of any float dtype.
    pub fn from_tensor(tensor: Tensor<3>) -> Self {
        let [tokens, heads, dim] = tensor.dims();
        Self { values: tensor.into_data().iter::<f64>().collect(), tokens, heads, dim }
    }

    /// On a device, in a dtype.
    pub fn to_tensor(&self, device: &Device, dtype: DType) -> Tensor<3> {
        let shape = [self.tokens, self.heads, self.dim];
        let data = TensorData::new(self.values.clone(), shape).convert_dtype(dtype);
        Tensor::from_data(data, (device, dtype))
    }

    /// One head of one token.
    pub fn row(&self, token: usize, head: usize) -> &[f64] {
        &self.values[(token * self.heads + head) * self.dim..][..self.dim]
    }

    /// The tokens of a range.
    pub fn tokens(&self, range: Range<usize>) -> Self {
        let width = self.heads * self.dim;
        let values = self.values[range.start * width..range.end * width].to_vec();
        Self { values, tokens: range.len(), ..*self }
    }

    /// Tokens of `parts`, one after another.
    ///
    /// # Panics
    ///
    /// When there is no part.
    pub fn concat(parts: &[Self]) -> Self {
        let values = parts.iter().flat_map(|part| part.values.clone()).collect();
        Self { values, tokens: parts.iter().map(|part| part.tokens).sum(), ..parts[0] }
    }
}

/// Output and lse (`[tokens, heads]`, row-major).
pub fn attention_varlen(
    q: &Heads,
    k: &Heads,
    v: &Heads,
    segments_q: &Segments,
    segments_k: &Segments,
    options: &AttentionOptions,
) -> (Heads, Vec<f64>) {
    let scale = options.softmax_scale.unwrap_or(1.0 / (q.dim as f64).sqrt());
    let mut out = Heads { values: Vec::new(), dim: v.dim, ..*q };
    let mut lse = Vec::new();
    for (queries, keys) in segments_q.ranges().zip(segments_k.ranges()) {
        let shift = keys.len() as i64 - queries.len() as i64;
        for (row, token) in queries.clone().enumerate() {
            for head in 0..q.heads {
                let kv_head = head / (q.heads / k.heads);
                let score = |key: usize| {
                    let dot =
                        q.row(token, head).iter().zip(k.row(key, kv_head)).map(|(a, b)| a * b);
                    let score = scale * dot.sum::<f64>();
                    options.softcap.map_or(score, |cap| cap * (score / cap).tanh())
                };
                let seen = |column: usize| sees(options, column as i64 - row as i64 - shift);
                let columns = (0..keys.len()).filter(|&column| seen(column));
                let scores: Vec<_> = columns
                    .map(|column| (keys.start + column, score(keys.start + column)))
                    .collect();
                let max = scores.iter().fold(f64::NEG_INFINITY, |max, score| max.max(score.1));
                let sum: f64 = scores.iter().map(|score| (score.1 - max).exp()).sum();
                lse.push(if scores.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() });
                let weights =
                    || scores.iter().map(|&(key, score)| (key, (score - max).exp() / sum));
                out.values.extend((0..v.dim).map(|channel| {
                    weights()
                        .map(|(key, weight)| weight * v.row(key, kv_head)[channel])
                        .sum::<f64>()
                }));
            }
        }
    }
    (out, lse)
}

/// Whether a key at this distance from a query's own place is seen.
fn sees(options: &AttentionOptions, distance: i64) -> bool {
    let limit = |window: Option<usize>| window.map_or(i64::MAX, |limit| limit.min(1 << 40) as i64);
    let right = if options.is_causal { 0 } else { limit(options.window.right) };
    distance <= right && distance >= -limit(options.window.left)
}
