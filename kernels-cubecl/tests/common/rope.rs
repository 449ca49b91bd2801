//! The gradient of the fused norm and rotation in plain Rust, and one kernel run compared with it.
#![allow(dead_code, clippy::unwrap_used)]

use cubecl::{client::Client, ir::ElemType, prelude::TensorBinding};
use kernels_cubecl::{
    LaunchError, RotaryTables, TensorLayout, Unsupported,
    rope_qk_norm::{
        RmsNorm,
        backward::{
            NormGradients, RopeQkNormBackwardProblem, RopeQkNormBackwardTensors, launch, supports,
        },
    },
};

use super::common::{
    F32, GUARD, Output, Random, binding, decode, device_name, encode, max_error, round, upload,
};

const EPSILON: f32 = 1e-5;

/// Strides of the tensors of a call; without `d_out` it is replaced in place.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub x: [usize; 4],
    pub d_out: Option<[usize; 4]>,
    pub dx: [usize; 4],
}

/// One call with everything a test varies.
#[derive(Clone, Debug)]
pub struct Case {
    pub dtype: ElemType,
    pub tokens: usize,
    pub heads: usize,
    pub heads_kv: Option<usize>,
    pub head_dim: usize,
    pub weight: Option<ElemType>,
    pub epsilon: f32,
    pub rotary: bool,
    pub table: [usize; 2],
    pub place: Place,
}

/// Values by group of heads.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub x: Vec<Vec<f64>>,
    pub d_out: Vec<Vec<f64>>,
    pub weights: Vec<Vec<f64>>,
    pub cos: Vec<f64>,
    pub sin: Vec<f64>,
}

pub struct Gradients {
    pub dx: Vec<Vec<f64>>,
    pub d_weights: Vec<Vec<f64>>,
    /// All that was written, as bytes.
    pub bytes: Vec<Vec<u8>>,
}

/// Memory between two guards, with the value that it had before the call.
pub struct Memory {
    handle: cubecl::server::Handle,
    before: Vec<u8>,
}

impl Case {
    /// Contiguous, of 37 tokens and 3 heads.
    pub fn single(head_dim: usize) -> Self {
        let place = Place { x: [0; 4], d_out: Some([0; 4]), dx: [0; 4] };
        Self {
            dtype: F32,
            tokens: 37,
            heads: 3,
            heads_kv: None,
            head_dim,
            weight: Some(F32),
            epsilon: EPSILON,
            rotary: true,
            table: [head_dim / 2, 1],
            place,
        }
        .with_heads(3)
    }

    /// Slots of a contiguous `[37, 3, 3, head_dim]`, in place.
    pub fn packed(head_dim: usize) -> Self {
        let mut case = Self::single(head_dim);
        (case.heads_kv, case.place.d_out) = (Some(3), None);
        case.with_heads(3)
    }

    /// The same with other heads, contiguous.
    pub fn with_heads(mut self, heads: usize) -> Self {
        let row = heads * self.head_dim;
        let slots = if self.heads_kv.is_some() { 3 } else { 1 };
        let strides = [slots * row, row, self.head_dim, 1];
        self.heads = heads;
        self.heads_kv = self.heads_kv.map(|_| heads);
        let d_out = self.place.d_out.map(|_| strides);
        self.place = Place { x: strides, d_out, dx: strides };
        self
    }

    fn groups(&self) -> Vec<usize> {
        [Some(self.heads), self.heads_kv].into_iter().flatten().collect()
    }

    pub fn problem(&self) -> RopeQkNormBackwardProblem {
        RopeQkNormBackwardProblem {
            tokens: self.tokens,
            heads: self.heads,
            heads_kv: self.heads_kv,
            head_dim: self.head_dim,
            dtype: self.dtype,
            norm: self.weight.map(|weight_dtype| RmsNorm { epsilon: self.epsilon, weight_dtype }),
            rotary: self.rotary.then_some([self.table; 2]),
            x: self.place.x,
            d_out: self.place.d_out,
            dx: self.place.dx,
        }
    }

