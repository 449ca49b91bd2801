//! A run of Burn's training loop, and what it leaves behind.

use std::collections::HashSet;
use std::error::Error;
use std::fs;
use std::sync::Arc;
use std::time::Instant;

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::LrSchedulerConfig;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::lr_scheduler::sequential::SequentialLrSchedulerConfig;
use burn::optim::AdamWConfig;
use burn::tensor::Device;
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::metric::{AccuracyMetric, LearningRateMetric, LossMetric};
use burn::train::{ExecutionStrategy, Learner, LearningResult, SupervisedTraining};
use burn_dots_vit::preprocess::PreprocessorConfig;
use burn_vision_attention::AttentionImplementation;
use examples::digits::{
    Digit, DigitClassifier, DigitLoader, Order, Placement, Random, Split, draw, preprocessing,
};
use examples::output::OutputFile;
use examples::terminal::say;

use crate::curves::{Curves, save_png};
use crate::plain::PlainRenderer;
use crate::settings::{RunFolder, Settings};

/// Decides how digits are drawn that are not learned from: alike in every run.
const FIXED: Order = Order::Fixed { seed: 0 };
/// Digits in a batch that is not learned from.
const INFERENCE_BATCH: usize = 128;

/// What a run is made of.
pub struct Run {
    /// Its folder.
    pub folder: RunFolder,
    /// Its settings.
    pub settings: Settings,
    /// The epoch whose checkpoint it begins from.
    pub resumed: Option<usize>,
    /// Where it runs.
    pub strategy: ExecutionStrategy,
    /// The devices' names.
    pub devices: String,
    /// The attention asked for, instead of the tower's.
    pub implementation: Option<AttentionImplementation>,
    /// One line an epoch instead of a dashboard.
    pub plain: bool,
}

impl Run {
    /// Trains, judges by the held-out digits, and writes model, samples and curves.
    ///
    /// # Errors
    ///
    /// What stopped training, or a file that cannot be written.
    pub fn run(self, digits: Split) -> Result<(), Box<dyn Error>> {
        let clock = Instant::now();
        let device = self.strategy.main_device().clone();
        let (folder, epochs) = (self.folder.clone(), self.settings.epochs);
        let [train, valid, test] = [digits.train, digits.valid, digits.test].map(|mut part| {
            part.truncate(self.settings.digits);
            part
        });
        say(format_args!(
            "digits:    {} to learn from, {} to watch, {} held out",
            train.len(),
            valid.len(),
            test.len()
        ));
        let result = self.train(train.into(), valid.into(), &device)?;
        // Burn's dashboard gives the terminal back when it is dropped.
        let LearningResult { model, renderer, interrupted, error } = result;
        drop(renderer);
        if let Some(error) = error {
            return Err(format!("training stopped: {error}").into());
        }
        Curves::read(folder.path(), epochs).save(&folder.curves())?;
        if interrupted.is_some() {
            let (out, curves) = (folder.path().display(), folder.curves());
            say(format_args!("curves:    {}", curves.display()));
            say(format_args!("stopped:   continue with --resume --out {out}"));
            return Ok(());
        }
        let test: Arc<[Digit]> = test.into();
        let right = count_right(&model, test.clone(), &device.without_autodiff());
        save_model(&model, &folder)?;
        save_samples(&test, &folder)?;
        let percent = 100.0 * right as f64 / test.len() as f64;
        say(format_args!("held out:  {percent:.1} % told right, {right} of {}", test.len()));
        say(format_args!("time:      {:.1} s", clock.elapsed().as_secs_f64()));
        say(format_args!("curves:    {}", folder.curves().display()));
        say(format_args!("model:     {}", folder.model().display()));
        say(format_args!("samples:   {}", folder.samples().display()));
        Ok(())
    }

    fn train(
        self,
        train: Arc<[Digit]>,
        valid: Arc<[Digit]>,
        device: &Device,
    ) -> Result<LearningResult<DigitClassifier>, Box<dyn Error>> {
        let Settings { epochs, batch_size, learning_rate, seed, .. } = self.settings;
        let device = device.clone().autodiff();
        let mut model = DigitClassifier::new(seed, &device)?;
        if let Some(implementation) = self.implementation {
            model.tower.set_implementation(implementation);
        }
        say(format_args!("attention: {}", model.tower.resolution(&device, model.tower.dtype())));
        say(format_args!("device:    {}", self.devices));

        let steps = epochs * steps(train.len(), devices(&self.strategy), batch_size);
        let optimizer = AdamWConfig::new()
            .with_beta_2(0.99)
            // Gradients of a mean over many tokens are small beside Burn's default.
            .with_epsilon(1e-8)
            .with_weight_decay(0.05)
            .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
            .init();
        let learner = Learner::new(model, optimizer, schedule(learning_rate, steps)?);

        let first_epoch = self.resumed.unwrap_or(0) as u64 + 1;
        let order = Order::Shuffled { seed, first_epoch };
        let mut training = SupervisedTraining::new(
            self.folder.path(),
            Arc::new(DigitLoader::new(train, order, batch_size)),
            Arc::new(DigitLoader::new(valid, FIXED, INFERENCE_BATCH)),
        )
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .metric_train_numeric(LearningRateMetric::new())
        .with_default_checkpointers()
        .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
        .num_epochs(epochs)
        .with_training_strategy(self.strategy.into());
        if let Some(epoch) = self.resumed {
            training = training.checkpoint(epoch);
        }
        if self.plain {
            training = training.renderer(Box::new(PlainRenderer::new()));
        }
        Ok(training.launch(learner))
    }
}

