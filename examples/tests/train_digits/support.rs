//! Runs the program and reads what it printed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// A folder of its own to run the program in.
pub struct Workplace(TempDir);

impl Workplace {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, contents: &str) {
        fs::write(self.path(name), contents).unwrap();
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_train_digits"));
        command.args(arguments).current_dir(self.0.path()).env_remove("RUST_LOG");
        command.output().unwrap()
    }

    /// Runs the program to a good end, with nothing to complain of, and returns what it printed.
    pub fn train(&self, arguments: &[&str]) -> String {
        let Output { status, stdout, stderr } = self.run(arguments);
        let stderr = String::from_utf8(stderr).unwrap();
        assert!(status.success(), "{status}: {stderr}");
        assert_eq!(stderr, "");
        String::from_utf8(stdout).unwrap()
    }

    /// Runs the program, which must refuse in one line and print nothing else.
    pub fn refuse(&self, arguments: &[&str]) -> String {
        let Output { status, stdout, stderr } = self.run(arguments);
        let stderr = String::from_utf8(stderr).unwrap();
        assert!(matches!(status.code(), Some(1 | 2)), "{status}: {stderr}");
        assert_eq!(String::from_utf8(stdout).unwrap(), "");
        let line = stderr.strip_prefix("error: ").and_then(|line| line.strip_suffix('\n'));
        let line = line.filter(|line| !line.contains('\n'));
        line.unwrap_or_else(|| panic!("not one line of error: {stderr}")).to_owned()
    }

    pub fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }
}

/// Copies a folder and all below.
pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// What a line of an epoch says: its number, how many there are, and training loss, training
/// accuracy, validation loss and validation accuracy.
pub fn epochs(stdout: &str) -> Vec<(usize, usize, [f64; 4])> {
    let lines = stdout.lines().filter_map(|line| line.strip_prefix("epoch "));
    lines
        .map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let (epoch, total) = words[0].split_once('/').unwrap();
            let values = [3, 5, 9, 11].map(|word| words[word].parse().unwrap());
            (epoch.parse().unwrap(), total.parse().unwrap(), values)
        })
        .collect()
}
