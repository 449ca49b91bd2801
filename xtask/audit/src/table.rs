//! The table of the usual kernels that is kept under version control, and what has changed since.

use core::fmt;
use std::collections::{HashMap, HashSet};

use thiserror::Error;

use crate::report::{Report, Row};
use crate::sass::HotLoop;

/// Which kernels a table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Those that the default compiler compiles.
    Default,
    /// Those that need the C++ compiler: kernels with a producer.
    Cpp,
}

impl Kind {
    /// Where the table is kept.
    pub fn file(self) -> &'static str {
        match self {
            Self::Default => concat!(env!("CARGO_MANIFEST_DIR"), "/table.txt"),
            Self::Cpp => concat!(env!("CARGO_MANIFEST_DIR"), "/table_cpp.txt"),
        }
    }

    /// What the file says about itself, before the releases of the tools.
    fn title(self) -> &'static str {
        match self {
            Self::Default => "# The usual kernels, written by `cargo xtask audit --update` with ",
            Self::Cpp => {
                "# The usual kernels with a producer, written by `cargo xtask audit --update` with "
            }
        }
    }

    /// The columns before the kernel, and how wide they are.
    fn columns(self) -> impl Iterator<Item = (&'static str, usize)> {
        let copies = (self == Self::Cpp).then_some(COPIES);
        COLUMNS.into_iter().chain(copies)
    }
}

const LEGEND: &str = "\
# Of a thread: registers; bytes spilled, stores and loads; bytes of local memory. Of a block: threads;
# bytes of shared memory. Of the hottest loop: matrix products, loads of matrices, all instructions,
# and matrix instructions in percent of them. Of a multiprocessor: blocks that reside at a time.
";

/// What is said of the last column of kernels with a producer.
const COPIES_LEGEND: &str = "\
# tma: copies by TMA in the hottest loop, one for each panel of a tile of keys and of values.
";

/// The columns before the kernel, and how wide they are.
const COLUMNS: [(&str, usize); 12] = [
    ("arch", 6),
    ("threads", 7),
    ("registers", 9),
    ("shared", 6),
    ("spilled", 7),
    ("local", 5),
    ("mma", 4),
    ("ldmatrix", 8),
    ("loop", 4),
    ("share", 5),
    ("blocks", 6),
    ("verdict", 7),
];

/// The last column of kernels with a producer: copies by TMA in the hottest loop.
const COPIES: (&str, usize) = ("tma", 4);

/// Columns that other releases of the tools do not change.
const STEADY: [&str; 3] = ["threads", "shared", "verdict"];

/// The column of matrix products, of which other releases of the tools unroll more or fewer, but not
/// none.
const PRODUCTS: &str = "mma";

/// A file that is no table.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: expected {expected}; write the table anew with `cargo xtask audit --update`")]
pub struct TableError {
    line: usize,
    expected: &'static str,
}

/// The table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    kind: Kind,
    releases: String,
    lines: Vec<Line>,
}

/// A kernel on an architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    cells: Vec<String>,
    kernel: String,
}

impl Line {
    fn of(row: &Row, kind: Kind) -> Self {
        let HotLoop { matrix_products, matrix_loads, loop_instructions, tensor_copies } =
            row.hot_loop;
        let mut cells = vec![
            row.architecture.to_string(),
            row.threads.to_string(),
            row.usage.registers.to_string(),
            row.all_shared_memory().to_string(),
            (row.usage.spill_stores + row.usage.spill_loads).to_string(),
            row.usage.local_memory.to_string(),
            matrix_products.to_string(),
            matrix_loads.to_string(),
            loop_instructions.to_string(),
            format!("{}%", row.hot_loop.share()),
            row.resident_blocks.to_string(),
            row.verdict.to_string(),
            tensor_copies.to_string(),
        ];
        cells.truncate(kind.columns().count());
        Self { cells, kernel: row.blueprint.clone() }
    }

    fn read(mut text: &str, kind: Kind) -> Option<Self> {
        let mut cells = Vec::new();
        for _ in kind.columns() {
            let (word, rest) = text.trim_start().split_once(' ')?;
            cells.push(word.to_owned());
            text = rest;
        }
        let kernel = text.trim().to_owned();
        (!kernel.is_empty()).then_some(Self { cells, kernel })
    }

    fn key(&self) -> (&str, &str) {
        (&self.cells[0], &self.kernel)
    }

    /// The cells that differ, each with whether that is the kernels' doing whatever the tools.
    fn changes(&self, new: &Self) -> Vec<(String, bool)> {
        // Tables of a kind have the same columns.
        let cells = Kind::Cpp.columns().zip(self.cells.iter().zip(&new.cells));
        let changed = cells.filter(|(_, (old, new))| old != new);
        let change = |((name, _), (old, new)): ((&str, usize), (&String, &String))| {
            let lost = [PRODUCTS, COPIES.0].contains(&name) && (old == "0" || new == "0");
            (format!("{name} {old} -> {new}"), lost || STEADY.contains(&name))
        };
        changed.map(change).collect()
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_cells(f, self.cells.iter().map(String::as_str), &self.kernel)
    }
}

