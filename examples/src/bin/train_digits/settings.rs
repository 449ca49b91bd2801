//! What a run is made of, and where it stands: the files of its folder.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use burn::optim::{OptimizerRecord, lr_scheduler::LrSchedulerRecord};
use burn::store::ModuleRecord;
use examples::output::OutputFile;
use serde::{Deserialize, Serialize};

/// What decides the course of a run, besides its devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Times that every digit is seen.
    pub epochs: usize,
    /// Digits used of each part of the split, at most.
    pub digits: usize,
    /// Images a device packs into one step.
    pub batch_size: usize,
    /// Peak of the schedule.
    pub learning_rate: f64,
    /// Decides the first weights, the order of the digits and how each is drawn.
    pub seed: u64,
}

/// The folder of a run.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// A folder for a new run, made if need be.
    ///
    /// # Errors
    ///
    /// When it holds a run already, or cannot be written.
    pub fn create(path: &Path, settings: &Settings) -> Result<Self, Box<dyn Error>> {
        let folder = Self { path: path.to_owned() };
        if folder.settings_file().exists() {
            let path = path.display();
            return Err(format!(
                "{path} holds an earlier run: pass --resume to continue it, or another --out"
            )
            .into());
        }
        fs::create_dir_all(folder.checkpoints()).map_err(|error| {
            format!("cannot write {}: {error}; choose another --out", path.display())
        })?;
        folder.write_settings(settings)?;
        Ok(folder)
    }

    /// The folder of an earlier run, its settings, and its last epoch with a whole checkpoint.
    ///
    /// # Errors
    ///
    /// When there is no such run, its settings are damaged, or no epoch was completed.
    pub fn resume(path: &Path) -> Result<(Self, Settings, usize), Box<dyn Error>> {
        let folder = Self { path: path.to_owned() };
        let file = folder.settings_file();
        let text = fs::read_to_string(&file).map_err(|error| {
            format!(
                "{}: no run to resume ({error}); run without --resume, or pass its --out",
                file.display()
            )
        })?;
        let settings = serde_json::from_str(&text).map_err(|error| {
            format!("{}: {error}; restore it, or start anew with another --out", file.display())
        })?;
        let epoch = folder.last_checkpoint().ok_or_else(|| {
            format!(
                "{}: no epoch was completed, nothing to resume; remove it and run without --resume",
                path.display()
            )
        })?;
        Ok((folder, settings, epoch))
    }

    /// Keeps `settings` for the next `--resume`.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub fn write_settings(&self, settings: &Settings) -> Result<(), Box<dyn Error>> {
        let json = serde_json::to_string_pretty(settings)?;
        let file = OutputFile::create(&self.settings_file())?;
        Ok(file.stage(|writer| writeln!(writer, "{json}"))?.publish()?)
    }

    /// The folder itself, where Burn logs metrics.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The trained tower.
    pub fn model(&self) -> PathBuf {
        self.path.join("model")
    }

    /// Held-out digits as image files.
    pub fn samples(&self) -> PathBuf {
        self.path.join("samples")
    }

    /// The picture of loss and accuracy.
    pub fn curves(&self) -> PathBuf {
        self.path.join("curves.png")
    }

    fn settings_file(&self) -> PathBuf {
        self.path.join("run.json")
    }

    /// Where Burn's training loop keeps them.
    fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoint")
    }

    /// The last epoch whose three files can be read: a run may have ended while writing them.
    fn last_checkpoint(&self) -> Option<usize> {
        let names = fs::read_dir(self.checkpoints()).ok()?.filter_map(Result::ok);
        let epoch = |name: String| name.strip_prefix("model-")?.strip_suffix(".bpk")?.parse().ok();
        let mut epochs: Vec<usize> =
            names.filter_map(|entry| epoch(entry.file_name().into_string().ok()?)).collect();
        epochs.sort_unstable();
        epochs.into_iter().rev().find(|epoch| {
            let file = |name: &str| self.checkpoints().join(format!("{name}-{epoch}.bpk"));
            ModuleRecord::load(file("model")).is_ok()
                && OptimizerRecord::load(file("optim")).is_ok()
                && LrSchedulerRecord::load(file("scheduler")).is_ok()
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_run_is_found_again_and_not_overwritten() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("run");
        let settings =
            Settings { epochs: 3, digits: 9, batch_size: 4, learning_rate: 0.5, seed: u64::MAX };
        let error = |result: Result<RunFolder, Box<dyn Error>>| result.unwrap_err().to_string();
        let resumed = || RunFolder::resume(&path).map(|(folder, ..)| folder);
        assert!(error(resumed()).contains("no run to resume"));
        let folder = RunFolder::create(&path, &settings).unwrap();
        assert!(error(RunFolder::create(&path, &settings)).contains("holds an earlier run"));
        assert!(error(resumed()).contains("no epoch was completed"));
        fs::write(folder.checkpoints().join("model-7.bpk"), "half a checkpoint").unwrap();
        assert!(error(resumed()).contains("no epoch was completed"));
        fs::write(folder.settings_file(), "{}").unwrap();
        assert!(error(resumed()).contains("missing field `epochs`"));
    }
}
