//! What can be asked for.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use burn::tensor::DType;
use burn_vision_attention::AttentionImplementation;
use clap::{Args, ValueEnum};
use serde::{Serialize, Serializer};
use thiserror::Error;

use crate::layout::Layout;

/// Arguments of the benchmark.
#[derive(Args, Clone, Debug)]
pub struct Bench {
    /// Device to measure, repeatable: flex, ndarray, wgpu, cpu, cuda.
    #[arg(long = "device", value_name = "NAME", default_value = "flex")]
    pub devices: Vec<String>,
    /// What to measure, repeatable; all four by default, and none with --scaling.
    #[arg(long = "op", value_enum, value_name = "NAME")]
    pub operations: Vec<Operation>,
    /// Measure a forward and a backward pass together instead of a forward pass.
    #[arg(long)]
    pub backward: bool,
    /// Which passes to measure, repeatable: forward, both together, or backward alone.
    #[arg(long = "pass", value_enum, value_name = "PASS", conflicts_with = "backward")]
    pub passes: Vec<Pass>,
    /// Images in the batch, repeatable: `pages` or SEGMENTSxLENGTH. By default 1x4096, 4x1024, 64x64
    /// and pages; for the tower pages alone.
    #[arg(long = "layout", value_name = "LAYOUT")]
    pub layouts: Vec<Layout>,
    /// Heads and dimensions of each, repeatable; 24x64 has norms of q and k. By default 24x64, 12x128
    /// and 16x80, and with --scaling 12x128. The tower has its own.
    #[arg(long = "heads", value_name = "HEADSxDIM")]
    pub heads: Vec<Heads>,
    /// Implementation of attention, repeatable: one of the five, or burn_masked (Burn's attention with
    /// a mask over the whole batch). By default flash_attention_2, sdpa, eager_v2 and burn_masked, and
    /// eager where its scores take at most 256 MiB.
    #[arg(long = "implementation", value_name = "NAME")]
    pub implementations: Vec<Implementation>,
    /// Timed calls of each, after warm-up.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = positive)]
    pub repeats: usize,
    /// Threads of the CPU device and of torch; all cores by default.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub threads: Option<usize>,
    /// Float type of activations and weights.
    #[arg(long, value_enum, value_name = "NAME", default_value_t = Dtype::F32)]
    pub dtype: Dtype,
    /// Measure another framework's CPU layers in the same run, layout by layout.
    #[arg(long, value_enum, value_name = "NAME")]
    pub peer: Option<PeerName>,
    /// The Python that has torch.
    #[arg(long, value_name = "PATH", default_value = "python3")]
    pub python: PathBuf,
    /// Measure attention_varlen against the number of tokens, of segments or of threads, repeatable.
    #[arg(long, value_enum, value_name = "AXIS")]
    pub scaling: Vec<Scaling>,
    /// Time for the repeats of one row: longer ones get fewer repeats, and points of --scaling of
    /// which one call would take longer are left out.
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = seconds)]
    pub max_seconds: f64,
    /// Write all results to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw all results to this file.
    #[arg(long, value_name = "FILE.png")]
    pub plot: Option<PathBuf>,
    /// Side of the matrices whose product gives the machine's rate.
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = positive, hide = true)]
    pub gemm: usize,
    /// MiB of the array whose copy gives a device's rate.
    #[arg(long, value_name = "MIB", default_value_t = 128, value_parser = positive, hide = true)]
    pub copy: usize,
}

impl Bench {
    /// The passes to measure, in order.
    pub fn passes(&self) -> &[Pass] {
        match (&self.passes[..], self.backward) {
            ([], false) => &[Pass::Forward],
            ([], true) => &[Pass::Both],
            (asked, _) => asked,
        }
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// The attention layer of a block, with rotary embedding and without biases.
    Layer,
    /// Attention of given q, k and v.
    AttentionVarlen,
    /// Norm and rotation of given q and k.
    RopeQkNorm,
    /// Two blocks of dots.ocr's tower, with its patch embedding and its adapter.
    Tower,
}

/// What of an operation is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// The forward pass.
    Forward,
    /// A forward and a backward pass together.
    Both,
    /// The backward pass alone: the forward pass has run before.
    Backward,
}

impl Pass {
    /// Whether gradients are computed.
    pub fn has_backward(self) -> bool {
        self != Self::Forward
    }

    /// As table headings have it.
    pub fn short(self) -> &'static str {
        match self {
            Self::Forward => "fwd",
            Self::Both => "fwd+bwd",
            Self::Backward => "bwd",
        }
    }

    /// As sentences have it, after what is measured; a forward pass goes without saying.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Forward => "",
            Self::Both => " forward and backward",
            Self::Backward => " backward",
        }
    }
}

/// What the time is plotted against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum Scaling {
    /// 1024 to 65,536 tokens in one segment.
    Tokens,
    /// 1 to 1000 segments of 64 tokens.
    Segments,
    /// 1, 2, 4, ... threads, on the first layout.
    Threads,
}

/// Another framework.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PeerName {
    /// PyTorch on the CPU.
    Torch,
}

/// The float types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// 32 bits.
    F32,
    /// 16 bits, 5 of them exponent.
    F16,
    /// 16 bits, 8 of them exponent.
    Bf16,
}

impl Dtype {
    /// As Burn calls it.
    pub fn burn(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }

    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        self.burn().size()
    }
}

/// Heads and the dimensions of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Number of heads.
    pub heads: usize,
    /// Dimensions of one head.
    pub head_dim: usize,
}

impl Heads {
    /// `heads` heads of `head_dim` dimensions.
    pub const fn new(heads: usize, head_dim: usize) -> Self {
        Self { heads, head_dim }
    }

