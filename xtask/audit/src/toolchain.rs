//! Where the tools are that the audit needs beyond Rust.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

/// Where toolkits install themselves.
const SYSTEM_ROOTS: [&str; 4] = ["/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda", "/usr"];

/// A missing tool.
#[derive(Debug, Error, PartialEq)]
pub enum ToolchainError {
    /// The build would not find LLVM.
    #[error("LLVM is missing in {}; run `cargo xtask provision`", .0.display())]
    Llvm(PathBuf),
    /// The folder that the caller names lacks a file.
    #[error(
        "CUDA_PATH: {} is missing; run `cargo xtask provision` and set CUDA_PATH as it says, or unset it",
        .0.display()
    )]
    CudaPath(PathBuf),
    /// No folder has all files.
    #[error(
        "ptxas, nvdisasm or libdevice is missing; run `cargo xtask provision`, or set CUDA_PATH to a toolkit"
    )]
    Cuda,
    /// A tool does not say which release it is.
    #[error("{} --version: {reason}; run `cargo xtask provision`", .tool.display())]
    Version {
        /// The tool.
        tool: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The system does not say where the user's files go.
    #[error("neither HOME nor {0} is set; set one")]
    Home(&'static str),
}

/// A CUDA toolkit, or the part of one that `cargo xtask provision` installs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolkit {
    root: PathBuf,
}

impl Toolkit {
    /// The toolkit that `CUDA_PATH` names if it is set; else the provisioned one; else the system's.
    ///
    /// # Errors
    ///
    /// If there is none with `ptxas`, `nvdisasm` and `libdevice`.
    pub fn find() -> Result<Self, ToolchainError> {
        let provisioned =
            user_folder("XDG_CACHE_HOME", ".cache")?.join("burn-vision-attention/cuda");
        let roots = SYSTEM_ROOTS.map(PathBuf::from);
        let named = env::var_os("CUDA_PATH").map(PathBuf::from);
        Self::choose(named, core::iter::once(provisioned).chain(roots))
    }

    fn choose(
        named: Option<PathBuf>,
        mut roots: impl Iterator<Item = PathBuf>,
    ) -> Result<Self, ToolchainError> {
        if let Some(root) = named {
            let toolkit = Self { root };
            return match toolkit.missing() {
                Some(file) => Err(ToolchainError::CudaPath(file)),
                None => Ok(toolkit),
            };
        }
        let root = roots.find(|root| Self { root: root.clone() }.missing().is_none());
        root.map(|root| Self { root }).ok_or(ToolchainError::Cuda)
    }

    fn missing(&self) -> Option<PathBuf> {
        let libdevice = self.root.join("nvvm/libdevice/libdevice.10.bc");
        [self.ptxas(), self.nvdisasm(), libdevice].into_iter().find(|file| !file.is_file())
    }

    /// The folder, for `CUDA_PATH`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The assembler.
    pub fn ptxas(&self) -> PathBuf {
        self.root.join("bin/ptxas")
    }

    /// The compiler of C++ with its headers, if they are there: `cargo xtask provision --nvrtc` installs
    /// them beside the other tools, a whole toolkit has them as well.
    pub fn nvrtc(&self) -> Option<Nvrtc> {
        let include = self.root.join("include");
        let library = ["lib", "lib64"].map(|lib| self.root.join(lib).join("libnvrtc.so.13"));
        let library = library.into_iter().find(|file| file.is_file())?;
        let headers = [include.join("cuda_fp16.h"), include.join("cccl/cuda/barrier")];
        headers.iter().all(|file| file.is_file()).then_some(Nvrtc { library, include })
    }

    /// The disassembler.
    pub fn nvdisasm(&self) -> PathBuf {
        self.root.join("bin/nvdisasm")
    }
}

/// Where the compiler of C++ is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvrtc {
    /// The library.
    pub library: PathBuf,
    /// CUDA's headers, with those of its C++ library in `cccl`.
    pub include: PathBuf,
}

