//! Finding and mapping the files that hold a tower.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use super::CheckpointError;
use super::names::{PREFIXES, canonical, is_tower_key};

pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// A safetensors file mapped into memory; tensors are read where they are used.
#[derive(Debug)]
pub(super) struct Shard {
    pub path: PathBuf,
    map: Mmap,
}

/// One tensor of a shard.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    /// Index of the shard.
    pub shard: usize,
    /// Key in the file, with prefix.
    pub key: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Where its bytes are in the file.
    bytes: Range<usize>,
}

/// The tower's tensors by canonical name.
#[derive(Debug)]
pub(super) struct TowerFiles {
    pub shards: Vec<Shard>,
    pub prefix: String,
    pub tensors: BTreeMap<String, Stored>,
}

impl TowerFiles {
    /// Maps the files of `path`: a folder, a safetensors file, or a shard index. Shards without a
    /// tensor of the tower are not opened.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = locate(path)?;
        if file.extension().is_some_and(|extension| extension == "json") {
            Self::open_index(&file)
        } else {
            let (shard, tensors) = Shard::open(&file)?;
            let prefix = find_prefix(&file, tensors.iter().map(|tensor| tensor.key.as_str()))?;
            Self::collect(prefix, vec![(shard, tensors)])
        }
    }

    /// The bytes of piece `part` of `parts` of a tensor.
    pub fn bytes(&self, tensor: &Stored, part: usize, parts: usize) -> &[u8] {
        let all = &self.shards[tensor.shard].map[tensor.bytes.clone()];
        let length = all.len() / parts;
        &all[part * length..(part + 1) * length]
    }

    fn open_index(index: &Path) -> Result<Self, CheckpointError> {
        let files = read_index(index)?;
        let prefix = find_prefix(index, files.keys().map(String::as_str))?;
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for (key, shard) in &files {
            if tower_name(key, prefix).is_some() {
                *counts.entry(shard).or_default() += 1;
            }
        }
        let folder = index.parent().unwrap_or(Path::new("."));
        let mut opened = Vec::with_capacity(counts.len());
        for (shard, tensors) in counts {
            let path = folder.join(shard);
            if !path.is_file() {
                return Err(CheckpointError::MissingShard {
                    index: index.to_path_buf(),
                    shard: shard.to_string(),
                    tensors,
                });
            }
            opened.push(Shard::open(&path)?);
        }
        Self::collect(prefix, opened)
    }

    fn collect(prefix: &str, opened: Vec<(Shard, Vec<Stored>)>) -> Result<Self, CheckpointError> {
        let mut shards = Vec::with_capacity(opened.len());
        let mut tensors: BTreeMap<String, Stored> = BTreeMap::new();
        for (index, (shard, stored)) in opened.into_iter().enumerate() {
            shards.push(shard);
            for mut tensor in stored {
                let Some(name) = tower_name(&tensor.key, prefix).map(canonical) else {
                    continue;
                };
                tensor.shard = index;
                if let Some(other) = tensors.get(&name) {
                    return Err(CheckpointError::Duplicate {
                        parameter: name,
                        first: other.key.clone(),
                        second: tensor.key,
                    });
                }
                tensors.insert(name, tensor);
            }
        }
        Ok(Self { shards, prefix: prefix.to_string(), tensors })
    }
}

