//! The same layers in PyTorch, by a Python program that answers one request after another.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::{Deserialize, Serialize};

use crate::BenchError;
use crate::arguments::{Dtype, Operation};
use crate::case::Case;
use crate::measure::{Effort, Sample};

/// How torch computes attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TorchImplementation {
    /// A dense mask.
    Eager,
    /// Segment by segment in tensor operations.
    EagerV2,
    /// Segment by segment through `scaled_dot_product_attention`.
    Sdpa,
}

impl TorchImplementation {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "torch_eager",
            Self::EagerV2 => "torch_eager_v2",
            Self::Sdpa => "torch_sdpa",
        }
    }
}

#[derive(Serialize)]
struct CaseRequest {
    op: Operation,
    implementation: TorchImplementation,
    heads: usize,
    head_dim: usize,
    lengths: Vec<usize>,
    qk_norm: bool,
    backward: bool,
    #[serde(flatten)]
    terms: Terms,
}

#[derive(Serialize)]
struct GemmRequest {
    op: &'static str,
    size: usize,
    #[serde(flatten)]
    terms: Terms,
}

#[derive(Serialize)]
struct Terms {
    dtype: Dtype,
    threads: usize,
    repeats: usize,
    max_seconds: f64,
}

impl Terms {
    fn new(dtype: Dtype, threads: usize, effort: Effort) -> Self {
        let Effort { repeats, max_seconds, .. } = effort;
        Self { dtype, threads, repeats, max_seconds }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Hello {
    Ready { torch: String },
    Broken { error: String },
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Answer {
    Times { times_ms: Vec<f64> },
    Refusal { error: String },
}

/// A running Python with torch.
#[derive(Debug)]
pub struct Peer {
    python: PathBuf,
    child: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    version: String,
}

impl Peer {
    /// Starts `python` and waits until it has imported torch.
    ///
    /// # Errors
    ///
    /// When `python` cannot be started or has no torch.
    pub fn start(python: &Path) -> Result<Self, BenchError> {
        let fail = |source| BenchError::Python { python: python.to_owned(), source };
        let mut child = Command::new(python)
            .args(["-u", concat!(env!("CARGO_MANIFEST_DIR"), "/torch_cpu.py")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(fail)?;
        let requests = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().expect("it is piped"));
        let python = python.to_owned();
        let mut peer = Self { python, child, requests, answers, version: String::new() };
        match peer.read()? {
            Hello::Ready { torch } => peer.version = torch,
            Hello::Broken { error: reason } => {
                return Err(BenchError::NoTorch { python: peer.python.clone(), reason });
            }
        }
        Ok(peer)
    }

    /// The version of torch.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Measures a case; what torch itself refuses, such as a dtype, is the inner error.
    ///
    /// # Errors
    ///
    /// When the program breaks off.
    pub fn measure(
        &mut self,
        case: &Case,
        implementation: TorchImplementation,
        threads: usize,
        effort: Effort,
    ) -> Result<Result<Sample, String>, BenchError> {
        let request = CaseRequest {
            op: case.operation,
            implementation,
            heads: case.heads.heads,
            head_dim: case.heads.head_dim,
            lengths: case.layout.lengths().collect(),
            qk_norm: case.qk_norm(),
            backward: case.pass.has_backward(),
            terms: Terms::new(case.dtype, threads, effort),
        };
        self.ask(&request)
    }

    /// Measures the product of two square matrices.
    ///
    /// # Errors
    ///
    /// When the program breaks off.
    pub fn gemm(
        &mut self,
        size: usize,
        dtype: Dtype,
        threads: usize,
        effort: Effort,
    ) -> Result<Result<Sample, String>, BenchError> {
        self.ask(&GemmRequest { op: "gemm", size, terms: Terms::new(dtype, threads, effort) })
    }

    fn ask(&mut self, request: &impl Serialize) -> Result<Result<Sample, String>, BenchError> {
        let mut line = serde_json::to_string(request).expect("requests are plain values");
        line.push('\n');
        let requests = self.requests.as_mut().expect("it stays open until the end");
        if let Err(error) = requests.write_all(line.as_bytes()) {
            return Err(self.broken(error.to_string()));
        }
        match self.read()? {
            Answer::Times { times_ms } if times_ms.is_empty() => {
                Err(self.broken("it timed nothing".to_owned()))
            }
            Answer::Times { times_ms } => Ok(Ok(Sample::new(times_ms, None))),
            Answer::Refusal { error } => Ok(Err(error)),
        }
    }

    fn read<T: for<'a> Deserialize<'a>>(&mut self) -> Result<T, BenchError> {
        let mut line = String::new();
        match self.answers.read_line(&mut line) {
            Ok(0) => Err(self.broken("it ended".to_owned())),
            Ok(_) => serde_json::from_str(&line)
                .map_err(|_| self.broken(format!("it said `{}`", line.trim_end()))),
            Err(error) => Err(self.broken(error.to_string())),
        }
    }

    fn broken(&self, reason: String) -> BenchError {
        BenchError::Peer { python: self.python.clone(), reason }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The program ends when it can read no more requests.
        drop(self.requests.take());
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::arguments::{Heads, Pass};
    use crate::layout::Layout;

    #[test]
    fn a_python_that_is_not_there_is_an_error() {
        let message = Peer::start(Path::new("/no/such/python")).unwrap_err().to_string();
        assert!(message.contains("/no/such/python") && message.contains("--python"), "{message}");
        assert!(!message.contains('\n'));
    }

    #[test]
    fn a_program_that_is_no_python_is_an_error() {
        let message = Peer::start(Path::new("true")).unwrap_err().to_string();
        assert!(message.contains("`true` broke off (it ended)"), "{message}");
    }

    #[test]
    fn requests_are_what_the_program_reads() {
        let case = Case {
            operation: Operation::AttentionVarlen,
            heads: Heads::new(2, 8),
            layout: Layout::uniform(2, 3),
            dtype: Dtype::F32,
            pass: Pass::Both,
        };
        let effort = Effort { repeats: 5, max_seconds: 1.0, queued_seconds: 0.0 };
        let request = CaseRequest {
            op: case.operation,
            implementation: TorchImplementation::EagerV2,
            heads: case.heads.heads,
            head_dim: case.heads.head_dim,
            lengths: case.layout.lengths().collect(),
            qk_norm: case.qk_norm(),
            backward: case.pass.has_backward(),
            terms: Terms::new(case.dtype, 2, effort),
        };
        let expected = serde_json::json!({
            "op": "attention_varlen", "implementation": "eager_v2", "heads": 2, "head_dim": 8,
            "lengths": [3, 3], "qk_norm": false, "backward": true, "dtype": "f32", "threads": 2,
            "repeats": 5, "max_seconds": 1.0,
        });
        assert_eq!(serde_json::to_value(&request).unwrap(), expected);
    }
}
