//! What the example programs share.

pub mod devices;
pub mod digits;
pub mod heatmap;
pub mod output;
pub mod terminal;
