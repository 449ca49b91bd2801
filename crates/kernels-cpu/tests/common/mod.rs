//! What the tests share.
#![allow(dead_code)]

pub mod attention;
mod numbers;
pub use numbers::*;
