//! Everything asked for, one after another.

use burn_vision_attention::AttentionImplementation;
use examples::devices::{NamedDevice, device};
use rayon::ThreadPoolBuilder;

use crate::BenchError;
use crate::arguments::{Bench, Implementation, Operation, Pass, Scaling};
use crate::case::Case;
use crate::machine::{
    Calibration, Machine, copy_on_device, copy_on_host, cores, gemm, gemm_gflops,
};
use crate::measure::{Effort, Failure, Sample, measure};
use crate::peer::{Peer, TorchImplementation};
use crate::plan::{Point, or_default, points};
use crate::report::{Contender, Report, Row, Skipped, TORCH, ratios};
use crate::workload::{Candidate, MOST_SCORES, obstacle, prepare};

/// Where `eager`, which is there to compare with, runs without being asked for.
const SMALL_SCORES: usize = 256 << 20;

/// Seconds of calls in a row between two waits for a device that works beside the host.
const QUEUED_SECONDS: f64 = 5e-3;

/// Runs what the arguments ask for and shows each row as it comes. Where the arguments name a file for
/// the results it holds those so far after each case.
///
/// # Errors
///
/// When a device or the peer is missing, cannot do what is asked for, or fails.
pub fn run(arguments: &Bench, progress: &mut dyn FnMut(String)) -> Result<Report, BenchError> {
    let devices = arguments.devices.iter().map(|name| device(name));
    let devices = devices.collect::<Result<Vec<NamedDevice>, _>>()?;
    devices.iter().try_for_each(|device| check(arguments, device))?;
    if arguments.peer.is_some() && arguments.passes().contains(&Pass::Backward) {
        return Err(BenchError::PeerPass);
    }
    let peer = arguments.peer.map(|_| Peer::start(&arguments.python)).transpose()?;
    let machine = Machine::this(peer.as_ref().map(|peer| peer.version().to_owned()));
    let report = Report {
        machine,
        calibrations: Vec::new(),
        rows: Vec::new(),
        skipped: Vec::new(),
        ratios: Vec::new(),
    };
    let mut runner = Runner { arguments, devices, peer, progress, report };
    for point in points(arguments, cores()) {
        runner.point(&point)?;
        if let Some(file) = &arguments.json {
            runner.report.write(file)?;
        }
    }
    let mut report = runner.report;
    report.ratios = ratios(&report.rows);
    Ok(report)
}

/// Whether a device can do what is asked for.
fn check(arguments: &Bench, device: &NamedDevice) -> Result<(), BenchError> {
    let NamedDevice { name, device } = device;
    if !device.supports_dtype(arguments.dtype.burn()) {
        return Err(BenchError::Dtype { device: name, dtype: arguments.dtype });
    }
    let varies = arguments.scaling.contains(&Scaling::Threads);
    if !keeps_to_threads(name) && (varies || arguments.threads.is_some()) {
        let option = if varies { "--scaling threads" } else { "--threads" };
        return Err(BenchError::Threads { option, device: name });
    }
    Ok(())
}

/// Only Flex computes in the pool of threads that it is called from.
fn keeps_to_threads(device: &str) -> bool {
    device == "flex"
}

struct Runner<'a> {
    arguments: &'a Bench,
    devices: Vec<NamedDevice>,
    peer: Option<Peer>,
    progress: &'a mut dyn FnMut(String),
    report: Report,
}

