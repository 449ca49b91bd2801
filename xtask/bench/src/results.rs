//! What calls give, and whether it is the result of a computation.

use burn::tensor::{Gradients, Tensor};

use crate::measure::Results;

/// Outputs of a forward pass.
pub struct Outputs<const D: usize>(pub Vec<Tensor<D>>);

impl<const D: usize> Results for Outputs<D> {
    fn check(&self) -> Result<(), String> {
        self.0.iter().cloned().try_for_each(check_numbers)
    }
}

/// Gradients of a backward pass, and an input that has one.
pub struct InputGradients<const D: usize> {
    /// Of everything that learns.
    pub gradients: Gradients,
    /// What learns and takes part in the last results of the backward pass.
    pub input: Tensor<D>,
}

impl<const D: usize> Results for InputGradients<D> {
    fn check(&self) -> Result<(), String> {
        let gradient = self.input.grad(&self.gradients);
        check_numbers(gradient.ok_or_else(|| "its input has no gradient".to_owned())?)
    }
}

/// The innermost cause of an error, which is the last line that says something: those around it name every
/// kernel that had to be skipped.
fn cause(error: &str) -> &str {
    let says =
        |line: &&str| !line.is_empty() && !line.ends_with(':') && !line.contains("backtrace");
    error.lines().map(str::trim).rfind(says).unwrap_or("it does not say why")
}

/// Reads a result, which is neither infinite nor zero everywhere for the inputs there are.
fn check_numbers<const D: usize>(tensor: Tensor<D>) -> Result<(), String> {
    let data = tensor.try_into_data();
    let data = data.map_err(|error| format!("the device failed: {}", cause(&error.to_string())))?;
    let mut all_zero = true;
    for (index, number) in data.iter::<f32>().enumerate() {
        if !number.is_finite() {
            return Err(format!("its result has {number} at {index}"));
        }
        all_zero &= number == 0.0;
    }
    if all_zero { Err("its result is zero everywhere".to_owned()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use rstest::rstest;

    #[rstest]
    #[case([1.0, 2.0], Ok(()))]
    #[case([0.0, 2.0], Ok(()))]
    #[case([0.0, 0.0], Err("its result is zero everywhere".to_owned()))]
    #[case([1.0, f32::NAN], Err("its result has NaN at 1".to_owned()))]
    fn results_are_numbers(#[case] numbers: [f32; 2], #[case] expected: Result<(), String>) {
        let outputs = Outputs(vec![Tensor::<1>::from_floats(numbers, &Device::flex())]);
        assert_eq!(outputs.check(), expected);
    }

    #[rstest]
    #[case("out of memory", "out of memory")]
    #[case(
        "An error\nCaused by:\n  can't allocate buffer of size: 268435456\n  No backtrace available\nAsked at:\n",
        "can't allocate buffer of size: 268435456"
    )]
    #[case("", "it does not say why")]
    fn the_innermost_cause_is_shown(#[case] error: &str, #[case] expected: &str) {
        assert_eq!(cause(error), expected);
    }

    #[test]
    fn an_input_that_learned_nothing_has_no_gradient() {
        let device = Device::flex().autodiff();
        let [input, other] = [0, 1].map(|_| Tensor::<1>::ones([2], &device).require_grad());
        let gradients = || input.clone().sum().backward();
        let of =
            |input: &Tensor<1>| InputGradients { gradients: gradients(), input: input.clone() };
        assert_eq!(of(&input).check(), Ok(()));
        assert_eq!(of(&other).check(), Err("its input has no gradient".to_owned()));
    }
}
