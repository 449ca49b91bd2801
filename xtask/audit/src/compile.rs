//! Compiling and assembling every kernel.

use std::path::Path;
use std::sync::Arc;

use cubecl::Compiler;
use cubecl::ir::{DeviceProperties, TargetProperties};
use cubecl_llvm::nvptx::ptx_version::PtxVersion;
use cubecl_llvm::{LlvmTarget, PlironArtifact, PlironCompiler, PlironOptions};
use kernels_cubecl::Unsupported;
use rayon::prelude::*;
use thiserror::Error;

use crate::Audit;
use crate::architecture::{Architecture, Block};
use crate::cubin;
use crate::device;
use crate::nvdisasm::{NvdisasmError, disassemble};
use crate::ptxas::{Assembled, PtxasError, Verdict, alone, assemble};
use crate::report::{Report, Row};
use crate::sass::HotLoop;
use crate::toolchain::Toolkit;
use crate::variants::{Variant, variants};

/// CUDA release whose PTX is written: the toolkit and the driver must not be older.
const DRIVER: i32 = 12_080;

/// Why the audit could not be completed.
#[derive(Debug, Error)]
pub enum AuditError {
    /// The blueprint refuses a device of the architecture.
    #[error("{0}: {1}")]
    Unsupported(Architecture, Unsupported),
    /// The text that kernels were asked for by is in no blueprint.
    #[error("--kernel: no blueprint has {0:?} in it; the table without --kernel lists them")]
    None(String),
    /// The compiler refuses a kernel.
    #[error("{kernel} for {architecture}: {reason}")]
    Compile {
        /// The blueprint in words.
        kernel: String,
        /// What it was compiled for.
        architecture: Architecture,
        /// What the compiler says.
        reason: String,
    },
    /// The assembler refuses a kernel, or does not run.
    #[error("{kernel} for {architecture}: {error}")]
    Assemble {
        /// The blueprint in words.
        kernel: String,
        /// What it was assembled for.
        architecture: Architecture,
        /// What is wrong.
        error: PtxasError,
    },
    /// The machine code of kernels cannot be read.
    #[error("machine code for {0}: {1}")]
    Disassemble(Architecture, NvdisasmError),
}

/// Kernels whose machine code is disassembled at once: the disassembler starts slowly.
const AT_ONCE: usize = 64;

/// Compiles, assembles and disassembles the kernels for each architecture, on all cores.
///
/// # Errors
///
/// If a kernel does not compile, or none is asked for. One that spills is a row of the report.
pub fn audit(arguments: &Audit, toolkit: &Toolkit) -> Result<Report, AuditError> {
    let target = Arc::new(device::target());
    let mut rows = Vec::new();
    for &architecture in &arguments.architectures {
        let properties = Arc::new(device::properties(architecture));
        let mut variants = variants(&properties, arguments.selection())
            .map_err(|error| AuditError::Unsupported(architecture, error))?;
        variants.retain(|variant| variant.to_string().contains(&arguments.kernel));
        let row = |variant| row(variant, architecture, &properties, &target, &toolkit.ptxas());
        let mut found = variants.par_iter().map(row).collect::<Result<Vec<_>, _>>()?;
        found
            .par_chunks_mut(AT_ONCE)
            .try_for_each(|rows| read_code(rows, architecture, &toolkit.nvdisasm()))
            .map_err(|error| AuditError::Disassemble(architecture, error))?;
        rows.extend(found.into_iter().map(|(row, _)| row));
    }
    if rows.is_empty() {
        return Err(AuditError::None(arguments.kernel.clone()));
    }
    Ok(Report::new(rows))
}

/// Adds to the rows what their machine code tells.
fn read_code(
    rows: &mut [(Row, Vec<u8>)],
    architecture: Architecture,
    nvdisasm: &Path,
) -> Result<(), NvdisasmError> {
    let code = rows.iter().map(|(_, cubin)| cubin::code(cubin)).collect::<Result<Vec<_>, _>>()?;
    let kernels = disassemble(nvdisasm, &code, architecture)?;
    for ((row, _), instructions) in rows.iter_mut().zip(&kernels) {
        row.hot_loop = HotLoop::of(instructions);
    }
    Ok(())
}

/// A kernel before its machine code has been looked at, and the file that has it.
fn row(
    variant: &Variant,
    architecture: Architecture,
    properties: &Arc<DeviceProperties>,
    target: &Arc<TargetProperties>,
    ptxas: &Path,
) -> Result<(Row, Vec<u8>), AuditError> {
    let kernel = variant.kernel(properties.clone(), target.clone());
    let mut compiler = PlironCompiler { target: LlvmTarget::Nvptx };
    // As the CUDA runtime compiles from compute capability 7.0 on.
    let options = PlironOptions {
        sm_arch: Some(device::sm_arch(architecture)),
        ptx_version: PtxVersion::for_driver(DRIVER),
        grid_constants: true,
        ..Default::default()
    };
    let refused =
        |reason: String| AuditError::Compile { kernel: variant.to_string(), architecture, reason };
    let module = match compiler.compile(kernel.define(), &options) {
        Ok(PlironArtifact::NvptxCode(module)) => module,
        Ok(_) => return Err(refused("the compiler wrote no PTX".to_owned())),
        Err(error) => return Err(refused(error.to_string())),
    };
    let ptx = module.ptx.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect::<Vec<_>>();
    let (Assembled { usage, cubin }, verdict) =
        judge(ptxas, &String::from_utf8_lossy(&ptx), architecture).map_err(|error| {
            AuditError::Assemble { kernel: variant.to_string(), architecture, error }
        })?;
    let mut row = Row {
        operation: variant.operation(),
        blueprint: variant.to_string(),
        architecture,
        threads: variant.threads(),
        shared_memory: module.shared_memory_size,
        usage,
        hot_loop: HotLoop::default(),
        resident_blocks: 0,
        verdict,
    };
    row.resident_blocks = architecture.resident_blocks(Block {
        threads: row.threads as u32,
        registers: usage.registers,
        shared_memory: row.all_shared_memory(),
    });
    Ok((row, cubin))
}

fn judge(
    ptxas: &Path,
    ptx: &str,
    architecture: Architecture,
) -> Result<(Assembled, Verdict), PtxasError> {
    let own = assemble(ptxas, ptx, architecture)?;
    if own.usage.is_clean() {
        return Ok((own, Verdict::Clean));
    }
    let alone = assemble(ptxas, &alone(ptx)?, architecture)?;
    let verdict = Verdict::of(&own.usage, &alone.usage);
    Ok((own, verdict))
}
