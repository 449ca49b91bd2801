//! Compiling CUDA C++ by NVRTC, which needs neither a driver nor a GPU.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::{null, null_mut};
use std::ffi::CString;

use libloading::Library;
use thiserror::Error;

use crate::architecture::Architecture;
use crate::toolchain;

/// Why a program could not be compiled.
#[derive(Debug, Error)]
pub enum NvrtcError {
    /// The library cannot be used.
    #[error("NVRTC: {0}; run `cargo xtask provision --nvrtc`")]
    Library(#[from] libloading::Error),
    /// A function failed that should not.
    #[error("{0} fails with status {1}")]
    Status(&'static str, c_int),
    /// The program was refused.
    #[error("NVRTC refuses the kernel: {0}")]
    Refused(String),
    /// The program has a byte 0 in it.
    #[error("the kernel's source ends early: {0}")]
    Source(#[from] std::ffi::NulError),
}

type Program = *mut c_void;
type Status = c_int;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> Status;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status;
type Size = unsafe extern "C" fn(Program, *mut usize) -> Status;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> Status;
type Destroy = unsafe extern "C" fn(*mut Program) -> Status;
type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status;

/// The library, with the folders of its headers.
#[derive(Debug)]
pub struct Nvrtc {
    library: Library,
    includes: [String; 2],
}

impl Nvrtc {
    /// Loads the library.
    ///
    /// # Errors
    ///
    /// If it cannot be loaded.
    pub fn load(found: &toolchain::Nvrtc) -> Result<Self, NvrtcError> {
        // SAFETY: NVIDIA's library has no more to run when it is loaded than its own set-up.
        let library = unsafe { Library::new(&found.library) }?;
        let include = |folder: std::path::PathBuf| format!("--include-path={}", folder.display());
        let includes = [found.include.clone(), found.include.join("cccl")].map(include);
        Ok(Self { library, includes })
    }

    /// The release, in words.
    ///
    /// # Errors
    ///
    /// If it does not say.
    pub fn release(&self) -> Result<String, NvrtcError> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the type is the one that nvrtc.h declares, and both pointers can be written.
        let status = unsafe {
            self.library.get::<Version>(b"nvrtcVersion\0")?(&raw mut major, &raw mut minor)
        };
        checked("nvrtcVersion", status)?;
        Ok(format!("NVRTC {major}.{minor}"))
    }

    /// Compiles a program to PTX, with the options that `CubeCL`'s CUDA runtime gives.
    ///
    /// # Errors
    ///
    /// If it does not compile.
    pub fn ptx(&self, source: &str, architecture: Architecture) -> Result<String, NvrtcError> {
        let source = CString::new(source)?;
        let mut program = null_mut();
        // SAFETY: the type is the one that nvrtc.h declares; the source ends with 0, it has no name and
        // no headers of its own.
        let status = unsafe {
            let create = self.library.get::<Create>(b"nvrtcCreateProgram\0")?;
            create(&raw mut program, source.as_ptr(), null(), 0, null(), null())
        };
        checked("nvrtcCreateProgram", status)?;
        let program = Compiling { nvrtc: self, program };
        let architecture = format!("--gpu-architecture={architecture}");
        let [headers, library] = &self.includes;
        let options = [architecture.as_str(), headers, library, "-lineinfo"];
        let options = options.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>()?;
        let pointers = options.iter().map(|option| option.as_ptr()).collect::<Vec<_>>();
        // SAFETY: the type is the one that nvrtc.h declares, the program lives, and there are as many
        // options as is said, each of which ends with 0.
        let status = unsafe {
            let compile = self.library.get::<Compile>(b"nvrtcCompileProgram\0")?;
            compile(program.program, pointers.len() as c_int, pointers.as_ptr())
        };
        if status != 0 {
            let log = program.text(b"nvrtcGetProgramLogSize\0", b"nvrtcGetProgramLog\0")?;
            let reason = log.lines().find(|line| line.contains("error"));
            let reason = reason.unwrap_or("no reason given").trim().to_owned();
            return Err(NvrtcError::Refused(reason));
        }
        program.text(b"nvrtcGetPTXSize\0", b"nvrtcGetPTX\0")
    }
}

/// A program that is forgotten when it goes out of scope.
struct Compiling<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Compiling<'_> {
    /// What these two functions tell the length of, and write.
    fn text(&self, size: &[u8], text: &[u8]) -> Result<String, NvrtcError> {
        let mut length = 0;
        // SAFETY: the type is the one that nvrtc.h declares, the program lives, and the length can be
        // written.
        let status =
            unsafe { self.nvrtc.library.get::<Size>(size)?(self.program, &raw mut length) };
        checked("the length of a text", status)?;
        let mut bytes = vec![0u8; length.max(1)];
        // SAFETY: as above, and there are as many bytes as the library has asked for.
        let status = unsafe {
            self.nvrtc.library.get::<Text>(text)?(self.program, bytes.as_mut_ptr().cast())
        };
        checked("a text", status)?;
        let text = CStr::from_bytes_until_nul(&bytes);
        Ok(text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default())
    }
}

impl Drop for Compiling<'_> {
    fn drop(&mut self) {
        // SAFETY: the type is the one that nvrtc.h declares, and the program is not used again. There is
        // nothing to be done about a failure.
        unsafe {
            if let Ok(destroy) = self.nvrtc.library.get::<Destroy>(b"nvrtcDestroyProgram\0") {
                destroy(&raw mut self.program);
            }
        }
    }
}

fn checked(function: &'static str, status: Status) -> Result<(), NvrtcError> {
    match status {
        0 => Ok(()),
        status => Err(NvrtcError::Status(function, status)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::toolchain::Toolkit;

    /// Where it is installed, as the feature promises: a refusal names its reason, a kernel compiles.
    #[test]
    fn programs_are_compiled_or_refused_with_a_reason() {
        let toolkit = Toolkit::find().unwrap();
        let nvrtc = Nvrtc::load(&toolkit.nvrtc().expect("cargo xtask provision --nvrtc")).unwrap();
        assert!(nvrtc.release().unwrap().starts_with("NVRTC "));
        let source = "#include <cuda/barrier>\n__global__ void kernel(int* p) { *p = 1; }";
        let ptx = nvrtc.ptx(source, Architecture::Sm90a).unwrap();
        assert!(ptx.contains(".target sm_90a"), "{ptx}");
        let error = nvrtc.ptx("__global__ void kernel() { wrong; }", Architecture::Sm90a);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("\"wrong\" is undefined"), "{error}");
    }
}
