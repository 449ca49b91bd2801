//! The fused norm and rotation against plain Rust on the wgpu device.
#![allow(clippy::unwrap_used)]

mod common;

use common::{BF16, F16, F32, Output, Random, binding, client, decode, encode, round, upload};
use cubecl::{client::Client, ir::ElemType, prelude::TensorBinding};
use kernels_cubecl::{
    LaunchError, NormWeights, RopeQkNormProblem, RopeQkNormTensors, RotaryTables, TensorLayout,
    Unsupported,
    rope_qk_norm::{RmsNorm, launch, supports},
};
use rstest::rstest;

const EPSILON: f32 = 1e-5;

#[derive(Clone, Debug)]
struct Case {
    dtype: ElemType,
    tokens: usize,
    heads: usize,
    heads_kv: usize,
    head_dim: usize,
    weight: Option<ElemType>,
    rotary: bool,
}

struct Inputs {
    q: Vec<f64>,
    k: Vec<f64>,
    weights: [Vec<f64>; 2],
    cos: Vec<f64>,
    sin: Vec<f64>,
}

impl Case {
    fn new(head_dim: usize) -> Self {
        Self {
            dtype: F32,
            tokens: 37,
            heads: 3,
            heads_kv: 3,
            head_dim,
            weight: Some(F32),
            rotary: true,
        }
    }

    fn shapes(&self) -> [[usize; 3]; 2] {
        [self.heads, self.heads_kv].map(|heads| [self.tokens, heads, self.head_dim])
    }

    fn inputs(&self, seed: u64) -> Inputs {
        let mut random = Random::new(seed);
        let [q, k] = self.shapes().map(|shape| random.normals(self.dtype, shape.iter().product()));
        let weight_dtype = self.weight.unwrap_or(F32);
        let mut weight = || {
            (0..self.head_dim).map(|_| round(weight_dtype, 1.0 + 0.3 * random.normal())).collect()
        };
        let weights = [weight(), weight()];
        let half = self.head_dim / 2;
        let angle = |i: usize| {
            let frequency = 100f64.powf(-((i % half) as f64) / half as f64);
            (i / half) as f64 * frequency
        };
        let table =
            |f: fn(f64) -> f64| (0..self.tokens * half).map(|i| round(F32, f(angle(i)))).collect();
        Inputs { q, k, weights, cos: table(f64::cos), sin: table(f64::sin) }
    }

    fn reference(&self, x: &[f64], weight: &[f64], inputs: &Inputs, heads: usize) -> Vec<f64> {
        let (d, half) = (self.head_dim, self.head_dim / 2);
        let mut out = Vec::with_capacity(x.len());
        for (row, x) in x.chunks_exact(d).enumerate() {
            let mut x = x.to_vec();
            if let Some(weight_dtype) = self.weight {
                let promoted = if weight_dtype == self.dtype { self.dtype } else { F32 };
                let mean = x.iter().map(|x| x * x).sum::<f64>() / d as f64;
                let factor = 1.0 / (mean + f64::from(EPSILON)).sqrt();
                for (x, w) in x.iter_mut().zip(weight) {
                    *x = round(promoted, round(self.dtype, *x * factor) * w);
                }
            }
            if self.rotary {
                let at = row / heads * half;
                for i in 0..half {
                    let (cos, sin) = (inputs.cos[at + i], inputs.sin[at + i]);
                    (x[i], x[i + half]) =
                        (x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin);
                }
            }
            out.extend(x.iter().map(|&x| round(self.dtype, x)));
        }
        out
    }

    fn problem(&self, [q, k]: [TensorLayout; 2], table: [usize; 2]) -> RopeQkNormProblem {
        RopeQkNormProblem {
            q,
            k,
            dtype: self.dtype,
            norm: self.weight.map(|weight_dtype| RmsNorm { epsilon: EPSILON, weight_dtype }),
            rotary: self.rotary.then_some([table; 2]),
        }
    }

    fn optional(&self, client: &Client, inputs: &Inputs, table: [usize; 2]) -> Optional {
        let vector = |values: &[f64], dtype| {
            let layout = TensorLayout::contiguous([1, 1, values.len()]);
            flat(upload(client, dtype, values, layout), &[values.len()], &[1])
        };
        let (tokens, half) = (self.tokens, self.head_dim / 2);
        let table = |values: &[f64]| {
            let layout =
                TensorLayout { shape: [tokens, 1, half], strides: [table[0], 0, table[1]] };
            flat(upload(client, F32, values, layout), &[tokens, half], &table)
        };
        let weights = self.weight.map(|dtype| NormWeights {
            q: vector(&inputs.weights[0], dtype),
            k: vector(&inputs.weights[1], dtype),
        });
        let tables =
            self.rotary.then(|| RotaryTables { cos: table(&inputs.cos), sin: table(&inputs.sin) });
        (weights, tables)
    }

