//! Results as rows, tables and JSON.

use std::fmt;
use std::fs;
use std::path::Path;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::BenchError;
use crate::arguments::{Dtype, Heads, Operation, Pass, Scaling, by_name};
use crate::case::Case;
use crate::layout::Layout;
use crate::machine::{Calibration, Machine};
use crate::measure::Sample;

/// One case by one implementation on one device.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What ran.
    pub op: Operation,
    /// The device's name, or `torch`.
    pub device: String,
    /// How it was computed.
    pub implementation: &'static str,
    /// Number of heads.
    pub heads: usize,
    /// Dimensions of a head.
    pub head_dim: usize,
    /// Images in the batch.
    pub segments: usize,
    /// Tokens of all images.
    pub tokens: usize,
    /// Float type of activations and weights.
    pub dtype: Dtype,
    /// Whether gradients are computed.
    pub backward: bool,
    /// What is timed.
    pub pass: Pass,
    /// Time of a call, in milliseconds; median of the repeats.
    pub ms: f64,
    /// Time of the shortest call, in milliseconds.
    pub best_ms: f64,
    /// How often it was timed.
    pub repeats: usize,
    /// Rate of the operations that have to be done ([`Case::flops`]), in 10^9 a second.
    pub gflops: Option<f64>,
    /// That rate as a part of the device's rate of a large matrix product.
    pub gemm_share: Option<f64>,
    /// Bytes that have to be moved ([`Case::moved_bytes`]), in 10^9 a second.
    pub gbs: Option<f64>,
    /// Time as a multiple of copying the bytes that have to be moved ([`Case::moved_bytes`]).
    pub copy_ratio: Option<f64>,
    /// The most bytes of the host's memory in use above those before the call; on CPU devices alone.
    pub peak_bytes: Option<usize>,
    /// These as a multiple of inputs and outputs ([`Case::visible_bytes`]).
    pub peak_ratio: Option<f64>,
    /// Threads, where the device keeps to a number.
    pub threads: Option<usize>,
    /// Whether q and k are normalised per head.
    pub qk_norm: bool,
    /// The images, by name.
    pub layout: String,
    /// What the time is measured against, where it is a point of a curve.
    pub scaling: Option<Scaling>,
    /// Whether it is this library, rather than something to compare with.
    #[serde(skip)]
    pub ours: bool,
}

/// Who computed a row.
#[derive(Clone, Copy, Debug)]
pub struct Contender<'a> {
    /// The device's name, or `torch`.
    pub device: &'a str,
    /// The implementation's.
    pub implementation: &'static str,
    /// Whether it is this library.
    pub ours: bool,
    /// Threads, where the device keeps to a number.
    pub threads: Option<usize>,
}

impl Row {
    /// A case, who computed it, what it took, and what the device reaches.
    pub fn new(
        case: &Case,
        contender: Contender<'_>,
        sample: &Sample,
        yardstick: &Calibration,
        scaling: Option<Scaling>,
    ) -> Self {
        let gflops = case.flops().map(|flops| flops / sample.median_ms / 1e6);
        let gbs = case.moved_bytes().map(|bytes| bytes as f64 / sample.median_ms / 1e6);
        Self {
            op: case.operation,
            device: contender.device.to_owned(),
            implementation: contender.implementation,
            heads: case.heads.heads,
            head_dim: case.heads.head_dim,
            segments: case.layout.len(),
            tokens: case.layout.tokens(),
            dtype: case.dtype,
            backward: case.pass.has_backward(),
            pass: case.pass,
            ms: sample.median_ms,
            best_ms: sample.best_ms,
            repeats: sample.repeats,
            gflops,
            gemm_share: gflops.map(|rate| rate / yardstick.gemm_gflops),
            gbs,
            copy_ratio: yardstick.copy_gbs.zip(gbs).map(|(copy, rate)| copy / rate),
            peak_bytes: sample.peak_bytes,
            peak_ratio: sample.peak_bytes.map(|peak| peak as f64 / case.visible_bytes() as f64),
            threads: contender.threads,
            qk_norm: case.qk_norm(),
            layout: case.layout.to_string(),
            scaling,
            ours: contender.ours,
        }
    }

    /// The head layout.
    pub fn head_layout(&self) -> Heads {
        Heads::new(self.heads, self.head_dim)
    }

