//! `cargo xtask devices`: what a request for each implementation resolves to on each device, and the
//! kernels that can run there.

use std::error::Error;
use std::process::ExitCode;

use burn::tensor::DType;
use burn_vision_attention::{
    AttentionImplementation, KernelRequirements, describe_attn_kernel, resolve_attn_implementation,
};
use clap::Args;
use vision_attention_tests::devices::devices;

/// Arguments of the command.
#[derive(Args)]
pub struct Devices {
    /// Dimensions of a head.
    #[arg(long, default_value_t = 64)]
    head_dim: usize,
    /// What flash requests fall back to.
    #[arg(long, default_value_t = AttentionImplementation::Sdpa)]
    eager_fallback: AttentionImplementation,
}

impl Devices {
    /// Prints one block per device; fails when none answers.
    pub fn run(self) -> Result<ExitCode, Box<dyn Error>> {
        let mut answered = false;
        for device in devices() {
            let device = match device {
                Ok(device) => device,
                Err(error) => {
                    println!("{error}");
                    continue;
                }
            };
            answered = true;
            println!("{device} ({:?})", device.device.as_dispatch());
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                if !device.device.supports_dtype(dtype) {
                    println!("  {}: not supported", dtype.name());
                    continue;
                }
                println!("  {}, heads of {}:", dtype.name(), self.head_dim);
                let requirements =
                    KernelRequirements { dtype, head_dim: self.head_dim, value_dim: self.head_dim };
                for requested in AttentionImplementation::ALL {
                    let resolution = resolve_attn_implementation(
                        requested,
                        &device.device,
                        &requirements,
                        self.eager_fallback,
                    );
                    println!("    {requested:<18} -> {resolution}");
                }
                for implementation in AttentionImplementation::ALL {
                    let kernel =
                        describe_attn_kernel(implementation, &device.device, &requirements);
                    if let Ok(kernel) = kernel {
                        println!("    kernel of {implementation}: {kernel}");
                    }
                }
            }
        }
        Ok(if answered { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
