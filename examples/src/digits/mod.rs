//! Handwritten digits for the Dots tower: data, drawing, batches, the classifier and what it answers.
//!
//! A digit is drawn at a random size and place, so that images differ in their number of patches. A
//! batch packs the patches of all its images into one sequence, in which attention stays within each
//! image; the tower's tokens are averaged over each image and are the scores of the ten digits.

mod answer;
mod batch;
mod classifier;
mod data;
mod draw;
mod random;

pub use answer::{Answer, AnswerError, DigitReader};
pub use batch::{DigitBatch, DigitLoader, Order};
pub use classifier::{CLASSES, DigitClassifier, config, mean_pool, preprocessing};
pub use data::{DataError, Digit, SIDE, Split, bundled, parse};
pub use draw::{LARGEST_CANVAS, LARGEST_DIGIT, Placement, draw};
pub use random::Random;
