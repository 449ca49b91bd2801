//! Compiling and assembling every kernel.

use std::path::Path;
use std::sync::Arc;

use cubecl::Compiler;
use cubecl::ir::DeviceProperties;
use cubecl::prelude::KernelDefinition;
#[cfg(feature = "nvrtc")]
use cubecl_cpp::{
    shared::{CompilationOptions, CppCompiler, CppSupportedFeatures},
    target::Cuda,
};
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
#[cfg(feature = "nvrtc")]
use crate::nvrtc::Nvrtc;
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

/// A kernel as PTX, and the bytes of shared memory that a launch asks for.
type Compiled = (String, usize);

/// What compiles a kernel, or says why it does not.
type Compile<'a> = dyn Fn(KernelDefinition) -> Result<Compiled, String> + Sync + 'a;

/// Compiles, assembles and disassembles the kernels for each architecture, on all cores.
///
/// # Errors
///
/// If a kernel does not compile. One that spills is a row of the report.
pub fn audit(arguments: &Audit, toolkit: &Toolkit) -> Result<Report, AuditError> {
    let mut rows = Vec::new();
    for &architecture in &arguments.architectures {
        let properties = device::properties(architecture);
        let compile = |kernel| default_compiler(kernel, architecture);
        rows.extend(rows_of(arguments, architecture, properties, &compile, toolkit, |_| true)?);
    }
    Ok(Report::new(rows))
}

/// As [`audit`], of the kernels with a producer, by the C++ compiler, for the architectures that have
/// what they need.
///
/// # Errors
///
/// As [`audit`], and if NVRTC is missing.
#[cfg(feature = "nvrtc")]
pub fn audit_cpp(
    arguments: &Audit,
    toolkit: &Toolkit,
    nvrtc: &Nvrtc,
) -> Result<Report, AuditError> {
    let mut rows = Vec::new();
    for &architecture in &arguments.architectures {
        let properties = device::all_properties(architecture);
        let compile = |kernel| cpp_compiler(kernel, architecture, nvrtc);
        rows.extend(rows_of(arguments, architecture, properties, &compile, toolkit, |variant| {
            variant.needs_cpp()
        })?);
    }
    Ok(Report::new(rows))
}

/// The rows of the selected kernels for an architecture.
fn rows_of(
    arguments: &Audit,
    architecture: Architecture,
    properties: DeviceProperties,
    compile: &Compile<'_>,
    toolkit: &Toolkit,
    wanted: fn(&Variant) -> bool,
) -> Result<Vec<Row>, AuditError> {
    let (properties, target) = (Arc::new(properties), Arc::new(device::target()));
    let mut variants = variants(&properties, arguments.selection())
        .map_err(|error| AuditError::Unsupported(architecture, error))?;
    variants.retain(|variant| wanted(variant) && variant.to_string().contains(&arguments.kernel));
    let row = |variant: &Variant| {
        let kernel = variant.kernel(properties.clone(), target.clone()).define();
        let compiled = compile(kernel).map_err(|reason| AuditError::Compile {
            kernel: variant.to_string(),
            architecture,
            reason,
        })?;
        row(variant, architecture, compiled, &toolkit.ptxas())
    };
    let mut found = variants.par_iter().map(row).collect::<Result<Vec<_>, _>>()?;
    found
        .par_chunks_mut(AT_ONCE)
        .try_for_each(|rows| read_code(rows, architecture, &toolkit.nvdisasm()))
        .map_err(|error| AuditError::Disassemble(architecture, error))?;
    Ok(found.into_iter().map(|(row, _)| row).collect())
}

/// By LLVM, as `CubeCL`'s CUDA runtime compiles unless it is built with `cuda-cpp`.
fn default_compiler(
    kernel: KernelDefinition,
    architecture: Architecture,
) -> Result<Compiled, String> {
    let mut compiler = PlironCompiler { target: LlvmTarget::Nvptx };
    // As the CUDA runtime compiles from compute capability 7.0 on.
    let options = PlironOptions {
        sm_arch: Some(device::sm_arch(architecture)),
        ptx_version: PtxVersion::for_driver(DRIVER),
        grid_constants: true,
        ..Default::default()
    };
    let module = match compiler.compile(kernel, &options) {
        Ok(PlironArtifact::NvptxCode(module)) => module,
        Ok(_) => return Err("the compiler wrote no PTX".to_owned()),
        Err(error) => return Err(error.to_string()),
    };
    let ptx = module.ptx.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect::<Vec<_>>();
    Ok((String::from_utf8_lossy(&ptx).into_owned(), module.shared_memory_size))
}

/// By way of C++, as `CubeCL`'s CUDA runtime compiles with `cuda-cpp`.
#[cfg(feature = "nvrtc")]
fn cpp_compiler(
    kernel: KernelDefinition,
    architecture: Architecture,
    nvrtc: &Nvrtc,
) -> Result<Compiled, String> {
    // As the CUDA runtime has it from compute capability 7.5, and from 9.0 on; a warp has 32 threads by
    // default.
    let hopper = architecture.version() >= 90;
    let options = CompilationOptions {
        supports_features: CppSupportedFeatures {
            grid_constants: true,
            clusters: hopper,
            fast_math: true,
            fast_tanh: DRIVER >= 12_080,
            elect_sync: hopper,
            dp4a: true,
        },
        ..Default::default()
    };
    let compiled = CppCompiler::<Cuda>::default().compile(kernel, &options);
    let compiled = compiled.map_err(|error| error.to_string())?;
    let ptx = nvrtc.ptx(&compiled.source, architecture).map_err(|error| error.to_string())?;
    Ok((ptx, compiled.shared_memory_size))
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
    (ptx, shared_memory): Compiled,
    ptxas: &Path,
) -> Result<(Row, Vec<u8>), AuditError> {
    let judged = judge(ptxas, &ptx, architecture);
    let (Assembled { usage, cubin }, verdict) = judged.map_err(|error| AuditError::Assemble {
        kernel: variant.to_string(),
        architecture,
        error,
    })?;
    let mut row = Row {
        operation: variant.operation(),
        blueprint: variant.to_string(),
        architecture,
        threads: variant.threads(),
        shared_memory,
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
