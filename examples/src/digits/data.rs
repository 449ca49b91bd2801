//! The digits that come with this package, and how they are split.

use std::io::Read;

use flate2::read::GzDecoder;
use thiserror::Error;

use super::random::Random;

/// Side of a digit in pixels.
pub const SIDE: usize = 8;
/// The most ink that a pixel holds.
const MOST_INK: u8 = 16;

/// One handwritten digit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digit {
    /// Its row in the data, from 0.
    pub row: usize,
    /// Ink of each pixel, `0..=16`, row by row.
    pub ink: [u8; SIDE * SIDE],
    /// Which digit it is, `0..=9`.
    pub label: u8,
}

/// Data that holds no digits. Lines count from 1.
#[derive(Debug, Error)]
pub enum DataError {
    /// The data cannot be unpacked, or is not text of comma-separated values.
    #[error("cannot read the digits: {0}; restore digits.csv.gz")]
    Read(String),
    /// A line has too few or too many values.
    #[error("line {line}: expected 64 pixels and a label, got {found} values; restore the data")]
    Columns {
        /// The line.
        line: usize,
        /// Its values.
        found: usize,
    },
    /// A value is not a whole number in its range.
    #[error(
        "line {line}, value {column}: expected a whole number from 0 to {most}, got {value:?}; restore the data"
    )]
    Value {
        /// The line.
        line: usize,
        /// Which of its values, from 1.
        column: usize,
        /// What stands there.
        value: String,
        /// The largest that may.
        most: u8,
    },
    /// There is no digit at all.
    #[error("the data holds no digit; restore digits.csv.gz")]
    Empty,
}

/// Reads comma-separated rows of 64 pixels and a label.
///
/// # Errors
///
/// [`DataError`] for the first line that is none, or when there is no line.
pub fn parse(csv: impl Read) -> Result<Vec<Digit>, DataError> {
    let mut rows = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(csv);
    let mut digits = Vec::new();
    for (row, record) in rows.records().enumerate() {
        let record = record.map_err(|error| DataError::Read(error.to_string()))?;
        let line = record.position().map_or(row + 1, |position| position.line() as usize);
        digits.push(digit(row, line, &record)?);
    }
    if digits.is_empty() { Err(DataError::Empty) } else { Ok(digits) }
}

fn digit(row: usize, line: usize, record: &csv::StringRecord) -> Result<Digit, DataError> {
    if record.len() != SIDE * SIDE + 1 {
        return Err(DataError::Columns { line, found: record.len() });
    }
    let value = |column: usize, most: u8| {
        let number = record[column].parse().ok().filter(|&number: &u8| number <= most);
        let value = || record[column].to_owned();
        number.ok_or_else(|| DataError::Value { line, column: column + 1, value: value(), most })
    };
    let mut ink = [0; SIDE * SIDE];
    for (column, ink) in ink.iter_mut().enumerate() {
        *ink = value(column, MOST_INK)?;
    }
    Ok(Digit { row, ink, label: value(SIDE * SIDE, 9)? })
}

/// The 1,797 digits that come with this package.
///
/// # Errors
///
/// [`DataError`] when the file that was built in is damaged.
pub fn bundled() -> Result<Vec<Digit>, DataError> {
    parse(GzDecoder::new(&include_bytes!("../../assets/digits/digits.csv.gz")[..]))
}

/// Digits to learn from, to watch while learning, and to be judged by.
///
/// The split is by row and the same in every run, whatever its seed. Writers are not known, so that
/// one may have digits in several parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// To learn from.
    pub train: Vec<Digit>,
    /// To watch while learning.
    pub valid: Vec<Digit>,
    /// Held out to the end: a sixth.
    pub test: Vec<Digit>,
}

impl Split {
    /// Deals out `digits`: two thirds to train, a sixth to validate, a sixth to test.
    pub fn new(mut digits: Vec<Digit>) -> Self {
        Random::new(&[0x646967697473]).shuffle(&mut digits);
        let sixth = digits.len() / 6;
        let test = digits.split_off(digits.len() - sixth);
        let valid = digits.split_off(digits.len() - sixth);
        Self { train: digits, valid, test }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::HashSet;

    use rstest::rstest;

    use super::*;

    fn line(label: &str) -> String {
        "3,".repeat(64) + label
    }

    #[test]
    fn rows_are_pixels_and_a_label() {
        let digits = parse(format!("{}\n{}\n", line("7"), line("0")).as_bytes()).unwrap();
        let expected = |row, label| Digit { row, ink: [3; 64], label };
        assert_eq!(digits, [expected(0, 7), expected(1, 0)]);
    }

    #[rstest]
    #[case(String::new(), "the data holds no digit; restore digits.csv.gz")]
    #[case(line("1") + "\n1,2,3\n",
        "line 2: expected 64 pixels and a label, got 3 values; restore the data")]
    #[case(line("1,2"), "line 1: expected 64 pixels and a label, got 66 values; restore the data")]
    #[case(
        line("10"),
        "line 1, value 65: expected a whole number from 0 to 9, got \"10\"; restore the data"
    )]
    #[case(line("1") + "\n" + &line("1").replacen('3', "17", 1),
        "line 2, value 1: expected a whole number from 0 to 16, got \"17\"; restore the data")]
    #[case(line("1").replacen('3', "-1", 1),
        "line 1, value 1: expected a whole number from 0 to 16, got \"-1\"; restore the data")]
    #[case(line("1").replacen(",3", ",x", 1),
        "line 1, value 2: expected a whole number from 0 to 16, got \"x\"; restore the data")]
    fn bad_rows_are_errors(#[case] csv: String, #[case] expected: &str) {
        assert_eq!(parse(csv.as_bytes()).unwrap_err().to_string(), expected);
    }

    #[test]
    fn damaged_archives_are_errors() {
        let error = parse(GzDecoder::new(&b"not gzip"[..])).unwrap_err();
        assert!(matches!(error, DataError::Read(_)), "{error}");
        assert!(!error.to_string().contains('\n'));
    }

    #[test]
    fn the_split_deals_out_every_digit_once_and_every_class_everywhere() {
        let digits = bundled().unwrap();
        assert_eq!(digits.len(), 1797);
        let Split { train, valid, test } = Split::new(digits.clone());
        assert_eq!([train.len(), valid.len(), test.len()], [1199, 299, 299]);
        let rows: HashSet<usize> =
            [&train, &valid, &test].into_iter().flatten().map(|digit| digit.row).collect();
        assert_eq!(rows.len(), 1797);
        for part in [&train, &valid, &test] {
            let labels: HashSet<u8> = part.iter().map(|digit| digit.label).collect();
            assert_eq!(labels.len(), 10);
            assert!(part.iter().all(|digit| digits[digit.row] == *digit));
        }
    }
}