    /// Width of the hidden states.
    pub const fn dim(self) -> usize {
        self.heads * self.head_dim
    }
}

impl fmt::Display for Heads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}x{}", self.heads, self.head_dim))
    }
}

/// Heads that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "heads `{0}`: expected HEADSxDIM such as 24x64, at most 256 heads of at most 1024 dimensions, a \
     multiple of 4"
)]
pub struct HeadsError(String);

impl FromStr for Heads {
    type Err = HeadsError;

    fn from_str(text: &str) -> Result<Self, HeadsError> {
        let parse = || {
            let (heads, head_dim) = text.split_once('x')?;
            let (heads, head_dim) = (heads.parse::<usize>().ok()?, head_dim.parse::<usize>().ok()?);
            let fits = (1..=256).contains(&heads)
                && (4..=1024).contains(&head_dim)
                && head_dim.is_multiple_of(4);
            fits.then_some(Self::new(heads, head_dim))
        };
        parse().ok_or_else(|| HeadsError(text.to_owned()))
    }
}

/// How attention is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Implementation {
    /// By one of the library's five.
    Ours(AttentionImplementation),
    /// By Burn's `attention` over the whole batch, with a mask between the segments.
    BurnMasked,
}

impl Implementation {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ours(implementation) => implementation.name(),
            Self::BurnMasked => "burn_masked",
        }
    }

    /// Whether it holds the scores of all tokens with all tokens.
    pub fn is_dense(self) -> bool {
        matches!(self, Self::BurnMasked | Self::Ours(AttentionImplementation::Eager))
    }
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is none of the implementations.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "implementation `{0}`: expected eager, eager_v2, sdpa, flash_attention_2, flash_attention_3 or burn_masked"
)]
pub struct ImplementationError(String);

impl FromStr for Implementation {
    type Err = ImplementationError;

    fn from_str(name: &str) -> Result<Self, ImplementationError> {
        if name == Self::BurnMasked.name() {
            return Ok(Self::BurnMasked);
        }
        name.parse().map(Self::Ours).map_err(|_| ImplementationError(name.to_owned()))
    }
}

macro_rules! show_as_value {
    ($($type:ty),*) => {$(
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.to_possible_value().expect("no variant is skipped").get_name())
            }
        }
    )*};
}

show_as_value!(Operation, Pass, Scaling, Dtype);

/// For fields that are shown in results by their name.
pub(crate) fn by_name<T: fmt::Display, S: Serializer>(
    value: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

fn positive(text: &str) -> Result<usize, String> {
    let value = text.parse::<usize>().ok().filter(|value| *value > 0);
    value.ok_or_else(|| "expected a whole number from 1 on".to_owned())
}

fn seconds(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| value.is_finite() && *value > 0.0);
    value.ok_or_else(|| "expected a positive number of seconds".to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::Parser;
    use rstest::rstest;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        bench: Bench,
    }

    #[test]
    fn names_of_the_contract_are_taken() {
        let line = "bench --device flex --device wgpu --op layer --op attention_varlen --op rope_qk_norm \
                    --op tower --backward --layout 1x4096 --layout pages --heads 16x72 \
                    --implementation sdpa --implementation burn_masked --repeats 3 --threads 2 --peer torch \
                    --python p --json a.json --plot a.png --scaling tokens --scaling threads --dtype bf16";
        let bench = Cli::try_parse_from(line.split_whitespace()).unwrap().bench;
        assert_eq!(bench.operations.len(), 4);
        assert_eq!(bench.heads, [Heads::new(16, 72)]);
        let sdpa = Implementation::Ours(AttentionImplementation::Sdpa);
        assert_eq!(bench.implementations, [sdpa, Implementation::BurnMasked]);
        assert_eq!((bench.dtype, bench.dtype.bytes()), (Dtype::Bf16, 2));
    }

    #[rstest]
    #[case("--heads", "24", "heads `24`")]
    #[case("--heads", "24x6", "heads `24x6`")]
    #[case("--heads", "0x64", "heads `0x64`")]
    #[case("--layout", "1", "layout `1`")]
    #[case("--implementation", "flash", "implementation `flash`")]
    #[case("--repeats", "0", "from 1 on")]
    #[case("--max-seconds", "nan", "positive number")]
    #[case("--op", "mlp", "rope_qk_norm")]
    #[case("--pass", "all", "backward")]
    #[case("--copy", "0", "from 1 on")]
    fn what_cannot_be_read_is_said(
        #[case] option: &str,
        #[case] value: &str,
        #[case] message: &str,
    ) {
        let error = Cli::try_parse_from(["bench", option, value]).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }

    #[rstest]
    #[case("", &[Pass::Forward])]
    #[case("--backward", &[Pass::Both])]
    #[case("--pass backward --pass forward", &[Pass::Backward, Pass::Forward])]
    fn passes_are_named_or_implied(#[case] line: &str, #[case] passes: &[Pass]) {
        let words = std::iter::once("bench").chain(line.split_whitespace());
        assert_eq!(Cli::try_parse_from(words).unwrap().bench.passes(), passes);
    }

    #[rstest]
    #[case(Pass::Both.to_string(), "both")]
    #[case(Operation::AttentionVarlen.to_string(), "attention_varlen")]
    #[case(Scaling::Tokens.to_string(), "tokens")]
    #[case(Dtype::Bf16.to_string(), "bf16")]
    #[case(Heads::new(16, 80).to_string(), "16x80")]
    fn names_are_shown_as_they_are_taken(#[case] shown: String, #[case] expected: &str) {
        assert_eq!(shown, expected);
    }
}
