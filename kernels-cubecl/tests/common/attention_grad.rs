//! Attention's gradients in plain Rust, and one run of the kernels compared with them.
#![allow(dead_code, clippy::unwrap_used)]

use std::sync::Arc;

use cubecl::{client::Client, prelude::TensorBinding};
use kernels_cubecl::{
    AttentionGradBlueprint, AttentionGradProblem, AttentionGradTensors, DeviceWorkList,
    GradPlacements, GradWork, Placement, TensorLayout, WorkList,
    attention_varlen::{
        CutWork,
        backward::{CutGradWork, launch_fastest, launch_wanted, supports, supports_engine},
    },
};

use super::{
    attention::{Case, cumulative},
    common::{F32, Output, POISON, Random, decode, max_error, round, upload},
};

/// What the kernels read, as logical values.
#[derive(Clone)]
pub struct Inputs {
    pub qkv: [Vec<f64>; 3],
    pub d_out: Vec<f64>,
    pub d_lse: Option<Vec<f64>>,
    /// From the forward pass, of the element type and f32.
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
}

impl Inputs {
    /// Random inputs; `out` and `lse` are those of the reference.
    pub fn new(case: &Case, d_lse: bool, seed: u64) -> Self {
        let qkv = case.inputs(seed);
        let mut random = Random::new(seed + 1000);
        let rows = case.tokens_q() * case.heads;
        let d_out = random.normals(case.dtype, rows * case.value_dim);
        let d_lse = d_lse.then(|| random.normals(F32, rows));
        let (out, lse) = case.reference(&qkv, false);
        let out = out.iter().map(|&x| round(case.dtype, x)).collect();
        let lse = lse.iter().map(|&x| round(F32, x)).collect();
        Self { qkv, d_out, d_lse, out, lse }
    }
}

impl Inputs {
    fn has_nan(&self) -> bool {
        let nan = |values: &Vec<f64>| values.iter().any(|x| x.is_nan());
        self.qkv.iter().chain([&self.d_out, &self.out, &self.lse]).chain(&self.d_lse).any(nan)
    }
}

/// Values of a tensor whose memory is random, so that expanded axes repeat them.
pub fn expanded(case: &Case, layout: TensorLayout, seed: u64) -> Vec<f64> {
    let memory = Random::new(seed).normals(case.dtype, layout.span());
    let [tokens, heads, width] = layout.shape;
    (0..tokens * heads * width)
        .map(|i| [i / (heads * width), i / width % heads, i % width])
        .map(|index| memory[(0..3).map(|a| index[a] * layout.strides[a]).sum::<usize>()])
        .collect()
}

/// dq, dk and dv.
pub type Gradients = [Vec<f64>; 3];

/// Gradients of the reference. With `rounding`, every intermediate is rounded to the element type.
pub fn reference(case: &Case, inputs: &Inputs, rounding: bool) -> Gradients {
    let r = |x: f64| if rounding { round(case.dtype, x) } else { x };
    let [q, k, v] = &inputs.qkv;
    let (h, hk, d, dv) = (case.heads, case.heads_kv, case.head_dim, case.value_dim);
    let mut gradients = [q, k, v].map(|x| vec![0.0; x.len()]);
    let [dq, dk, d_v] = &mut gradients;
    let dot = |a: &[f64], b: &[f64]| r(a.iter().zip(b).map(|(a, b)| a * b).sum());
    let add = |sum: &mut [f64], factor: f64, x: &[f64]| {
        sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += factor * x);
    };
    let scale = f64::from(case.scale);
    let (mut start_q, mut start_k) = (0, 0);
    for (&nq, &nk) in case.lengths_q.iter().zip(&case.lengths_k) {
        for (row, head) in (0..nq).flat_map(|row| (0..h).map(move |head| (row, head))) {
            let at = (start_q + row) * h + head;
            let kv = |j: usize| (start_k + j) * hk + head / (h / hk);
            let query = &q[at * d..][..d];
            let d_out = &inputs.d_out[at * dv..][..dv];
            let keys: Vec<usize> = (0..nk).filter(|&j| case.sees(row, nq, j, nk)).collect();
            // Scores and the derivative of softcap.
            let score = |&j: &usize| {
                let scaled: Vec<f64> = k[kv(j) * d..][..d].iter().map(|x| r(x * scale)).collect();
                let s = dot(query, &scaled);
                case.softcap.map_or((s, 1.0), |cap| {
                    let tanh = r((s / f64::from(cap)).tanh());
                    (r(f64::from(cap) * tanh), r(1.0 - tanh * tanh))
                })
            };
            let scores: Vec<(f64, f64)> = keys.iter().map(score).collect();
            let nan = scores.iter().any(|(s, _)| s.is_nan());
            let max = match nan {
                true => f64::NAN,
                false => scores.iter().map(|(s, _)| *s).fold(f64::NEG_INFINITY, f64::max),
            };
            let sum: f64 = scores.iter().map(|(s, _)| (s - max).exp()).sum();
            let weights: Vec<f64> = scores.iter().map(|(s, _)| r((s - max).exp() / sum)).collect();
            let d_weights: Vec<f64> =
                keys.iter().map(|&j| dot(d_out, &v[kv(j) * dv..][..dv])).collect();
            let delta = r(weights.iter().zip(&d_weights).map(|(p, dp)| p * dp).sum());
            let d_lse = inputs.d_lse.as_ref().map_or(0.0, |d_lse| d_lse[at]);
            for (i, &j) in keys.iter().enumerate() {
                let ds = r(r(weights[i] * (d_weights[i] - delta + d_lse)) * scores[i].1);
                add(&mut dq[at * d..][..d], ds * scale, &k[kv(j) * d..][..d]);
                add(&mut dk[kv(j) * d..][..d], ds * scale, query);
                add(&mut d_v[kv(j) * dv..][..dv], weights[i], d_out);
            }
        }
        start_q += nq;
        start_k += nk;
    }
    gradients.map(|x| x.into_iter().map(r).collect())
}

