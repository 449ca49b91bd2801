//! What the audit found, for people and for programs.

use core::fmt;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::architecture::Architecture;
use crate::ptxas::{Usage, Verdict};
use crate::sass::HotLoop;

/// One kernel on one architecture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The operation.
    pub operation: &'static str,
    /// The blueprint in words.
    pub blueprint: String,
    /// What it was assembled for.
    pub architecture: Architecture,
    /// Threads of a block.
    pub threads: usize,
    /// Shared memory that a launch asks for, in bytes per block.
    pub shared_memory: usize,
    /// What the assembler reports.
    #[serde(flatten)]
    pub usage: Usage,
    /// What its hottest loop does.
    #[serde(flatten)]
    pub hot_loop: HotLoop,
    /// Blocks that reside on one multiprocessor at a time.
    pub resident_blocks: u32,
    /// What is to be thought of it.
    pub verdict: Verdict,
}

impl Row {
    /// Whether it is written for matrix units and yet multiplies without them in its hottest loop, or
    /// no second block resides beside it to hide its latencies.
    fn wastes_matrix_units(&self) -> bool {
        let asked = self.blueprint.split(' ').any(|word| ["mma", "mma-async"].contains(&word));
        asked && (self.hot_loop.matrix_products == 0 || self.resident_blocks < 2)
    }

    /// All shared memory of a block, in bytes.
    pub fn all_shared_memory(&self) -> usize {
        self.shared_memory + self.usage.static_shared_memory as usize
    }
}

/// All kernels.
#[derive(Clone, Debug, Default)]
pub struct Report {
    rows: Vec<Row>,
}

impl Report {
    /// A report of these rows.
    pub fn new(rows: Vec<Row>) -> Self {
        Self { rows }
    }

    /// All rows.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Rows that need local memory.
    pub fn failures(&self) -> impl Iterator<Item = &Row> {
        self.judged(Verdict::Spilled)
    }

    fn judged(&self, verdict: Verdict) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(move |row| row.verdict == verdict)
    }

    /// Rows of kernels for matrix units that do not use them as they should.
    pub fn wasteful(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.wastes_matrix_units())
    }

    /// Whether there are kernels, none needs local memory, and those for matrix units use them.
    pub fn passed(&self) -> bool {
        let faults = self.failures().chain(self.wasteful());
        !self.rows.is_empty() && faults.count() == 0
    }

    /// A line per operation and architecture: kernels, and the most registers and shared memory.
    fn summary(&self) -> Vec<String> {
        let mut groups = Vec::new();
        for group in self.rows.iter().map(|row| (row.operation, row.architecture)) {
            if !groups.contains(&group) {
                groups.push(group);
            }
        }
        let line = |(operation, architecture)| {
            let rows = self.rows.iter();
            let rows =
                rows.filter(|row| (row.operation, row.architecture) == (operation, architecture));
            let rows = rows.collect::<Vec<_>>();
            let registers = rows.iter().map(|row| row.usage.registers).max().unwrap_or(0);
            let shared_memory = rows.iter().map(|row| row.shared_memory).max().unwrap_or(0);
            let count = rows.len();
            format!(
                "{operation} {architecture}: {count} kernels, at most {registers} registers and {shared_memory} B of shared memory"
            )
        };
        groups.into_iter().map(line).collect()
    }

    /// The most of each operation, the kernels that spill, and the counts.
    pub fn brief(&self) -> String {
        let mut lines = self.summary();
        let [traded, failed] = [Verdict::Traded, Verdict::Spilled];
        for (verdict, title) in [
            (traded, "a few bytes spilled for another resident block, with registers left"),
            (failed, "local memory needed"),
        ] {
            if self.judged(verdict).next().is_some() {
                lines.push(format!("{title}:\n{}", table(self.judged(verdict))));
            }
        }
        if self.wasteful().next().is_some() {
            let title = "no matrix instruction in the hottest loop, or no second resident block";
            lines.push(format!("{title}:\n{}", table(self.wasteful())));
        }
        let [traded, failed] = [traded, failed].map(|verdict| self.judged(verdict).count());
        // The counts stand alone on the last line; scripts read it.
        lines.push(format!(
            "{} kernels, {traded} that spill though registers are left, {failed} that need local memory",
            self.rows.len()
        ));
        lines.join("\n")
    }
}

/// All kernels, then what [`Report::brief`] says.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n{}", table(self.rows.iter()), self.brief())
    }
}

