//! Batches of drawn digits for Burn's training loop.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_dots_vit::GridThw;
use burn_dots_vit::preprocess::{ImageProcessor, PixelValues, PreprocessorConfig};

use super::classifier::preprocessing;
use super::data::Digit;
use super::draw::{Placement, draw};
use super::random::Random;

/// Drawn digits, packed into one sequence of patches.
#[derive(Clone, Debug)]
pub struct DigitBatch {
    /// f32 `[patches of all images, 48]`.
    pub pixel_values: Tensor<2>,
    /// Patches of each image.
    pub grids: Vec<GridThw>,
    /// Which digits they are: `[images]`.
    pub targets: Tensor<1, Int>,
}

/// In which order digits come, and how they are drawn.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    /// In their own order, drawn alike in each epoch.
    Fixed {
        /// Decides how each is drawn.
        seed: u64,
    },
    /// In another order in each epoch, drawn anew.
    Shuffled {
        /// Decides order and drawing, with the epoch.
        seed: u64,
        /// The epoch to begin with: a run that is resumed sees what it would have seen.
        first_epoch: u64,
    },
}

/// Draws and packs digits. What comes depends on the [`Order`] alone, whatever ran before.
pub struct DigitLoader {
    digits: Arc<[Digit]>,
    order: Order,
    batch_size: usize,
    device: Device,
    /// Epochs begun so far.
    epochs: AtomicU64,
    processor: ImageProcessor,
}

impl DigitLoader {
    /// # Panics
    ///
    /// When `batch_size` is 0.
    pub fn new(digits: Arc<[Digit]>, order: Order, batch_size: usize) -> Self {
        assert!(batch_size > 0, "batch_size: expected at least 1, got 0");
        // Canvases already have sides that patches tile.
        let config = PreprocessorConfig { do_resize: false, ..preprocessing() };
        let processor = ImageProcessor::new(config).expect("the constants are valid");
        let (device, epochs) = (Device::default(), AtomicU64::new(0));
        Self { digits, order, batch_size, device, epochs, processor }
    }

    /// The batches of the next epoch.
    pub fn batches(&self, device: &Device) -> Batches<'_> {
        let begun = self.epochs.fetch_add(1, Ordering::Relaxed);
        let mut order: Vec<usize> = (0..self.digits.len()).collect();
        let keys = match self.order {
            Order::Fixed { seed } => [seed, 0],
            Order::Shuffled { seed, first_epoch } => {
                let keys = [seed, first_epoch + begun];
                Random::new(&keys).shuffle(&mut order);
                keys
            }
        };
        Batches { loader: self, device: device.clone(), order, keys, next: 0 }
    }

    fn with(&self, digits: Arc<[Digit]>, device: &Device) -> Arc<dyn DataLoader<DigitBatch>> {
        Arc::new(Self {
            digits,
            order: self.order,
            batch_size: self.batch_size,
            device: device.clone(),
            epochs: AtomicU64::new(0),
            processor: self.processor.clone(),
        })
    }
}

impl DataLoader<DigitBatch> for DigitLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<DigitBatch> + 'a> {
        Box::new(Fallible(self.batches(&self.device)))
    }

    fn num_items(&self) -> usize {
        self.digits.len()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<DigitBatch>> {
        self.with(self.digits.clone(), device)
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<DigitBatch>> {
        self.with(self.digits[start..end].into(), &self.device)
    }
}

/// One epoch.
pub struct Batches<'a> {
    loader: &'a DigitLoader,
    device: Device,
    order: Vec<usize>,
    keys: [u64; 2],
    next: usize,
}

impl Iterator for Batches<'_> {
    type Item = DigitBatch;

    fn next(&mut self) -> Option<DigitBatch> {
        let end = (self.next + self.loader.batch_size).min(self.order.len());
        let indices = &self.order[self.next..end];
        if indices.is_empty() {
            return None;
        }
        self.next = end;
        let digits = indices.iter().map(|&index| &self.loader.digits[index]);
        let pixels = digits.clone().map(|digit| self.pixels(digit)).collect();
        let pixels = PixelValues::concat(pixels);
        let targets: Vec<i32> = digits.map(|digit| i32::from(digit.label)).collect();
        let count = targets.len();
        Some(DigitBatch {
            pixel_values: pixels.to_tensor(&self.device),
            grids: pixels.grids,
            targets: Tensor::from_data(TensorData::new(targets, [count]), &self.device),
        })
    }
}

