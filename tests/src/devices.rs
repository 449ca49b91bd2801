//! Devices by name, and what a test does without one.

pub use examples::devices::{DeviceError, NAMES, NamedDevice, device, devices};

/// The variable that turns an absent device from a skipped test into a failed one.
pub const REQUIRE_GPU_TESTS: &str = "VISION_ATTENTION_REQUIRE_GPU_TESTS";

/// The device of a test that needs hardware or a driver, or nothing, with a line on stderr, where it
/// does not answer.
///
/// # Panics
///
/// When the device does not answer although [`REQUIRE_GPU_TESTS`] is `1`.
pub fn device_or_skip(name: &str) -> Option<NamedDevice> {
    match device(name) {
        Ok(device) => Some(device),
        Err(error) if std::env::var(REQUIRE_GPU_TESTS).is_ok_and(|value| value == "1") => {
            panic!("{REQUIRE_GPU_TESTS}=1 and {error}")
        }
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}
