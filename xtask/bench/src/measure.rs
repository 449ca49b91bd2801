//! Time and memory of a call.

use std::any::Any;
use std::time::Instant;

use crate::memory::peak_during;

/// What a call gives. It lives until the device has finished, so that nothing of it is skipped.
pub trait Results: Any {
    /// Reads numbers back.
    ///
    /// # Errors
    ///
    /// Why they are not the results of a computation: what the device says, or that they are nothing but
    /// zeros, or not all of them numbers.
    fn check(&self) -> Result<(), String>;
}

/// A call to measure.
pub type Work<'a> = Box<dyn Fn() -> Box<dyn Results> + 'a>;

/// Why there is no time of a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure<E> {
    /// The device was lost.
    Device(E),
    /// The call gave no results.
    Results(String),
}

/// How often to call.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Timed calls, at most.
    pub repeats: usize,
    /// Seconds for all of them; one call runs in any case.
    pub max_seconds: f64,
}

/// What a call took.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The median of all calls, in milliseconds.
    pub median_ms: f64,
    /// The shortest call, in milliseconds.
    pub best_ms: f64,
    /// Timed calls.
    pub repeats: usize,
    /// The most bytes in use during one call above those before it, where they are counted.
    pub peak_bytes: Option<usize>,
}

impl Sample {
    /// From the time of each call, in milliseconds.
    ///
    /// # Panics
    ///
    /// When there is no time.
    pub fn new(mut times: Vec<f64>, peak_bytes: Option<usize>) -> Self {
        assert!(!times.is_empty(), "times: expected at least one call, got none");
        times.sort_by(f64::total_cmp);
        let half = times.len() / 2;
        let median_ms = if times.len().is_multiple_of(2) {
            (times[half - 1] + times[half]) / 2.0
        } else {
            times[half]
        };
        Self { median_ms, best_ms: times[0], repeats: times.len(), peak_bytes }
    }
}

/// Calls `work` until it is warm, once more to count its memory, and then to time it. `sync` waits for
/// the device.
///
/// Some devices run a call after it has returned, and tell of an error only to those who read results:
/// a call that fails at once would be the fastest. So the results of the first call are read back.
///
/// # Errors
///
/// As `sync`, and when the results are none.
pub fn measure<E>(
    work: &dyn Fn() -> Box<dyn Results>,
    sync: &dyn Fn() -> Result<(), E>,
    effort: Effort,
) -> Result<Sample, Failure<E>> {
    // Freeing the results is part of the call, as it is in every other framework.
    let call = || {
        let start = Instant::now();
        let results = work();
        sync().map_err(Failure::Device)?;
        drop(results);
        Ok(start.elapsed().as_secs_f64())
    };
    sync().map_err(Failure::Device)?;
    // The first call of a kernel compiles and tunes it.
    let results = work();
    results.check().map_err(Failure::Results)?;
    drop(results);
    sync().map_err(Failure::Device)?;
    let (warm, peak_bytes) = peak_during(call);
    let affordable = (effort.max_seconds / warm?.max(1e-9)) as usize;
    let times = (0..effort.repeats.min(affordable).max(1)).map(|_| call().map(|s| s * 1e3));
    Ok(Sample::new(times.collect::<Result<_, _>>()?, peak_bytes))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use rstest::rstest;
    use std::cell::Cell;

    #[rstest]
    #[case(vec![3.0], 3.0, 3.0)]
    #[case(vec![5.0, 1.0, 2.0], 2.0, 1.0)]
    #[case(vec![4.0, 1.0, 2.0, 9.0], 3.0, 1.0)]
    fn median_and_best(#[case] times: Vec<f64>, #[case] median: f64, #[case] best: f64) {
        let sample = Sample::new(times, None);
        assert_eq!((sample.median_ms, sample.best_ms), (median, best));
    }

    struct Checked(Result<(), String>);

    impl Results for Checked {
        fn check(&self) -> Result<(), String> {
            self.0.clone()
        }
    }

    #[rstest]
    #[case(1e9, 4, 6)]
    #[case(1e-12, 1, 3)]
    fn work_is_called_as_often_as_time_allows(
        #[case] max_seconds: f64,
        #[case] repeats: usize,
        #[case] calls: usize,
    ) {
        let count = Cell::new(0);
        let work = || {
            count.set(count.get() + 1);
            Box::new(Checked(Ok(()))) as Box<dyn Results>
        };
        let effort = Effort { repeats: 4, max_seconds };
        let sample = measure(&work, &|| Ok::<(), String>(()), effort).unwrap();
        assert_eq!((sample.repeats, count.get()), (repeats, calls));
    }

    #[test]
    fn a_device_that_fails_is_an_error() {
        let effort = Effort { repeats: 2, max_seconds: 1.0 };
        let error = measure(&|| Box::new(Checked(Ok(()))), &|| Err("lost"), effort).unwrap_err();
        assert_eq!(error, Failure::Device("lost"));
    }

    #[test]
    fn a_call_without_results_has_no_time() {
        let effort = Effort { repeats: 2, max_seconds: 1.0 };
        let calls = Cell::new(0);
        let work = || {
            calls.set(calls.get() + 1);
            Box::new(Checked(Err("out of memory".to_owned()))) as Box<dyn Results>
        };
        let error = measure(&work, &|| Ok::<(), String>(()), effort).unwrap_err();
        assert_eq!((error, calls.get()), (Failure::Results("out of memory".to_owned()), 1));
    }
}