impl Batches<'_> {
    fn pixels(&self, digit: &Digit) -> PixelValues {
        let [seed, epoch] = self.keys;
        let placement = Placement::random(&mut Random::new(&[seed, epoch, digit.row as u64]));
        let image = draw(digit, placement);
        let processed = self.loader.processor.process_image(image);
        processed.expect("canvases are tiled by patches").pixel_values
    }
}

/// [`Batches`] as Burn's training loop takes them.
struct Fallible<'a>(Batches<'a>);

impl Iterator for Fallible<'_> {
    type Item = Result<DigitBatch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(Ok)
    }
}

impl DataLoaderIterator<DigitBatch> for Fallible<'_> {
    fn progress(&self) -> Progress {
        Progress::new(self.0.next, self.0.order.len(), Some("digits".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::digits::bundled;

    type Seen = Vec<(Vec<GridThw>, Vec<i64>, TensorData)>;

    fn epoch(loader: &DigitLoader) -> Seen {
        let batches = loader.batches(&Device::flex());
        batches
            .map(|batch| {
                let targets = batch.targets.into_data().iter::<i64>().collect();
                (batch.grids, targets, batch.pixel_values.into_data())
            })
            .collect()
    }

    fn loader(order: Order) -> DigitLoader {
        DigitLoader::new(bundled().unwrap()[..50].into(), order, 16)
    }

    #[test]
    fn every_digit_comes_once_an_epoch_and_patches_match_grids() {
        let seen = epoch(&loader(Order::Shuffled { seed: 1, first_epoch: 1 }));
        let sizes: Vec<usize> = seen.iter().map(|(grids, ..)| grids.len()).collect();
        assert_eq!(sizes, [16, 16, 16, 2]);
        let mut labels: Vec<i64> =
            seen.iter().flat_map(|(_, targets, _)| targets.clone()).collect();
        let mut expected: Vec<i64> =
            bundled().unwrap()[..50].iter().map(|digit| i64::from(digit.label)).collect();
        labels.sort_unstable();
        expected.sort_unstable();
        assert_eq!(labels, expected);
        for (grids, _, pixels) in &seen {
            let patches: usize = grids.iter().map(GridThw::tokens).sum();
            assert_eq!(pixels.shape()[..], [patches, 48]);
        }
    }

    #[test]
    fn fixed_epochs_are_alike_and_shuffled_ones_are_not() {
        let fixed = loader(Order::Fixed { seed: 5 });
        assert_eq!(epoch(&fixed), epoch(&fixed));
        let shuffled = loader(Order::Shuffled { seed: 5, first_epoch: 1 });
        assert_ne!(epoch(&shuffled), epoch(&shuffled));
    }

    #[test]
    fn a_resumed_run_sees_what_it_would_have_seen() {
        let whole = loader(Order::Shuffled { seed: 5, first_epoch: 1 });
        let [_, second] = [epoch(&whole), epoch(&whole)];
        assert_eq!(epoch(&loader(Order::Shuffled { seed: 5, first_epoch: 2 })), second);
    }

    #[test]
    fn slices_share_out_the_digits() {
        let whole = loader(Order::Fixed { seed: 5 });
        let parts = [whole.slice(0, 20), whole.slice(20, 50)];
        assert_eq!(parts.each_ref().map(|part| part.num_items()), [20, 30]);
        let labels = |loader: &dyn DataLoader<DigitBatch>| -> Vec<i64> {
            let loader = loader.to_device(&Device::flex());
            let batches = loader.iter().map(|batch| batch.unwrap().targets.into_data());
            batches.flat_map(|targets| targets.iter::<i64>().collect::<Vec<_>>()).collect()
        };
        let joined = parts.iter().flat_map(|part| labels(part.as_ref())).collect::<Vec<_>>();
        assert_eq!(joined, labels(&whole));
    }
}
