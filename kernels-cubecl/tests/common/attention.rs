//! Attention in plain Rust, and one kernel run compared with it.
#![allow(dead_code, clippy::unwrap_used)]

use std::sync::Arc;

use cubecl::{
    client::Client,
    ir::{DeviceProperties, ElemType},
};
use kernels_cubecl::{
    AttentionBlueprint, AttentionProblem, AttentionTensors, Engine, TensorLayout, Unsupported,
    WorkList,
    attention_varlen::{launch, launch_fastest, supports, supports_engine},
};

use super::common::{F32, Output, Random, max_error, round, upload};

/// Whose tiles a case runs with. All of them run on any device; a device's own are the fastest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tiles {
    Device,
    Gpu,
    CpuRuntime,
}

impl Tiles {
    pub fn properties(self, client: &Client) -> DeviceProperties {
        let mut properties = client.properties().clone();
        let hardware = &mut properties.hardware;
        match self {
            Self::Device => {}
            Self::Gpu => (hardware.plane_size_min, hardware.plane_size_max) = (32, 32),
            Self::CpuRuntime => hardware.num_cpu_cores = Some(1),
        }
        properties
    }
}

/// One attention call with everything a test varies.
#[derive(Clone, Debug)]
pub struct Case {
    pub dtype: ElemType,
    pub lengths_q: Vec<usize>,
    pub lengths_k: Vec<usize>,
    pub heads: usize,
    pub heads_kv: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub scale: f32,
    pub is_causal: bool,
    pub window: (Option<usize>, Option<usize>),
    pub softcap: Option<f32>,
    pub tiles: Tiles,
    /// Runs on this engine, whatever the device would choose.
    pub engine: Option<Engine>,
}

impl Case {
    pub fn new(head_dim: usize, lengths: &[usize]) -> Self {
        Self {
            dtype: F32,
            lengths_q: lengths.to_vec(),
            lengths_k: lengths.to_vec(),
            heads: 2,
            heads_kv: 2,
            head_dim,
            value_dim: head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            is_causal: false,
            window: (None, None),
            softcap: None,
            tiles: Tiles::Gpu,
            engine: None,
        }
    }

    pub fn tokens_q(&self) -> usize {
        self.lengths_q.iter().sum()
    }

    pub fn tokens_k(&self) -> usize {
        self.lengths_k.iter().sum()
    }

    pub fn shapes(&self) -> [[usize; 3]; 3] {
        [
            [self.tokens_q(), self.heads, self.head_dim],
            [self.tokens_k(), self.heads_kv, self.head_dim],
            [self.tokens_k(), self.heads_kv, self.value_dim],
        ]
    }

    pub fn problem(&self, layouts: [TensorLayout; 3]) -> AttentionProblem {
        AttentionProblem {
            softmax_scale: self.scale,
            is_causal: self.is_causal,
            window: self.window,
            softcap: self.softcap,
            ..AttentionProblem::new(layouts[0], layouts[1], layouts[2], self.dtype)
        }
    }

    pub fn inputs(&self, seed: u64) -> [Vec<f64>; 3] {
        let mut random = Random::new(seed);
        let mut inputs =
            self.shapes().map(|shape| random.normals(self.dtype, shape.iter().product()));
        if let Some(cap) = self.softcap {
            // Scores large enough to reach the cap.
            for q in &mut inputs[0] {
                *q = round(self.dtype, *q * f64::from(cap) / 4.0);
            }
        }
        inputs
    }

    /// Whether a query of a segment sees a key of it.
    pub fn sees(&self, row: usize, q_len: usize, key: usize, k_len: usize) -> bool {
        let diagonal = row as i64 + k_len as i64 - q_len as i64;
        let (left, right) = self.window;
        let right = if self.is_causal { Some(0) } else { right };
        left.is_none_or(|left| key as i64 >= diagonal - left as i64)
            && right.is_none_or(|right| key as i64 <= diagonal + right as i64)
    }

    /// Output, rounded to the element type, and lse. With `rounding`, so is every intermediate, which
    /// estimates what arithmetic in that type can achieve.
    pub fn reference(&self, inputs: &[Vec<f64>; 3], rounding: bool) -> (Vec<f64>, Vec<f64>) {
        let (out, lse) = self.forward(inputs, rounding);
        (out.into_iter().map(|x| round(self.dtype, x)).collect(), lse)
    }

