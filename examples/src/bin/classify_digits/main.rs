//! Tells which digits image files show, with a tower that `train_digits` trained.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn_vision_attention::AttentionImplementation;
use clap::Parser;
use examples::devices;
use examples::digits::DigitReader;
use examples::terminal::{arguments, complain, printable, say, show_warnings};

/// Tell which digit each image shows: the likeliest and the second likeliest, with probabilities.
#[derive(Parser)]
#[command(
    name = "classify_digits",
    version,
    after_help = "\
An image shows one digit, light on dark or dark on light (its border decides), upright, as high as half
the image or more. It may have any size: it is resized to sides that are multiples of 8 pixels and an
area of at most 24 x 24 pixels, keeping its proportions as far as that allows, and stretched from black
to white.
One line an image. An image that cannot be read is an error line; the others are answered all the same,
and the exit code is 1."
)]
struct Cli {
    /// PNG or JPEG files [default: ten digits that the tower has not learned from]
    #[arg(value_name = "IMAGE")]
    images: Vec<PathBuf>,
    /// Folder of a trained model [default: the one that comes with this package]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// flex (the CPU) or, where cargo was given `--features NAME`: ndarray, wgpu, cpu, cuda
    #[arg(long, value_name = "NAME", default_value = "flex")]
    device: String,
    /// Attention: eager, eager_v2, sdpa, flash_attention_2, flash_attention_3 [default: the model's]
    #[arg(long, value_name = "NAME")]
    implementation: Option<AttentionImplementation>,
}

fn main() -> ExitCode {
    show_warnings();
    let cli = match arguments::<Cli>() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    match run(cli) {
        Ok(code) => code,
        Err(error) => {
            complain(error);
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode, Box<dyn Error>> {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/digits");
    let device = devices::device(&cli.device)?.device;
    let model = cli.model.unwrap_or_else(|| assets.join("model"));
    if !model.is_dir() {
        let model = model.display();
        return Err(
            format!("--model {model}: not a folder; pass one that train_digits wrote").into()
        );
    }
    let reader = DigitReader::load(&model, cli.implementation, &device)?;
    let mut images = cli.images;
    if images.is_empty() {
        say("no image given: reading the samples that come with this package");
        images.extend((0..10).map(|digit| assets.join(format!("samples/{digit}.png"))));
    }
    let mut code = ExitCode::SUCCESS;
    for image in &images {
        match reader.read(image) {
            Ok(answer) => {
                say(format_args!("{}: {answer}", printable(&image.display().to_string())))
            }
            Err(error) => {
                complain(error);
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}
