//! Everything that can keep a benchmark from running.

use std::io;
use std::path::PathBuf;

use examples::devices::DeviceError;
use thiserror::Error;

use crate::arguments::Dtype;

/// Why a benchmark did not run, in one line.
#[derive(Debug, Error)]
pub enum BenchError {
    /// The device is unknown, not built in or absent.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device does not compute in the dtype.
    #[error(
        "--dtype {dtype}: device `{device}` does not support it; choose another dtype or device"
    )]
    Dtype {
        /// The device's name.
        device: &'static str,
        /// What was asked for.
        dtype: Dtype,
    },
    /// A number of threads for a device that chooses its own.
    #[error(
        "{option}: device `{device}` chooses its own threads; only flex keeps to a given number"
    )]
    Threads {
        /// The option at fault.
        option: &'static str,
        /// The device's name.
        device: &'static str,
    },
    /// The peer has no such measurement.
    #[error("--peer torch: it measures no backward pass alone; leave out --pass backward")]
    PeerPass,
    /// The pool of threads could not be made.
    #[error("cannot start {threads} threads ({source}); ask for fewer by --threads")]
    Pool {
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        source: rayon::ThreadPoolBuildError,
    },
    /// The device failed while it computed.
    #[error("device `{device}` failed during {what}: {reason}")]
    Execution {
        /// The device's name.
        device: &'static str,
        /// What was measured.
        what: String,
        /// What the device said.
        reason: String,
    },
    /// The Python program could not be started.
    #[error("--peer torch: cannot start `{}` ({source}); name a Python that has torch by --python PATH", .python.display())]
    Python {
        /// The program.
        python: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Python has no torch.
    #[error("--peer torch: `{}` cannot import torch ({reason}); run `pip install torch`, or name another by --python PATH", .python.display())]
    NoTorch {
        /// The program.
        python: PathBuf,
        /// What Python said.
        reason: String,
    },
    /// The peer stopped or said something else than expected.
    #[error("--peer torch: `{}` broke off ({reason}); what it printed above says why", .python.display())]
    Peer {
        /// The program.
        python: PathBuf,
        /// What went wrong.
        reason: String,
    },
    /// A result could not be written.
    #[error("cannot write {} ({source}); choose another file by {option}", .path.display())]
    Write {
        /// The option that named the file.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The picture could not be drawn.
    #[error("--plot: {0}")]
    Plot(String),
}