fn devices(strategy: &ExecutionStrategy) -> usize {
    match strategy {
        ExecutionStrategy::SingleDevice(_) => 1,
        ExecutionStrategy::MultiDevice(devices, _) => devices.len(),
        ExecutionStrategy::DistributedDataParallel { devices, .. } => devices.len(),
    }
}

/// Optimizer steps of an epoch: Burn deals out `items` evenly, and the last device takes what is left.
fn steps(items: usize, devices: usize, batch_size: usize) -> usize {
    let most = items - items / devices * (devices - 1);
    most.div_ceil(batch_size)
}

/// Up to `peak` over the first tenth of all steps, then down along a cosine to a hundredth of it.
fn schedule(peak: f64, steps: usize) -> Result<ModuleLrScheduler, String> {
    let warmup = (steps / 10).max(1);
    let rise = LinearLrSchedulerConfig::new(peak / warmup as f64, peak, warmup);
    let fall = CosineAnnealingLrSchedulerConfig::new(peak, (steps - warmup).max(1));
    SequentialLrSchedulerConfig::new(
        vec![
            LrSchedulerConfig::Linear(rise),
            LrSchedulerConfig::Cosine(fall.with_min_lr(peak / 100.0)),
        ],
        vec![warmup],
    )
    .init()
}

/// How many of the digits, each drawn once, the model tells right.
fn count_right(model: &DigitClassifier, digits: Arc<[Digit]>, device: &Device) -> usize {
    let loader = DigitLoader::new(digits, FIXED, INFERENCE_BATCH);
    let right = loader.batches(device).map(|batch| {
        let output = model.classify(batch);
        let found = output.output.argmax(1).squeeze_dim::<1>(1);
        found.equal(output.targets).int().sum().into_scalar::<i64>() as usize
    });
    right.sum()
}

fn save_model(model: &DigitClassifier, folder: &RunFolder) -> Result<(), Box<dyn Error>> {
    model.tower.save_pretrained(folder.model())?;
    let json = serde_json::to_string_pretty(&preprocessing())?;
    let file = OutputFile::create(&folder.model().join(PreprocessorConfig::FILE_NAME))?;
    Ok(file.stage(|writer| writeln!(writer, "{json}"))?.publish()?)
}

/// The first held-out digit of each class as an image file, in white on black.
fn save_samples(digits: &[Digit], folder: &RunFolder) -> Result<(), Box<dyn Error>> {
    let samples = folder.samples();
    fs::create_dir_all(&samples)
        .map_err(|error| format!("cannot write {}: {error}", samples.display()))?;
    let mut seen = HashSet::new();
    for digit in digits.iter().filter(|digit| seen.insert(digit.label)) {
        let placement = Placement::random(&mut Random::new(&[digit.row as u64]));
        save_png(&draw(digit, placement), &samples.join(format!("{}.png", digit.label)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(100, 1, 32, 4)]
    #[case(100, 2, 32, 2)]
    #[case(101, 2, 25, 3)]
    #[case(7, 3, 1, 3)]
    fn steps_are_those_of_the_device_with_most_digits(
        #[case] items: usize,
        #[case] devices: usize,
        #[case] batch_size: usize,
        #[case] expected: usize,
    ) {
        assert_eq!(steps(items, devices, batch_size), expected);
    }

    #[test]
    fn the_schedule_rises_and_falls() {
        for steps in [1, 2, 15, 200] {
            let mut schedule = schedule(0.5, steps).unwrap();
            let rates: Vec<f64> = (0..steps).map(|_| schedule.step().base()).collect();
            let peak = rates.iter().copied().fold(0.0, f64::max);
            assert!((peak - 0.5).abs() < 1e-9, "{rates:?}");
            assert!(rates.iter().all(|rate| *rate > 0.004), "{rates:?}");
            if steps > 2 {
                assert!(rates[steps - 1] < 0.03, "{rates:?}");
            }
        }
    }

    /// The loop learns: a few digits are soon told apart by heart.
    #[test]
    fn a_few_digits_are_learned_by_heart() {
        let digits: Arc<[Digit]> = examples::digits::bundled().unwrap()[..8].into();
        let device = Device::flex().autodiff();
        let mut model = DigitClassifier::new(1, &device).unwrap();
        let mut optimizer = AdamWConfig::new().init();
        let loader = DigitLoader::new(digits.clone(), FIXED, 8);
        let mut losses = Vec::new();
        for _ in 0..40 {
            let batch = loader.batches(&device).next().unwrap();
            let output = burn::train::TrainStep::step(&model, batch);
            losses.push(output.item.loss.into_scalar::<f32>());
            model = optimizer.step(3e-3, model, output.grads);
        }
        assert!(losses[39] < 0.1 * losses[0], "{losses:?}");
        let model = burn::module::Module::valid(&model);
        assert_eq!(count_right(&model, digits, &Device::flex()), 8);
    }
}
