//! Golden parity: every case, device and implementation.

use burn_vision_attention::AttentionImplementation;
use rstest::rstest;
use vision_attention_tests::devices::{NamedDevice, device, device_or_skip};
use vision_attention_tests::fixtures;
use vision_attention_tests::parity::{Outcome, Request, run};

fn outcomes(device: NamedDevice, gradients: bool) -> Vec<Outcome> {
    outcomes_of(AttentionImplementation::ALL.to_vec(), device, gradients)
}

fn outcomes_of(
    implementations: Vec<AttentionImplementation>,
    device: NamedDevice,
    gradients: bool,
) -> Vec<Outcome> {
    let request = Request { devices: vec![device], implementations, gradients };
    let mut outcomes = Vec::new();
    run(&fixtures::directory(), &request, &mut |outcome| outcomes.push(outcome))
        .expect("the golden data of this repository can be read");
    outcomes
}

fn assert_parity(outcomes: &[Outcome], least: usize) {
    let failures = outcomes.iter().filter(|outcome| !outcome.skipped() && !outcome.passed());
    let failures: Vec<String> = failures.map(Outcome::to_string).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    let passed = outcomes.iter().filter(|outcome| outcome.passed()).count();
    assert!(passed >= least, "only {passed} cases ran, expected at least {least}");
}

/// 14 attention layers (two of them in dtypes that ndarray lacks), 4 towers and 2 checkpoints by
/// three implementations, on flex by the kernel, too; 7 images.
#[rstest]
#[case::flex("flex", 4 * 20 + 7)]
#[case::ndarray("ndarray", 3 * 18 + 7)]
fn outputs_match_the_reference(#[case] name: &str, #[case] least: usize) {
    let device = device(name).expect("a CPU device answers");
    assert_parity(&outcomes(device, false), least);
}

/// As above by the kernel, too; bf16 only where the device computes in it.
#[test]
fn outputs_match_the_reference_on_wgpu() {
    let Some(device) = device_or_skip("wgpu") else { return };
    assert_parity(&outcomes(device, false), 4 * 19 + 7);
}

#[rstest]
#[case::flex("flex", 4 * 18)]
#[case::ndarray("ndarray", 3 * 16)]
fn gradients_match_the_reference(#[case] name: &str, #[case] least: usize) {
    let device = device(name).expect("a CPU device answers");
    assert_parity(&outcomes(device, true), least);
}

/// By the kernels alone: the composed implementations are the same tensor operations everywhere, and
/// a software GPU compiles each of them for seconds.
#[test]
fn gradients_match_the_reference_on_wgpu() {
    let Some(device) = device_or_skip("wgpu") else { return };
    let kernels = vec![AttentionImplementation::FlashAttention2];
    assert_parity(&outcomes_of(kernels, device, true), 17);
}
