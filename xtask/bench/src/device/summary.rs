//! Rates, ratios and targets of a run.

use std::collections::BTreeMap;

use serde::Serialize;

use super::input::{Bench, Input, Row, Skipped, Step, Torch, TorchRow};

/// A rate of the device itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Yardstick {
    /// As Burn reaches it.
    pub burn: Option<f64>,
    /// As PyTorch reaches it.
    pub torch: Option<f64>,
}

impl Yardstick {
    /// The higher one: what the device can do.
    pub fn best(self) -> Option<f64> {
        [self.burn, self.torch].into_iter().flatten().reduce(f64::max)
    }

    fn share(self, rate: Option<f64>) -> Option<f64> {
        rate.zip(self.best()).map(|(rate, best)| rate / best)
    }
}

/// `attention_varlen` on one case.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Attention {
    /// How it was computed.
    pub implementation: String,
    /// Heads and dimensions of each.
    pub heads: String,
    /// Segments and their length.
    pub layout: String,
    /// `forward` or `backward`.
    pub pass: String,
    /// Median time of a call, in milliseconds.
    pub ms: f64,
    /// 10^12 floating-point operations a second, of those that have to be done.
    pub tflops: Option<f64>,
    /// That as a share of the device's matrix product.
    pub of_matmul: Option<f64>,
    /// Median time of `varlen_attn`, in milliseconds.
    pub varlen_ms: Option<f64>,
    /// Our rate as a share of `varlen_attn`'s: above 1 we are faster.
    pub of_varlen: Option<f64>,
}

/// `rope_qk_norm` on one case.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rope {
    /// Heads and dimensions of each.
    pub heads: String,
    /// Segments and their length.
    pub layout: String,
    /// Median time of a call, in milliseconds.
    pub ms: f64,
    /// Bytes that have to be moved, in 10^9 a second.
    pub gbs: Option<f64>,
    /// That as a share of the device's copy.
    pub of_copy: Option<f64>,
    /// Median time of norm and rotation one after the other, in milliseconds.
    pub composed_ms: Option<f64>,
}

/// Something that a measured figure should reach.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Target {
    /// Which figure.
    pub figure: String,
    /// Of what it is a share.
    pub of: &'static str,
    /// The least share.
    pub least: f64,
    /// The share, where it was measured.
    pub measured: Option<f64>,
    /// Whether it is reached, where it was measured.
    pub met: Option<bool>,
}

/// Heads of the targets.
const HEADS: [&str; 2] = ["12x128", "24x64"];
/// Layouts of the targets, and the share of `varlen_attn` that a forward pass should reach.
const FORWARD: [(&str, f64); 3] = [("1x16384", 0.9), ("16x1024", 0.9), ("256x64", 1.0)];
/// The implementation whose passes have targets, and the one whose forward pass has the same where it runs.
const IMPLEMENTATIONS: [&str; 2] = ["flash_attention_2", "flash_attention_3"];
/// The share that a backward pass should reach.
const BACKWARD: f64 = 0.8;
/// The share of the copy's rate that `rope_qk_norm` should reach, on this layout.
const ROPE: (&str, f64) = ("1x16384", 0.8);
/// The float type of the targets and of everything that PyTorch is compared by.
const DTYPE: &str = "bf16";

/// What a run found.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Whether every check holds.
    pub correct: bool,
    /// What is known of machine and run, by name.
    pub facts: BTreeMap<String, String>,
    /// 10^12 floating-point operations a second in a large matrix product.
    pub matmul_tflops: Yardstick,
    /// 10^9 bytes a second in a copy.
    pub copy_gbs: Yardstick,
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// `attention_varlen`.
    pub attention: Vec<Attention>,
    /// `rope_qk_norm`.
    pub rope_qk_norm: Vec<Rope>,
    /// What the figures should reach; on CUDA alone.
    pub targets: Vec<Target>,
    /// What else has to be said.
    pub notes: Vec<String>,
    /// PyTorch's own figures.
    pub torch: Option<Torch>,
}

impl Summary {
    /// Of what a run left.
    pub fn new(input: Input) -> Self {
        let Input { mut facts, steps, attention, attention_async, rope, torch, mut notes } = input;
        let benches = || [&attention, &attention_async, &rope].into_iter().flatten();
        if let Some(machine) = benches().next().map(|bench| &bench.machine) {
            for (name, value) in
                [("cpu", &machine.cpu), ("version", &machine.version), ("burn", &machine.burn)]
            {
                facts.insert(name.to_owned(), value.clone());
            }
        }
        if let Some(torch) = &torch {
            facts.insert("torch".to_owned(), torch.torch.clone());
        }
        let calibrations = || benches().flat_map(|bench| &bench.calibrations);
        let matmul_tflops = Yardstick {
            burn: calibrations().map(|known| known.gemm_gflops / 1e3).reduce(f64::max),
            torch: torch.as_ref().map(|torch| torch.matmul_tflops),
        };
        let copy_gbs = Yardstick {
            burn: calibrations().filter_map(|known| known.copy_gbs).reduce(f64::max),
            torch: torch.as_ref().map(|torch| torch.copy_gbs),
        };
        notes.extend(skipped(benches().flat_map(|bench| &bench.skipped)));
        let varlen =
            torch.iter().flat_map(|torch| &torch.rows).filter(|row| row.variant == "varlen");
        let varlen: Vec<&TorchRow> = varlen.collect();
        let attention = [&attention, &attention_async].into_iter().flatten();
        let attention = attention.flat_map(|bench| &bench.rows);
        let attention: Vec<Attention> =
            attention.map(|row| Attention::new(row, matmul_tflops, &varlen)).collect();
        let rope_qk_norm = rope.as_ref().map_or_else(Vec::new, |bench| ropes(bench, copy_gbs));
        let is = |name: &str, value| facts.get(name).is_some_and(|fact| fact == value);
        let targets = if is("device", "cuda") && is("dtype", DTYPE) {
            targets(&attention, &rope_qk_norm)
        } else {
            Vec::new()
        };
        Self {
            correct: !steps.is_empty() && !steps.iter().any(Step::is_bad),
            facts,
            matmul_tflops,
            copy_gbs,
            steps,
            attention,
            rope_qk_norm,
            targets,
            notes,
            torch,
        }
    }
}