/// LLVM where `tracel-llvm-bundler` looks for it, which is checked before a build would try to download
/// it.
///
/// # Errors
///
/// If it is not there, or not completely.
pub fn llvm() -> Result<PathBuf, ToolchainError> {
    // The path and the mark of the bundler's release 23.1.0-4.
    let llvm = user_folder("XDG_DATA_HOME", ".local/share")?.join("tracel/tracel-llvm-23.1.0-4");
    match llvm.join(".tracel-llvm-installed").exists() {
        true => Ok(llvm),
        false => Err(ToolchainError::Llvm(llvm)),
    }
}

/// The releases of the tools that decide what a kernel takes, in words.
///
/// # Errors
///
/// If a tool is missing or does not say.
pub fn releases(toolkit: &Toolkit) -> Result<String, ToolchainError> {
    let llvm = version(&llvm()?.join("bin/llvm-config"), |line| Some(line.trim().to_owned()))?;
    Ok(format!("LLVM {llvm}, ptxas {}", ptxas(toolkit)?))
}

/// The release of the assembler.
///
/// # Errors
///
/// If it is missing or does not say.
pub fn ptxas(toolkit: &Toolkit) -> Result<String, ToolchainError> {
    // `Cuda compilation tools, release 13.2, V13.2.78`
    version(&toolkit.ptxas(), |line| Some(line.split_once(", V")?.1.trim().to_owned()))
}

/// What is found in the first line that has it.
fn version(tool: &Path, find: fn(&str) -> Option<String>) -> Result<String, ToolchainError> {
    let failed = |reason| ToolchainError::Version { tool: tool.to_owned(), reason };
    let output = Command::new(tool).arg("--version").output();
    let output = output.map_err(|error| failed(error.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let found = text.lines().find_map(find).filter(|found| !found.is_empty());
    found.ok_or_else(|| failed("no version in its output".to_owned()))
}

/// The folder that the variable names, or the default one below HOME.
fn user_folder(variable: &'static str, default: &str) -> Result<PathBuf, ToolchainError> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set(variable)
        .or_else(|| set("HOME").map(|home| home.join(default)))
        .ok_or(ToolchainError::Home(variable))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;

    use super::*;

    fn toolkit(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let file = folder.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "").unwrap();
        }
        folder
    }

    const FILES: [&str; 3] = ["bin/ptxas", "bin/nvdisasm", "nvvm/libdevice/libdevice.10.bc"];

    #[test]
    fn the_first_complete_folder_is_taken() {
        let (half, whole) = (toolkit(&FILES[..2]), toolkit(&FILES));
        let roots = [half.path().to_owned(), whole.path().to_owned()];
        let found = Toolkit::choose(None, roots.into_iter()).unwrap();
        assert_eq!(found.root(), whole.path());
        assert_eq!(found.ptxas(), whole.path().join("bin/ptxas"));
    }

    #[test]
    fn a_named_folder_is_the_only_one_asked() {
        let (half, whole) = (toolkit(&FILES[..2]), toolkit(&FILES));
        let roots = [whole.path().to_owned()];
        let error = Toolkit::choose(Some(half.path().to_owned()), roots.into_iter()).unwrap_err();
        assert_eq!(error, ToolchainError::CudaPath(half.path().join(FILES[2])));
        assert!(error.to_string().contains("cargo xtask provision"));
    }

    #[test]
    fn the_compiler_of_cpp_needs_its_headers() {
        let library = "lib/libnvrtc.so.13";
        let headers = ["include/cuda_fp16.h", "include/cccl/cuda/barrier"];
        let of = |files: &[&str]| {
            let folder = toolkit(files);
            Toolkit { root: folder.path().to_owned() }.nvrtc().is_some()
        };
        assert!(of(&[library, headers[0], headers[1]]));
        assert!(!of(&[library, headers[0]]));
        assert!(!of(&headers));
    }

    #[test]
    fn a_tool_without_a_version_is_named() {
        let error = version(Path::new("no/such/tool"), |_| None).unwrap_err().to_string();
        assert!(error.starts_with("no/such/tool --version: "), "{error}");
        let error = version(Path::new("true"), |_| None).unwrap_err();
        assert!(error.to_string().contains("no version"), "{error}");
    }

    #[test]
    fn a_missing_toolkit_names_the_remedy() {
        let error = Toolkit::choose(None, core::iter::empty()).unwrap_err().to_string();
        assert!(error.contains("`cargo xtask provision`"), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
}
