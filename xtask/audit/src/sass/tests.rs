#![allow(clippy::unwrap_used)]

use rstest::rstest;

use super::*;

/// Release 13.2 for sm_80: an outer loop from 0x20, of which the inner one has been unrolled four
/// times, with a rest of it at either side.
const MATRIX: &str = include_str!("matrix.sass");

/// Release 13.2 for sm_90a: a loop with a division, whose rare case is a function that has been put at
/// the end. The kernel is the second of its file and starts at 0x100.
const CALL: &str = include_str!("call.sass");

fn hot(text: &str, sizes: &[usize]) -> Vec<HotLoop> {
    parse(text, sizes).unwrap().iter().map(|code| HotLoop::of(code)).collect()
}

#[test]
fn the_loop_with_most_matrix_instructions_is_hot() {
    let expected =
        HotLoop { matrix_products: 4, matrix_loads: 4, loop_instructions: 17, tensor_copies: 0 };
    assert_eq!(hot(MATRIX, &[0x500]), [expected]);
    assert_eq!(expected.share(), 47);
}

#[test]
fn a_called_function_is_no_part_of_the_loop() {
    let expected = HotLoop { loop_instructions: 21, ..HotLoop::default() };
    assert_eq!(hot(CALL, &[0x100, 0x900]), [HotLoop::default(), expected]);
    assert_eq!(expected.share(), 0);
}

#[rstest]
#[case("HMMA.16816.F32", Kind::Product)]
#[case("HGMMA.64x64x16.F32.BF16", Kind::Product)]
#[case("LDSM.16.MT88.4", Kind::Load)]
#[case("HFMA2.MMA", Kind::Other)]
#[case("UTMALDG.3D", Kind::Copy)]
#[case("LDS.128", Kind::Other)]
fn matrix_instructions_are_told_from_others(#[case] opcode: &str, #[case] expected: Kind) {
    assert_eq!(Kind::of(opcode), expected);
}

#[rstest]
#[case("EXIT", Flow::End)]
#[case("@P0 EXIT", Flow::Next)]
#[case("BRA 0x1050", Flow::Jump(5))]
#[case("@!P0 BRA 0x1050", Flow::Either(5))]
#[case("BRA !P5, 0x1050", Flow::Either(5))]
#[case("BRA.DIV ~URZ, 0x1050", Flow::Either(5))]
#[case("CALL.REL.NOINC 0x1050", Flow::Either(5))]
#[case("@!UPT UIADD3 URZ, URZ, URZ, URZ", Flow::Next)]
#[case("BSYNC B0", Flow::Next)]
fn control_flow_is_read(#[case] words: &str, #[case] expected: Flow) {
    assert_eq!(instruction(words, 0x1000, 16).unwrap().flow, expected);
}

#[rstest]
#[case::cut("/*0000*/ NOP;", &[0x20], SassError::Missing(0x10))]
#[case::skipped("/*0000*/ NOP;\n/*0020*/ NOP;", &[0x20], SassError::Missing(0x10))]
#[case::no_address("/*zero*/ NOP;", &[0x10], SassError::Line("/*zero*/ NOP;".to_owned()))]
#[case::outside(
    "/*0000*/ BRA 0x10;",
    &[0x10],
    SassError::Line("/*0000*/ BRA 0x10;".to_owned())
)]
#[case::no_target("/*0000*/ BRA `(.L_x);", &[0x10], SassError::Line("/*0000*/ BRA `(.L_x);".to_owned()))]
fn other_text_is_told(#[case] text: &str, #[case] sizes: &[usize], #[case] expected: SassError) {
    assert_eq!(parse(text, sizes), Err(expected));
}
