//! The program `train_digits` as its users run it: a folder out, or one line of error.
#![allow(clippy::unwrap_used)]

mod bad_arguments;
mod runs;
mod support;
