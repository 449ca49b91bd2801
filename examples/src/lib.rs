//! What the example programs share.

pub mod devices;
pub mod heatmap;
pub mod output;
