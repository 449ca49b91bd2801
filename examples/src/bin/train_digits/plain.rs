//! One line an epoch, where there is no terminal to draw on.

use std::collections::HashMap;
use std::time::Instant;

use burn::train::LearnerSummary;
use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::{MetricDefinition, MetricId, NumericEntry};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining,
};
use examples::terminal::say;

/// Burn's training loop shows its metrics to it.
pub struct PlainRenderer {
    names: HashMap<MetricId, String>,
    train: HashMap<String, f64>,
    valid: HashMap<String, f64>,
    epochs: usize,
    clock: Instant,
}

impl PlainRenderer {
    /// Nothing shown yet.
    pub fn new() -> Self {
        let (names, train, valid) = Default::default();
        Self { names, train, valid, epochs: 0, clock: Instant::now() }
    }

    /// An epoch's value of a metric, which comes after those of its batches.
    fn last_value(&self, state: MetricState) -> Option<(String, f64)> {
        match state {
            MetricState::Numeric(entry, Some(NumericEntry::Final(value))) => {
                Some((self.names.get(&entry.metric_id)?.clone(), value))
            }
            _ => None,
        }
    }
}

/// Both values of a metric; NaN where Burn showed none.
fn pair(name: &str, train: &HashMap<String, f64>, valid: &HashMap<String, f64>) -> [f64; 2] {
    [train, valid].map(|values| values.get(name).copied().unwrap_or(f64::NAN))
}

impl MetricsRendererTraining for PlainRenderer {
    fn update_train(&mut self, state: MetricState) {
        self.train.extend(self.last_value(state));
    }

    fn update_valid(&mut self, state: MetricState) {
        self.valid.extend(self.last_value(state));
    }

    fn on_train_end(
        &mut self,
        _: Option<LearnerSummary>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl TrainingProgressLogger for PlainRenderer {
    fn start(&mut self, total_epochs: usize, _: usize, _: Option<usize>, _: Option<&str>) {
        self.epochs = total_epochs;
        self.clock = Instant::now();
    }

    fn update_epoch(&mut self, epoch: usize) {
        let [train_loss, valid_loss] = pair("Loss", &self.train, &self.valid);
        let [train_accuracy, valid_accuracy] = pair("Accuracy", &self.train, &self.valid);
        let seconds = self.clock.elapsed().as_secs_f64();
        let epochs = self.epochs;
        say(format_args!(
            "epoch {epoch:>3}/{epochs}  training loss {train_loss:.3} accuracy {train_accuracy:5.1} %  \
             validation loss {valid_loss:.3} accuracy {valid_accuracy:5.1} %  {seconds:.1} s"
        ));
        self.clock = Instant::now();
    }

    fn start_split(&mut self, _: &str, _: usize) {}
    fn update_split(&mut self, _: usize) {}
    fn end_split(&mut self) {}
    fn end(&mut self) {}
    fn log_event_training(&mut self, _: String) {}
}

impl MetricsRendererEvaluation for PlainRenderer {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
}

impl EvaluationProgressLogger for PlainRenderer {
    fn start_global_progress(&mut self, _: usize) {}
    fn start_test(&mut self, _: &str, _: usize) {}
    fn update_test_progress(&mut self, _: usize) {}
    fn end_test(&mut self) {}
    fn end_global_progress(&mut self) {}
    fn log_event_evaluation(&mut self, _: String) {}
}

impl MetricsRenderer for PlainRenderer {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name.to_string());
    }
}