impl Shard {
    fn open(path: &Path) -> Result<(Self, Vec<Stored>), CheckpointError> {
        let read_error = |source| CheckpointError::Read { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(read_error)?;
        // SAFETY: the map is only read, and only as bytes, for which every bit pattern is valid.
        // Another process that truncates the file meanwhile can end this one with SIGBUS, as with
        // every mapped checkpoint; released weights are not rewritten in place.
        let map = unsafe { Mmap::map(&file) }.map_err(read_error)?;
        let header_error = |error: safetensors::SafeTensorError| CheckpointError::Header {
            path: path.to_path_buf(),
            reason: error.to_string(),
        };
        let (header, metadata) = SafeTensors::read_metadata(&map).map_err(header_error)?;
        let start = 8 + header;
        let tensors = metadata
            .tensors()
            .into_iter()
            .map(|(key, info)| Stored {
                shard: 0,
                key,
                dtype: info.dtype,
                shape: info.shape.clone(),
                bytes: start + info.data_offsets.0..start + info.data_offsets.1,
            })
            .collect();
        let path = path.to_path_buf();
        Ok((Self { path, map }, tensors))
    }
}

/// A key of the safetensors file `path` that does not belong to the (first) tower in it, if any.
pub(super) fn key_outside_tower(path: &Path) -> Result<Option<String>, CheckpointError> {
    let (_, tensors) = Shard::open(path)?;
    let prefix = prefixes(tensors.iter().map(|tensor| tensor.key.as_str())).into_iter().next();
    let mut keys = tensors.into_iter().map(|tensor| tensor.key);
    Ok(keys.find(|key| prefix.and_then(|prefix| tower_name(key, prefix)).is_none()))
}

/// The file to start from: `path` itself, or the folder's index, single file or only file.
fn locate(path: &Path) -> Result<PathBuf, CheckpointError> {
    if !path.is_dir() {
        return Ok(path.to_path_buf());
    }
    for name in [INDEX, SINGLE] {
        let file = path.join(name);
        if file.is_file() {
            return Ok(file);
        }
    }
    let entries = std::fs::read_dir(path)
        .map_err(|source| CheckpointError::Read { path: path.to_path_buf(), source })?;
    let mut files = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    match (files.next(), files.next()) {
        (Some(file), None) => Ok(file),
        _ => Err(CheckpointError::NoWeights { path: path.to_path_buf() }),
    }
}

/// The index's `weight_map`: key to file name.
fn read_index(path: &Path) -> Result<HashMap<String, String>, CheckpointError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let text = std::fs::read_to_string(path)
        .map_err(|source| CheckpointError::Read { path: path.to_path_buf(), source })?;
    let error = |reason: String| CheckpointError::Index { path: path.to_path_buf(), reason };
    let Index { weight_map } = serde_json::from_str(&text).map_err(|e| error(e.to_string()))?;
    let shards: BTreeSet<&String> = weight_map.values().collect();
    for shard in shards {
        let mut parts = Path::new(shard).components();
        // An index is data from elsewhere: it must not lead out of its folder.
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
            return Err(error(format!("`{shard}` is not the name of a file beside it")));
        }
    }
    Ok(weight_map)
}

/// `key` without `prefix`, if it belongs to the tower: everything under a prefix does, and without
/// one what looks like it.
fn tower_name<'a>(key: &'a str, prefix: &str) -> Option<&'a str> {
    key.strip_prefix(prefix).filter(|name| !prefix.is_empty() || is_tower_key(name))
}

/// The one prefix under which blocks or a patch embedding are found.
fn find_prefix<'a>(
    path: &Path,
    keys: impl Iterator<Item = &'a str>,
) -> Result<&'static str, CheckpointError> {
    match prefixes(keys).as_slice() {
        [prefix] => Ok(prefix),
        [] => Err(CheckpointError::NoTower { path: path.to_path_buf() }),
        several => Err(CheckpointError::SeveralTowers {
            path: path.to_path_buf(),
            prefixes: several.iter().map(|prefix| format!("`{prefix}`")).collect(),
        }),
    }
}

/// The prefixes under which blocks or a patch embedding are found.
fn prefixes<'a>(keys: impl Iterator<Item = &'a str>) -> Vec<&'static str> {
    let mut counts = [0usize; PREFIXES.len()];
    for key in keys {
        for (count, prefix) in counts.iter_mut().zip(PREFIXES) {
            // A language model without prefix may have a `norm.` of its own: blocks decide.
            let block = key.strip_prefix(prefix).is_some_and(|name| {
                name.starts_with("blocks.") || name.starts_with("patch_embed.")
            });
            *count += usize::from(block);
        }
    }
    let counted = PREFIXES.into_iter().zip(counts);
    counted.filter_map(|(prefix, count)| (count > 0).then_some(prefix)).collect()
}
