//! Trains a small Dots tower to tell handwritten digits apart, with Burn's own training loop.
//!
//! Every digit is drawn at a random size and place in each epoch, so that the images of a batch
//! differ in their number of patches; they are packed into one sequence, without padding. Burn's
//! `SupervisedTraining` does the rest: its loop, dashboard, metrics, checkpoints and strategies for
//! several devices.
//!
//! With one thread count and device, a seed gives the same run to the last bit, and a run that is
//! resumed ends as if it had not been stopped.

mod curves;
mod devices;
mod plain;
mod run;
mod settings;

use std::error::Error;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use burn_vision_attention::AttentionImplementation;
use clap::Parser;
use examples::devices::NAMES;
use examples::digits::{Split, bundled};
use examples::terminal::{arguments, complain, positive};

use crate::devices::Strategy;
use crate::run::Run;
use crate::settings::{RunFolder, Settings};

/// Train a small Dots tower to tell handwritten digits of many sizes apart.
#[derive(Parser)]
#[command(
    name = "train_digits",
    version,
    after_help = "\
Data: 1,797 digits that come with this package, 1,199 to learn from, 299 to watch while learning, 299
held out to the end. Each is drawn on a canvas of 8 x 8 to 32 x 32 pixels: 2 x 2 to 8 x 8 patches.
Folder (--out):
  model/        the trained tower, for classify_digits and encode
  samples/      a held-out digit of each class, to try them on
  curves.png    loss and accuracy, epoch by epoch
  checkpoint/   weights, optimizer and schedule of the last two epochs, for --resume
  train/ valid/ every metric of every batch; experiment.log has the log, run.json the settings
Several devices (--device cuda:0,cuda:1): each takes batches of --batch-size. Strategies single, multi
and sharded run on every device, even on one named twice; ddp needs cuda and NCCL.
With --resume more --epochs may be asked for: the learning rate goes on along the longer schedule."
)]
struct Cli {
    /// How often every digit is seen [default: 60, or what the resumed run had]
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    epochs: Option<usize>,
    /// Use fewer digits of each part, for a quick look: up to 1199
    #[arg(long, value_name = "COUNT", default_value = "1199", value_parser = digits)]
    #[arg(conflicts_with = "resume")]
    digits: usize,
    /// Images that a device packs into one step
    #[arg(long, value_name = "COUNT", default_value = "16", value_parser = positive)]
    #[arg(conflicts_with = "resume")]
    batch_size: usize,
    /// Peak of the schedule: up over a tenth of the steps, down along a cosine
    #[arg(long, value_name = "RATE", default_value = "0.003", value_parser = learning_rate)]
    #[arg(conflicts_with = "resume")]
    learning_rate: f64,
    /// Decides first weights, order and drawing
    #[arg(long, value_name = "NUMBER", default_value = "1", conflicts_with = "resume")]
    seed: u64,
    /// flex (the CPU) or, where cargo was given `--features NAME`: ndarray, wgpu, cpu, cuda; several
    /// of one kind after commas, by number: cuda:0,cuda:1
    #[arg(long, value_name = "NAME", default_value = "flex", value_delimiter = ',')]
    device: Vec<String>,
    /// How several devices share the work [default: single for one, multi for several]
    #[arg(long, value_enum)]
    strategy: Option<Strategy>,
    /// Attention: eager, eager_v2, sdpa, flash_attention_2, flash_attention_3
    #[arg(long, value_name = "NAME", default_value = "flash_attention_2")]
    implementation: AttentionImplementation,
    /// Folder of the run
    #[arg(long, value_name = "DIR", default_value = "digits-run")]
    out: PathBuf,
    /// Continue the run in --out after its last whole epoch
    #[arg(long)]
    resume: bool,
    /// Print a line an epoch instead of the dashboard; the default where stdout is no terminal
    #[arg(long)]
    plain: bool,
}

fn digits(text: &str) -> Result<usize, String> {
    positive(text)
        .ok()
        .filter(|&count| count <= 1199)
        .ok_or("expected a whole number from 1 to 1199".to_owned())
}

fn learning_rate(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|rate| (1e-9..=1.0).contains(rate))
        .ok_or("expected a number from 1e-9 to 1".to_owned())
}

fn main() -> ExitCode {
    let cli = match arguments::<Cli>() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    if let Some(kind) = NAMES.into_iter().find(|name| *name == devices::kind(&cli.device[0])) {
        // Burn loads an optimizer's state by way of its default device, which may be one that this
        // machine does not have.
        // SAFETY: no other thread runs yet that could read the environment.
        unsafe { std::env::set_var("BURN_DEVICE", kind) };
    }
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(error);
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), Box<dyn Error>> {
    let devices = devices::open(&cli.device)?;
    let strategy = devices::strategy(cli.strategy, devices::kind(&cli.device[0]), &devices)?;
    let digits = Split::new(bundled()?);
    let (folder, settings, resumed) = if cli.resume {
        let (folder, mut settings, epoch) = RunFolder::resume(&cli.out)?;
        settings.epochs = cli.epochs.unwrap_or(settings.epochs);
        if epoch >= settings.epochs {
            let out = cli.out.display();
            return Err(format!(
                "{out} is trained for {epoch} epochs already: ask for more with --epochs"
            )
            .into());
        }
        folder.write_settings(&settings)?;
        (folder, settings, Some(epoch))
    } else {
        let Cli { digits, batch_size, learning_rate, seed, .. } = cli;
        let epochs = cli.epochs.unwrap_or(60);
        let settings = Settings { epochs, digits, batch_size, learning_rate, seed };
        (RunFolder::create(&cli.out, &settings)?, settings, None)
    };
    let plain = cli.plain || !std::io::stdout().is_terminal();
    Run {
        folder,
        settings,
        resumed,
        strategy,
        devices: cli.device.join(", "),
        implementation: Some(cli.implementation),
        plain,
    }
    .run(digits)
}
