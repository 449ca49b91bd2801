//! The program `encode` as its users run it: files in, files out, or one line of error.
#![allow(clippy::unwrap_used)]

mod bad_arguments;
mod bad_images;
mod bad_models;
mod odd_inputs;
mod results;
mod support;
