//! Devices by the names that commands and tests use, as far as this program was built with them.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{Device, Tensor};
use thiserror::Error;

/// A device that answered, with the name it was asked by.
#[derive(Clone, Debug)]
pub struct NamedDevice {
    /// The name on the command line.
    pub name: &'static str,
    /// The device, without autodiff.
    pub device: Device,
}

impl fmt::Display for NamedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

/// Why a device cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DeviceError {
    /// The name is none of those known.
    #[error("unknown device `{0}`: expected one of {names}", names = NAMES.join(", "))]
    Unknown(String),
    /// The program was built without the device's feature.
    #[error("device `{0}` is not built in: run with `--features {0}`")]
    NotBuilt(&'static str),
    /// Creating a tensor on the device failed.
    #[error(
        "device `{name}` does not answer ({reason}): install its driver, or choose another device"
    )]
    Absent {
        /// The name asked for.
        name: &'static str,
        /// What its driver said.
        reason: String,
    },
}

/// Every name that [`device`] knows.
pub const NAMES: [&str; 5] = ["flex", "ndarray", "wgpu", "cpu", "cuda"];

/// Opens a device and makes it compute once, so that an absent one is found out here.
///
/// # Errors
///
/// When the name is unknown, its feature is off, or the device does not answer.
pub fn device(name: &str) -> Result<NamedDevice, DeviceError> {
    let name = NAMES
        .into_iter()
        .find(|known| *known == name)
        .ok_or_else(|| DeviceError::Unknown(name.to_owned()))?;
    let open = constructor(name).ok_or(DeviceError::NotBuilt(name))?;
    let device = probe(open).map_err(|reason| DeviceError::Absent { name, reason })?;
    Ok(NamedDevice { name, device })
}

/// The devices of this build that answer, and why the others do not.
pub fn devices() -> Vec<Result<NamedDevice, DeviceError>> {
    NAMES.into_iter().map(device).collect()
}

fn constructor(name: &str) -> Option<fn() -> Device> {
    match name {
        #[cfg(feature = "flex")]
        "flex" => Some(Device::flex),
        #[cfg(feature = "ndarray")]
        #[allow(deprecated)]
        "ndarray" => Some(Device::ndarray),
        #[cfg(feature = "wgpu")]
        "wgpu" => Some(|| Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
        #[cfg(feature = "cpu")]
        "cpu" => Some(Device::cpu),
        #[cfg(feature = "cuda")]
        "cuda" => Some(|| Device::cuda(0usize)),
        _ => None,
    }
}

/// Drivers that find no device panic, so that is what an absent one does here.
fn probe(open: fn() -> Device) -> Result<Device, String> {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let answer = catch_unwind(AssertUnwindSafe(|| {
        let device = open();
        let two = Tensor::<1>::ones([2], &device).sum().try_into_scalar::<f32>();
        two.map(|_| device).map_err(|error| format!("{error:?}"))
    }));
    std::panic::set_hook(hook);
    let answer = answer.unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<String>().cloned();
        let message =
            message.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(message.unwrap_or_else(|| "its driver panicked".to_owned()))
    });
    // Errors tell of their causes line by line.
    answer.map_err(|reason| reason.split_whitespace().collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_device_that_is_not_there_is_an_error() {
        assert_eq!(
            probe(|| panic!("no adapter\n  on Vulkan")).unwrap_err(),
            "no adapter on Vulkan"
        );
        assert!(probe(Device::flex).is_ok());
        assert_eq!(device("gpu").unwrap_err(), DeviceError::Unknown("gpu".to_owned()));
    }
}