    /// What a row of another device must share for the two to be compared.
    fn is_same_work(&self, other: &Self) -> bool {
        let key = |row: &Self| {
            let shape = (row.op, row.heads, row.head_dim, row.layout.clone(), row.qk_norm);
            (shape, row.dtype, row.pass, row.scaling)
        };
        // A device without a number of threads is taken as it is.
        let threads = self.threads.is_none() || other.threads.is_none();
        key(self) == key(other) && (threads || self.threads == other.threads)
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pass = self.pass.suffix();
        let (heads, layout) = (self.head_layout(), &self.layout);
        let threads =
            self.threads.map_or_else(String::new, |threads| format!(", {threads} threads"));
        write!(
            f,
            "{} {heads} {layout} {}{pass} by {} on {}{threads}: {:.2} ms",
            self.op, self.dtype, self.implementation, self.device, self.ms
        )
    }
}

/// Something that was asked for and did not run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// The operation.
    pub op: Operation,
    /// The device's name, or `torch`.
    pub device: String,
    /// The implementation.
    pub implementation: &'static str,
    /// Heads and dimensions of each.
    #[serde(serialize_with = "by_name")]
    pub heads: Heads,
    /// The images.
    #[serde(serialize_with = "by_name")]
    pub layout: Layout,
    /// Why.
    pub reason: String,
}

impl Skipped {
    fn is_alike(&self, other: &Self) -> bool {
        let key = |skipped: &Self| (skipped.op, skipped.implementation, skipped.reason.clone());
        key(self) == key(other) && self.device == other.device
    }
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, device, implementation, heads, layout, reason } = self;
        write!(f, "skipped {op} {heads} {layout} by {implementation} on {device}: {reason}")
    }
}

/// The library's fastest on a device over the peer's fastest.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// The operation.
    pub op: Operation,
    /// Heads and dimensions of each.
    #[serde(serialize_with = "by_name")]
    pub heads: Heads,
    /// The images.
    pub layout: String,
    /// Whether gradients are computed.
    pub backward: bool,
    /// What is timed.
    pub pass: Pass,
    /// The library's device.
    pub device: String,
    /// Its threads, where it keeps to a number.
    pub threads: Option<usize>,
    /// The library's fastest implementation.
    pub ours: &'static str,
    /// Its median time in milliseconds.
    pub ours_ms: f64,
    /// The peer's fastest implementation.
    pub peer: &'static str,
    /// Its median time in milliseconds.
    pub peer_ms: f64,
    /// `ours_ms / peer_ms`: below 1 the library is faster.
    pub ratio: f64,
    /// The same of the shortest times of these two.
    pub best_ratio: f64,
}

/// The device name of the peer's rows.
pub const TORCH: &str = "torch";

/// The ratio for every device and case that both ran.
pub fn ratios(rows: &[Row]) -> Vec<Ratio> {
    let faster = |a: &&Row, b: &&Row| a.ms.total_cmp(&b.ms);
    let mut ratios = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        let is_rival =
            |other: &&Row| other.ours && other.device == row.device && other.is_same_work(row);
        let first = rows[..index].iter().all(|other| !is_rival(&other));
        if !row.ours || !first {
            continue;
        }
        let ours = rows.iter().filter(is_rival).min_by(faster);
        let is_peer = |other: &&Row| other.device == TORCH && other.is_same_work(row);
        let peer = rows.iter().filter(is_peer).min_by(faster);
        let Some((ours, peer)) = ours.zip(peer) else { continue };
        ratios.push(Ratio {
            op: row.op,
            heads: row.head_layout(),
            layout: row.layout.clone(),
            backward: row.backward,
            pass: row.pass,
            device: row.device.clone(),
            threads: row.threads,
            ours: ours.implementation,
            ours_ms: ours.ms,
            peer: peer.implementation,
            peer_ms: peer.ms,
            ratio: ours.ms / peer.ms,
            best_ratio: ours.best_ms / peer.best_ms,
        });
    }
    ratios
}

/// Everything that a run found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Where it ran.
    pub machine: Machine,
    /// What each device reaches.
    pub calibrations: Vec<Calibration>,
    /// What was measured.
    pub rows: Vec<Row>,
    /// What was not.
    pub skipped: Vec<Skipped>,
    /// The library against the peer.
    pub ratios: Vec<Ratio>,
}

