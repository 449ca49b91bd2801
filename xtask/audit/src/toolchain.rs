//! Where the tools are that the audit needs beyond Rust.

use std::env;
use std::path::{Path, PathBuf};

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
        "ptxas or libdevice is missing; run `cargo xtask provision`, or set CUDA_PATH to a toolkit"
    )]
    Cuda,
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
    /// If there is none with both `ptxas` and `libdevice`.
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
        [self.ptxas(), libdevice].into_iter().find(|file| !file.is_file())
    }

    /// The folder, for `CUDA_PATH`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The assembler.
    pub fn ptxas(&self) -> PathBuf {
        self.root.join("bin/ptxas")
    }
}

/// Checks that LLVM is where `tracel-llvm-bundler` looks, before a build would try to download it.
///
/// # Errors
///
/// If it is not, or not completely.
pub fn check_llvm() -> Result<(), ToolchainError> {
    // The path and the mark of the bundler's release 23.1.0-4.
    let llvm = user_folder("XDG_DATA_HOME", ".local/share")?.join("tracel/tracel-llvm-23.1.0-4");
    match llvm.join(".tracel-llvm-installed").exists() {
        true => Ok(()),
        false => Err(ToolchainError::Llvm(llvm)),
    }
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

    const FILES: [&str; 2] = ["bin/ptxas", "nvvm/libdevice/libdevice.10.bc"];

    #[test]
    fn the_first_complete_folder_is_taken() {
        let (half, whole) = (toolkit(&FILES[..1]), toolkit(&FILES));
        let roots = [half.path().to_owned(), whole.path().to_owned()];
        let found = Toolkit::choose(None, roots.into_iter()).unwrap();
        assert_eq!(found.root(), whole.path());
        assert_eq!(found.ptxas(), whole.path().join("bin/ptxas"));
    }

    #[test]
    fn a_named_folder_is_the_only_one_asked() {
        let (half, whole) = (toolkit(&FILES[..1]), toolkit(&FILES));
        let roots = [whole.path().to_owned()];
        let error = Toolkit::choose(Some(half.path().to_owned()), roots.into_iter()).unwrap_err();
        assert_eq!(error, ToolchainError::CudaPath(half.path().join(FILES[1])));
        assert!(error.to_string().contains("cargo xtask provision"));
    }

    #[test]
    fn a_missing_toolkit_names_the_remedy() {
        let error = Toolkit::choose(None, core::iter::empty()).unwrap_err().to_string();
        assert!(error.contains("`cargo xtask provision`"), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
}
