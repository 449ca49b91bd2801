#![allow(clippy::unwrap_used)]

use rstest::rstest;

use super::*;
use crate::architecture::Architecture;
use crate::ptxas::{Usage, Verdict};

const TOOLS: &str = "LLVM 23.1.4, ptxas 13.2.78";

fn row(kernel: &str) -> Row {
    Row {
        operation: "attention_varlen",
        blueprint: format!("attention_varlen {kernel}"),
        architecture: Architecture::Sm90a,
        threads: 128,
        shared_memory: 27_648,
        usage: Usage { registers: 162, ..Usage::default() },
        hot_loop: HotLoop {
            matrix_products: 16,
            matrix_loads: 8,
            loop_instructions: 96,
            tensor_copies: 0,
        },
        resident_blocks: 3,
        verdict: Verdict::Clean,
    }
}

fn table(rows: &[Row], tools: &str) -> Table {
    Table::new(Kind::Default, &Report::new(rows.to_vec()), tools.to_owned())
}

#[test]
fn what_is_written_is_read() {
    let table = table(&[row("f16 [4, 4]"), row("bf16")], TOOLS);
    let text = table.to_string();
    let expected = "\
arch   threads registers shared spilled local  mma ldmatrix loop share blocks verdict kernel
sm_90a     128       162  27648       0     0   16        8   96   25%      3   clean attention_varlen f16 [4, 4]
sm_90a     128       162  27648       0     0   16        8   96   25%      3   clean attention_varlen bf16
";
    assert!(text.ends_with(expected), "{text}");
    assert_eq!(Table::read(Kind::Default, &text), Ok(table));
}

#[test]
fn kernels_with_a_producer_have_a_table_of_their_own() {
    let mut copying = row("mma-async f16");
    copying.hot_loop.tensor_copies = 2;
    let of = |row: &Row| Table::new(Kind::Cpp, &Report::new(vec![row.clone()]), TOOLS.to_owned());
    let text = of(&copying).to_string();
    assert!(text.ends_with(" clean    2 attention_varlen mma-async f16\n"), "{text}");
    assert_eq!(Table::read(Kind::Cpp, &text), Ok(of(&copying)));
    assert!(Table::read(Kind::Default, &text).is_err());
    let mut waiting = copying.clone();
    waiting.hot_loop.tensor_copies = 0;
    let difference = of(&copying).difference(&Table::new(
        Kind::Cpp,
        &Report::new(vec![waiting]),
        "NVRTC 14.0, ptxas 14.0.0".to_owned(),
    ));
    assert!(!difference.passed(), "{difference}");
}

#[test]
fn equal_tables_pass() {
    let table = table(&[row("f16")], TOOLS);
    let difference = table.difference(&table);
    assert!(difference.passed());
    let counts = "0 kernels new, 0 gone, 0 changed, 0 changed by other tools alone";
    assert_eq!(difference.to_string(), counts);
}

#[test]
fn every_kind_of_change_is_told_and_fails() {
    let mut changed = row("changed");
    changed.usage = Usage { registers: 168, spill_stores: 4, spill_loads: 8, ..changed.usage };
    let old = table(&[row("kept"), row("gone"), row("changed")], TOOLS);
    let new = table(&[row("kept"), row("new"), changed], TOOLS);
    let difference = old.difference(&new);
    assert!(!difference.passed());
    let text = difference.to_string();
    let lines = text.lines().collect::<Vec<_>>();
    assert!(lines[0].starts_with("+ sm_90a ") && lines[0].ends_with(" new"), "{text}");
    assert!(lines[1].starts_with("- sm_90a ") && lines[1].ends_with(" gone"), "{text}");
    let words = "! sm_90a attention_varlen changed: registers 162 -> 168, spilled 0 -> 12";
    assert_eq!(lines[2], words);
    assert!(lines[3].starts_with("1 kernels new, 1 gone, 1 changed, "), "{text}");
    assert!(lines[3].ends_with("`cargo xtask audit --update` writes the table anew"), "{text}");
}

#[rstest]
#[case::registers(|row: &mut Row| row.usage.registers = 168, true)]
#[case::unrolled(|row: &mut Row| row.hot_loop.matrix_products = 32, true)]
#[case::spilled(|row: &mut Row| row.verdict = Verdict::Spilled, false)]
#[case::shared_memory(|row: &mut Row| row.shared_memory *= 2, false)]
#[case::threads(|row: &mut Row| row.threads *= 2, false)]
#[case::no_matrix_products(|row: &mut Row| row.hot_loop.matrix_products = 0, false)]
fn other_tools_excuse_other_figures(#[case] change: fn(&mut Row), #[case] excused: bool) {
    let mut changed = row("f16");
    change(&mut changed);
    let old = table(&[row("f16")], TOOLS);
    assert!(!old.difference(&table(core::slice::from_ref(&changed), TOOLS)).passed());
    let difference = old.difference(&table(&[changed], "LLVM 24.0.0, ptxas 13.2.78"));
    assert_eq!(difference.passed(), excused);
    let text = difference.to_string();
    assert!(text.starts_with("the table was written with LLVM 23.1.4,"), "{text}");
    assert!(text.contains(" -> "), "{text}");
}

#[rstest]
#[case("", "line 1: expected the title")]
#[case("arch threads", "line 1: expected the title")]
#[case(&format!("{}{TOOLS}.\n{LEGEND}", Kind::Default.title()), "line 5: expected the columns' names")]
#[case(
    &table(&[row("f16")], TOOLS).to_string().replace("ldmatrix", "ldsm"),
    "line 5: expected the columns' names"
)]
#[case(&format!("{}sm_90a 128", table(&[], TOOLS)), "line 6: expected the columns")]
fn another_file_is_refused(#[case] text: &str, #[case] message: &str) {
    let error = Table::read(Kind::Default, text).unwrap_err().to_string();
    assert!(error.starts_with(message), "{error}");
}
