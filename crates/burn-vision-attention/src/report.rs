//! Reports that a user should see once, not once a layer.

use std::collections::HashSet;
use std::sync::Mutex;

use burn::tensor::Device;

/// A device as its backend names it.
pub(crate) fn device_name(device: &Device) -> String {
    format!("{:?}", device.as_dispatch())
}

/// Logs a warning the first time this very text comes.
pub(crate) fn warn_once(message: String) {
    static SEEN: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    let mut seen = SEEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let seen = seen.get_or_insert_default();
    if !seen.contains(&message) {
        log::warn!("{message}");
        seen.insert(message);
    }
}
