//! What saving leaves behind, in good and in bad circumstances.

use burn_vision_attention::AttentionImplementation;

use super::*;

#[rstest]
#[case("dots_ocr_tiny")]
#[case("dots3_note_tiny")]
fn saving_gives_the_release_back(#[case] name: &str) {
    let (source, target) = (fixture(name), tempfile::tempdir().unwrap());
    let options = CheckpointOptions::default().with_dtype(DType::BF16);
    let device = Device::flex();
    let (tower, _) = DotsVisionEncoder::from_pretrained_with(&source, &options, &device).unwrap();
    tower.save_pretrained(target.path()).unwrap();
    let saved = read(&target.path().join("model.safetensors"));
    let mut released = Tensors::new();
    for entry in std::fs::read_dir(&source).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_str().unwrap().starts_with("model-") {
            released.extend(read(&path));
        }
    }
    released.retain(|key, _| key.starts_with("vision"));
    assert_eq!(saved, released);
    let (again, report) = DotsVisionEncoder::from_pretrained(target.path(), &device).unwrap();
    assert!(report.is_complete() && report.unused.is_empty());
    let (first, _) = DotsVisionEncoder::from_pretrained(&source, &device).unwrap();
    assert_eq!(encode(&again), encode(&first));
    assert_eq!(again.config(), tower.config());
}

#[test]
fn biases_and_pixel_shuffle_survive_a_round_trip() {
    let mut config = DotsVitConfig::dots_moe_vit();
    (config.embed_dim, config.num_attention_heads, config.num_hidden_layers) = (32, 2, 2);
    (config.intermediate_size, config.moe_intermediate_size) = (48, 24);
    (config.adapter_out_dim, config.use_bias) = (40, true);
    config.pyramid_num_routed = vec![-1, 3];
    let tower = DotsVisionEncoder::new(&config, &Device::flex()).unwrap();
    let expected = encode(&tower);
    let folder = tempfile::tempdir().unwrap();
    tower.save_pretrained(folder.path()).unwrap();
    let (tower, _) = DotsVisionEncoder::from_pretrained(folder.path(), &Device::flex()).unwrap();
    assert_eq!(encode(&tower), expected);
}

/// A tower other than those of the fixtures.
fn tower() -> DotsVisionEncoder {
    let mut config = DotsVitConfig::dots_vit();
    (config.embed_dim, config.num_attention_heads, config.num_hidden_layers) = (32, 2, 1);
    (config.intermediate_size, config.adapter_out_dim) = (48, 40);
    DotsVisionEncoder::new(&config, &Device::flex()).unwrap()
}

/// Every entry of `folder`: a file's contents, or none for a folder.
fn entries(folder: &Path) -> BTreeMap<String, Option<Vec<u8>>> {
    std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, std::fs::read(entry.path()).ok())
        })
        .collect()
}

/// Saving into `folder` must fail and change nothing; returns why, after the file's path.
fn refused(folder: &Path, file: &str) -> String {
    let before = entries(folder);
    let error = tower().save_pretrained(folder).unwrap_err();
    assert!(matches!(error, CheckpointError::Write { .. }), "{error}");
    assert_eq!(entries(folder), before);
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    let start = format!("cannot write {}: ", folder.join(file).display());
    text.strip_prefix(&start).unwrap_or_else(|| panic!("{text}")).to_string()
}

#[test]
fn saving_again_replaces_the_tower() {
    let folder = tempfile::tempdir().unwrap();
    let (config, mut tensors) = moe();
    // The tower that is there may be of any layout.
    rename(&mut tensors, VISION, "visual.");
    write(&folder.path().join("model.safetensors"), &tensors);
    let text = serde_json::to_string(&config).unwrap();
    std::fs::write(folder.path().join("config.json"), text).unwrap();

    let tower = tower();
    for _ in 0..2 {
        tower.save_pretrained(folder.path()).unwrap();
        let (again, _) =
            DotsVisionEncoder::from_pretrained(folder.path(), &Device::flex()).unwrap();
        assert_eq!(encode(&again), encode(&tower));
        let names: Vec<String> = entries(folder.path()).into_keys().collect();
        assert_eq!(names, ["config.json", "model.safetensors"]);
    }
}

