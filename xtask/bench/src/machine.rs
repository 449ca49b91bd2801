//! What the machine is, and what it reaches: the yardsticks of every row.

use std::fs;
use std::num::NonZeroUsize;
use std::thread::available_parallelism;

use burn::tensor::{Device, Distribution, Tensor};
use rayon::prelude::*;
use serde::Serialize;

use crate::arguments::Dtype;
use crate::measure::{Effort, Failure, Results, Sample, measure, timed};
use crate::results::Outputs;

/// The machine and the versions that ran.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The processor's name.
    pub cpu: String,
    /// Logical cores that the program may use.
    pub cores: usize,
    /// Operating system and architecture.
    pub system: String,
    /// This workspace.
    pub version: &'static str,
    /// Burn.
    pub burn: &'static str,
    /// The peer, where one ran.
    pub torch: Option<String>,
    /// Whether the program was compiled without optimisation of the workspace's own code.
    pub debug: bool,
}

impl Machine {
    /// This machine.
    pub fn this(torch: Option<String>) -> Self {
        Self {
            cpu: cpu_name(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
            cores: cores(),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            version: env!("CARGO_PKG_VERSION"),
            burn: burn_version(include_str!("../../../Cargo.toml")),
            torch,
            debug: cfg!(debug_assertions),
        }
    }
}

/// Logical cores that the program may use.
pub fn cores() -> usize {
    available_parallelism().map_or(1, NonZeroUsize::get)
}

fn cpu_name(cpuinfo: &str) -> String {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"));
    let name = line.and_then(|line| line.split_once(':')).map(|(_, name)| name.trim());
    name.filter(|name| !name.is_empty()).unwrap_or("unknown").to_owned()
}

/// The version that the workspace pins.
fn burn_version(manifest: &'static str) -> &'static str {
    let line = manifest.lines().find(|line| line.starts_with("burn = "));
    line.and_then(|line| line.split('"').nth(1)).map_or("unknown", |text| text.trim_matches('='))
}

/// What a device reaches with a number of threads.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Calibration {
    /// The device's name.
    pub device: String,
    /// Threads, where the device keeps to a number.
    pub threads: Option<usize>,
    /// The float type of the product.
    pub dtype: Dtype,
    /// Rate of a large square matrix product, in 10^9 floating-point operations a second; median.
    pub gemm_gflops: f64,
    /// Bytes read plus bytes written by a copy of a large array, in 10^9 a second; median.
    pub copy_gbs: Option<f64>,
}

/// The rate of a product of square matrices of side `size`.
pub fn gemm_gflops(size: usize, sample: &Sample) -> f64 {
    2.0 * (size as f64).powi(3) / sample.median_ms / 1e6
}

/// Time of a matrix product on a device.
///
/// # Errors
///
/// As [`measure`].
pub fn gemm<E>(
    device: &Device,
    dtype: Dtype,
    size: usize,
    sync: &dyn Fn() -> Result<(), E>,
    effort: Effort,
) -> Result<Sample, Failure<E>> {
    let matrix = || {
        let distribution = Distribution::Normal(0.0, 1.0);
        Tensor::<2>::random([size, size], distribution, (device, dtype.burn()))
    };
    let (a, b) = (matrix(), matrix());
    let product = || Box::new(Outputs(vec![a.clone().matmul(b.clone())])) as Box<dyn Results>;
    measure(&timed(product), sync, effort)
}

/// Rate of a copy in the host's memory of so many bytes, which should be more than the caches hold, by
/// all threads of the pool, in 10^9 bytes a second.
pub fn copy_on_host(bytes: usize, effort: Effort) -> f64 {
    let from = vec![1_u8; bytes];
    let mut to = vec![0_u8; bytes];
    let part = bytes.div_ceil(rayon::current_num_threads());
    let mut copy = || {
        let start = std::time::Instant::now();
        to.par_chunks_mut(part).zip(from.par_chunks(part)).for_each(|(to, from)| {
            to.copy_from_slice(from);
        });
        std::hint::black_box(&to);
        start.elapsed().as_secs_f64() * 1e3
    };
    copy();
    let times = (0..effort.repeats).map(|_| copy()).collect();
    copy_gbs(bytes, &Sample::new(times, None))
}

/// Rate of reading and writing each number of an array of so many bytes once on a device, in 10^9 bytes
/// a second.
///
/// # Errors
///
/// As [`measure`].
pub fn copy_on_device<E>(
    device: &Device,
    bytes: usize,
    sync: &dyn Fn() -> Result<(), E>,
    effort: Effort,
) -> Result<f64, Failure<E>> {
    let from = Tensor::<1>::ones([bytes / 4], (device, Dtype::F32.burn()));
    let copy = || Box::new(Outputs(vec![from.clone().add_scalar(1.0)])) as Box<dyn Results>;
    Ok(copy_gbs(bytes, &measure(&timed(copy), sync, effort)?))
}

fn copy_gbs(bytes: usize, sample: &Sample) -> f64 {
    2.0 * bytes as f64 / sample.median_ms / 1e6
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nmodel name\t: B\n", "A CPU @ 2 GHz")]
    #[case("model name\t:\n", "unknown")]
    #[case("", "unknown")]
    fn the_processor_has_a_name(#[case] cpuinfo: &str, #[case] name: &str) {
        assert_eq!(cpu_name(cpuinfo), name);
    }

    #[test]
    fn the_version_of_burn_is_the_pinned_one() {
        let version = Machine::this(None).burn;
        assert!(version.split('.').count() >= 3 && version.starts_with(char::is_numeric));
        assert_eq!(burn_version("[dependencies]\n"), "unknown");
    }

    #[test]
    fn rates_are_work_over_time() {
        let sample = Sample::new(vec![2.0], None);
        assert_eq!(gemm_gflops(1000, &sample), 1000.0);
        assert_eq!(copy_gbs(1 << 27, &sample), 2.0 * 134_217_728.0 / 2e-3 / 1e9);
        let effort = Effort { repeats: 1, max_seconds: 1.0, queued_seconds: 0.0 };
        assert!(copy_on_host(1 << 20, effort) > 0.0);
        let sync = || Ok::<(), String>(());
        let sample = gemm(&Device::flex(), Dtype::F32, 16, &sync, effort).unwrap();
        assert!(sample.median_ms > 0.0);
        assert!(copy_on_device(&Device::flex(), 1 << 20, &sync, effort).unwrap() > 0.0);
    }
}
