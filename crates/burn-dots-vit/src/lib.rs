//! The Dots vision towers as [Burn](burn) modules: the dense tower of dots.ocr and the
//! mixture-of-experts tower of dots3-note.
//!
//! | module | what it holds |
//! |---|---|
//! | [`config`] | [`DotsVitConfig`]: hyper-parameters, from either dialect of `config.json` |
//! | [`preprocess`] | images to pixel rows |
//! | [`grid`] | [`GridThw`]: how many patches an image has, and what a batch of them means |
//! | [`encoder`] | [`DotsVisionEncoder`]: the tower |
//! | [`patch_embed`], [`block`], [`mlp`], [`moe`], [`adapter`] | its parts |
//! | [`checkpoint`] | released safetensors to towers and back |

pub mod adapter;
pub mod block;
pub mod checkpoint;
pub mod config;
pub mod encoder;
pub mod grid;
pub mod mlp;
pub mod moe;
pub mod patch_embed;
pub mod preprocess;
#[cfg(feature = "autodiff")]
mod recompute;

pub use checkpoint::{CheckpointError, CheckpointOptions, LoadReport};
pub use config::{ConfigError, DotsVitConfig};
pub use encoder::{DotsVisionEncoder, EncoderError, TowerStage};
pub use grid::{GridError, GridThw};

/// Compiles the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
