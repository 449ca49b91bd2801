//! Which cases the arguments ask for.

use std::iter;

use crate::arguments::{Bench, Heads, Operation, Pass, Scaling};
use crate::case::{Case, tower_heads};
use crate::layout::Layout;

const DEFAULT_HEADS: [Heads; 3] = [Heads::new(24, 64), Heads::new(12, 128), Heads::new(16, 80)];
const SCALED_HEADS: Heads = Heads::new(12, 128);
/// Length of each segment where their number is varied.
const SCALED_LENGTH: usize = 64;

/// A case and how to run it.
#[derive(Clone, Debug)]
pub struct Point {
    /// What is measured.
    pub case: Case,
    /// On how many threads, where the device keeps to a number.
    pub threads: usize,
    /// What the time is measured against, where it is a point of a curve.
    pub scaling: Option<Scaling>,
}

/// The table's cases, then those of each curve, on `cores` threads where the arguments name no number.
pub fn points(arguments: &Bench, cores: usize) -> Vec<Point> {
    let threads = arguments.threads.unwrap_or(cores);
    let all =
        [Operation::Layer, Operation::AttentionVarlen, Operation::RopeQkNorm, Operation::Tower];
    let default = if arguments.scaling.is_empty() { &all[..] } else { &[] };
    let operations = or_default(&arguments.operations, default);
    let table = operations.iter().flat_map(|&operation| table(arguments, operation));
    let table = table.map(|case| Point { case, threads, scaling: None });
    let curves = arguments.scaling.iter().flat_map(|&scaling| curve(arguments, scaling, threads));
    table.chain(curves).collect()
}

/// What was asked for, or the default where nothing was.
pub(crate) fn or_default<'a, T>(asked: &'a [T], default: &'a [T]) -> &'a [T] {
    if asked.is_empty() { default } else { asked }
}

fn case(arguments: &Bench, operation: Operation, heads: Heads, layout: Layout, pass: Pass) -> Case {
    Case { operation, heads, layout, dtype: arguments.dtype, pass }
}

fn table(arguments: &Bench, operation: Operation) -> Vec<Case> {
    let (heads, layouts) = match operation {
        Operation::Tower => (vec![tower_heads()], vec![Layout::pages()]),
        _ => (or_default(&arguments.heads, &DEFAULT_HEADS).to_vec(), default_layouts()),
    };
    let layouts = or_default(&arguments.layouts, &layouts);
    let of_layout = |heads: Heads, layout: &Layout| {
        let passes = arguments.passes().iter();
        passes
            .map(|&pass| case(arguments, operation, heads, layout.clone(), pass))
            .collect::<Vec<_>>()
    };
    let of_heads = |heads: Heads| layouts.iter().flat_map(move |layout| of_layout(heads, layout));
    heads.into_iter().flat_map(of_heads).collect()
}

fn default_layouts() -> Vec<Layout> {
    let uniform = [(1, 4096), (4, 1024), (64, 64)];
    let uniform = uniform.map(|(segments, length)| Layout::uniform(segments, length));
    uniform.into_iter().chain([Layout::pages()]).collect()
}

fn curve(arguments: &Bench, scaling: Scaling, threads: usize) -> Vec<Point> {
    let heads = arguments.heads.first().copied().unwrap_or(SCALED_HEADS);
    let first = || arguments.layouts.first().cloned().unwrap_or_else(|| Layout::uniform(1, 4096));
    let places: Vec<(Layout, usize)> = match scaling {
        Scaling::Tokens => {
            (10..=16).map(|power| (Layout::uniform(1, 1 << power), threads)).collect()
        }
        Scaling::Segments => [1, 3, 10, 30, 100, 300, 1000]
            .map(|segments| (Layout::uniform(segments, SCALED_LENGTH), threads))
            .to_vec(),
        Scaling::Threads => iter::successors(Some(1), |threads| Some(2 * threads))
            .take_while(|fewer| *fewer < threads)
            .chain([threads])
            .map(|threads| (first(), threads))
            .collect(),
    };
    let of_pass = |pass: Pass| {
        places.iter().map(move |(layout, threads)| {
            let case = case(arguments, Operation::AttentionVarlen, heads, layout.clone(), pass);
            Point { case, threads: *threads, scaling: Some(scaling) }
        })
    };
    arguments.passes().iter().flat_map(|&pass| of_pass(pass).collect::<Vec<_>>()).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::Parser;
    use rstest::rstest;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        bench: Bench,
    }

    fn plan(line: &str) -> Vec<Point> {
        let words = iter::once("bench").chain(line.split_whitespace());
        points(&Cli::try_parse_from(words).unwrap().bench, 6)
    }

    #[test]
    fn everything_is_measured_by_default() {
        let points = plan("");
        let count = |operation| points.iter().filter(|p| p.case.operation == operation).count();
        let of_heads = DEFAULT_HEADS.len() * default_layouts().len();
        for operation in [Operation::Layer, Operation::AttentionVarlen, Operation::RopeQkNorm] {
            assert_eq!(count(operation), of_heads, "{operation}");
        }
        assert_eq!((count(Operation::Tower), points.len()), (1, 3 * of_heads + 1));
        assert!(points.iter().all(|p| p.threads == 6 && p.case.layout.tokens() == 4096));
    }

    #[test]
    fn passes_of_a_case_follow_each_other() {
        let points = plan(
            "--op attention_varlen --heads 12x128 --heads 24x64 --layout 1x8 --layout 2x4 \
                           --pass forward --pass backward",
        );
        let found: Vec<_> = points.iter().map(|point| point.case.to_string()).collect();
        assert_eq!(
            found[..3],
            [
                "attention_varlen 12x128 1x8 f32",
                "attention_varlen 12x128 1x8 f32 backward",
                "attention_varlen 12x128 2x4 f32",
            ]
        );
        assert_eq!(found.len(), 8);
        assert_eq!(plan("--scaling tokens --pass forward --pass both").len(), 14);
    }

    #[rstest]
    #[case("--scaling threads", &[1, 2, 4, 6])]
    #[case("--scaling threads --threads 4", &[1, 2, 4])]
    #[case("--scaling threads --threads 1", &[1])]
    fn threads_double_up_to_the_most(#[case] line: &str, #[case] expected: &[usize]) {
        let threads: Vec<_> = plan(line).iter().map(|point| point.threads).collect();
        assert_eq!(threads, expected);
    }

    #[test]
    fn curves_come_alone_unless_an_operation_is_asked_for() {
        let tokens: Vec<_> =
            plan("--scaling tokens").iter().map(|p| p.case.layout.tokens()).collect();
        assert_eq!(tokens, [1, 2, 4, 8, 16, 32, 64].map(|k| k * 1024));
        let both = plan("--scaling segments --op tower --layout 2x16 --heads 16x72");
        assert_eq!(both[0].case.heads, tower_heads());
        assert_eq!(both.len(), 8);
        assert!(both[1..].iter().all(|point| point.case.heads == Heads::new(16, 72)));
    }
}
