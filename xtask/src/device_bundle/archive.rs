//! A bundle as a folder, then as a file.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::BundleError;
use super::build::{Built, Program};

/// Files of the repository, and where they go.
const FILES: [(&str, &str); 4] = [
    ("xtask/device/run.sh", "run.sh"),
    ("xtask/bench/torch_gpu.py", "torch_gpu.py"),
    ("LICENSE-MIT", "LICENSE-MIT"),
    ("LICENSE-APACHE", "LICENSE-APACHE"),
];

/// What every Linux has in the version of its own kernel interface; a program must not bring another.
const GLIBC: [&str; 7] =
    ["ld-linux", "libc.", "libm.", "libdl.", "libpthread.", "librt.", "linux-vdso"];

/// Programs share most of their code, that of LLVM: a dictionary longer than one of them finds it again.
const XZ: &str = "xz --threads=1 --lzma2=preset=9,dict=256MiB";

/// Fills `bundle` anew: programs, stripped, the list of their features, the libraries that they need, golden
/// data and scripts.
///
/// # Errors
///
/// When a file cannot be copied, or `strip` or `ldd` fails.
pub fn collect(
    built: &Built,
    repository: &Path,
    fixtures: &Path,
    bundle: &Path,
) -> Result<(), BundleError> {
    if bundle.exists() {
        file(bundle, fs::remove_dir_all)?;
    }
    for (from, to) in FILES {
        copy(&repository.join(from), &bundle.join(to))?;
    }
    copy_all(fixtures, &bundle.join("fixtures"))?;
    let features = built.features.iter().map(|name| format!("{name}\n")).collect::<String>();
    file(&bundle.join("features"), |path| fs::write(path, features))?;
    let mut needed = BTreeMap::new();
    for Program { name, path } in &built.programs {
        let to = bundle.join("bin").join(name);
        copy(path, &to)?;
        output("strip", Command::new("strip").arg(&to))?;
        needed.extend(libraries(&output("ldd", Command::new("ldd").arg(&to))?));
    }
    needed.iter().try_for_each(|(name, path)| copy(path, &bundle.join("lib").join(name)))
}

/// Packs `name`, a folder in `folder`, and says how many bytes that takes.
///
/// # Errors
///
/// When `tar` or `xz` fails, or there is no archive then.
pub fn pack(folder: &Path, name: &str, archive: &Path) -> Result<u64, BundleError> {
    let parent = archive.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent {
        file(parent, fs::create_dir_all)?;
    }
    let mut tar = Command::new("tar");
    tar.arg("--create").arg("--file").arg(archive).arg("--directory").arg(folder);
    // Whoever unpacks it owns it.
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"]);
    tar.args(["--use-compress-program", XZ, name]);
    output("tar", &mut tar)?;
    Ok(file(archive, fs::metadata)?.len())
}

/// Libraries and their paths in the answer of `ldd`, but those of glibc.
fn libraries(answer: &str) -> Vec<(String, PathBuf)> {
    let library = |line: &str| {
        let (name, path) = line.trim().split_once(" => ")?;
        let path = path.split(" (").next()?;
        let own = path.starts_with('/') && !GLIBC.iter().any(|known| name.starts_with(known));
        own.then(|| (name.to_owned(), path.into()))
    };
    answer.lines().filter_map(library).collect()
}

/// What a program says; what it complains about is shown.
fn output(program: &'static str, command: &mut Command) -> Result<String, BundleError> {
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.map_err(|source| BundleError::Tool { program, source })?;
    if !output.status.success() {
        return Err(BundleError::Failed { program, reason: output.status.to_string() });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Does something with a file, which the error names.
pub fn file<T>(path: &Path, call: impl FnOnce(PathBuf) -> io::Result<T>) -> Result<T, BundleError> {
    call(path.to_owned()).map_err(|source| BundleError::File { path: path.to_owned(), source })
}

fn copy(from: &Path, to: &Path) -> Result<(), BundleError> {
    if let Some(parent) = to.parent() {
        file(parent, fs::create_dir_all)?;
    }
    file(from, |from| fs::copy(from, to)).map(|_| ())
}

fn copy_all(from: &Path, to: &Path) -> Result<(), BundleError> {
    for entry in file(from, fs::read_dir)? {
        let entry = entry.map_err(|source| BundleError::File { path: from.to_owned(), source })?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() { copy_all(&from, &to)? } else { copy(&from, &to)? }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::device_bundle::repository;

    #[test]
    fn libraries_are_those_beside_glibc() {
        let answer = "\tlinux-vdso.so.1 (0x00007f71c1f74000)\n\
                      \tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f71c1f43000)\n\
                      \tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f71bbf20000)\n\
                      \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f71bba1e000)\n\
                      \tlibcuda.so.1 => not found\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x00007f71c1f76000)\n";
        let path = "/lib/x86_64-linux-gnu/libz.so.1".into();
        assert_eq!(libraries(answer), [("libz.so.1".to_owned(), path)]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_bundle_has_every_part_and_unpacks() {
        let folder = tempfile::tempdir().unwrap();
        let fixtures = folder.path().join("data");
        let zeros = fixtures.join("model/zeros");
        fs::create_dir_all(zeros.parent().unwrap()).unwrap();
        fs::write(&zeros, vec![0; 4 << 20]).unwrap();
        // Any program will do, best a small one.
        let path = PathBuf::from("/bin/ls");
        let programs = vec![Program { name: "xtask".to_owned(), path }];
        let features = vec!["cuda".to_owned(), "cuda-cpp".to_owned()];
        let built = Built { programs, features, folder: folder.path().to_owned() };
        let bundle = folder.path().join("bundle");
        // Twice: what an earlier one left is not in the next.
        for _ in 0..2 {
            collect(&built, &repository(), &fixtures, &bundle).unwrap();
            fs::write(bundle.join("stale"), "").unwrap();
        }
        collect(&built, &repository(), &fixtures, &bundle).unwrap();
        let archive = folder.path().join("made/a.tar.xz");
        let bytes = pack(folder.path(), "bundle", &archive).unwrap();
        assert!(bytes < 4 << 20, "{bytes} bytes are not compressed");

        let unpacked = folder.path().join("unpacked");
        fs::create_dir(&unpacked).unwrap();
        let mut tar = Command::new("tar");
        output("tar", tar.arg("xf").arg(&archive).arg("-C").arg(&unpacked)).unwrap();
        let mut names: Vec<String> = fs::read_dir(unpacked.join("bundle"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "lib")
            .collect();
        names.sort();
        let expected = [
            "LICENSE-APACHE",
            "LICENSE-MIT",
            "bin",
            "features",
            "fixtures",
            "run.sh",
            "torch_gpu.py",
        ];
        assert_eq!(names, expected);
        let features = fs::read_to_string(unpacked.join("bundle/features")).unwrap();
        assert_eq!(features, "cuda\ncuda-cpp\n");
        assert_eq!(
            fs::metadata(unpacked.join("bundle/fixtures/model/zeros")).unwrap().len(),
            4 << 20
        );
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error =
            copy(Path::new("/no/such/file"), &folder.path().join("a")).unwrap_err().to_string();
        assert!(error.starts_with("/no/such/file: "), "{error}");
    }
}