    fn check_layouts(&self, client: &Client, layouts: [TensorLayout; 2], table: [usize; 2]) {
        let problem = self.problem(layouts, table);
        match supports(client.properties(), &problem) {
            Ok(_) => {}
            Err(error @ Unsupported::Dtype { .. }) => return println!("skipped: {error}"),
            Err(error) => panic!("{error}"),
        }
        let inputs = self.inputs(self.head_dim as u64);
        let outs = self.shapes().map(|shape| Output::new(client, self.dtype, &shape));
        let (weights, tables) = self.optional(client, &inputs, table);
        let tensors = RopeQkNormTensors {
            q: upload(client, self.dtype, &inputs.q, layouts[0]),
            k: upload(client, self.dtype, &inputs.k, layouts[1]),
            weights,
            tables,
            q_out: outs[0].binding(),
            k_out: outs[1].binding(),
        };
        launch(client, &problem, tensors).unwrap();
        self.compare(&outs.map(|out| out.read(client)), &inputs);
    }

    /// Norm, weight and rotation each round once; drivers may round towards zero or skip an
    /// intermediate rounding, so each may be off by one step of the element type.
    fn compare(&self, [q_out, k_out]: &[Vec<f64>; 2], inputs: &Inputs) {
        let step = match self.dtype {
            F16 => 2f64.powi(-10),
            BF16 => 2f64.powi(-7),
            _ => 1e-6,
        };
        let expected_q = self.reference(&inputs.q, &inputs.weights[0], inputs, self.heads);
        let expected_k = self.reference(&inputs.k, &inputs.weights[1], inputs, self.heads_kv);
        for (name, out, expected) in [("q", q_out, expected_q), ("k", k_out, expected_k)] {
            for (i, (out, expected)) in out.iter().zip(&expected).enumerate() {
                let bound = 3.0 * step * expected.abs().max(1.0);
                assert!(
                    (out - expected).abs() <= bound,
                    "{name}[{i}]: {out} != {expected}\n{self:?}"
                );
            }
        }
    }

    fn check(&self, client: &Client) {
        let layouts = self.shapes().map(TensorLayout::contiguous);
        self.check_layouts(client, layouts, [self.head_dim / 2, 1]);
    }
}

type Optional = (Option<NormWeights>, Option<RotaryTables>);

fn flat(tensor: TensorBinding, shape: &[usize], strides: &[usize]) -> TensorBinding {
    TensorBinding { shape: shape.to_vec().into(), strides: strides.to_vec().into(), ..tensor }
}

#[rstest]
fn head_dims(
    #[values(2, 6, 40, 64, 72, 80, 90, 96, 128, 250, 256)] head_dim: usize,
    #[values(F32, F16, BF16)] dtype: ElemType,
) {
    let Some(client) = client() else { return };
    let mut case = Case::new(head_dim);
    case.dtype = dtype;
    case.weight = Some(dtype);
    case.check(&client);
}

#[rstest]
fn options(
    #[values(None, Some(F32), Some(F16))] weight: Option<ElemType>,
    #[values(false, true)] rotary: bool,
    #[values(F32, F16)] dtype: ElemType,
) {
    let Some(client) = client() else { return };
    let mut case = Case::new(72);
    (case.weight, case.rotary, case.dtype) = (weight, rotary, dtype);
    case.check(&client);
}

#[rstest]
fn grouped_heads(#[values(6, 2, 1, 0)] heads_kv: usize) {
    let Some(client) = client() else { return };
    let mut case = Case::new(64);
    (case.heads, case.heads_kv) = (6, heads_kv);
    case.check(&client);
}

#[rstest]
fn token_counts(#[values(0, 1, 15, 16, 17, 300)] tokens: usize) {
    let Some(client) = client() else { return };
    let mut case = Case::new(64);
    case.tokens = tokens;
    case.check(&client);
}

#[rstest]
#[case::padded_rows([3 * 80, 80, 1], [40, 1])]
#[case::odd_padding([3 * 75 + 1, 75, 1], [37, 1])]
#[case::heads_first([72, 37 * 72, 1], [64, 1])]
#[case::elements_outermost([3, 1, 37 * 3], [1, 37])]
fn strided_tensors(
    #[case] strides: [usize; 3],
    #[case] table: [usize; 2],
    #[values(F32, F16)] dtype: ElemType,
) {
    let Some(client) = client() else { return };
    let mut case = Case::new(72);
    (case.dtype, case.weight) = (dtype, Some(dtype));
    let layouts = case.shapes().map(|shape| TensorLayout { shape, strides });
    case.check_layouts(&client, layouts, table);
}

