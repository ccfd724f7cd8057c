//! Standard output and standard error.

use std::io::{self, IsTerminal as _, Write as _};

use clap::ValueEnum;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use crate::error::CliError;
use crate::sanitize;
use crate::table::printable;

/// Output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Aligned columns
    Table,
    /// More columns
    Wide,
    /// JSON
    Json,
    /// YAML
    Yaml,
}

/// Writes `text` to standard output and flushes it. Control characters are escaped, except colour sequences where standard output
/// is a terminal.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    print_bytes(sanitize::lines(text, io::stdout().is_terminal()).as_bytes())
}

/// Writes bytes unchanged to standard output and flushes them.
pub(crate) fn print_bytes(bytes: &[u8]) -> Result<(), CliError> {
    write_and_flush(&mut io::stdout().lock(), bytes)
}

fn write_and_flush(out: &mut impl io::Write, bytes: &[u8]) -> Result<(), CliError> {
    out.write_all(bytes).and_then(|()| out.flush()).map_err(|source| {
        if source.kind() == io::ErrorKind::BrokenPipe {
            CliError::BrokenPipe
        } else {
            CliError::Output { source }
        }
    })
}

/// Prints a line for the person to standard error.
pub(crate) fn notice(text: &str) {
    // Ignore an error: there is no other place to report that standard error is closed.
    let text = sanitize::lines(text, io::stderr().is_terminal());
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Prints an `error:` line, and a `try:` line where there is a hint. An error of several lines, such as one of a
/// manifest, gets an `error:` line for each.
pub(crate) fn print_error(error: &CliError, colour: Colour) {
    if matches!(error, CliError::CommandEnded { .. } | CliError::Signalled { .. }) {
        return;
    }
    for line in error.to_string().lines() {
        notice(&format!("{} {}", colour.paint("1;31", "error:"), printable(line)));
    }
    if let Some(hint) = error.hint() {
        notice(&format!("{} {hint}", colour.paint("1;36", "try:")));
    }
}

/// Whether the format is for programs.
pub(crate) fn is_document(format: Option<Format>) -> bool {
    matches!(format, Some(Format::Json | Format::Yaml))
}

/// Prints `document` as YAML or, for every other format, as JSON.
pub(crate) fn print_document<T: Serialize>(format: Option<Format>, document: &T) -> Result<(), CliError> {
    let text = if format == Some(Format::Yaml) { yaml(document)? } else { json(document)? };
    print(&text)
}

/// Indented JSON with a line break at its end.
pub(crate) fn json<T: Serialize>(document: &T) -> Result<String, CliError> {
    let mut out = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut out, formatter);
    document.serialize(&mut serializer).map_err(|e| CliError::Encode { reason: e.to_string() })?;
    out.push(b'\n');
    String::from_utf8(out).map(sanitize::json).map_err(|e| CliError::Encode { reason: e.to_string() })
}

/// Block-style YAML; long lines are not folded.
pub(crate) fn yaml<T: Serialize>(document: &T) -> Result<String, CliError> {
    let options = serde_saphyr::ser_options! { folded_wrap_chars: 1 << 20 };
    let value: Value =
        serde_json::to_value(document).map_err(|e| CliError::Encode { reason: e.to_string() })?;
    let text = serde_saphyr::to_string_with_options(&value, options)
        .map_err(|e| CliError::Encode { reason: e.to_string() })?;
    // YAML's escapes depend on the context. JSON is valid YAML, so print that instead.
    if text.chars().any(|c| sanitize::is_unsafe(c) && c != '\n') { json(&value) } else { Ok(text) }
}

/// One line of JSON with a line break at its end.
pub(crate) fn json_line<T: Serialize>(document: &T) -> Result<String, CliError> {
    let mut line = serde_json::to_string(document).map_err(|e| CliError::Encode { reason: e.to_string() })?;
    line.push('\n');
    Ok(sanitize::json(line))
}

/// Where a chunk of a command's output goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    Stdout,
    Stderr,
}

/// The number of chunks that are buffered for a slow reader.
const BUFFERED_CHUNKS: usize = 16;

