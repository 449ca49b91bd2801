//! `cargo xtask bench`: time, memory and arithmetic rate, in a release build.

use std::env;
use std::error::Error;
use std::process::{Command, ExitCode};

use attention_bench::arguments::Bench;
use vision_attention_tests::devices::{DeviceError, NAMES};

/// Builds and runs the benchmark with the arguments as they were given. It is a program of its own, since
/// `cargo xtask` itself is a development build, and is built for the devices that are measured alone. A
/// release build of this program, as the device bundle has it, measures by itself.
pub fn run(arguments: &Bench) -> Result<ExitCode, Box<dyn Error>> {
    if !cfg!(debug_assertions) {
        attention_bench::run(arguments)?;
        return Ok(ExitCode::SUCCESS);
    }
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["run", "--release", "--quiet", "--package", "attention-bench"])
        .args(["--features", &features(&arguments.devices)?])
        .args(["--manifest-path", concat!(env!("CARGO_MANIFEST_DIR"), "/bench/Cargo.toml"), "--"])
        .args(crate::arguments())
        .status()
        .map_err(|error| format!("cargo run: {error}"))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The features of the benchmark, which are called as the devices are.
fn features(devices: &[String]) -> Result<String, DeviceError> {
    let unknown = devices.iter().find(|name| !NAMES.contains(&name.as_str()));
    match unknown {
        Some(name) => Err(DeviceError::Unknown(name.clone())),
        None => Ok(devices.join(",")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_devices_that_exist_become_features() {
        let devices =
            |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(features(&devices(&["flex", "wgpu"])), Ok("flex,wgpu".to_owned()));
        let unknown = Err(DeviceError::Unknown("gpu".to_owned()));
        assert_eq!(features(&devices(&["flex", "gpu"])), unknown);
    }
}
