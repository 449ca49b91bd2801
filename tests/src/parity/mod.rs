//! Every golden case on every device by every implementation.

mod attention;
mod checkpoint;
mod encoder;
mod preprocess;

use std::fmt;
use std::path::Path;

use burn::tensor::Tensor;
use burn_vision_attention::AttentionImplementation;

use crate::devices::NamedDevice;
use crate::fixtures::{self, Fixture, FixtureError, Manifest, Preprocess};

/// What to run.
#[derive(Clone, Debug)]
pub struct Request {
    /// Devices to run on.
    pub devices: Vec<NamedDevice>,
    /// Implementations to run.
    pub implementations: Vec<AttentionImplementation>,
    /// Whether gradients are compared too.
    pub gradients: bool,
}

/// A tensor beside its expected values.
#[derive(Clone, Debug, PartialEq)]
pub struct Check {
    /// The tensor's name in the golden data.
    pub tensor: String,
    /// `max |ours - expected|`; NaN counts as infinite.
    pub error: f64,
    /// The largest error allowed.
    pub bound: f64,
}

impl Check {
    /// Whether the error is within its bound.
    pub fn holds(&self) -> bool {
        self.error <= self.bound
    }

    /// The error as a share of its bound.
    pub fn share(&self) -> f64 {
        if self.bound > 0.0 { self.error / self.bound } else { self.error }
    }
}

/// How a case ended.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// It ran; these are its comparisons.
    Ran(Vec<Check>),
    /// It cannot run here, for this reason.
    Skipped(String),
    /// It broke off.
    Broke(String),
}

/// One case on one device by one implementation.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// `attention`, `encoder`, `checkpoint` or `preprocess`.
    pub kind: &'static str,
    /// The case's name.
    pub case: String,
    /// The device's name; `host` for preprocessing.
    pub device: &'static str,
    /// The implementation's name; `-` for preprocessing.
    pub implementation: &'static str,
    /// How it ended.
    pub verdict: Verdict,
}

impl Outcome {
    /// Whether it ran and every comparison holds; a case without a comparison does not pass.
    pub fn passed(&self) -> bool {
        matches!(&self.verdict, Verdict::Ran(checks)
            if !checks.is_empty() && checks.iter().all(Check::holds))
    }

    /// Whether it was skipped.
    pub fn skipped(&self) -> bool {
        matches!(self.verdict, Verdict::Skipped(_))
    }

    /// The comparison nearest to, or furthest over, its bound.
    pub fn worst(&self) -> Option<&Check> {
        let Verdict::Ran(checks) = &self.verdict else { return None };
        checks.iter().max_by(|a, b| a.share().total_cmp(&b.share()))
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match &self.verdict {
            Verdict::Skipped(_) => "skip",
            _ if self.passed() => "ok",
            _ => "FAIL",
        };
        let Self { kind, case, device, implementation, .. } = self;
        write!(f, "{word:<4} {kind:<10} {case:<18} {device:<8} {implementation:<18}")?;
        match (&self.verdict, self.worst()) {
            (Verdict::Skipped(reason) | Verdict::Broke(reason), _) => write!(f, "{reason}"),
            (Verdict::Ran(_), None) => write!(f, "nothing was compared"),
            (Verdict::Ran(checks), Some(Check { tensor, error, bound })) => {
                let count = checks.len();
                write!(f, "worst of {count}: {tensor} error {error:.2e} bound {bound:.2e}")
            }
        }
    }
}

/// Runs every case of a folder's `manifest.json` and `preprocess.json`, handing each outcome to
/// `report` as it comes.
///
/// # Errors
///
/// When one of the two lists cannot be read. A case whose own files are broken fails by itself.
pub fn run(
    directory: &Path,
    request: &Request,
    report: &mut dyn FnMut(Outcome),
) -> Result<(), FixtureError> {
    let manifest: Manifest = fixtures::json(&directory.join("manifest.json"))?;
    let images: Preprocess = fixtures::json(&directory.join("preprocess.json"))?;

    if !request.gradients {
        for case in &images.cases {
            let verdict = preprocess::run(directory, case, images.atol);
            report(outcome("preprocess", &case.name, "host", "-", verdict));
        }
    }
    for device in &request.devices {
        for &implementation in &request.implementations {
            let mut push = |kind, case: &str, verdict| {
                report(outcome(kind, case, device.name, implementation.name(), verdict));
            };
            for case in &manifest.attention {
                let layer = attention::Layer { directory, case, device, implementation };
                push("attention", &case.name, layer.run(request.gradients));
            }
            for case in &manifest.encoder {
                let tower = encoder::Tower { directory, case, device, implementation };
                push("encoder", &case.name, tower.run(request.gradients));
            }
            if !request.gradients {
                for case in &manifest.checkpoint {
                    push(
                        "checkpoint",
                        &case.name,
                        checkpoint::run(directory, case, device, implementation),
                    );
                }
            }
        }
    }
    Ok(())
}

fn outcome(
    kind: &'static str,
    case: &str,
    device: &'static str,
    implementation: &'static str,
    verdict: Result<Verdict, CaseError>,
) -> Outcome {
    let verdict = verdict.unwrap_or_else(|error| Verdict::Broke(error.to_string()));
    Outcome { kind, case: case.to_owned(), device, implementation, verdict }
}

type CaseError = Box<dyn std::error::Error>;

/// Runs `case` unless the implementation resolves to another one on the device.
fn unless_unsupported(
    resolution: &burn_vision_attention::Resolution,
    case: impl FnOnce() -> Result<Vec<Check>, CaseError>,
) -> Result<Verdict, CaseError> {
    match resolution.fallbacks.first() {
        Some(fallback) => Ok(Verdict::Skipped(fallback.reason.clone())),
        None => case().map(Verdict::Ran),
    }
}

/// Compares a tensor with the golden values of `name`.
fn check<const D: usize>(
    golden: &Fixture,
    name: &str,
    tensor: Tensor<D>,
    bound: impl FnOnce(&[f64]) -> f64,
) -> Result<Check, CaseError> {
    let data = tensor.try_into_data()?;
    let values: Vec<f64> = data.iter::<f64>().collect();
    check_values(golden, name, data.shape(), &values, bound)
}

/// Compares values of a shape with the golden values of `name`.
fn check_values(
    golden: &Fixture,
    name: &str,
    shape: &[usize],
    values: &[f64],
    bound: impl FnOnce(&[f64]) -> f64,
) -> Result<Check, CaseError> {
    let expected = golden.data(name)?;
    if expected.shape()[..] != *shape {
        return Err(format!("{name}: shape {shape:?}, expected {:?}", expected.shape()).into());
    }
    let expected = golden.values(name)?;
    let error = max_difference(values, &expected);
    Ok(Check { tensor: name.to_owned(), error, bound: bound(&expected) })
}

/// `max |a - b|`; infinite where one of them is NaN.
fn max_difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |max, difference| {
        if difference.is_nan() { f64::INFINITY } else { f64::max(max, difference) }
    })
}

/// `atol + rtol * max |expected|`.
fn relative(atol: f64, rtol: f64) -> impl Fn(&[f64]) -> f64 {
    move |expected| atol + rtol * expected.iter().fold(0.0, |max, value| f64::max(max, value.abs()))
}