fn table<'a>(rows: impl Iterator<Item = &'a Row>) -> Table {
    const NUMBERS: [&str; 13] = [
        "threads",
        "registers",
        "shared",
        "stack",
        "stores",
        "loads",
        "local",
        "mma",
        "ldmatrix",
        "tma",
        "loop",
        "share",
        "blocks",
    ];
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(["blueprint", "arch"].iter().chain(&NUMBERS));
    table.add_rows(rows.map(|row| {
        let Usage { registers, stack_frame, spill_stores, spill_loads, local_memory, .. } =
            row.usage;
        let HotLoop { matrix_products, matrix_loads, loop_instructions, tensor_copies } =
            row.hot_loop;
        let numbers = [
            row.threads.to_string(),
            registers.to_string(),
            row.all_shared_memory().to_string(),
            stack_frame.to_string(),
            spill_stores.to_string(),
            spill_loads.to_string(),
            local_memory.to_string(),
            matrix_products.to_string(),
            matrix_loads.to_string(),
            tensor_copies.to_string(),
            loop_instructions.to_string(),
            format!("{}%", row.hot_loop.share()),
            row.resident_blocks.to_string(),
        ];
        [row.blueprint.clone(), row.architecture.to_string()].into_iter().chain(numbers)
    }));
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rstest::rstest;

    use super::*;

    fn row(blueprint: &str, usage: Usage) -> Row {
        let verdict = if usage.is_clean() { Verdict::Clean } else { Verdict::Spilled };
        Row {
            operation: "attention_varlen",
            blueprint: blueprint.to_owned(),
            architecture: Architecture::Sm90a,
            threads: 64,
            shared_memory: 27_648,
            usage,
            hot_loop: HotLoop {
                matrix_products: 16,
                matrix_loads: 8,
                loop_instructions: 96,
                tensor_copies: 0,
            },
            resident_blocks: 6,
            verdict,
        }
    }

    fn clean() -> Row {
        row("fits", Usage { registers: 162, ..Usage::default() })
    }

    #[rstest]
    #[case::stack(Usage { stack_frame: 8, ..Usage::default() })]
    #[case::stores(Usage { spill_stores: 4, ..Usage::default() })]
    #[case::loads(Usage { spill_loads: 4, ..Usage::default() })]
    #[case::local(Usage { local_memory: 16, ..Usage::default() })]
    fn one_bad_kernel_fails_the_audit(#[case] usage: Usage) {
        let report = Report::new(vec![clean(), row("does not fit", usage)]);
        assert!(!report.passed());
        let failures = report.failures().map(|row| row.blueprint.as_str());
        assert_eq!(failures.collect::<Vec<_>>(), ["does not fit"]);
        let text = report.to_string();
        let counts = "2 kernels, 0 that spill though registers are left, 1 that need local memory";
        assert!(text.ends_with(counts), "{text}");
        assert_eq!(text.matches("does not fit").count(), 2, "named in the table and below: {text}");
    }

    #[rstest]
    #[case::as_it_should("attention_varlen mma f16", 16, 2, true)]
    #[case::without_instructions("attention_varlen mma f16", 0, 2, false)]
    #[case::producer_alone("attention_varlen mma-async f16", 16, 1, false)]
    #[case::alone("attention_varlen backward mma f16", 16, 1, false)]
    #[case::plain("attention_varlen simt f16", 0, 1, true)]
    fn matrix_units_are_used_where_they_are_asked_for(
        #[case] blueprint: &str,
        #[case] matrix_products: u32,
        #[case] resident_blocks: u32,
        #[case] passes: bool,
    ) {
        let mut row = row(blueprint, Usage::default());
        row.hot_loop.matrix_products = matrix_products;
        row.resident_blocks = resident_blocks;
        assert_eq!(Report::new(vec![row]).passed(), passes);
    }

    #[test]
    fn a_trade_is_told_and_passes() {
        let usage = Usage { spill_stores: 8, ..Usage::default() };
        let traded = Row { verdict: Verdict::Traded, ..row("squeezed", usage) };
        let report = Report::new(vec![clean(), traded]);
        assert!(report.passed());
        let text = report.to_string();
        assert_eq!(text.matches("squeezed").count(), 2, "named in the table and below: {text}");
        assert!(text.contains("2 kernels, 1 that spill"), "{text}");
    }

    #[test]
    fn clean_kernels_pass_and_none_at_all_do_not() {
        assert!(Report::new(vec![clean()]).passed());
        assert!(!Report::default().passed());
        let text = Report::new(vec![clean()]).to_string();
        let summary = "attention_varlen sm_90a: 1 kernels, at most 162 registers and 27648 B of shared memory";
        assert!(text.contains(summary), "{text}");
        assert!(text.contains("16         8    0    96    25%       6"), "{text}");
    }

    #[test]
    fn rows_are_flat_json() {
        let json = serde_json::to_value(clean()).unwrap();
        assert_eq!(json["architecture"], "sm_90a");
        assert_eq!(json["registers"], 162);
        assert_eq!(json["spill_stores"], 0);
        assert_eq!(json["matrix_products"], 16);
    }
}
