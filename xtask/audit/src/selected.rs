//! Why no kernel was audited.

use kernels_cubecl::Unsupported;
use thiserror::Error;

use crate::Audit;
use crate::device::all_properties;
use crate::variants::variants;

/// What `--kernel` asked for and is not in the report.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum NothingSelected {
    /// There are such kernels, all of them with a producer.
    #[error(
        "--kernel: {text:?} names {count} kernels with a producer and no others, and these were left out \
         since NVRTC is missing, which compiles them; `cargo xtask provision --nvrtc` installs it"
    )]
    LeftOut {
        /// The text.
        text: String,
        /// How many kernels have it.
        count: usize,
    },
    /// There are none.
    #[error(
        "--kernel: no blueprint for {architectures} has {text:?} in it; the table without --kernel lists them"
    )]
    Nowhere {
        /// The text.
        text: String,
        /// Where it was looked for.
        architectures: String,
    },
}

/// Why no kernel has the text that was asked for, where those that the C++ compiler alone lowers may have
/// been left out.
///
/// # Errors
///
/// If a device of an architecture cannot run a kernel.
pub fn nothing_selected(
    arguments: &Audit,
    cpp_was_left_out: bool,
) -> Result<NothingSelected, Unsupported> {
    let text = arguments.kernel.clone();
    let mut count = 0;
    for &architecture in &arguments.architectures {
        let variants = variants(&all_properties(architecture), arguments.selection())?;
        let named = |variant: &String| variant.contains(&text);
        count += variants.iter().map(ToString::to_string).filter(named).count();
    }
    if cpp_was_left_out && count > 0 {
        return Ok(NothingSelected::LeftOut { text, count });
    }
    let names: Vec<String> = arguments.architectures.iter().map(ToString::to_string).collect();
    Ok(NothingSelected::Nowhere { text, architectures: names.join(" and ") })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rstest::rstest;

    use super::*;
    use crate::architecture::Architecture::{self, Sm80, Sm90a};

    /// A missing compiler is named where it is the reason, and nowhere else.
    #[rstest]
    #[case::left_out("mma-async", &[Sm80, Sm90a], true, "since NVRTC is missing")]
    #[case::none_there("mma-async", &[Sm80], true, "no blueprint for sm_80 has")]
    #[case::not_left_out("mma-async f32", &[Sm90a], false, "no blueprint for sm_90a has")]
    #[case::misspelt("mma_async", &[Sm80, Sm90a], true, "no blueprint for sm_80 and sm_90a has")]
    fn the_reason_is_named(
        #[case] kernel: &str,
        #[case] architectures: &[Architecture],
        #[case] cpp_was_left_out: bool,
        #[case] reason: &str,
    ) {
        let audit = Audit {
            architectures: architectures.to_vec(),
            full: false,
            kernel: kernel.to_owned(),
            json: None,
            check: false,
            update: false,
        };
        let message = nothing_selected(&audit, cpp_was_left_out).unwrap().to_string();
        assert!(message.contains(reason) && !message.contains('\n'), "{message}");
        assert_eq!(message.contains("`cargo xtask provision --nvrtc`"), reason.contains("NVRTC"));
    }
}