/// Both inputs in one buffer `[tokens, 3, heads, head_dim]`, which stays as it is; the values are
/// NaN, so that reading one would show.
#[rstest]
fn packed_projection_is_read_in_place(#[values(F32, F16)] dtype: ElemType) {
    let Some(client) = client() else { return };
    let mut case = Case::new(64);
    (case.dtype, case.weight) = (dtype, Some(dtype));
    (case.heads, case.heads_kv) = (4, 4);
    let width = case.heads * case.head_dim;
    let layouts =
        case.shapes().map(|shape| TensorLayout { shape, strides: [3 * width, case.head_dim, 1] });
    let problem = case.problem(layouts, [32, 1]);
    if supports(client.properties(), &problem).is_err() {
        return;
    }
    let inputs = case.inputs(1);
    let mut packed = vec![f64::NAN; case.tokens * 3 * width];
    for token in 0..case.tokens {
        let (from, to) = (token * width, token * 3 * width);
        packed[to..to + width].copy_from_slice(&inputs.q[from..from + width]);
        packed[to + width..to + 2 * width].copy_from_slice(&inputs.k[from..from + width]);
    }
    let bytes = encode(dtype, packed);
    let handle = client.create_from_slice(&bytes);
    let part = |index: usize| {
        let offset = (index * width * dtype.size()) as u64;
        let after = ((2 - index) * width * dtype.size()) as u64;
        let handle = handle.clone().offset_start(offset).offset_end(after);
        binding(&handle, &layouts[index].shape, &layouts[index].strides)
    };
    let outs = case.shapes().map(|shape| Output::new(&client, dtype, &shape));
    let (weights, tables) = case.optional(&client, &inputs, [32, 1]);
    let tensors = RopeQkNormTensors {
        q: part(0),
        k: part(1),
        weights,
        tables,
        q_out: outs[0].binding(),
        k_out: outs[1].binding(),
    };
    launch(&client, &problem, tensors).unwrap();
    case.compare(&outs.map(|out| out.read(&client)), &inputs);
    assert!(client.read_one(handle.clone()).unwrap()[..] == bytes[..], "input changed");
}

#[test]
fn nan_stays_in_its_head() {
    let Some(client) = client() else { return };
    let case = Case::new(64);
    let layouts = case.shapes().map(TensorLayout::contiguous);
    let mut inputs = case.inputs(3);
    inputs.q[5 * 64 + 7] = f64::NAN;
    let outs = case.shapes().map(|shape| Output::new(&client, F32, &shape));
    let (weights, tables) = case.optional(&client, &inputs, [32, 1]);
    let tensors = RopeQkNormTensors {
        q: upload(&client, F32, &inputs.q, layouts[0]),
        k: upload(&client, F32, &inputs.k, layouts[1]),
        weights,
        tables,
        q_out: outs[0].binding(),
        k_out: outs[1].binding(),
    };
    launch(&client, &case.problem(layouts, [32, 1]), tensors).unwrap();
    let q = decode(F32, &outs[0].bytes(&client));
    for (i, x) in q.iter().enumerate() {
        assert_eq!(x.is_nan(), i / 64 == 5, "element {i}");
    }
    assert!(outs[1].read(&client).iter().all(|x| !x.is_nan()));
}

#[test]
#[cfg_attr(feature = "cpu", ignore = "names what other devices choose and lack")]
fn refusals_and_fallbacks() {
    let Some(client) = client() else { return };
    let mut problem =
        Case::new(72).problem(Case::new(72).shapes().map(TensorLayout::contiguous), [36, 1]);
    let blueprint = supports(client.properties(), &problem).unwrap();
    assert_eq!(
        blueprint.to_string(),
        "rope_qk_norm f32 head_dim 72 vectors 4 units 28x9 launches 1 U32 norm(f32 -> f32) rotary"
    );
    let mut properties = client.properties().clone();
    properties.hardware.max_bindings = 7;
    assert_eq!(supports(&properties, &problem).unwrap().launches(), 2);
    properties.hardware.max_bindings = 5;
    let error = supports(&properties, &problem).unwrap_err();
    assert_eq!(error.to_string(), "the kernel needs 6 storage buffers, the device binds 5");
    properties.hardware.max_bindings = 7;
    problem.norm = None;
    assert_eq!(supports(&properties, &problem).unwrap().launches(), 1);

    let odd = TensorLayout::contiguous([10, 2, 59]);
    let error = supports(client.properties(), &RopeQkNormProblem::new(odd, odd, F32)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "q, k: head_dim 59 is not supported; allowed: even numbers from 2"
    );
}

#[test]
fn short_buffers_are_refused() {
    let Some(client) = client() else { return };
    let case = Case::new(64);
    let layouts = case.shapes().map(TensorLayout::contiguous);
    let inputs = case.inputs(4);
    let outs = case.shapes().map(|shape| Output::new(&client, F32, &shape));
    let (weights, tables) = case.optional(&client, &inputs, [32, 1]);
    let mut tensors = RopeQkNormTensors {
        q: upload(&client, F32, &inputs.q, layouts[0]),
        k: upload(&client, F32, &inputs.k, layouts[1]),
        weights,
        tables,
        q_out: outs[0].binding(),
        k_out: outs[1].binding(),
    };
    let sin = &mut tensors.tables.as_mut().unwrap().sin.handle;
    sin.offset_end = Some(sin.offset_end.unwrap() + 4);
    let error = launch(&client, &case.problem(layouts, [32, 1]), tensors).unwrap_err();
    assert!(matches!(error, LaunchError::OutOfBounds { argument: "tables.sin", .. }), "{error}");
}