    /// The same before the output is rounded.
    pub fn forward(&self, [q, k, v]: &[Vec<f64>; 3], rounding: bool) -> (Vec<f64>, Vec<f64>) {
        let r = |x: f64| if rounding { round(self.dtype, x) } else { x };
        let (h, hk, d, dv) = (self.heads, self.heads_kv, self.head_dim, self.value_dim);
        let mut out = vec![0.0; self.tokens_q() * h * dv];
        let mut lse = vec![f64::NEG_INFINITY; self.tokens_q() * h];
        let (mut start_q, mut start_k) = (0, 0);
        for (&nq, &nk) in self.lengths_q.iter().zip(&self.lengths_k) {
            for (row, head) in (0..nq).flat_map(|row| (0..h).map(move |head| (row, head))) {
                let kv = head / (h / hk);
                let target = (start_q + row) * h + head;
                let query = &q[target * d..][..d];
                let keys: Vec<usize> = (0..nk).filter(|&j| self.sees(row, nq, j, nk)).collect();
                let score = |&j: &usize| {
                    let key = &k[((start_k + j) * hk + kv) * d..][..d];
                    let scaled = |x: f64| r(x * f64::from(self.scale));
                    let s = r(query.iter().zip(key).map(|(a, b)| a * scaled(*b)).sum());
                    self.softcap.map_or(s, |cap| {
                        let cap = f64::from(cap);
                        r(cap * r((s / cap).tanh()))
                    })
                };
                let scores: Vec<f64> = keys.iter().map(score).collect();
                if scores.is_empty() {
                    continue;
                }
                let nan = scores.iter().any(|s| s.is_nan());
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                lse[target] = if nan { f64::NAN } else { max + sum.ln() };
                for (&j, s) in keys.iter().zip(&scores) {
                    let weight = r((s - max).exp() / sum);
                    let value = &v[((start_k + j) * hk + kv) * dv..][..dv];
                    for (o, x) in out[target * dv..][..dv].iter_mut().zip(value) {
                        *o += weight * x;
                    }
                }
            }
            start_q += nq;
            start_k += nk;
        }
        (out, lse)
    }

    /// Runs the kernel on inputs laid out as given; output and lse.
    pub fn run(
        &self,
        client: &Client,
        inputs: &[Vec<f64>; 3],
        layouts: [TensorLayout; 3],
    ) -> (Output, Output) {
        let problem = self.problem(layouts);
        let properties = self.tiles.properties(client);
        let blueprint = match self.engine {
            None => supports(&properties, &problem),
            Some(engine) => supports_engine(&properties, &problem, engine),
        }
        .unwrap();
        let work = WorkList::new(
            &cumulative(&self.lengths_q),
            &cumulative(&self.lengths_k),
            blueprint.tile_q(),
        )
        .unwrap()
        .upload(client);
        let out = Output::new(client, self.dtype, &problem.out_shape());
        let lse = Output::new(client, F32, &problem.lse_shape());
        let [q, k, v] = [0, 1, 2].map(|i| upload(client, self.dtype, &inputs[i], layouts[i]));
        let tensors = AttentionTensors { q, k, v, out: out.binding(), lse: lse.binding() };
        launch(client, &problem, &blueprint, &work, tensors).unwrap();
        (out, lse)
    }

    /// As [`run`](Self::run), with the fastest of several blueprints.
    pub fn run_fastest(
        &self,
        client: &Client,
        inputs: &[Vec<f64>; 3],
        layouts: [TensorLayout; 3],
        blueprints: &[AttentionBlueprint],
    ) -> (Output, Output) {
        let problem = self.problem(layouts);
        let (lengths_q, lengths_k) = (cumulative(&self.lengths_q), cumulative(&self.lengths_k));
        let segments = self.lengths_q.len();
        let device = client.clone();
        let cut = Arc::new(move |tile_q| {
            WorkList::new(&lengths_q, &lengths_k, tile_q).unwrap().upload(&device)
        });
        let out = Output::new(client, self.dtype, &problem.out_shape());
        let lse = Output::new(client, F32, &problem.lse_shape());
        let [q, k, v] = [0, 1, 2].map(|i| upload(client, self.dtype, &inputs[i], layouts[i]));
        let tensors = AttentionTensors { q, k, v, out: out.binding(), lse: lse.binding() };
        launch_fastest(client, &problem, blueprints, segments, cut, tensors).unwrap();
        (out, lse)
    }

    /// Runs on contiguous inputs and compares by flash-attention's rule.
    pub fn check(&self, client: &Client, seed: u64) {
        self.check_layouts(client, seed, self.shapes().map(TensorLayout::contiguous));
    }

    /// Compares by flash-attention's rule: the error is at most twice (with softcap three times)
    /// that of a plain implementation in the element type, plus two roundings; lse within 2e-4.
    pub fn check_layouts(&self, client: &Client, seed: u64, layouts: [TensorLayout; 3]) {
        let inputs = self.inputs(seed);
        let outputs = self.run(client, &inputs, layouts);
        self.compare(client, &inputs, outputs);
    }

