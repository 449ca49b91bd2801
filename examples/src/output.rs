//! Files that are whole or not there.

use std::io::{BufWriter, Write};
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

/// A file that appears at its path only when it is complete.
///
/// Made before the work begins, so that a path that cannot be written is found out at once.
#[derive(Debug)]
pub struct OutputFile {
    path: PathBuf,
    file: NamedTempFile,
}

impl OutputFile {
    /// Prepares to write `path`.
    ///
    /// # Errors
    ///
    /// When its folder is missing or cannot be written, or the path is a folder.
    pub fn create(path: &Path) -> Result<Self, OutputError> {
        let error = |reason: String| OutputError { path: path.to_owned(), reason };
        if path.file_name().is_none() || path.is_dir() {
            return Err(error("it is a folder".to_owned()));
        }
        let folder = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let file = tempfile::Builder::new()
            .prefix(".partial-")
            .tempfile_in(folder)
            .map_err(|source| error(source.to_string()))?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Writes the contents and moves the file to its path.
    ///
    /// # Errors
    ///
    /// When writing fails; then nothing is left behind.
    pub fn write(
        self,
        contents: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
    ) -> Result<(), OutputError> {
        let Self { path, file } = self;
        let finish = || -> std::io::Result<()> {
            let mut writer = BufWriter::new(file);
            contents(&mut writer)?;
            let file = writer.into_inner().map_err(|error| error.into_error())?;
            make_readable(&file)?;
            file.persist(&path).map_err(|error| error.error)?;
            Ok(())
        };
        finish().map_err(|source| OutputError { path: path.clone(), reason: source.to_string() })
    }
}

/// Temporary files are private to their owner; a result is not.
fn make_readable(file: &NamedTempFile) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        file.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
    }
    let _ = file;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_file_is_whole_or_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        let failing = OutputFile::create(&path).unwrap();
        let error = failing.write(|writer| {
            writer.write_all(b"half")?;
            Err(std::io::Error::other("disk full"))
        });
        assert!(error.unwrap_err().to_string().contains("disk full"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);

        OutputFile::create(&path).unwrap().write(|writer| writer.write_all(b"whole")).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"whole");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_missing_folder_is_found_out_before_the_work() {
        let error = OutputFile::create(Path::new("no/such/folder/out")).unwrap_err().to_string();
        assert!(error.starts_with("cannot write no/such/folder/out: "), "{error}");
        assert!(OutputFile::create(Path::new("/")).is_err());
    }
}