fn write_cells<'a>(
    f: &mut fmt::Formatter<'_>,
    cells: impl Iterator<Item = &'a str>,
    kernel: &str,
) -> fmt::Result {
    for (index, (cell, (_, width))) in cells.zip(Kind::Cpp.columns()).enumerate() {
        match index {
            0 => write!(f, "{cell:<width$}")?,
            _ => write!(f, " {cell:>width$}")?,
        }
    }
    write!(f, " {kernel}")
}

/// The file.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}.\n{LEGEND}", self.kind.title(), self.releases)?;
        if self.kind == Kind::Cpp {
            f.write_str(COPIES_LEGEND)?;
        }
        write_cells(f, self.kind.columns().map(|(name, _)| name), "kernel\n")?;
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

impl Table {
    /// The table of a report that was made with tools of these releases.
    pub fn new(kind: Kind, report: &Report, releases: String) -> Self {
        let lines = report.rows().iter().map(|row| Line::of(row, kind)).collect();
        Self { kind, releases, lines }
    }

    /// Reads the file.
    ///
    /// # Errors
    ///
    /// If it is not one that was written by this program.
    pub fn read(kind: Kind, text: &str) -> Result<Self, TableError> {
        let mut lines = text.lines().enumerate();
        let first = lines.next().and_then(|(_, first)| first.strip_prefix(kind.title()));
        let releases = first.and_then(|rest| rest.strip_suffix('.'));
        let releases =
            releases.ok_or(TableError { line: 1, expected: "the title of the table" })?;
        let rows = lines.filter(|(_, line)| !line.starts_with('#'));
        let mut rows = rows.map(|(index, line)| {
            let expected = "the columns of the table";
            Line::read(line, kind).ok_or(TableError { line: index + 1, expected })
        });
        let head = rows.next().transpose()?;
        let named = head.is_some_and(|head| {
            head.cells.iter().map(String::as_str).eq(kind.columns().map(|(name, _)| name))
        });
        if !named {
            let line = 1 + text.lines().take_while(|line| line.starts_with('#')).count();
            return Err(TableError { line, expected: "the columns' names" });
        }
        Ok(Self { kind, releases: releases.to_owned(), lines: rows.collect::<Result<_, _>>()? })
    }

    /// What is different in `new`.
    pub fn difference(&self, new: &Self) -> Difference {
        let old = self.lines.iter().map(|line| (line.key(), line)).collect::<HashMap<_, _>>();
        let same_tools = self.releases == new.releases;
        let mut difference = Difference {
            tools: (!same_tools).then(|| (self.releases.clone(), new.releases.clone())),
            ..Difference::default()
        };
        for line in &new.lines {
            let Some(old) = old.get(&line.key()) else {
                difference.added.push(line.to_string());
                continue;
            };
            let changes = old.changes(line);
            if !changes.is_empty() {
                let words = changes.iter().map(|(words, _)| words.as_str()).collect::<Vec<_>>();
                let (architecture, kernel) = line.key();
                let words = format!("{architecture} {kernel}: {}", words.join(", "));
                match same_tools || changes.iter().any(|&(_, own)| own) {
                    true => difference.changed.push(words),
                    false => difference.by_tools.push(words),
                }
            }
        }
        let kept = new.lines.iter().map(Line::key).collect::<HashSet<_>>();
        let gone = self.lines.iter().filter(|line| !kept.contains(&line.key()));
        difference.gone = gone.map(ToString::to_string).collect();
        difference
    }
}

/// What has changed since the table was written, a line a kernel.
///
/// Other releases of LLVM and of the assembler hand out registers otherwise and unroll loops further.
/// Where the table was written with others than are at hand, changed figures are told and pass, but
/// for the verdict, what is asked for at launch, and whether there are matrix products at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Releases of the tools then and now, if they are not the same.
    tools: Option<(String, String)>,
    added: Vec<String>,
    gone: Vec<String>,
    changed: Vec<String>,
    by_tools: Vec<String>,
}

impl Difference {
    /// Whether the kernels are still those of the table.
    pub fn passed(&self) -> bool {
        [&self.added, &self.gone, &self.changed].iter().all(|lines| lines.is_empty())
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((old, new)) = &self.tools {
            writeln!(f, "the table was written with {old}; here are {new}")?;
        }
        let [added, gone] = [(&self.added, "+ "), (&self.gone, "- ")];
        for (lines, sign) in [added, gone, (&self.changed, "! "), (&self.by_tools, "~ ")] {
            lines.iter().try_for_each(|line| writeln!(f, "{sign}{line}"))?;
        }
        let Self { added, gone, changed, by_tools, .. } = self;
        write!(
            f,
            "{} kernels new, {} gone, {} changed, {} changed by other tools alone",
            added.len(),
            gone.len(),
            changed.len(),
            by_tools.len()
        )?;
        match self.passed() {
            true => Ok(()),
            false => write!(f, "; `cargo xtask audit --update` writes the table anew"),
        }
    }
}

#[cfg(test)]
mod tests;
