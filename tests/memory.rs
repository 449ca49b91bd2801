//! Memory of a training step on the CPU, by an allocator that counts: what is kept for the backward
//! pass grows with the tokens, not with their square.
//!
//! `cargo test --workspace --test memory -- --nocapture` prints the figures.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard};

use burn::tensor::{Device, Distribution, Tensor};
use burn_dots_vit::{DotsVisionEncoder, DotsVitConfig, GridThw};
use burn_vision_attention::{
    AttentionImplementation, Segments, VisionAttention, VisionAttentionConfig, release_memory,
};

/// Counts live bytes and their peak.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; the counters are atomics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), SeqCst) + layout.size(), SeqCst);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), SeqCst);
        // SAFETY: the pointer came from `alloc` above with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test at a time: the counters know nothing of threads.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Bytes that `run` had allocated at its peak, beyond those alive before it; memory that earlier calls left
/// to be used again is not among the latter.
fn peak(run: impl FnOnce()) -> usize {
    release_memory();
    let before = LIVE.load(SeqCst);
    PEAK.store(before, SeqCst);
    run();
    PEAK.load(SeqCst) - before
}

fn layer(implementation: AttentionImplementation, device: &Device) -> VisionAttention {
    VisionAttentionConfig::new(128, 4)
        .with_use_qk_norm(true)
        .with_implementation(implementation)
        .init(device)
}

/// Peak of one training step over segments of `length` tokens.
fn training_step(implementation: AttentionImplementation, segments: usize, length: usize) -> usize {
    let device = Device::flex().autodiff();
    let attention = layer(implementation, &device);
    let x = Tensor::random([segments * length, 128], Distribution::Default, &device);
    let segments = Segments::from_lengths(vec![length; segments]).expect("fits");
    let step = || {
        let gradients = attention.forward(x.clone(), &segments, None).sum().backward();
        assert!(attention.qkv.weight.grad(&gradients).is_some());
    };
    // Once before, for what is allocated once and kept.
    step();
    peak(step)
}

#[test]
fn a_training_step_by_the_kernel_grows_with_the_tokens() {
    let _alone = alone();
    let kernel = AttentionImplementation::FlashAttention2;
    let [one, two] = [512, 1024].map(|length| training_step(kernel, 2, length));
    let composed = training_step(AttentionImplementation::EagerV2, 2, 1024);
    println!(
        "one layer, 4 heads of 32, two segments: kernel {one} B at 512 tokens each, {two} B at"
    );
    println!(
        "1,024 each; eager_v2 {composed} B at 1,024 each: {:.1} times",
        composed as f64 / two as f64
    );
    assert!(two < one * 9 / 4, "twice the tokens took {two} B after {one} B");
    assert!(composed > 3 * two, "the composed step took {composed} B, the kernel's {two} B");
}

/// Every block of a tower but its input is computed anew.
#[test]
fn gradient_checkpointing_keeps_the_inputs_of_blocks() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let mut config = DotsVitConfig::dots_vit();
    (config.embed_dim, config.num_attention_heads, config.num_hidden_layers) = (64, 2, 8);
    (config.intermediate_size, config.patch_size, config.adapter_out_dim) = (256, 4, 64);
    let mut tower = DotsVisionEncoder::new(&config, &device).expect("a valid config");
    let grids = [GridThw::new(1, 16, 16), GridThw::new(1, 8, 24)];
    let rows: usize = grids.iter().map(GridThw::tokens).sum();
    let pixels = Tensor::random([rows, config.pixel_row_len()], Distribution::Default, &device);
    let step = |tower: &DotsVisionEncoder| {
        let tokens = tower.forward(pixels.clone(), &grids).expect("grids fit");
        let gradients = tokens.sum().backward();
        assert!(tower.patch_embed.proj.weight.grad(&gradients).is_some());
    };
    step(&tower);
    let kept = peak(|| step(&tower));
    tower.set_gradient_checkpointing(true);
    step(&tower);
    let recomputed = peak(|| step(&tower));
    println!(
        "eight blocks: {kept} B with everything kept, {recomputed} B with blocks computed anew"
    );
    assert!(recomputed * 2 < kept, "{recomputed} B with checkpointing, {kept} B without");
}