impl Report {
    /// Writes everything as JSON.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), BenchError> {
        let mut json = serde_json::to_string_pretty(self).expect("rows are plain values");
        json.push('\n');
        fs::write(path, json).map_err(|source| BenchError::Write {
            option: "--json",
            path: path.to_owned(),
            source,
        })
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        let words = ["op", "heads", "layout", "dtype", "pass", "device", "implementation"];
        let numbers = [
            "threads",
            "ms",
            "best",
            "GFLOP/s",
            "of GEMM",
            "GB/s",
            "of copy",
            "peak MiB",
            "of in+out",
        ];
        table.load_preset(presets::NOTHING).set_header(words.iter().chain(&numbers));
        table.add_rows(self.rows.iter().map(|row| {
            let number =
                |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.2}"));
            [
                row.op.to_string(),
                row.head_layout().to_string(),
                row.layout.clone(),
                row.dtype.to_string(),
                row.pass.short().to_owned(),
                row.device.clone(),
                row.implementation.to_owned(),
                row.threads.map_or_else(String::new, |threads| threads.to_string()),
                format!("{:.2}", row.ms),
                format!("{:.2}", row.best_ms),
                row.gflops.map_or_else(String::new, |rate| format!("{rate:.1}")),
                row.gemm_share.map_or_else(String::new, |share| format!("{:.0}%", 100.0 * share)),
                row.gbs.map_or_else(String::new, |rate| format!("{rate:.1}")),
                number(row.copy_ratio),
                number(row.peak_bytes.map(|bytes| bytes as f64 / f64::from(1 << 20))),
                number(row.peak_ratio),
            ]
        }));
        align_right(&mut table, words.len());
        table
    }

    /// What was skipped for the same reason, with heads and layouts of each case.
    fn skipped_alike(&self) -> Vec<(&Skipped, Vec<String>)> {
        let mut groups: Vec<(&Skipped, Vec<String>)> = Vec::new();
        for skipped in &self.skipped {
            let case = format!("{} {}", skipped.heads, skipped.layout);
            match groups.iter_mut().find(|(first, _)| first.is_alike(skipped)) {
                Some((_, cases)) => cases.push(case),
                None => groups.push((skipped, vec![case])),
            }
        }
        groups
    }

    fn ratio_table(&self) -> Table {
        let mut table = Table::new();
        let words = ["op", "heads", "layout", "pass", "device", "ours", "torch"];
        let numbers = ["threads", "ours ms", "torch ms", "ours/torch", "of best"];
        table.load_preset(presets::NOTHING).set_header(words.iter().chain(&numbers));
        table.add_rows(self.ratios.iter().map(|ratio| {
            [
                ratio.op.to_string(),
                ratio.heads.to_string(),
                ratio.layout.clone(),
                ratio.pass.short().to_owned(),
                ratio.device.clone(),
                ratio.ours.to_owned(),
                ratio.peer.to_owned(),
                ratio.threads.map_or_else(String::new, |threads| threads.to_string()),
                format!("{:.2}", ratio.ours_ms),
                format!("{:.2}", ratio.peer_ms),
                format!("{:.2}", ratio.ratio),
                format!("{:.2}", ratio.best_ratio),
            ]
        }));
        align_right(&mut table, words.len());
        table
    }
}

fn align_right(table: &mut Table, from: usize) {
    for column in table.column_iter_mut().skip(from) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { cpu, cores, system, version, burn, torch, debug } = &self.machine;
        let torch = torch.as_ref().map_or_else(String::new, |version| format!(", torch {version}"));
        writeln!(f, "{cpu}, {cores} cores, {system}; version {version}, burn {burn}{torch}")?;
        if *debug {
            writeln!(f, "a development build: the times say nothing; run `cargo xtask bench`")?;
        }
        for calibration in &self.calibrations {
            let Calibration { device, threads, dtype, gemm_gflops, copy_gbs } = calibration;
            let threads = threads.map_or_else(String::new, |n| format!(" on {n} threads"));
            let copy =
                copy_gbs.map_or_else(String::new, |rate| format!(", memory copy {rate:.1} GB/s"));
            writeln!(
                f,
                "{device}{threads}: {dtype} matrix product {gemm_gflops:.1} GFLOP/s{copy}"
            )?;
        }
        write!(f, "\n{}", self.table())?;
        for (Skipped { op, device, implementation, reason, .. }, cases) in self.skipped_alike() {
            let cases = cases.join(", ");
            write!(f, "\nskipped {op} by {implementation} on {device} ({cases}): {reason}")?;
        }
        if !self.ratios.is_empty() {
            write!(f, "\n\n{}", self.ratio_table())?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
