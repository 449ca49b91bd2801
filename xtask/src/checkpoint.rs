//! `cargo xtask checkpoint`: a folder laid out like a released model, with random weights.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::tensor::Device;
use burn_dots_vit::{DotsVisionEncoder, DotsVitConfig};
use clap::Args;

/// Arguments of the command; the defaults are the widths of dots.ocr's tower.
#[derive(Args)]
pub struct Checkpoint {
    /// Where the folder goes.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Number of blocks.
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// Width of the hidden states.
    #[arg(long, default_value_t = 1536)]
    dim: usize,
    /// Number of heads.
    #[arg(long, default_value_t = 12)]
    heads: usize,
    /// Inner width of the MLP.
    #[arg(long, default_value_t = 4224)]
    intermediate: usize,
    /// Width of the output.
    #[arg(long, default_value_t = 1536)]
    out: usize,
    /// Seed of the weights.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl Checkpoint {
    /// Writes config.json, preprocessor_config.json and model.safetensors.
    pub fn run(self) -> Result<ExitCode, Box<dyn Error>> {
        let device = Device::flex();
        device.seed(self.seed);
        let mut config = DotsVitConfig::dots_vit();
        config.num_hidden_layers = self.layers;
        config.embed_dim = self.dim;
        config.num_attention_heads = self.heads;
        config.intermediate_size = self.intermediate;
        config.hidden_size = self.out;
        config.adapter_out_dim = self.out;
        let tower = DotsVisionEncoder::new(&config, &device)?;
        tower.save_pretrained(&self.directory)?;
        // Every setting has its default, which is that of dots.ocr.
        std::fs::write(self.directory.join("preprocessor_config.json"), "{}\n")?;
        println!(
            "{}: {} parameters",
            self.directory.display(),
            burn::module::Module::num_params(&tower)
        );
        Ok(ExitCode::SUCCESS)
    }
}