/// A line for each reason, with the first case and the number of others.
fn skipped<'a>(all: impl Iterator<Item = &'a Skipped>) -> Vec<String> {
    let mut groups: Vec<(&Skipped, usize)> = Vec::new();
    for skipped in all {
        let alike = |other: &Skipped| {
            (&other.op, &other.implementation, &other.reason)
                == (&skipped.op, &skipped.implementation, &skipped.reason)
        };
        match groups.iter_mut().find(|(first, _)| alike(first)) {
            Some((_, others)) => *others += 1,
            None => groups.push((skipped, 0)),
        }
    }
    let line = |(first, others): (&Skipped, usize)| {
        let Skipped { op, implementation, heads, layout, reason } = first;
        let others = if others > 0 { format!(" and {others} more") } else { String::new() };
        format!("{op} by {implementation} was not measured on {heads} {layout}{others}: {reason}")
    };
    groups.into_iter().map(line).collect()
}

fn heads_of(heads: usize, head_dim: usize) -> String {
    format!("{heads}x{head_dim}")
}

impl Attention {
    fn new(row: &Row, matmul: Yardstick, varlen: &[&TorchRow]) -> Self {
        let tflops = row.gflops.map(|rate| rate / 1e3);
        let is_same = |other: &&&TorchRow| {
            (other.heads, other.head_dim, &other.layout) == (row.heads, row.head_dim, &row.layout)
        };
        let peer = varlen.iter().find(is_same).filter(|_| row.dtype == DTYPE);
        let varlen_ms = peer.and_then(|peer| match row.pass.as_str() {
            "forward" => peer.forward_ms,
            "backward" => peer.backward_ms,
            _ => None,
        });
        Self {
            implementation: row.implementation.clone(),
            heads: heads_of(row.heads, row.head_dim),
            layout: row.layout.clone(),
            pass: row.pass.clone(),
            ms: row.ms,
            tflops,
            of_matmul: matmul.share(tflops),
            varlen_ms,
            of_varlen: varlen_ms.map(|varlen| varlen / row.ms),
        }
    }
}

fn ropes(bench: &Bench, copy: Yardstick) -> Vec<Rope> {
    let by = |name: &'static str| bench.rows.iter().filter(move |row| row.implementation == name);
    let key = |row: &Row| (row.heads, row.head_dim, row.layout.clone(), row.pass.clone());
    let rope = |row: &Row| Rope {
        heads: heads_of(row.heads, row.head_dim),
        layout: row.layout.clone(),
        ms: row.ms,
        gbs: row.gbs,
        of_copy: copy.share(row.gbs),
        composed_ms: by("composed").find(|other| key(other) == key(row)).map(|other| other.ms),
    };
    by("rope_qk_norm").map(rope).collect()
}

fn targets(attention: &[Attention], rope: &[Rope]) -> Vec<Target> {
    let share = |implementation: &str, pass: &str, heads: &str, layout: &str| {
        let asked = [implementation, pass, heads, layout];
        let row = attention.iter().find(|row| {
            [&row.implementation, &row.pass, &row.heads, &row.layout].map(String::as_str) == asked
        });
        row.and_then(|row| row.of_varlen)
    };
    let [synchronous, asynchronous] = IMPLEMENTATIONS;
    let runs_both = attention.iter().any(|row| row.implementation == asynchronous);
    let mut targets = Vec::new();
    let mut add = |figure, of, least, measured: Option<f64>| {
        let met = measured.map(|measured| measured >= least);
        targets.push(Target { figure, of, least, measured, met });
    };
    for heads in HEADS {
        for (layout, least) in FORWARD {
            for (pass, least) in [("forward", least), ("backward", BACKWARD)] {
                let measured = share(synchronous, pass, heads, layout);
                add(format!("{pass} {heads} {layout}"), "varlen_attn", least, measured);
            }
            if runs_both {
                let measured = share(asynchronous, "forward", heads, layout);
                add(format!("{asynchronous} {heads} {layout}"), "varlen_attn", least, measured);
            }
        }
    }
    let (layout, least) = ROPE;
    for heads in HEADS {
        let row = rope.iter().find(|row| row.heads == heads && row.layout == layout);
        let measured = row.and_then(|row| row.of_copy);
        add(format!("rope_qk_norm {heads} {layout}"), "copy", least, measured);
    }
    targets
}