    /// Position in memory of each element of a group.
    fn positions(&self, group: usize, strides: [usize; 4]) -> Vec<usize> {
        let (heads, d) = (self.groups()[group], self.head_dim);
        let at = |i: usize| {
            let index = [i / (heads * d), group, i / d % heads, i % d];
            index.iter().zip(strides).map(|(index, stride)| index * stride).sum()
        };
        (0..self.tokens * heads * d).map(at).collect()
    }

    pub fn inputs(&self, seed: u64) -> Inputs {
        let mut random = Random::new(seed);
        let (dtype, groups) = (self.dtype, self.groups());
        let mut normals = || {
            let sizes = groups.iter().map(|heads| self.tokens * heads * self.head_dim);
            sizes.map(|size| random.normals(dtype, size)).collect::<Vec<_>>()
        };
        let (x, mut d_out) = (normals(), normals());
        if let Some(strides) = self.place.d_out {
            // Elements that share memory have the value of the first.
            for (group, values) in d_out.iter_mut().enumerate() {
                let mut first = std::collections::HashMap::new();
                for (at, value) in self.positions(group, strides).into_iter().zip(values) {
                    *value = *first.entry(at).or_insert(*value);
                }
            }
        }
        let weight_dtype = self.weight.unwrap_or(F32);
        let mut weight = || {
            (0..self.head_dim).map(|_| round(weight_dtype, 1.0 + 0.3 * random.normal())).collect()
        };
        let weights = groups.iter().map(|_| weight()).collect();
        let half = self.head_dim / 2;
        let angle = |i: usize| {
            let frequency = 100f64.powf(-((i % half) as f64) / half as f64);
            (i / half) as f64 * frequency
        };
        let table =
            |f: fn(f64) -> f64| (0..self.tokens * half).map(|i| round(F32, f(angle(i)))).collect();
        Inputs { x, d_out, weights, cos: table(f64::cos), sin: table(f64::sin) }
    }

    fn factor(&self, x: &[f64]) -> f64 {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / self.head_dim as f64;
        1.0 / (mean + f64::from(self.epsilon)).sqrt()
    }

    /// Output of a group in f64, without any rounding.
    pub fn forward(&self, inputs: &Inputs, group: usize) -> Vec<f64> {
        let (d, half) = (self.head_dim, self.head_dim / 2);
        let mut out = inputs.x[group].clone();
        for (row, x) in out.chunks_exact_mut(d).enumerate() {
            if self.weight.is_some() {
                let factor = self.factor(x);
                x.iter_mut().zip(&inputs.weights[group]).for_each(|(x, w)| *x *= factor * w);
            }
            if self.rotary {
                let at = row / self.groups()[group] * half;
                for i in 0..half {
                    let (cos, sin) = (inputs.cos[at + i], inputs.sin[at + i]);
                    (x[i], x[i + half]) =
                        (x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin);
                }
            }
        }
        out
    }

    /// Gradients of a group. With `rounding`, every element-wise intermediate is rounded to the
    /// element type and every sum to f32, which estimates what arithmetic in that type can achieve.
    fn reference(&self, inputs: &Inputs, group: usize, rounding: bool) -> [Vec<f64>; 2] {
        let r = |x: f64| if rounding { round(self.dtype, x) } else { x };
        let single = |x: f64| if rounding { round(F32, x) } else { x };
        let (d, half, heads) = (self.head_dim, self.head_dim / 2, self.groups()[group]);
        let weight = &inputs.weights[group];
        let (mut dx, mut d_weight) = (Vec::new(), vec![0.0; d]);
        for row in 0..self.tokens * heads {
            let mut g = inputs.d_out[group][row * d..][..d].to_vec();
            if self.rotary {
                let at = row / heads * half;
                for i in 0..half {
                    let (cos, sin) = (inputs.cos[at + i], inputs.sin[at + i]);
                    (g[i], g[i + half]) =
                        (r(g[i] * cos + g[i + half] * sin), r(g[i + half] * cos - g[i] * sin));
                }
            }
            if self.weight.is_some() {
                let x = &inputs.x[group][row * d..][..d];
                let factor = single(self.factor(x));
                let n = x.iter().map(|x| r(x * factor)).collect::<Vec<_>>();
                for i in 0..d {
                    d_weight[i] = single(d_weight[i] + r(g[i] * n[i]));
                    g[i] = r(g[i] * weight[i]);
                }
                let mean = g.iter().zip(&n).map(|(g, n)| g * n).sum::<f64>() / d as f64;
                for i in 0..d {
                    g[i] = factor * (g[i] - n[i] * single(mean));
                }
            }
            dx.extend(g.into_iter().map(r));
        }
        if rounding {
            let dtype = self.weight.unwrap_or(F32);
            d_weight.iter_mut().for_each(|x| *x = round(dtype, *x));
        }
        [dx, d_weight]
    }

