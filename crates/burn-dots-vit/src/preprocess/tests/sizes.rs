//! The size rules, on the values of the reference implementations.

use rstest::rstest;

use crate::preprocess::{PreprocessorConfig, SmartResize, SmartResizeError};

fn target(
    rule: SmartResize,
    height: usize,
    width: usize,
) -> Result<(usize, usize), SmartResizeError> {
    let config = PreprocessorConfig::default();
    rule.target_size(height, width, config.factor(), config.min_pixels, config.max_pixels)
}

#[rstest]
#[case((10, 1000), (28, 560), (28, 1008))]
#[case((14, 1500), (28, 588), (28, 1512))]
#[case((1, 150), (28, 700), (28, 140))]
#[case((10, 10), (56, 56), (56, 56))]
#[case((1080, 1920), (1092, 1932), (1092, 1932))]
#[case((3508, 2480), (3500, 2492), (3500, 2492))]
#[case((4000, 6000), (2716, 4088), (2716, 4088))]
#[case((98, 126), (112, 112), (112, 112))]
#[case((42, 70), (56, 56), (56, 56))]
#[case((28, 28), (56, 56), (56, 56))]
#[case((1, 1), (56, 56), (56, 56))]
#[case((56, 84), (56, 84), (56, 84))]
fn sizes_are_the_references(
    #[case] size: (usize, usize),
    #[case] hugging_face: (usize, usize),
    #[case] dots_ocr: (usize, usize),
) {
    assert_eq!(target(SmartResize::HuggingFace, size.0, size.1), Ok(hugging_face));
    assert_eq!(target(SmartResize::DotsOcr, size.0, size.1), Ok(dots_ocr));
}

#[test]
fn only_the_dots_rule_shrinks_again_after_enlarging() {
    // 1 x 100 pixels enlarge to 28 x 644 at these bounds, over twice the largest area.
    let call = |rule: SmartResize| rule.target_size(1, 100, 28, 4096, 8192).unwrap();
    assert_eq!(call(SmartResize::HuggingFace), (28, 644));
    assert_eq!(call(SmartResize::DotsOcr), (28, 420));
}

#[rstest]
#[case(1, 200, true)]
#[case(1, 201, false)]
#[case(2010, 10, false)]
#[case(2000, 10, true)]
fn ratios_over_two_hundred_are_refused(
    #[case] height: usize,
    #[case] width: usize,
    #[case] accepted: bool,
    #[values(SmartResize::HuggingFace, SmartResize::DotsOcr)] rule: SmartResize,
) {
    let expected = SmartResizeError::AspectRatio { height, width };
    let result = target(rule, height, width);
    assert_eq!(result.is_ok(), accepted);
    assert!(accepted || result == Err(expected));
}

#[test]
fn an_image_without_pixels_is_refused() {
    assert_eq!(
        target(SmartResize::HuggingFace, 0, 5),
        Err(SmartResizeError::Empty { height: 0, width: 5 })
    );
}
