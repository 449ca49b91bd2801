//! The files that the steps of `run.sh` leave.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::ReportError;

/// Whether a step has to succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// It has to.
    Check,
    /// It must not fail, as far as there is time for it.
    Extra,
    /// It measures.
    Measure,
}

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Its program was content.
    Ok,
    /// Its program ended with this status.
    Failed(i32),
    /// It was ended when its time was over.
    RanOut,
    /// It did not run.
    LeftOut,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// Whether it has to succeed.
    pub kind: Kind,
    /// Its name, which its log has, too.
    pub name: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Seconds that it took.
    pub seconds: u64,
    /// Seconds that it was given.
    pub limit: u64,
    /// Its last words, or why it was left out.
    pub detail: String,
}

impl Step {
    /// Whether it speaks against the kernels, or fails to speak for them where it has to.
    pub fn is_bad(&self) -> bool {
        match self.kind {
            Kind::Check => self.outcome != Outcome::Ok,
            Kind::Extra => matches!(self.outcome, Outcome::Failed(_)),
            Kind::Measure => false,
        }
    }

    fn parse(line: &str) -> Result<Self, String> {
        let fields: Vec<&str> = line.splitn(6, '\t').collect();
        let [kind, name, code, seconds, limit, detail] = fields[..] else {
            return Err(format!("expected 6 fields, got {}", fields.len()));
        };
        let number = |text: &str| text.parse::<u64>().map_err(|_| format!("`{text}` is no number"));
        let (seconds, limit) = (number(seconds)?, number(limit)?);
        let kind = match kind {
            "check" => Kind::Check,
            "extra" => Kind::Extra,
            "measure" => Kind::Measure,
            other => return Err(format!("`{other}` is no kind of step")),
        };
        // The statuses of `timeout`, the second where the program had to be killed.
        let outcome = match code {
            "-" => Outcome::LeftOut,
            "0" => Outcome::Ok,
            "124" => Outcome::RanOut,
            "137" if seconds >= limit => Outcome::RanOut,
            code => Outcome::Failed(code.parse().map_err(|_| format!("`{code}` is no status"))?),
        };
        Ok(Self { kind, name: name.to_owned(), outcome, seconds, limit, detail: detail.to_owned() })
    }
}

/// What `attention-bench` writes, as far as it is used.
#[derive(Clone, Debug, Deserialize)]
pub struct Bench {
    /// Where it ran.
    pub machine: Machine,
    /// What the device reaches.
    pub calibrations: Vec<Calibration>,
    /// What was measured.
    pub rows: Vec<Row>,
    /// What was not.
    pub skipped: Vec<Skipped>,
}

/// The machine and the versions that ran.
#[derive(Clone, Debug, Deserialize)]
pub struct Machine {
    /// The processor's name.
    pub cpu: String,
    /// This workspace.
    pub version: String,
    /// Burn.
    pub burn: String,
}

/// What a device reaches.
#[derive(Clone, Debug, Deserialize)]
pub struct Calibration {
    /// Rate of a large matrix product, in 10^9 floating-point operations a second.
    pub gemm_gflops: f64,
    /// Rate of a copy, in 10^9 bytes a second.
    pub copy_gbs: Option<f64>,
}

/// One case by one implementation.
#[derive(Clone, Debug, Deserialize)]
pub struct Row {
    /// What ran.
    pub op: String,
    /// How it was computed.
    pub implementation: String,
    /// Number of heads.
    pub heads: usize,
    /// Dimensions of a head.
    pub head_dim: usize,
    /// Segments and their length.
    pub layout: String,
    /// Float type.
    pub dtype: String,
    /// What was timed.
    pub pass: String,
    /// Median time of a call, in milliseconds.
    pub ms: f64,
    /// 10^9 floating-point operations a second.
    pub gflops: Option<f64>,
    /// 10^9 bytes a second.
    pub gbs: Option<f64>,
}

/// Something that was not measured.
#[derive(Clone, Debug, Deserialize)]
pub struct Skipped {
    /// What would have run.
    pub op: String,
    /// How.
    pub implementation: String,
    /// Heads and dimensions of each.
    pub heads: String,
    /// Segments and their length.
    pub layout: String,
    /// Why not.
    pub reason: String,
}

/// What `torch_gpu.py` writes.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Torch {
    /// The version.
    pub torch: String,
    /// The GPU's name.
    pub device: String,
    /// Rate of a large matrix product, in 10^12 floating-point operations a second.
    pub matmul_tflops: f64,
    /// Rate of a copy, in 10^9 bytes a second.
    pub copy_gbs: f64,
    /// What was measured.
    pub rows: Vec<TorchRow>,
}

/// One case by one way of PyTorch's.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct TorchRow {
    /// Number of heads.
    pub heads: usize,
    /// Dimensions of a head.
    pub head_dim: usize,
    /// Segments and their length.
    pub layout: String,
    /// `varlen`, `loop` or `padded`.
    pub variant: String,
    /// Median time of a forward pass, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forward_ms: Option<f64>,
    /// The same in 10^12 floating-point operations a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forward_tflops: Option<f64>,
    /// Median time of a backward pass alone, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backward_ms: Option<f64>,
    /// The same in 10^12 floating-point operations a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backward_tflops: Option<f64>,
    /// Why there is no time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Everything that a run left.
#[derive(Clone, Debug)]
pub struct Input {
    /// What is known of machine and run, by name.
    pub facts: BTreeMap<String, String>,
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// `attention_varlen` by `flash_attention_2`.
    pub attention: Option<Bench>,
    /// `attention_varlen` by `flash_attention_3`, where it runs.
    pub attention_async: Option<Bench>,
    /// `rope_qk_norm`.
    pub rope: Option<Bench>,
    /// PyTorch.
    pub torch: Option<Torch>,
    /// Files that are there and cannot be used, and why.
    pub notes: Vec<String>,
}

/// Reads the files of a run.
///
/// # Errors
///
/// When the facts or the steps cannot be read.
pub fn read(folder: &Path) -> Result<Input, ReportError> {
    let facts = lines(folder, "facts.tsv", |line| {
        let (name, value) = line.split_once('\t').ok_or("expected a name, a tab and a value")?;
        Ok((name.to_owned(), value.to_owned()))
    })?;
    let steps = lines(folder, "steps.tsv", Step::parse)?;
    let mut notes = Vec::new();
    Ok(Input {
        facts: facts.into_iter().collect(),
        steps,
        attention: json(folder, "attention.json", &mut notes),
        attention_async: json(folder, "attention-async.json", &mut notes),
        rope: json(folder, "rope_qk_norm.json", &mut notes),
        torch: json(folder, "torch.json", &mut notes),
        notes,
    })
}

fn lines<T>(
    folder: &Path,
    name: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<T>, ReportError> {
    let path = folder.join(name);
    let text = fs::read_to_string(&path)
        .map_err(|source| ReportError::Read { path: path.clone(), source })?;
    let parsed = text.lines().enumerate().map(|(index, line)| {
        let malformed =
            |reason| ReportError::Malformed { path: path.clone(), line: index + 1, reason };
        parse(line).map_err(malformed)
    });
    parsed.collect()
}

/// What a step wrote, if it got so far; one that was ended may have left half a file.
fn json<T: DeserializeOwned>(folder: &Path, name: &str, notes: &mut Vec<String>) -> Option<T> {
    let text = match fs::read_to_string(folder.join(name)) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => {
            notes.push(format!("{name} cannot be read: {error}"));
            return None;
        }
    };
    serde_json::from_str(&text)
        .map_err(|error| notes.push(format!("{name} is not whole: {error}")))
        .ok()
}