/// The next load would take the shards.
#[test]
fn sharded_models_are_not_saved_over() {
    let folder = copy_fixture("dots_ocr_tiny");
    assert_eq!(
        refused(folder.path(), "model.safetensors"),
        "model.safetensors.index.json beside it lists other weights, which would be loaded \
         instead; save into another folder, or remove that model first"
    );
}

#[rstest]
#[case::whole_model(|t: &mut Tensors| {
    t.insert("model.norm.weight".into(), (Dtype::F32, vec![1], vec![0; 4]));
}, "model.norm.weight")]
#[case::no_tower(|t: &mut Tensors| {
    *t = Tensors::from([("lm_head.weight".into(), (Dtype::F32, vec![1], vec![0; 4]))]);
}, "lm_head.weight")]
#[case::two_towers(|t: &mut Tensors| {
    let tensor = t[&format!("{VISION}post_trunk_norm.weight")].clone();
    t.insert("visual.blocks.0.norm1.weight".into(), tensor);
}, "visual.blocks.0.norm1.weight")]
fn weights_beyond_one_tower_are_not_replaced(#[case] change: fn(&mut Tensors), #[case] key: &str) {
    let folder = tempfile::tempdir().unwrap();
    let (_, mut tensors) = moe();
    change(&mut tensors);
    write(&folder.path().join("model.safetensors"), &tensors);
    assert_eq!(
        refused(folder.path(), "model.safetensors"),
        format!(
            "it holds {key:?}, which is not the tower's and would be lost; save into another folder"
        )
    );
}

#[test]
fn files_that_are_no_safetensors_are_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.safetensors"), "a pointer to a file").unwrap();
    let reason = refused(folder.path(), "model.safetensors");
    assert!(reason.starts_with("the file there is truncated or not a safetensors file ("));
    assert!(reason.ends_with("); save into another folder, or remove it first"), "{reason}");
}

#[rstest]
fn folders_in_the_way(#[values("model.safetensors", "config.json")] file: &str) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join(file)).unwrap();
    assert_eq!(refused(folder.path(), file), "it is a folder; save into another folder");
}

/// The first or the second file cannot be written to its end: neither is changed, and what was
/// begun is gone.
#[cfg(target_os = "linux")]
#[rstest]
fn full_disks(#[values("model.safetensors", "config.json")] file: &str) {
    let folder = tempfile::tempdir().unwrap();
    tower().save_pretrained(folder.path()).unwrap();
    let before = entries(folder.path());
    let partial = folder.path().join(format!("{file}.partial"));
    std::os::unix::fs::symlink("/dev/full", partial).unwrap();
    let text = tower().save_pretrained(folder.path()).unwrap_err().to_string();
    let start = format!("cannot write {}: ", folder.path().join(file).display());
    assert!(text.starts_with(&start) && text.contains("No space left on device"), "{text}");
    assert!(text.ends_with("; check its folder's permissions and free space, or save elsewhere"));
    assert_eq!(entries(folder.path()), before);
}

#[test]
fn folders_that_cannot_be_made() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let text = tower().save_pretrained(file.join("model")).unwrap_err().to_string();
    assert!(
        text.starts_with(&format!("cannot write {}: ", file.join("model").display())),
        "{text}"
    );
}

/// What cannot be loaded is not saved, and no folder made for it.
#[test]
fn towers_that_could_not_be_loaded_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut kernel = tower();
    kernel.set_eager_fallback(AttentionImplementation::FlashAttention2);
    let error = kernel.save_pretrained(folder.path().join("new")).unwrap_err();
    assert!(matches!(error, CheckpointError::Config(_)), "{error}");
    assert!(error.to_string().contains("eager_fallback = flash_attention_2"), "{error}");

    let mut wide = tower();
    let norm = wide.post_trunk_norm.as_mut().unwrap();
    norm.weight = norm.weight.clone().map(|weight| weight.cast(DType::F64));
    let error = wide.save_pretrained(folder.path().join("new")).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("post_trunk_norm.weight is F64; cast the tower to F32, BF16"), "{text}");
    assert!(entries(folder.path()).is_empty());
}
