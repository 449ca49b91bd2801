//! A summary for readers.

use std::fmt;

use comfy_table::{CellAlignment, Table, presets};

use super::input::{Outcome, Step};
use super::summary::{Summary, Target, Yardstick};

impl Summary {
    /// Everything: the summary, then each figure.
    pub fn table(&self) -> String {
        format!("{self}\n{}\n\n{}\n", self.attention_table(), self.rope_table())
    }

    /// Device, driver, toolkit and versions, as far as they are known.
    fn heading(&self) -> String {
        let fact = |name: &str| self.facts.get(name).map(String::as_str);
        let device = fact("gpu").or(fact("cpu")).unwrap_or("unknown device");
        let mut parts = vec![format!("{device} as {}", fact("device").unwrap_or("unknown"))];
        let named = [
            ("memory", "memory"),
            ("power_limit", "power limit"),
            ("driver", "driver"),
            ("toolkit", "CUDA toolkit"),
            ("compiler", "kernels by"),
            ("version", "burn-vision-attention"),
            ("burn", "burn"),
            ("torch", "torch"),
        ];
        let known =
            named.iter().filter_map(|(name, label)| Some(format!("{label} {}", fact(name)?)));
        parts.extend(known);
        parts.join(", ")
    }

    fn attention_table(&self) -> Table {
        let mut table = table(
            &["attention_varlen", "heads", "layout", "pass"],
            &["ms", "TFLOP/s", "of matmul", "varlen_attn ms", "of varlen_attn"],
        );
        table.add_rows(self.attention.iter().map(|row| {
            [
                row.implementation.clone(),
                row.heads.clone(),
                row.layout.clone(),
                row.pass.clone(),
                format!("{:.3}", row.ms),
                number(row.tflops, 1),
                percent(row.of_matmul),
                number(row.varlen_ms, 3),
                number(row.of_varlen, 2),
            ]
        }));
        table
    }

    fn rope_table(&self) -> Table {
        let mut table =
            table(&["rope_qk_norm", "layout"], &["ms", "GB/s", "of copy", "composed ms"]);
        table.add_rows(self.rope_qk_norm.iter().map(|row| {
            [
                row.heads.clone(),
                row.layout.clone(),
                format!("{:.3}", row.ms),
                number(row.gbs, 0),
                percent(row.of_copy),
                number(row.composed_ms, 3),
            ]
        }));
        table
    }
}

fn table(words: &[&str], numbers: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(words.iter().chain(numbers));
    for column in table.column_iter_mut().skip(words.len()) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(String::new, |value| format!("{value:.digits$}"))
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(String::new, |share| format!("{:.0}%", 100.0 * share))
}

/// What each of the two frameworks reaches; of nothing where nothing was measured.
fn rate(f: &mut fmt::Formatter<'_>, what: &str, yardstick: Yardstick, unit: &str) -> fmt::Result {
    let by = [(yardstick.burn, "Burn"), (yardstick.torch, "PyTorch")];
    let by: Vec<String> = by
        .into_iter()
        .filter_map(|(rate, name)| Some(format!("{:.1} {unit} by {name}", rate?)))
        .collect();
    match by.is_empty() {
        true => writeln!(f, "{what}: not measured"),
        false => writeln!(f, "{what}: {}", by.join(", ")),
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok => f.pad("ok"),
            Self::Failed(status) => f.pad(&format!("FAILED ({status})")),
            Self::RanOut => f.pad("RAN OUT"),
            Self::LeftOut => f.pad("left out"),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, outcome, seconds, limit, detail, .. } = self;
        write!(f, "{name:<18} {outcome:<12}")?;
        if *outcome != Outcome::LeftOut {
            write!(f, " {seconds:>3} of {limit:>3} s  ")?;
        }
        f.write_str(detail)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { figure, of, least, measured, met } = self;
        let verdict = match met {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "open",
        };
        let measured =
            measured.map_or_else(|| "not measured".to_owned(), |share| format!("{share:.2}"));
        write!(f, "{verdict:<7} {figure:<32} {measured:>12} of {of}, at least {least}")
    }
}

/// One screen: the device, its rates, the steps and the targets.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.heading())?;
        rate(f, "matrix product", self.matmul_tflops, "TFLOP/s")?;
        rate(f, "copy", self.copy_gbs, "GB/s")?;
        writeln!(f)?;
        for step in &self.steps {
            writeln!(f, "{}", step.to_string().trim_end())?;
        }
        if !self.targets.is_empty() {
            writeln!(f)?;
        }
        for target in &self.targets {
            writeln!(f, "{target}")?;
        }
        for note in &self.notes {
            writeln!(f, "{note}")?;
        }
        let verdict = if self.correct { "every check holds" } else { "NOT every check holds" };
        let seconds =
            self.facts.get("seconds").map_or_else(String::new, |s| format!(", {s} s in all"));
        writeln!(f, "\n{verdict}{seconds}")
    }
}