/// Writes bytes on a thread of its own, so that a slow reader blocks only the stream from the service and not the
/// keepalive pings of its connection.
#[derive(Debug)]
pub(crate) struct OutputWriter {
    chunks: mpsc::Sender<(Target, Vec<u8>)>,
    result: oneshot::Receiver<Result<(), CliError>>,
}

impl OutputWriter {
    /// Starts the thread.
    pub(crate) fn start() -> Result<Self, CliError> {
        let (chunks, mut receiver) = mpsc::channel::<(Target, Vec<u8>)>(BUFFERED_CHUNKS);
        let (sender, result) = oneshot::channel();
        let work = move || {
            let mut outcome = Ok(());
            while let Some((target, bytes)) = receiver.blocking_recv() {
                outcome = match target {
                    Target::Stdout => print_bytes(&bytes),
                    Target::Stderr => write_and_flush(&mut io::stderr().lock(), &bytes),
                };
                if outcome.is_err() {
                    break;
                }
            }
            // The receiver is gone when the command has failed for another reason.
            let _ = sender.send(outcome);
        };
        let thread = std::thread::Builder::new().name("output".into()).spawn(work);
        thread.map_err(|source| CliError::AsyncRuntime { source })?;
        Ok(Self { chunks, result })
    }

    /// Queues bytes for the thread; waits while the queue is full.
    ///
    /// # Errors
    /// The reader has closed the output, or earlier bytes could not be written.
    pub(crate) async fn write(&mut self, target: Target, bytes: Vec<u8>) -> Result<(), CliError> {
        if self.chunks.send((target, bytes)).await.is_ok() {
            return Ok(());
        }
        match (&mut self.result).await {
            Ok(outcome) => outcome.and(Err(CliError::BrokenPipe)),
            Err(_) => Err(CliError::BrokenPipe),
        }
    }

    /// Waits until everything is written.
    pub(crate) async fn finish(self) -> Result<(), CliError> {
        drop(self.chunks);
        self.result.await.unwrap_or(Err(CliError::BrokenPipe))
    }
}

/// Whether to colour a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Colour(bool);

impl Colour {
    /// Colours for standard error if it is a terminal and colours are not disabled.
    pub(crate) fn for_stderr(no_color: bool) -> Self {
        Self(is_enabled(no_color) && io::stderr().is_terminal())
    }

    /// Colours for standard output if it is a terminal and colours are not disabled.
    pub(crate) fn for_stdout(no_color: bool) -> Self {
        Self(is_enabled(no_color) && io::stdout().is_terminal())
    }

    /// `text` in the colour of an SGR code, or unchanged without colours.
    pub(crate) fn paint(self, sgr: &str, text: &str) -> String {
        if self.0 && !text.is_empty() { format!("\u{1b}[{sgr}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}

fn is_enabled(no_color: bool) -> bool {
    !no_color && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_escape_control_characters_without_loss() {
        let document = serde_json::json!({"metadata": {"annotations": {"note": "a\u{1b}]0;t\u{7}\u{9b}2J\u{202e}b\u{85}"}}});
        for text in [yaml(&document).unwrap(), json(&document).unwrap(), json_line(&document).unwrap()] {
            assert!(!text.chars().any(|c| sanitize::is_unsafe(c) && c != '\n'), "{text:?}");
            let back: Value = serde_saphyr::from_str(&text).unwrap();
            assert_eq!(back, document, "{text}");
        }
    }

    #[test]
    fn yaml_and_json_documents_have_equal_values() {
        let document = serde_json::json!({
            "apiVersion": "v1",
            "metadata": {"labels": {"version": "1.10", "on": "yes", "empty": ""}, "annotations": {}},
            "spec": {"containers": [{"command": ["sh", "-c", "a\n  b: c\n\n"], "args": ["- x", "#", "~", "null", "0x1f"]}]},
            "long": "word ".repeat(60),
            "count": 3, "ready": true, "nothing": null,
        });
        let text = yaml(&document).unwrap();
        let back: Value = serde_saphyr::from_str(&text).unwrap();
        assert_eq!(back, document, "{text}");
        assert!(text.starts_with("apiVersion: v1\n"), "{text}");
    }
}
