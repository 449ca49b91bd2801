//! `cargo xtask device-bundle`: one archive that checks and measures the kernels on another machine.

mod archive;
mod build;

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use kernel_audit::toolchain::llvm;
use thiserror::Error;
use vision_attention_tests::devices::{DeviceError, NAMES};
use vision_attention_tests::fixtures;

/// The most megabytes of an archive: it has to reach machines by slow ways.
const MOST: f64 = 60.0;

/// The folder that the archive unpacks to.
const NAME: &str = "burn-vision-attention-device";

/// The feature by which CubeCL compiles C++ for CUDA.
const CUDA_CPP: &str = "cuda-cpp";

/// Arguments of the command.
#[derive(Args)]
pub struct DeviceBundle {
    /// Device to build for, repeatable: cuda, wgpu, ndarray, cpu; flex is always built in.
    #[arg(long = "device", value_name = "NAME", default_values_t = ["cuda".to_owned()])]
    devices: Vec<String>,
    /// Compile every kernel for CUDA by CubeCL's C++ compiler, which alone has asynchronous copies: run.sh
    /// then checks and measures flash_attention_3, too, and the other machine needs NVRTC and CUDA's headers.
    #[arg(long)]
    cuda_cpp: bool,
    /// Where the archive goes; in the build folder by default.
    #[arg(long, value_name = "FILE.tar.xz")]
    output: Option<PathBuf>,
}

/// Why there is no archive, in one line.
#[derive(Debug, Error)]
enum BundleError {
    /// A program that is needed cannot be started.
    #[error("cannot start `{program}` ({source}); install it")]
    Tool {
        /// The program.
        program: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A program failed.
    #[error("`{program}` failed ({reason}); what it printed above says why")]
    Failed {
        /// The program.
        program: &'static str,
        /// Its status, or what is missing in what it said.
        reason: String,
    },
    /// A file cannot be copied or made.
    #[error("{}: {source}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The C++ compiler is for a device that is not built for.
    #[error("--cuda-cpp: it compiles for CUDA, which is not among the devices; add --device cuda")]
    NoCuda,
    /// The archive is too large.
    #[error(
        "the archive has {megabytes:.1} MB, more than {most} MB; build for fewer devices by --device",
        most = MOST
    )]
    Size {
        /// Its size.
        megabytes: f64,
    },
}

impl DeviceBundle {
    /// Builds, strips, collects and packs; prints where the archive is and how large.
    pub fn run(self) -> Result<ExitCode, Box<dyn Error>> {
        let mut features = features(&self.devices)?;
        let mut name = NAME.to_owned();
        if self.cuda_cpp {
            if !features.contains(&"cuda") {
                return Err(BundleError::NoCuda.into());
            }
            features.push(CUDA_CPP);
            name.push_str("-cpp");
        }
        if features.contains(&"cuda") || features.contains(&"cpu") {
            llvm()?;
        }
        let built = build::build(&features)?;
        let folder = built.folder.join("device-bundle");
        let bundle = folder.join(&name);
        archive::collect(&built, &repository(), &fixtures::directory(), &bundle)?;
        let output = self.output.unwrap_or_else(|| folder.join(format!("{name}.tar.xz")));
        let megabytes = archive::pack(&folder, &name, &output)? as f64 / 1e6;
        within_limit(megabytes, &output)?;
        println!("{}: {megabytes:.1} MB", output.display());
        println!("on the other machine: tar xf {name}.tar.xz && {name}/run.sh");
        Ok(ExitCode::SUCCESS)
    }
}

fn repository() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    root.expect("this package is in a folder of the repository").to_owned()
}

/// The features of the programs, which are called as the devices are; those of Flex come with any.
fn features(devices: &[String]) -> Result<Vec<&'static str>, DeviceError> {
    let known = |name: &String| {
        let known = NAMES.into_iter().find(|known| known == name);
        known.ok_or_else(|| DeviceError::Unknown(name.clone()))
    };
    let mut features = devices.iter().map(known).collect::<Result<Vec<_>, _>>()?;
    features.push("flex");
    features.sort_unstable();
    features.dedup();
    Ok(features)
}

/// Takes an archive away that is too large.
fn within_limit(megabytes: f64, archive: &Path) -> Result<(), BundleError> {
    if megabytes <= MOST {
        return Ok(());
    }
    archive::file(archive, std::fs::remove_file)?;
    Err(BundleError::Size { megabytes })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(&["cuda"], &["cuda", "flex"])]
    #[case(&["flex", "wgpu", "flex"], &["flex", "wgpu"])]
    fn devices_become_features(#[case] devices: &[&str], #[case] expected: &[&str]) {
        let devices: Vec<String> = devices.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(features(&devices).unwrap(), expected);
    }

    #[test]
    fn the_compiler_for_cuda_needs_cuda() {
        let bundle =
            DeviceBundle { devices: vec!["wgpu".to_owned()], cuda_cpp: true, output: None };
        let error = bundle.run().unwrap_err().to_string();
        assert!(error.starts_with("--cuda-cpp: ") && error.contains("--device cuda"), "{error}");
    }

    #[test]
    fn unknown_devices_are_refused() {
        let error = features(&["gpu".to_owned()]).unwrap_err();
        assert_eq!(error, DeviceError::Unknown("gpu".to_owned()));
    }

    #[test]
    fn an_archive_that_is_too_large_is_refused_with_its_size() {
        let folder = tempfile::tempdir().unwrap();
        let archive = folder.path().join("a.tar.xz");
        std::fs::write(&archive, "").unwrap();
        within_limit(MOST, &archive).unwrap();
        assert!(archive.exists());
        let error = within_limit(61.23, &archive).unwrap_err().to_string();
        assert!(error.starts_with("the archive has 61.2 MB, more than 60 MB"), "{error}");
        assert!(!archive.exists());
    }
}