/// The problem of a case on contiguous tensors.
pub fn problem(case: &Case, d_lse: bool) -> AttentionGradProblem {
    let forward = case.problem(case.shapes().map(TensorLayout::contiguous));
    let d_lse = d_lse.then_some([case.heads, 1]);
    AttentionGradProblem { d_lse, ..AttentionGradProblem::new(forward) }
}

/// Picks gradients by their work lists.
pub type Pick = for<'a> fn([&'a DeviceWorkList; 2]) -> GradWork<'a>;

pub const ALL: Pick = |[work_q, work_k]| GradWork::All { work_q, work_k };
pub const QUERIES: Pick = |[work_q, _]| GradWork::Queries { work_q };
pub const KEYS_VALUES: Pick = |[_, work_k]| GradWork::KeysValues { work_k };

/// Runs the kernels; the gradient buffer.
pub fn run(
    client: &Client,
    case: &Case,
    problem: &AttentionGradProblem,
    inputs: &Inputs,
) -> Vec<u8> {
    run_wanted(client, case, problem, inputs, (ALL, problem.grads_len()))
}

/// Runs the kernels for some of the gradients; the gradient buffer, which has that many elements.
pub fn run_wanted(
    client: &Client,
    case: &Case,
    problem: &AttentionGradProblem,
    inputs: &Inputs,
    (pick, grads_len): (Pick, usize),
) -> Vec<u8> {
    let properties = case.tiles.properties(client);
    let blueprint = match case.engine {
        None => supports(&properties, problem),
        Some(engine) => supports_engine(&properties, problem, engine),
    }
    .unwrap();
    let offsets = (cumulative(&case.lengths_q), cumulative(&case.lengths_k));
    let list = |a: &[usize], b: &[usize], tile| WorkList::new(a, b, tile).unwrap().upload(client);
    let work_q = list(&offsets.0, &offsets.1, blueprint.tile_q());
    let work_k = list(&offsets.1, &offsets.0, blueprint.tile_k());
    let work = pick([&work_q, &work_k]);
    queue(client, case, problem, inputs, grads_len, |tensors| {
        launch_wanted(client, problem, &blueprint, work, tensors).unwrap();
    })
}

/// Runs the fastest of several blueprints for all gradients; the gradient buffer.
pub fn run_fastest(
    client: &Client,
    case: &Case,
    problem: &AttentionGradProblem,
    inputs: &Inputs,
    blueprints: &[AttentionGradBlueprint],
) -> Vec<u8> {
    let [offsets_q, offsets_k] = [&case.lengths_q, &case.lengths_k].map(|l| cumulative(l));
    let cut = |a: &[usize], b: &[usize]| -> CutWork {
        let (a, b, device) = (a.to_vec(), b.to_vec(), client.clone());
        Arc::new(move |tile| WorkList::new(&a, &b, tile).unwrap().upload(&device))
    };
    let (cut_q, cut_k) = (cut(&offsets_q, &offsets_k), cut(&offsets_k, &offsets_q));
    let (segments, work) = (case.lengths_q.len(), CutGradWork::All { cut_q, cut_k });
    queue(client, case, problem, inputs, problem.grads_len(), |tensors| {
        launch_fastest(client, problem, blueprints, segments, work, tensors).unwrap();
    })
}

