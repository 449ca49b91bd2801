//! How the programs talk: results line by line, and every error in one.

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

/// `text` with line breaks, terminal commands and other control characters spelled out.
pub fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            printable.extend(character.escape_default());
        } else {
            printable.push(character);
        }
    }
    printable
}

/// Says what is wrong in one line, whatever is in file names and other people's files.
pub fn complain(error: impl Display) {
    eprintln!("error: {}", printable(&error.to_string()));
}

/// Prints a line. A reader that has gone, such as `head`, is no failure: the files matter.
pub fn say(line: impl Display) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// The command line, or the code to leave with after saying in one line what is wrong with it.
///
/// # Errors
///
/// 2 for a bad command line; `--help` and `--version` leave by themselves.
pub fn arguments<Cli: Parser>() -> Result<Cli, ExitCode> {
    match Cli::try_parse() {
        Ok(cli) => Ok(cli),
        Err(error) if !error.use_stderr() => error.exit(),
        Err(error) => {
            complain(argument_error(&error));
            Err(ExitCode::from(2))
        }
    }
}

/// What clap says on several lines, without the usage.
fn argument_error(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim);
    let lines =
        lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    format!("{}; see --help", lines.join("; ").trim_start_matches("error: "))
}

/// Shows warnings, but for the fallbacks of attention: the summaries say what runs, and why.
pub fn show_warnings() {
    let log = env_logger::Env::default();
    // Fallbacks alone come from there: what the same crate says of its settings is to be seen.
    let log = log.default_filter_or("warn,burn_vision_attention::report=error");
    env_logger::Builder::from_env(log).init();
}

/// A whole number of at least 1, for clap.
///
/// # Errors
///
/// A sentence for anything else.
pub fn positive(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|&count| count > 0)
        .ok_or("expected a whole number, at least 1".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_spelled_out() {
        assert_eq!(printable("größe\n\u{1b}[2J.png"), "größe\\n\\u{1b}[2J.png");
    }
}