    /// NaN in any tensor at this token, of the second of three segments, reaches that segment alone.
    pub fn check_nan_containment(&self, client: &Client, token: usize) {
        let layouts = self.shapes().map(TensorLayout::contiguous);
        let width = self.heads * self.head_dim;
        let start = self.lengths_q[0];
        let end = start + self.lengths_q[1];
        for poisoned in 0..3 {
            let mut inputs = self.inputs(6);
            let clean = self.run(client, &inputs, layouts).0.read(client);
            inputs[poisoned][token * width + 5] = f64::NAN;
            let out = self.run(client, &inputs, layouts).0.read(client);
            assert!(
                out[..start * width] == clean[..start * width]
                    && out[end * width..] == clean[end * width..]
            );
            assert!(out[start * width..end * width].iter().any(|x| x.is_nan()));
        }
    }

    /// Compares what a run on these inputs wrote; see [`check_layouts`](Self::check_layouts).
    pub fn compare(&self, client: &Client, inputs: &[Vec<f64>; 3], (out, lse): (Output, Output)) {
        let (expected, expected_lse) = self.reference(inputs, false);
        let (plain, _) = self.reference(inputs, true);
        let error = max_error(&out.read(client), &expected);
        let r = |x: f64| round(self.dtype, x);
        let rounding =
            expected.iter().map(|&x| (r(r(x + 0.3) - 0.3) - x).abs()).fold(0.0, f64::max);
        // Shader languages let exp be off by a few units in the last place, growing with the score.
        let absolute = 1e-5;
        let factor = if self.softcap.is_some() { 3.0 } else { 2.0 };
        let bound = factor * max_error(&plain, &expected) + 2.0 * rounding + absolute;
        assert!(error <= bound, "out: {error:e} > {bound:e}\n{self:?}");
        let error = max_error(&lse.read(client), &expected_lse);
        assert!(error <= 2e-4, "lse: {error:e}\n{self:?}");
    }
}

pub fn cumulative(lengths: &[usize]) -> Vec<usize> {
    let mut offsets = vec![0];
    for length in lengths {
        offsets.push(offsets[offsets.len() - 1] + length);
    }
    offsets
}

/// flash-attention's modes: all `max`, uniform in `max - 20 ..= max`, or in `max / 3 ..= max`; then
/// every fifth and the last segment emptied.
fn lengths(mode: &str, max: usize, segments: usize, random: &mut Random) -> Vec<usize> {
    let mut lengths: Vec<usize> = (0..segments)
        .map(|_| match mode {
            "full" => max,
            "random" => random.int(max.saturating_sub(20), max),
            "third" => random.int(max / 3, max),
            _ => panic!("unknown mode {mode}"),
        })
        .collect();
    for i in (0..segments).step_by(5).chain([segments - 1]) {
        lengths[i] = 0;
    }
    lengths
}

/// Lengths of 7 segments.
pub fn segments(mode: &str, max: usize, seed: u64) -> Vec<usize> {
    lengths(mode, max, 7, &mut Random::new(seed))
}

/// Whether the device has buffers of this type.
pub fn has_dtype(client: &Client, dtype: ElemType) -> bool {
    let layout = TensorLayout::contiguous([1, 1, 32]);
    let problem = AttentionProblem::new(layout, layout, layout, dtype);
    match supports(client.properties(), &problem) {
        Ok(_) => true,
        Err(error) => {
            assert!(matches!(error, Unsupported::Dtype { .. }), "{error}");
            println!("skipped: {error}");
            false
        }
    }
}

/// Query and key lengths of flash-attention's grid, shortened.
const PAIRS: [(usize, usize); 9] =
    [(1, 47), (47, 1), (13, 43), (43, 13), (32, 64), (64, 32), (33, 65), (65, 33), (100, 99)];

/// All pairs, and segments that are empty on either side.
pub fn pairs() -> Case {
    let mut case = Case::new(64, &[]);
    (case.lengths_q, case.lengths_k) = PAIRS.into_iter().unzip();
    case.lengths_q.extend([5, 0, 0]);
    case.lengths_k.extend([0, 5, 0]);
    case
}

/// A layout with the axes in this order, outermost first, each padded.
pub fn permuted(shape: [usize; 3], order: [usize; 3], padding: usize) -> TensorLayout {
    let mut strides = [0; 3];
    let mut next = 1;
    for axis in order.into_iter().rev() {
        strides[axis] = next;
        next = next * shape[axis] + padding;
    }
    TensorLayout { shape, strides }
}