    /// Values of all groups in one memory, by strides, between guards; elsewhere `filler`.
    fn memory(
        &self,
        client: &Client,
        strides: [usize; 4],
        values: &[Vec<f64>],
        filler: f64,
    ) -> (TensorBinding, Memory) {
        let span = self.span(strides);
        // The last token's values, of a packed tensor.
        let behind = strides[1] + GUARD;
        let mut memory = vec![filler; GUARD + span + behind];
        for (group, values) in values.iter().enumerate() {
            for (at, &value) in self.positions(group, strides).into_iter().zip(values) {
                memory[GUARD + at] = value;
            }
        }
        let before = encode(self.dtype, memory);
        let handle = client.create_from_slice(&before);
        let size = self.dtype.size();
        let inner = handle.clone().offset_start((GUARD * size) as u64);
        let inner = inner.offset_end((behind * size) as u64);
        (binding(&inner, &[1], &[1]), Memory { handle, before })
    }

    /// Elements up to the last one of the call.
    fn span(&self, strides: [usize; 4]) -> usize {
        let all = (0..self.groups().len()).flat_map(|group| self.positions(group, strides));
        all.max().map_or(0, |last| last + 1)
    }

    /// The values of each group, after checking that the call changed nothing else.
    fn written(&self, client: &Client, memory: &Memory) -> Vec<Vec<f64>> {
        let after = client.read_one(memory.handle.clone()).unwrap();
        let (size, strides) = (self.dtype.size(), self.place.dx);
        let mut untouched = vec![true; after.len() / size];
        let values = decode(self.dtype, &after);
        let groups = 0..self.groups().len();
        let values = groups.map(|group| {
            let positions = self.positions(group, strides).into_iter().map(|at| GUARD + at);
            positions
                .map(|at| {
                    untouched[at] = false;
                    values[at]
                })
                .collect::<Vec<_>>()
        });
        let values = values.collect();
        let pairs = after.chunks_exact(size).zip(memory.before.chunks_exact(size)).enumerate();
        for (at, (after, before)) in pairs {
            assert!(!untouched[at] || after == before, "element {at} changed\n{self:?}");
        }
        values
    }

