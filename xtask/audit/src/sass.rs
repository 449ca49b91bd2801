//! Machine code in words, as `nvdisasm` prints it: how much of a kernel's hottest loop is matrix
//! arithmetic.

use serde::Serialize;
use thiserror::Error;

use crate::flow::{Flow, loops};

/// Bytes of an instruction.
const INSTRUCTION: u64 = 16;

/// Opcodes of matrix products, sparse and asynchronous ones among them: NVIDIA, CUDA Binary
/// Utilities, "Instruction Set Reference".
const PRODUCTS: [&str; 9] =
    ["HMMA", "IMMA", "BMMA", "DMMA", "QMMA", "HGMMA", "IGMMA", "BGMMA", "QGMMA"];

/// Opcode of `ldmatrix`.
const LOAD: &str = "LDSM";

/// Opcode of a copy by TMA into shared memory.
const COPY: &str = "UTMALDG";

/// Disassembly in another form than the one that is read here.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SassError {
    /// A line is not understood.
    #[error("nvdisasm prints {0:?}: its output has changed, adapt the audit to it")]
    Line(String),
    /// Instructions are missing.
    #[error("nvdisasm prints nothing at {0:#x}: its output has changed, adapt the audit to it")]
    Missing(u64),
}

/// The loop that a kernel is taken to spend its time in, by the instructions that are in no loop
/// within it.
///
/// It is the loop with most matrix instructions, and the shorter of equal ones; where no loop has
/// any, the longest loop that has none within it. All zero for a kernel without loops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HotLoop {
    /// Matrix products, by one warp or a group of them.
    pub matrix_products: u32,
    /// Loads of matrices from shared memory, `ldmatrix`.
    pub matrix_loads: u32,
    /// All instructions.
    pub loop_instructions: u32,
    /// Copies by TMA. Each is in a loop of its own, which sees to it that all threads that get there name
    /// the same copy.
    pub tensor_copies: u32,
}

impl HotLoop {
    /// Finds the loop in the instructions of one kernel.
    pub fn of(code: &[Instruction]) -> Self {
        let flow = code.iter().map(|instruction| instruction.flow).collect::<Vec<_>>();
        let loops = loops(&flow);
        let candidates = loops.iter().map(|body| {
            let own = body.own.iter().map(|&at| &code[at]);
            let count = |kind| own.clone().filter(|instruction| instruction.kind == kind).count();
            let copies = body.body.iter().filter(|&&at| code[at].kind == Kind::Copy);
            let found = Self {
                matrix_products: count(Kind::Product) as u32,
                matrix_loads: count(Kind::Load) as u32,
                loop_instructions: body.own.len() as u32,
                tensor_copies: copies.count() as u32,
            };
            (found, body.innermost)
        });
        let (matrix, plain): (Vec<_>, Vec<_>) =
            candidates.partition(|(found, _)| found.matrix_instructions() > 0);
        let matrix = matrix.into_iter().map(|(found, _)| found).max_by_key(|found| {
            (found.matrix_instructions(), core::cmp::Reverse(found.loop_instructions))
        });
        let innermost = plain.into_iter().filter(|&(_, innermost)| innermost);
        let longest = innermost.map(|(found, _)| found).max_by_key(|found| found.loop_instructions);
        matrix.or(longest).unwrap_or_default()
    }

    /// Matrix products and loads of matrices.
    pub fn matrix_instructions(&self) -> u32 {
        self.matrix_products + self.matrix_loads
    }

    /// Matrix products and loads of matrices, in percent of all instructions.
    pub fn share(&self) -> u32 {
        100 * self.matrix_instructions() / self.loop_instructions.max(1)
    }
}

/// What an instruction is counted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Product,
    Load,
    Copy,
    Other,
}

impl Kind {
    fn of(opcode: &str) -> Self {
        // What follows the first dot says shape and type. `HFMA2.MMA` is no matrix product.
        let name = opcode.split('.').next().unwrap_or(opcode);
        match name {
            LOAD => Self::Load,
            COPY => Self::Copy,
            _ if PRODUCTS.contains(&name) => Self::Product,
            _ => Self::Other,
        }
    }
}

/// One instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    kind: Kind,
    flow: Flow,
}

/// Reads the disassembly of code that starts at 0, and cuts it into pieces of these sizes in bytes.
///
/// # Errors
///
/// If an instruction is missing or not understood.
pub fn parse(text: &str, sizes: &[usize]) -> Result<Vec<Vec<Instruction>>, SassError> {
    let mut lines = text.lines().map(str::trim).filter(|line| line.starts_with("/*"));
    let mut start = 0;
    let mut piece = |&size: &usize| {
        let count = size as u64 / INSTRUCTION;
        let code = (0..count).map(|index| {
            let address = start + index * INSTRUCTION;
            let line = lines.next().ok_or(SassError::Missing(address))?;
            let unknown = || SassError::Line(line.to_owned());
            let (found, words) = split(line).ok_or_else(unknown)?;
            if found != address {
                return Err(SassError::Missing(address));
            }
            instruction(words, start, count).ok_or_else(unknown)
        });
        let code = code.collect();
        start += count * INSTRUCTION;
        code
    };
    sizes.iter().map(&mut piece).collect()
}

/// Address and words of `/*0010*/  @P0 BRA 0x480 ;`.
fn split(line: &str) -> Option<(u64, &str)> {
    let (address, rest) = line.strip_prefix("/*")?.split_once("*/")?;
    let words = rest.split(';').next()?.trim();
    Some((u64::from_str_radix(address, 16).ok()?, words))
}

/// Reads an instruction of a kernel that starts at `start` and has `count` of them.
fn instruction(words: &str, start: u64, count: u64) -> Option<Instruction> {
    let (guard, words) = match words.split_once(' ') {
        Some((guard, rest)) if guard.starts_with('@') => (true, rest.trim()),
        _ => (false, words),
    };
    let (opcode, operands) = words.split_once(' ').unwrap_or((words, ""));
    if !opcode.starts_with(|first: char| first.is_ascii_uppercase()) {
        return None;
    }
    let target = || {
        let address = operands.rsplit([',', ' ']).next()?.strip_prefix("0x")?;
        let address = u64::from_str_radix(address, 16).ok()?.checked_sub(start)?;
        (address < count * INSTRUCTION).then_some((address / INSTRUCTION) as usize)
    };
    let flow = match opcode.split('.').next()? {
        // `BRA !P5, 0x59f0` has its condition among the operands.
        "BRA" if guard || operands.contains(',') => Flow::Either(target()?),
        "BRA" => Flow::Jump(target()?),
        "CALL" if opcode.contains(".REL") => Flow::Either(target()?),
        "EXIT" | "RET" | "BRX" | "JMX" | "KILL" if !guard => Flow::End,
        _ => Flow::Next,
    };
    Some(Instruction { kind: Kind::of(opcode), flow })
}

#[cfg(test)]
mod tests;
