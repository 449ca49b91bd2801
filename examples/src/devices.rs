//! Devices by name, as far as this program was built with them.

use burn::tensor::Device;

/// The names that [`open`] can know.
pub const NAMES: [&str; 5] = ["flex", "ndarray", "wgpu", "cpu", "cuda"];

/// The device of a name.
///
/// # Errors
///
/// A sentence that says whether the name is unknown or its feature is not built in.
pub fn open(name: &str) -> Result<Device, String> {
    match name {
        #[cfg(feature = "flex")]
        "flex" => Ok(Device::flex()),
        #[cfg(feature = "ndarray")]
        #[allow(deprecated)] // Burn deprecates ndarray; it stays selectable as long as it exists.
        "ndarray" => Ok(Device::ndarray()),
        #[cfg(feature = "wgpu")]
        "wgpu" => Ok(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
        #[cfg(feature = "cpu")]
        "cpu" => Ok(Device::cpu()),
        #[cfg(feature = "cuda")]
        "cuda" => Ok(Device::cuda(0usize)),
        name if NAMES.contains(&name) => {
            Err(format!("device `{name}` is not built in: run with `--features {name}`"))
        }
        name => Err(format!("unknown device `{name}`: expected one of {}", NAMES.join(", "))),
    }
}