    /// The tensors of a call, and where the results will be.
    pub fn tensors(
        &self,
        client: &Client,
        inputs: &Inputs,
    ) -> (RopeQkNormBackwardTensors, Memory, Vec<Output>) {
        let vector = |values: &[f64], dtype, shape: &[usize], strides: &[usize]| {
            let layout = match *shape {
                [rows, columns] => {
                    TensorLayout { shape: [rows, 1, columns], strides: [strides[0], 0, strides[1]] }
                }
                _ => TensorLayout::contiguous([1, 1, values.len()]),
            };
            let tensor = upload(client, dtype, values, layout);
            let (shape, strides) = (shape.to_vec().into(), strides.to_vec().into());
            TensorBinding { shape, strides, ..tensor }
        };
        let d = self.head_dim;
        let dtype = self.weight.unwrap_or(F32);
        let outputs: Vec<_> =
            self.groups().iter().map(|_| Output::new(client, dtype, &[d])).collect();
        let norm = self.weight.map(|_| NormGradients {
            x: self.memory(client, self.place.x, &inputs.x, f64::NAN).0,
            weights: inputs.weights.iter().map(|w| vector(w, dtype, &[d], &[1])).collect(),
            d_weights: outputs.iter().map(Output::binding).collect(),
        });
        let table = |values| vector(values, F32, &[self.tokens, d / 2], &self.table);
        let tables =
            self.rotary.then(|| RotaryTables { cos: table(&inputs.cos), sin: table(&inputs.sin) });
        let d_out = self.place.d_out;
        let d_out = d_out.map(|strides| self.memory(client, strides, &inputs.d_out, f64::NAN).0);
        // Where the gradient is replaced, its neighbours are values that have to stay.
        let (dx, memory) = match self.place.d_out {
            None => self.memory(client, self.place.dx, &inputs.d_out, 7.0),
            Some(_) => self.memory(client, self.place.dx, &[], f64::NAN),
        };
        (RopeQkNormBackwardTensors { norm, tables, d_out, dx }, memory, outputs)
    }

    pub fn run(&self, client: &Client, inputs: &Inputs) -> Result<Gradients, LaunchError> {
        self.run_with(client, inputs, |_| {})
    }

    /// Runs the kernel with tensors that have been changed.
    pub fn run_with(
        &self,
        client: &Client,
        inputs: &Inputs,
        change: impl FnOnce(&mut RopeQkNormBackwardTensors),
    ) -> Result<Gradients, LaunchError> {
        let (mut tensors, memory, outputs) = self.tensors(client, inputs);
        change(&mut tensors);
        launch(client, &self.problem(), tensors)?;
        let dx = self.written(client, &memory);
        let outputs = if self.weight.is_some() { &outputs[..] } else { &[] };
        let d_weights = outputs.iter().map(|output| output.read(client)).collect();
        let mut bytes: Vec<_> = outputs.iter().map(|output| output.bytes(client)).collect();
        bytes.push(client.read_one(memory.handle.clone()).unwrap().to_vec());
        Ok(Gradients { dx, d_weights, bytes })
    }

    /// Runs the kernel and compares: the error is at most three times that of plain arithmetic in
    /// the element type, plus one step of the type.
    pub fn check(&self, client: &Client) {
        match supports(client.properties(), &self.problem()) {
            Ok(_) => {}
            Err(error @ Unsupported::Dtype { .. }) => return println!("skipped: {error}"),
            // The sums of the weights' gradients take more units than the CPU runtime has.
            Err(error @ Unsupported::UnitsPerCube { .. }) if device_name() == "cpu" => {
                return println!("skipped: {error}");
            }
            Err(error) => panic!("{error}"),
        }
        let inputs = self.inputs(self.head_dim as u64);
        let result = self.run(client, &inputs).unwrap();
        for group in 0..self.groups().len() {
            let [dx, d_weight] = self.reference(&inputs, group, false);
            let [plain_dx, plain_d_weight] = self.reference(&inputs, group, true);
            let mut pairs = vec![("dx", self.dtype, &result.dx[group], dx, plain_dx)];
            if let Some(dtype) = self.weight {
                let own = &result.d_weights[group];
                pairs.push(("d_weight", dtype, own, d_weight, plain_d_weight));
            }
            for (name, dtype, own, expected, plain) in pairs {
                let largest = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
                let step = step_of(dtype) * largest;
                let bound = 3.0 * max_error(&plain, &expected) + step;
                let error = max_error(own, &expected);
                assert!(error <= bound, "{name} {group}: {error:e} > {bound:e}\n{self:?}");
            }
        }
    }
}

/// Distance of neighbours around 1, relative.
fn step_of(dtype: ElemType) -> f64 {
    match dtype.size() {
        4 => 2f64.powi(-23),
        _ if dtype == super::common::F16 => 2f64.powi(-10),
        _ => 2f64.powi(-7),
    }
}
