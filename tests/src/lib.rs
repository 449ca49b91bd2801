//! Golden-data harness: devices by name, fixtures, and the parity cases that both the integration
//! tests and `cargo xtask parity` run.

pub mod devices;
pub mod fixtures;
pub mod parity;
pub mod reference;
