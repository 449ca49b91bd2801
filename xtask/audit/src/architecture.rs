//! GPU architectures that kernels are audited for.

use core::fmt;

use clap::ValueEnum;
use serde::{Serialize, Serializer};

/// A GPU architecture, by the name that `ptxas` knows it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum Architecture {
    /// A100.
    #[value(name = "sm_80")]
    Sm80,
    /// RTX 30 and A10.
    #[value(name = "sm_86")]
    Sm86,
    /// RTX 40 and L4.
    #[value(name = "sm_89")]
    Sm89,
    /// H100 and H200, with the instructions that only they have.
    #[value(name = "sm_90a")]
    Sm90a,
}

impl Architecture {
    /// Compute capability in two digits: 9.0 is 90.
    pub fn version(self) -> u32 {
        match self {
            Self::Sm80 => 80,
            Self::Sm86 => 86,
            Self::Sm89 => 89,
            Self::Sm90a => 90,
        }
    }

    /// Most shared memory of a block, in bytes: NVIDIA, CUDA C++ Programming Guide, table
    /// "Technical Specifications per Compute Capability".
    pub fn max_shared_memory(self) -> usize {
        let kib = match self {
            Self::Sm80 => 163,
            Self::Sm86 | Self::Sm89 => 99,
            Self::Sm90a => 227,
        };
        kib * 1024
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value =
            self.to_possible_value().expect("no architecture is hidden from the command line");
        f.write_str(value.get_name())
    }
}

impl Serialize for Architecture {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
