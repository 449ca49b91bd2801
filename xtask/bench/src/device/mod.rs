//! What the device bundle's `run.sh` found on a machine, from the files of its steps.
//!
//! | room | holds |
//! |---|---|
//! | [`input`] | the files that the steps leave |
//! | [`summary`] | rates, ratios and targets |
//! | `text` | the same as tables |

pub mod input;
pub mod summary;
mod text;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

pub use summary::Summary;

/// Why there is no report, in one line.
#[derive(Debug, Error)]
pub enum ReportError {
    /// A file that every run has cannot be read.
    #[error("cannot read {} ({source}); name a folder that run.sh wrote", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is not what `run.sh` writes.
    #[error("{} line {line}: {reason}; run run.sh again", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line, from 1 on.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A result could not be written.
    #[error("cannot write {} ({source}); name a folder that can be written to", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Reads what the steps left in a folder, and writes `results.json` and `table.txt` there.
///
/// # Errors
///
/// When the list of steps or facts is missing or none, or the results cannot be written. Steps that left
/// nothing, or half a file, are part of the summary.
pub fn report(folder: &Path) -> Result<Summary, ReportError> {
    let summary = Summary::new(input::read(folder)?);
    let mut json = serde_json::to_string_pretty(&summary).expect("they are plain values");
    json.push('\n');
    for (name, text) in [("results.json", json), ("table.txt", summary.table())] {
        let path = folder.join(name);
        fs::write(&path, text).map_err(|source| ReportError::Write { path, source })?;
    }
    Ok(summary)
}

#[cfg(test)]
mod tests;
