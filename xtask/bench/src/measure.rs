//! Time and memory of a call.

use std::any::Any;
use std::rc::Rc;
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

/// What is timed of a call.
pub type Timed<'a> = Box<dyn FnOnce() -> Box<dyn Results> + 'a>;

/// A call to measure: it does what has to precede, and hands out what is timed.
pub type Work<'a> = Box<dyn Fn() -> Timed<'a> + 'a>;

/// Work that nothing has to precede.
pub fn timed<'a>(call: impl Fn() -> Box<dyn Results> + 'a) -> Work<'a> {
    let call = Rc::new(call);
    Box::new(move || {
        let call = Rc::clone(&call);
        Box::new(move || call())
    })
}

/// The most calls that are queued before the device is waited for: their results live until then.
const MOST_QUEUED: usize = 16;

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
    /// Seconds of calls that are queued before the device is waited for, so that a device which works
    /// while the host prepares the next call shows its own rate; 0 waits for every call.
    pub queued_seconds: f64,
}

/// What a call took.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The median of all calls, in milliseconds.
    pub median_ms: f64,
    /// The shortest call, in milliseconds.
    pub best_ms: f64,
    /// How often it was timed.
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

/// Calls `work` until it is warm, once more to count its memory, and then to time it: a time is that of
/// one call, or of several in a row over their number ([`Effort::queued_seconds`]). `sync` waits for the
/// device.
///
/// Some devices run a call after it has returned, and tell of an error only to those who read results:
/// a call that fails at once would be the fastest. So the results of the first call are read back.
///
/// # Errors
///
/// As `sync`, and when the results are none.
pub fn measure<E>(
    work: &Work<'_>,
    sync: &dyn Fn() -> Result<(), E>,
    effort: Effort,
) -> Result<Sample, Failure<E>> {
    let prepared = |count| {
        let calls: Vec<Timed<'_>> = (0..count).map(|_| work()).collect();
        sync().map(|()| calls).map_err(Failure::Device)
    };
    // Freeing the results is part of the call, as it is in every other framework.
    let run = |calls: Vec<Timed<'_>>| {
        let (count, start) = (calls.len(), Instant::now());
        let results: Vec<_> = calls.into_iter().map(|call| call()).collect();
        sync().map_err(Failure::Device)?;
        drop(results);
        Ok(start.elapsed().as_secs_f64() / count as f64)
    };
    sync().map_err(Failure::Device)?;
    // The first call of a kernel compiles and tunes it.
    let results = work()();
    results.check().map_err(Failure::Results)?;
    drop(results);
    let calls = prepared(1)?;
    let (warm, peak_bytes) = peak_during(|| run(calls));
    let warm = warm?.max(1e-9);
    let queued = ((effort.queued_seconds / warm) as usize).clamp(1, MOST_QUEUED);
    let affordable = (effort.max_seconds / warm) as usize / queued;
    let times = 0..effort.repeats.min(affordable).max(1);
    let times = times.map(|_| Ok(1e3 * run(prepared(queued)?)?));
    Ok(Sample::new(times.collect::<Result<_, _>>()?, peak_bytes))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use rstest::rstest;
    use std::cell::{Cell, RefCell};

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

    /// Work that counts what precedes and what is timed.
    fn counting<'a>(
        before: &'a Cell<usize>,
        calls: &'a Cell<usize>,
        result: Result<(), String>,
    ) -> Work<'a> {
        Box::new(move || {
            before.set(before.get() + 1);
            let result = Checked(result.clone());
            Box::new(move || {
                calls.set(calls.get() + 1);
                Box::new(result) as Box<dyn Results>
            })
        })
    }

    #[rstest]
    #[case(1e9, 0.0, 4, 6)]
    #[case(1e-12, 0.0, 1, 3)]
    // The calls take no time, so that as many as may be are queued.
    #[case(1e9, 1e9, 4, 2 + 4 * 16)]
    fn work_is_called_as_often_as_time_allows(
        #[case] max_seconds: f64,
        #[case] queued_seconds: f64,
        #[case] repeats: usize,
        #[case] expected: usize,
    ) {
        let (before, calls) = (Cell::new(0), Cell::new(0));
        let effort = Effort { repeats: 4, max_seconds, queued_seconds };
        let work = counting(&before, &calls, Ok(()));
        let sample = measure(&work, &|| Ok::<(), String>(()), effort).unwrap();
        assert_eq!((sample.repeats, calls.get(), before.get()), (repeats, expected, expected));
    }

    #[test]
    fn what_precedes_all_queued_calls_has_no_time() {
        let log = RefCell::new(String::new());
        let log = &log;
        let work: Work<'_> = Box::new(move || {
            log.borrow_mut().push('b');
            Box::new(move || {
                log.borrow_mut().push('c');
                Box::new(Checked(Ok(())))
            })
        });
        let effort = Effort { repeats: 1, max_seconds: 1e9, queued_seconds: 1e9 };
        measure(&work, &|| Ok::<(), String>(()), effort).unwrap();
        let (before, calls) = ("b".repeat(MOST_QUEUED), "c".repeat(MOST_QUEUED));
        assert_eq!(*log.borrow(), format!("bcbc{before}{calls}"));
    }

    const EFFORT: Effort = Effort { repeats: 2, max_seconds: 1.0, queued_seconds: 0.0 };

    #[test]
    fn a_device_that_fails_is_an_error() {
        let work = timed(|| Box::new(Checked(Ok(()))));
        let error = measure(&work, &|| Err("lost"), EFFORT).unwrap_err();
        assert_eq!(error, Failure::Device("lost"));
    }

    #[test]
    fn a_call_without_results_has_no_time() {
        let (before, calls) = (Cell::new(0), Cell::new(0));
        let work = counting(&before, &calls, Err("out of memory".to_owned()));
        let error = measure(&work, &|| Ok::<(), String>(()), EFFORT).unwrap_err();
        assert_eq!((error, calls.get()), (Failure::Results("out of memory".to_owned()), 1));
    }
}
