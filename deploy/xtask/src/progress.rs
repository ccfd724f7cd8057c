//! Progress of long steps: a spinner on a terminal, plain lines elsewhere.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, IsTerminal as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use indicatif::{ProgressBar, ProgressStyle};

/// How often a line is printed for a step that is still running, if there is no terminal.
const REMINDER: Duration = Duration::from_secs(10);

/// How many of the last output lines of a failed command are shown.
const SHOWN_LINES: usize = 30;

/// A step of a longer task.
pub struct Step {
    name: String,
    /// `None` without a terminal.
    spinner: Option<ProgressBar>,
    start: Instant,
    /// When the last line was printed.
    last_printed: Instant,
    /// The detail in the last printed line.
    last_detail: String,
}

impl Step {
    /// Starts a step, such as "Installing packages".
    pub fn start(name: &str) -> Self {
        let spinner = std::io::stderr().is_terminal().then(|| {
            let spinner = ProgressBar::new_spinner().with_message(name.to_owned());
            if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg} {elapsed}") {
                spinner.set_style(style);
            }
            spinner.enable_steady_tick(Duration::from_millis(100));
            spinner
        });
        if spinner.is_none() {
            eprintln!("{name} …");
        }
        let now = Instant::now();
        Self { name: name.to_owned(), spinner, start: now, last_printed: now, last_detail: String::new() }
    }

    /// Shows the current detail of the step. Lines are rate-limited, so this may be called often.
    pub fn show(&mut self, detail: &str) {
        match &self.spinner {
            Some(spinner) => spinner.set_message(format!("{}: {detail}", self.name)),
            None if self.last_detail != detail && self.last_printed.elapsed() >= Duration::from_secs(1)
                || self.last_printed.elapsed() >= REMINDER =>
            {
                eprintln!("  {detail} ({} s)", self.start.elapsed().as_secs());
                self.last_printed = Instant::now();
                detail.clone_into(&mut self.last_detail);
            }
            None => {}
        }
    }

    /// Ends a step that succeeded and prints its result.
    pub fn done(self, result: &str) {
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
        eprintln!("{}: {result} ({:.1} s)", self.name, self.start.elapsed().as_secs_f64());
    }

    /// Runs `command` and shows the newest line of its output.
    ///
    /// # Errors
    /// The command cannot be run or fails; the error has the last lines of its output.
    pub fn run(&mut self, command: &mut Command) -> anyhow::Result<()> {
        let program = command.get_program().to_string_lossy().into_owned();
        let (reader, writer) = std::io::pipe()?;
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
        let child = command.spawn().with_context(|| format!("cannot run {program}"));
        // `command` keeps the pipe's writing end open until it gets another stdout, and the loop below would not end.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = child?;
        let mut lines = VecDeque::new();
        for line in BufReader::new(reader).lines() {
            let line = line?;
            self.show(line.trim());
            lines.push_back(line);
            if lines.len() > SHOWN_LINES {
                lines.pop_front();
            }
        }
        let status = child.wait()?;
        let output = Vec::from(lines).join("\n");
        ensure!(status.success(), "{program} ended with {status}:\n{output}");
        Ok(())
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_failed_command_has_its_output() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; echo two >&2; exit 3"]);
        let error = Step::start("Testing").run(&mut command).unwrap_err().to_string();
        assert!(error.contains("one\ntwo") && error.contains('3'), "{error}");
    }

    #[test]
    fn a_successful_command_returns() {
        Step::start("Testing").run(&mut Command::new("true")).unwrap();
    }
}
