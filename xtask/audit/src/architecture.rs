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

    /// What `nvdisasm` calls the machine code.
    pub fn machine(self) -> &'static str {
        match self {
            Self::Sm80 => "SM80",
            Self::Sm86 => "SM86",
            Self::Sm89 => "SM89",
            Self::Sm90a => "SM90a",
        }
    }

    /// Most shared memory of a block, in bytes.
    pub fn max_shared_memory(self) -> usize {
        self.multiprocessor().shared_memory - RESERVED_SHARED_MEMORY
    }

    /// Blocks of a kernel that reside on one multiprocessor at a time, if nothing but its size limits
    /// them; 0 for a kernel that does not fit.
    pub fn resident_blocks(self, block: Block) -> u32 {
        let Multiprocessor { warps, blocks, shared_memory } = self.multiprocessor();
        let warps_per_block = block.threads.div_ceil(WARP).max(1);
        let registers_per_warp =
            (block.registers * WARP).next_multiple_of(REGISTERS_AT_ONCE).max(REGISTERS_AT_ONCE);
        // Registers belong to a quarter of the multiprocessor each, and so do warps.
        let by_registers =
            REGISTERS / PARTITIONS / registers_per_warp * PARTITIONS / warps_per_block;
        let shared_per_block =
            (block.shared_memory + RESERVED_SHARED_MEMORY).next_multiple_of(SHARED_MEMORY_AT_ONCE);
        let by_shared_memory = (shared_memory / shared_per_block) as u32;
        blocks.min(warps / warps_per_block).min(by_registers).min(by_shared_memory)
    }

    fn multiprocessor(self) -> Multiprocessor {
        let (warps, blocks, kib) = match self {
            Self::Sm80 => (64, 32, 164),
            Self::Sm86 => (48, 16, 100),
            Self::Sm89 => (48, 24, 100),
            Self::Sm90a => (64, 32, 228),
        };
        Multiprocessor { warps, blocks, shared_memory: kib * 1024 }
    }
}

/// What one block of a kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its threads.
    pub threads: u32,
    /// Registers of each.
    pub registers: u32,
    /// Shared memory, in bytes.
    pub shared_memory: usize,
}

/// What the blocks on one multiprocessor share: NVIDIA, CUDA C++ Programming Guide, table "Technical
/// Specifications per Compute Capability".
struct Multiprocessor {
    warps: u32,
    blocks: u32,
    /// In bytes.
    shared_memory: usize,
}

// The same on all of these architectures; how much is handed out at once is in `cuda_occupancy.h`.
const WARP: u32 = 32;
const PARTITIONS: u32 = 4;
const REGISTERS: u32 = 65_536;
const REGISTERS_AT_ONCE: u32 = 256;
const SHARED_MEMORY_AT_ONCE: usize = 128;
/// Bytes of shared memory that each block takes beyond its own.
const RESERVED_SHARED_MEMORY: usize = 1024;

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

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// As NVIDIA's occupancy calculator has them.
    #[rstest]
    #[case::blocks(Architecture::Sm80, 32, 32, 0, 32)]
    #[case::warps(Architecture::Sm90a, 256, 32, 0, 8)]
    #[case::registers(Architecture::Sm90a, 128, 128, 0, 4)]
    // 168 registers a thread are 5376 a warp: 3 of them in each quarter.
    #[case::registers_of_a_quarter(Architecture::Sm80, 64, 162, 0, 6)]
    #[case::half_a_warp_takes_a_whole_one(Architecture::Sm80, 48, 255, 0, 4)]
    #[case::shared_memory(Architecture::Sm80, 64, 32, 40 * 1024, 4)]
    #[case::all_shared_memory(Architecture::Sm90a, 64, 32, 227 * 1024, 1)]
    #[case::too_much_shared_memory(Architecture::Sm90a, 64, 32, 228 * 1024, 0)]
    #[case::fewer_warps(Architecture::Sm86, 256, 32, 0, 6)]
    #[case::too_many_registers(Architecture::Sm89, 1024, 128, 0, 0)]
    fn blocks_reside_as_far_as_there_is_room(
        #[case] architecture: Architecture,
        #[case] threads: u32,
        #[case] registers: u32,
        #[case] shared_memory: usize,
        #[case] expected: u32,
    ) {
        let block = Block { threads, registers, shared_memory };
        assert_eq!(architecture.resident_blocks(block), expected);
    }
}
