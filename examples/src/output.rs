//! Files that are whole or not there.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;
use thiserror::Error;

/// Why a file cannot be written.
#[derive(Debug, Error)]
#[error("cannot write {path}: {reason}; choose another path", path = path.display())]
pub struct OutputError {
    path: PathBuf,
    reason: String,
}

/// A place for a file that appears only when it is complete.
///
/// Made before the work begins, so that a path that cannot be written is found out at once.
#[derive(Debug)]
pub struct OutputFile {
    path: PathBuf,
    folder: PathBuf,
    /// The path with its folder's links resolved: equal for equal places.
    place: PathBuf,
}

impl OutputFile {
    /// Checks that `path` can be written, and leaves nothing there.
    ///
    /// # Errors
    ///
    /// When its folder is missing or cannot be written, or something other than a file is there.
    pub fn create(path: &Path) -> Result<Self, OutputError> {
        let error = |reason: &str| OutputError { path: path.to_owned(), reason: reason.to_owned() };
        let is_folder = || error("it is a folder");
        let name = path.file_name().ok_or_else(is_folder)?;
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => return Err(is_folder()),
            // Replacing a device or a pipe by a file would break it for everyone.
            Ok(found) if !found.is_file() => return Err(error("it is not a regular file")),
            _ => {}
        }
        let folder = folder_of(path);
        if !folder.is_dir() {
            return Err(error(&format!("there is no folder {}", folder.display())));
        }
        let place = folder.canonicalize().map_err(|source| error(&kind(&source)))?.join(name);
        let file = Self { path: path.to_owned(), folder: folder.to_owned(), place };
        // Dropped at once: a run that is killed while it works leaves nothing behind.
        file.temporary().map_err(|source| error(&kind(&source)))?;
        Ok(file)
    }

    /// Refuses to write where `input` is, or is linked to.
    ///
    /// # Errors
    ///
    /// When this file would replace `input`.
    pub fn keep_off(&self, input: &Path) -> Result<(), OutputError> {
        let entry = folder_of(input).canonicalize().ok().zip(input.file_name());
        let entry = entry.map(|(folder, name)| folder.join(name));
        let target = input.canonicalize().ok();
        let written_through = target.is_some() && self.path.canonicalize().ok() == target;
        if written_through || [entry, target].contains(&Some(self.place.clone())) {
            return Err(self.error(format!("it would replace the input {}", input.display())));
        }
        Ok(())
    }

    /// Refuses to write into `folder`.
    ///
    /// # Errors
    ///
    /// When this file would lie directly in it.
    pub fn keep_out_of(&self, folder: &Path) -> Result<(), OutputError> {
        if folder.canonicalize().ok().as_deref() == self.place.parent() {
            return Err(self.error("it lies in the model's folder".to_owned()));
        }
        Ok(())
    }

    /// Refuses to share a path.
    ///
    /// # Errors
    ///
    /// When both are the same.
    pub fn differ_from(&self, other: &Self) -> Result<(), OutputError> {
        if self.place == other.place {
            return Err(self.error("another result goes there".to_owned()));
        }
        Ok(())
    }

    /// Writes the contents beside the path.
    ///
    /// # Errors
    ///
    /// When writing fails; then nothing is left behind.
    pub fn stage(
        self,
        contents: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<StagedFile, OutputError> {
        let stage = || -> io::Result<NamedTempFile> {
            let mut writer = BufWriter::new(self.temporary()?);
            contents(&mut writer)?;
            let file = writer.into_inner().map_err(|error| error.into_error())?;
            make_readable(&file)?;
            Ok(file)
        };
        match stage() {
            Ok(file) => Ok(StagedFile { output: self, file }),
            Err(source) => Err(self.error(source.to_string())),
        }
    }

    fn temporary(&self) -> io::Result<NamedTempFile> {
        tempfile::Builder::new().prefix(".partial-").tempfile_in(&self.folder)
    }

    fn error(&self, reason: String) -> OutputError {
        OutputError { path: self.path.clone(), reason }
    }
}

/// A complete file that is not at its path yet; dropped, it leaves nothing behind.
#[derive(Debug)]
pub struct StagedFile {
    output: OutputFile,
    file: NamedTempFile,
}

impl StagedFile {
    /// Moves the file to its path, in place of what is there.
    ///
    /// # Errors
    ///
    /// When moving fails; then nothing is left behind.
    pub fn publish(self) -> Result<(), OutputError> {
        let Self { output, file } = self;
        file.persist(&output.path).map_err(|error| output.error(kind(&error.error)))?;
        Ok(())
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// What went wrong, without the name of the temporary file.
fn kind(error: &io::Error) -> String {
    error.kind().to_string()
}

/// Temporary files are private to their owner; a result is not.
fn make_readable(file: &NamedTempFile) -> io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        file.as_file().set_permissions(fs::Permissions::from_mode(0o644))?;
    }
    let _ = file;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn entries(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn a_file_is_whole_or_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        let file = OutputFile::create(&path).unwrap();
        assert_eq!(entries(folder.path()), 0);
        let error = file.stage(|writer| {
            writer.write_all(b"half")?;
            Err(io::Error::other("disk full"))
        });
        assert!(error.unwrap_err().to_string().contains("disk full"));
        assert_eq!(entries(folder.path()), 0);

        let stage =
            || OutputFile::create(&path).unwrap().stage(|writer| writer.write_all(b"whole"));
        drop(stage().unwrap());
        assert_eq!(entries(folder.path()), 0);
        stage().unwrap().publish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert_eq!(entries(folder.path()), 1);
    }

    #[test]
    fn a_missing_folder_is_found_out_before_the_work() {
        let error = OutputFile::create(Path::new("no/such/folder/out")).unwrap_err().to_string();
        let expected = "cannot write no/such/folder/out: there is no folder no/such/folder; choose another path";
        assert_eq!(error, expected);
        assert!(OutputFile::create(Path::new("/")).is_err());
        assert!(OutputFile::create(Path::new("")).is_err());
    }

    #[test]
    #[cfg(unix)]
    fn devices_are_not_replaced() {
        let error = OutputFile::create(Path::new("/dev/null")).unwrap_err().to_string();
        assert_eq!(error, "cannot write /dev/null: it is not a regular file; choose another path");
    }

    #[test]
    fn equal_places_are_seen_through_other_spellings() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("inner");
        fs::create_dir(&inner).unwrap();
        let input = folder.path().join("input");
        fs::write(&input, b"precious").unwrap();
        let output = OutputFile::create(&inner.join("../input")).unwrap();
        assert!(output.keep_off(&input).is_err());
        assert!(output.keep_out_of(&inner.join("..")).is_err());
        assert!(output.differ_from(&OutputFile::create(&input).unwrap()).is_err());

        let other = OutputFile::create(&inner.join("input")).unwrap();
        assert!(other.keep_off(&input).is_ok());
        assert!(other.keep_out_of(folder.path()).is_ok());
        assert!(other.differ_from(&output).is_ok());
    }

    #[test]
    #[cfg(unix)]
    fn inputs_behind_links_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        fs::write(&target, b"precious").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        for output in [&target, &link] {
            assert!(OutputFile::create(output).unwrap().keep_off(&link).is_err());
        }
    }
}
