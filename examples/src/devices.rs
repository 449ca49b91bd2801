//! Devices by name, as far as this program was built with them.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{Device, Tensor};

/// The names that [`open`] can know.
pub const NAMES: [&str; 5] = ["flex", "ndarray", "wgpu", "cpu", "cuda"];

/// The device of a name, once it has answered.
///
/// # Errors
///
/// A sentence that says whether the name is unknown, its feature is not built in, or the machine has
/// no such device.
pub fn open(name: &str) -> Result<Device, String> {
    let open: fn() -> Device = match name {
        #[cfg(feature = "flex")]
        "flex" => Device::flex,
        #[cfg(feature = "ndarray")]
        // Burn deprecates ndarray; it stays selectable as long as it exists.
        #[allow(deprecated)]
        "ndarray" => Device::ndarray,
        #[cfg(feature = "wgpu")]
        "wgpu" => || Device::wgpu(burn::tensor::DeviceKind::DefaultDevice),
        #[cfg(feature = "cpu")]
        "cpu" => Device::cpu,
        #[cfg(feature = "cuda")]
        "cuda" => || Device::cuda(0usize),
        name if NAMES.contains(&name) => {
            return Err(format!("device `{name}` is not built in: run with `--features {name}`"));
        }
        name => {
            return Err(format!("unknown device `{name}`: expected one of {}", NAMES.join(", ")));
        }
    };
    probe(open).map_err(|reason| {
        format!("device `{name}` does not answer ({reason}): choose another --device")
    })
}

/// Makes the device compute once. Drivers that find no device panic, so that is what an absent one
/// does here.
fn probe(open: fn() -> Device) -> Result<Device, String> {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let answer = catch_unwind(AssertUnwindSafe(|| {
        let device = open();
        let sum = Tensor::<1>::ones([2], &device).sum().try_into_scalar::<f32>();
        sum.map(|_| device).map_err(|error| format!("{error:?}"))
    }));
    std::panic::set_hook(hook);
    answer.unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<String>().cloned();
        let message =
            message.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(message.unwrap_or_else(|| "its driver panicked".to_owned()))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_device_that_is_not_there_is_an_error() {
        assert_eq!(probe(|| panic!("no adapter")).unwrap_err(), "no adapter");
        assert!(probe(Device::flex).is_ok());
    }
}
