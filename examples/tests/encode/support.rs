//! Runs the program and reads what it wrote.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use image::{DynamicImage, ImageFormat, RgbImage};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use tempfile::TempDir;

/// A file or folder of the golden data.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

/// The golden images, in the order that a shell lists them.
pub const IMAGES: [&str; 7] = [
    "gray.png",
    "no_resize.png",
    "palette.png",
    "resize_down.png",
    "rgba.png",
    "tall.png",
    "upscale_tiny.png",
];

/// A folder of its own to run the program in.
pub struct Workplace(TempDir);

impl Workplace {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.path(name), bytes).unwrap();
    }

    /// A copy of a golden image, as `name`.
    pub fn copy_image(&self, image: &str, name: &str) {
        fs::copy(fixture(image), self.path(name)).unwrap();
    }

    /// A copy of a golden model, as the folder `model`, without what is expected of it.
    pub fn copy_model(&self, name: &str) -> Model {
        let folder = self.path("model");
        fs::create_dir(&folder).unwrap();
        for entry in fs::read_dir(fixture(name)).unwrap() {
            let entry = entry.unwrap();
            if entry.file_name() != "expected.safetensors" {
                fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
            }
        }
        Model(folder)
    }

    /// The program with `arguments`, without the reader's own log settings.
    pub fn command<A: AsRef<std::ffi::OsStr>>(&self, arguments: &[A]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_encode"));
        command.args(arguments).current_dir(self.0.path()).env_remove("RUST_LOG");
        command
    }

    /// Runs the program to a good end, with nothing to complain of, and returns what it printed.
    pub fn encode<A: AsRef<std::ffi::OsStr>>(&self, arguments: &[A]) -> String {
        let output = self.command(arguments).output().unwrap();
        let stderr = text(&output.stderr);
        assert!(output.status.success(), "{}: {stderr}", output.status);
        assert_eq!(stderr, "");
        text(&output.stdout)
    }

    /// Runs the program, which must refuse in one line, leave every file as it was and make none.
    pub fn refuse<A: AsRef<std::ffi::OsStr>>(&self, arguments: &[A]) -> String {
        let before = self.files();
        let Output { status, stderr, .. } = self.command(arguments).output().unwrap();
        let stderr = text(&stderr);
        // No code at all would be a signal, such as that of an abort; 101 would be a panic.
        assert!(matches!(status.code(), Some(1 | 2)), "{status}: {stderr}");
        let line = stderr.strip_prefix("error: ").and_then(|line| line.strip_suffix('\n'));
        let line = line.filter(|line| !line.contains('\n'));
        let line = line.unwrap_or_else(|| panic!("not one line of error: {stderr}"));
        assert_eq!(self.files(), before, "the files of the folder before and after");
        line.to_owned()
    }

    /// Every file below, with its contents.
    pub fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut files = BTreeMap::new();
        let mut folders = vec![self.0.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() && !path.is_symlink() {
                    folders.push(path);
                } else {
                    let contents = fs::read(&path).unwrap_or_default();
                    files.insert(path, contents);
                }
            }
        }
        files
    }

    pub fn features(&self, name: &str) -> Features {
        Features::read(&self.path(name))
    }

    pub fn picture(&self, name: &str) -> RgbImage {
        image::open(self.path(name)).unwrap().into_rgb8()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The contents of a features file.
#[derive(Debug, PartialEq)]
pub struct Features {
    pub values: Vec<f32>,
    pub shape: Vec<usize>,
    pub grids: Vec<[i64; 3]>,
    pub cu_seqlens: Vec<i32>,
}

impl Features {
    fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.len(), 3, "{:?}", file.names());
        let tensor = |name: &str, dtype: Dtype| {
            let tensor = file.tensor(name).unwrap();
            assert_eq!(tensor.dtype(), dtype, "{name}");
            tensor
        };
        let features = tensor("features", Dtype::F32);
        let grids = tensor("grid_thw", Dtype::I64);
        let cu_seqlens = tensor("cu_seqlens", Dtype::I32);
        let grid_values = numbers(grids.data(), i64::from_le_bytes);
        assert_eq!(grids.shape(), [grid_values.len() / 3, 3]);
        let offsets = numbers(cu_seqlens.data(), i32::from_le_bytes);
        assert_eq!(cu_seqlens.shape(), [grids.shape()[0] + 1]);
        assert_eq!(offsets[offsets.len() - 1] as usize, features.shape()[0]);
        Self {
            values: numbers(features.data(), f32::from_le_bytes),
            shape: features.shape().to_vec(),
            grids: grid_values.chunks(3).map(|grid| grid.try_into().unwrap()).collect(),
            cu_seqlens: offsets,
        }
    }

    /// The rows of image `index`.
    pub fn image(&self, index: usize) -> &[f32] {
        let row = |index: usize| self.cu_seqlens[index] as usize * self.shape[1];
        &self.values[row(index)..row(index + 1)]
    }
}

fn numbers<const N: usize, T>(bytes: &[u8], read: fn([u8; N]) -> T) -> Vec<T> {
    let (chunks, rest) = bytes.as_chunks();
    assert!(rest.is_empty());
    chunks.iter().map(|chunk| read(*chunk)).collect()
}

/// Largest difference between two lists, relative to the largest value.
pub fn difference(actual: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(actual.len(), expected.len());
    let largest = expected.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    assert!(largest > 0.0, "features that are all zero compare with anything");
    let differences = actual.iter().zip(expected).map(|(a, b)| (a - b).abs());
    // Unlike `max`, this keeps NaN.
    differences.fold(0.0, |worst: f32, x| if x <= worst { worst } else { x }) / largest
}

/// An image of `width` by `height` pixels with something to see in it.
pub fn waves(width: u32, height: u32) -> RgbImage {
    RgbImage::from_fn(width, height, |x, y| {
        image::Rgb([(x * 7 + y * 3) as u8, (x * y / 5) as u8, (x / 3 + y * 11) as u8])
    })
}

/// `image` as a file of `format`.
pub fn file_of(image: RgbImage, format: ImageFormat) -> Vec<u8> {
    let mut file = std::io::Cursor::new(Vec::new());
    DynamicImage::from(image).write_to(&mut file, format).unwrap();
    file.into_inner()
}

/// A file without its last `count` bytes.
pub fn without_last(mut file: Vec<u8>, count: usize) -> Vec<u8> {
    file.truncate(file.len() - count);
    file
}

/// A model's folder, to be damaged.
pub struct Model(PathBuf);

/// Tensors by key: dtype, shape, bytes.
pub type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

impl Model {
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn remove(&self, name: &str) {
        fs::remove_file(self.path(name)).unwrap();
    }

    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        fs::write(self.path(name), contents).unwrap();
    }

    /// Drops the last `count` bytes of a file.
    pub fn truncate(&self, name: &str, count: usize) {
        let bytes = fs::read(self.path(name)).unwrap();
        self.write(name, without_last(bytes, count));
    }

    pub fn edit_json(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut value = serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap();
        edit(&mut value);
        self.write(name, value.to_string());
    }

    pub fn edit_tensors(&self, name: &str, edit: impl FnOnce(&mut Tensors)) {
        let bytes = fs::read(self.path(name)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors: Tensors = file
            .iter()
            .map(|(key, view)| {
                (key.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
            })
            .collect();
        edit(&mut tensors);
        let views = tensors.iter().map(|(key, (dtype, shape, bytes))| {
            (key, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        self.write(name, safetensors::serialize(views, None).unwrap());
    }
}