/// Uploads everything, launches, and reads a gradient buffer of that many elements.
fn queue(
    client: &Client,
    case: &Case,
    problem: &AttentionGradProblem,
    inputs: &Inputs,
    grads_len: usize,
    launch: impl FnOnce(AttentionGradTensors),
) -> Vec<u8> {
    let stats = Output::new(client, F32, &problem.stats_shape());
    let grads = Output::new(client, case.dtype, &[grads_len]);
    let forward = &problem.forward;
    let [tokens, heads] = forward.lse_shape();
    let upload = |values: &[f64], layout| upload(client, case.dtype, values, layout);
    let [q, k, v] = &inputs.qkv;
    let tensors = AttentionGradTensors {
        q: upload(q, forward.q),
        k: upload(k, forward.k),
        v: upload(v, forward.v),
        out: upload(&inputs.out, problem.out),
        d_out: upload(&inputs.d_out, problem.d_out),
        lse: rank_2(client, &inputs.lse, [tokens, heads], [heads, 1]),
        d_lse: inputs
            .d_lse
            .as_ref()
            .map(|d_lse| rank_2(client, d_lse, [tokens, heads], problem.d_lse.unwrap())),
        stats: stats.binding(),
        grads: grads.binding(),
    };
    launch(tensors);
    let written = stats.read(client).iter().all(|x| !x.is_nan());
    assert!(written || inputs.has_nan(), "stats: not every element is written");
    grads.bytes(client)
}

/// An f32 tensor of rank 2 with the given strides.
fn rank_2(
    client: &Client,
    values: &[f64],
    shape @ [tokens, heads]: [usize; 2],
    strides @ [token, head]: [usize; 2],
) -> TensorBinding {
    let layout = TensorLayout { shape: [tokens, heads, 1], strides: [token, head, 1] };
    let mut tensor = upload(client, F32, values, layout);
    (tensor.shape, tensor.strides) = (shape.into(), strides.into());
    tensor
}

/// The gradients in a buffer, after checking that nothing else was written.
pub fn gather(case: &Case, problem: &AttentionGradProblem, bytes: &[u8]) -> Gradients {
    let size = case.dtype.size();
    let values = decode(case.dtype, bytes);
    let mut free = vec![true; values.len()];
    let GradPlacements { dq, dk, dv } = problem.placements;
    let [q, k, v] = case.shapes();
    let gradients = [(dq, q), (dk, k), (dv, v)].map(|(placement, [tokens, heads, width])| {
        let Placement { offset, token_stride, head_stride } = placement;
        (0..tokens * heads * width)
            .map(|i| {
                let (token, head) = (i / (heads * width), i / width % heads);
                let at = offset + token * token_stride + head * head_stride + i % width;
                assert!(std::mem::take(&mut free[at]), "element {at} belongs to two gradients");
                values[at]
            })
            .collect()
    });
    for at in (0..values.len()).filter(|&at| free[at]) {
        let untouched = bytes[at * size..][..size].iter().all(|&b| b == POISON);
        assert!(untouched, "element {at} belongs to no gradient and was written");
    }
    gradients
}

/// Runs on contiguous inputs and compares.
pub fn check(client: &Client, case: &Case, d_lse: bool, seed: u64) {
    let inputs = Inputs::new(case, d_lse, seed);
    check_problem(client, case, &problem(case, d_lse), &inputs);
}

/// Compares by flash-attention's rule: the error is at most three times that of a plain
/// implementation in the element type, plus what shader languages allow exp to be off by.
pub fn check_problem(
    client: &Client,
    case: &Case,
    problem: &AttentionGradProblem,
    inputs: &Inputs,
) {
    compare(case, problem, inputs, &run(client, case, problem, inputs));
}

/// As [`check_problem`], of what a run left in the gradient buffer.
pub fn compare(case: &Case, problem: &AttentionGradProblem, inputs: &Inputs, bytes: &[u8]) {
    let gradients = gather(case, problem, bytes);
    let expected = reference(case, inputs, false);
    let plain = reference(case, inputs, true);
    for (i, name) in ["dq", "dk", "dv"].into_iter().enumerate() {
        let error = max_error(&gradients[i], &expected[i]);
        let largest = expected[i].iter().fold(0.0, |max: f64, x| max.max(x.abs()));
        let bound = 3.0 * max_error(&plain[i], &expected[i]) + 1e-5 * (1.0 + largest);
        assert!(error <= bound, "{name}: {error:e} > {bound:e}\n{case:?}\n{problem:?}");
    }
}