impl Runner<'_> {
    fn effort(&self, device: &str) -> Effort {
        let &Bench { repeats, max_seconds, .. } = self.arguments;
        let waits_for_each = device == TORCH || is_on_host(device);
        let queued_seconds = if waits_for_each { 0.0 } else { QUEUED_SECONDS };
        Effort { repeats, max_seconds, queued_seconds }
    }

    /// A case on every device, then by the peer: what is compared runs at about the same time.
    fn point(&mut self, point: &Point) -> Result<(), BenchError> {
        for index in 0..self.devices.len() {
            let device = self.devices[index].clone();
            for candidate in self.candidates(&point.case) {
                self.candidate(point, &device, candidate)?;
            }
        }
        let Some(mut peer) = self.peer.take() else { return Ok(()) };
        for implementation in self.peer_implementations(&point.case) {
            self.peer_candidate(point, &mut peer, implementation)?;
        }
        self.peer = Some(peer);
        Ok(())
    }

    fn candidates(&self, case: &Case) -> Vec<Candidate> {
        use AttentionImplementation::{EagerV2, FlashAttention2, Sdpa};
        if case.operation == Operation::RopeQkNorm {
            return vec![Candidate::RopeQkNorm, Candidate::Composed];
        }
        let ours = [FlashAttention2, Sdpa, EagerV2].map(Implementation::Ours);
        let mut chosen = or_default(&self.arguments.implementations, &ours).to_vec();
        if self.arguments.implementations.is_empty() {
            chosen.extend(self.runs_eager(case).then_some(EAGER));
            let has_masked = case.operation != Operation::Tower;
            chosen.extend(has_masked.then_some(Implementation::BurnMasked));
        }
        chosen.into_iter().map(Candidate::Attention).collect()
    }

    fn runs_eager(&self, case: &Case) -> bool {
        let asked = self.arguments.implementations.contains(&EAGER);
        let small =
            self.arguments.implementations.is_empty() && case.score_bytes(EAGER) <= SMALL_SCORES;
        (asked && case.score_bytes(EAGER) <= MOST_SCORES) || small
    }

    fn peer_implementations(&self, case: &Case) -> Vec<TorchImplementation> {
        use TorchImplementation::{Eager, EagerV2, Sdpa};
        match case.operation {
            Operation::Tower => Vec::new(),
            // It has one way, whose name says nothing.
            Operation::RopeQkNorm => vec![Sdpa],
            _ if self.runs_eager(case) => vec![Eager, EagerV2, Sdpa],
            _ => vec![EagerV2, Sdpa],
        }
    }

    fn candidate(
        &mut self,
        point: &Point,
        device: &NamedDevice,
        candidate: Candidate,
    ) -> Result<(), BenchError> {
        let case = &point.case;
        let contender = Contender {
            device: device.name,
            implementation: candidate.name(),
            ours: candidate.is_ours(),
            threads: keeps_to_threads(device.name).then_some(point.threads),
        };
        let obstacle = obstacle(case, candidate, &device.device);
        if let Some(reason) = obstacle.or_else(|| self.too_long(point, contender)) {
            self.skip(case, contender, reason);
            return Ok(());
        }
        let yardstick = self.calibration(device, contender.threads)?;
        let effort = self.effort(device.name);
        let sync = || synchronise(device, case.to_string());
        let sample = in_pool(contender.threads, || {
            let work = prepare(case, candidate, &device.device);
            measure(&work, &sync, effort)
        })?;
        let mut sample = match sample {
            Ok(sample) => sample,
            Err(Failure::Device(error)) => return Err(error),
            Err(Failure::Results(reason)) => {
                self.skip(case, contender, reason);
                return Ok(());
            }
        };
        // Other devices keep memory of their own, or blocks that they took from the host before.
        if !is_on_host(device.name) {
            sample.peak_bytes = None;
        }
        self.add(Row::new(case, contender, &sample, &yardstick, point.scaling));
        Ok(())
    }

    fn peer_candidate(
        &mut self,
        point: &Point,
        peer: &mut Peer,
        implementation: TorchImplementation,
    ) -> Result<(), BenchError> {
        let Point { case, threads, scaling } = point;
        let name = match case.operation {
            Operation::RopeQkNorm => "torch_composed",
            _ => implementation.name(),
        };
        let threads = Some(*threads);
        let contender = Contender { device: TORCH, implementation: name, ours: false, threads };
        if let Some(reason) = self.too_long(point, contender) {
            self.skip(case, contender, reason);
            return Ok(());
        }
        let effort = self.effort(TORCH);
        let yardstick = match self.peer_calibration(peer, point.threads)? {
            Ok(yardstick) => yardstick,
            Err(reason) => {
                self.skip(case, contender, reason);
                return Ok(());
            }
        };
        match peer.measure(case, implementation, point.threads, effort)? {
            Ok(sample) => self.add(Row::new(case, contender, &sample, &yardstick, *scaling)),
            Err(reason) => self.skip(case, contender, reason),
        }
        Ok(())
    }

    /// Why a point of a curve is left out, judged by the point before it.
    fn too_long(&self, point: &Point, contender: Contender<'_>) -> Option<String> {
        point.scaling?;
        let before = self.report.rows.iter().rev().find(|row| {
            row.scaling == point.scaling
                && (row.device.as_str(), row.implementation)
                    == (contender.device, contender.implementation)
        })?;
        let flops = point.case.flops()?;
        let seconds = flops / before.gflops? / 1e9;
        let most = self.arguments.max_seconds;
        (seconds > most).then(|| {
            format!("a call would take about {seconds:.0} s, more than --max-seconds {most}")
        })
    }

    /// Measures the device once for each number of threads.
    fn calibration(
        &mut self,
        device: &NamedDevice,
        threads: Option<usize>,
    ) -> Result<Calibration, BenchError> {
        if let Some(known) = self.known(device.name, threads) {
            return Ok(known);
        }
        let &Bench { gemm: size, dtype, copy, .. } = self.arguments;
        let (effort, copied) = (self.effort(device.name), copy << 20);
        let sync = || synchronise(device, "calibration".to_owned());
        let (product, copy) = in_pool(threads, || {
            let product = gemm(&device.device, dtype, size, &sync, effort)?;
            let copy = if is_on_host(device.name) {
                copy_on_host(copied, effort)
            } else {
                copy_on_device(&device.device, copied, &sync, effort)?
            };
            Ok((product, copy))
        })?
        .map_err(|failure| match failure {
            Failure::Device(error) => error,
            Failure::Results(reason) => BenchError::Execution {
                device: device.name,
                what: "calibration".to_owned(),
                reason,
            },
        })?;
        let copy_gbs = Some(copy);
        Ok(self.calibrated(device.name, threads, &product, copy_gbs))
    }

    fn peer_calibration(
        &mut self,
        peer: &mut Peer,
        threads: usize,
    ) -> Result<Result<Calibration, String>, BenchError> {
        if let Some(known) = self.known(TORCH, Some(threads)) {
            return Ok(Ok(known));
        }
        let (size, dtype) = (self.arguments.gemm, self.arguments.dtype);
        let sample = peer.gemm(size, dtype, threads, self.effort(TORCH))?;
        // The host copies as fast for one as for the other.
        let host = self.report.calibrations.iter();
        let mut host = host.filter(|known| is_on_host(&known.device));
        let copy = host.find(|known| known.threads == Some(threads)).and_then(|host| host.copy_gbs);
        Ok(sample.map(|sample| self.calibrated(TORCH, Some(threads), &sample, copy)))
    }

    fn known(&self, device: &str, threads: Option<usize>) -> Option<Calibration> {
        let mut calibrations = self.report.calibrations.iter();
        calibrations.find(|known| known.device == device && known.threads == threads).cloned()
    }

    fn calibrated(
        &mut self,
        device: &str,
        threads: Option<usize>,
        product: &Sample,
        copy_gbs: Option<f64>,
    ) -> Calibration {
        let calibration = Calibration {
            device: device.to_owned(),
            threads,
            dtype: self.arguments.dtype,
            gemm_gflops: gemm_gflops(self.arguments.gemm, product),
            copy_gbs,
        };
        self.report.calibrations.push(calibration.clone());
        calibration
    }

    fn add(&mut self, row: Row) {
        (self.progress)(row.to_string());
        self.report.rows.push(row);
    }

    fn skip(&mut self, case: &Case, contender: Contender<'_>, reason: String) {
        let skipped = Skipped {
            op: case.operation,
            device: contender.device.to_owned(),
            implementation: contender.implementation,
            heads: case.heads,
            layout: case.layout.clone(),
            reason,
        };
        (self.progress)(skipped.to_string());
        self.report.skipped.push(skipped);
    }
}

const EAGER: Implementation = Implementation::Ours(AttentionImplementation::Eager);

/// Whether a device's tensors are plain memory of this program.
fn is_on_host(device: &str) -> bool {
    matches!(device, "flex" | "ndarray")
}

fn synchronise(device: &NamedDevice, what: String) -> Result<(), BenchError> {
    device.device.sync().map_err(|error| BenchError::Execution {
        device: device.name,
        what,
        reason: error.to_string().replace('\n', " "),
    })
}

/// Runs `call` in a pool of so many threads, or where it is.
fn in_pool<T: Send>(
    threads: Option<usize>,
    call: impl FnOnce() -> T + Send,
) -> Result<T, BenchError> {
    let Some(threads) = threads else { return Ok(call()) };
    let pool = ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|source| BenchError::Pool { threads, source })?;
    Ok(pool.install(call))
}
