//! Standard output and standard error.

use std::io::{self, IsTerminal as _, Write as _};

use serde::Serialize;
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use crate::args::Format;
use crate::error::Failure;
use crate::plain;

/// Writes `text` to standard output at once. Whatever is in it, it does nothing to a terminal but change colours, and nothing at all
/// where standard output is none.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    print_bytes(plain::lines(text, io::stdout().is_terminal()).as_bytes())
}

/// Writes bytes as they are to standard output, at once.
pub(crate) fn print_bytes(bytes: &[u8]) -> Result<(), Failure> {
    written(&mut io::stdout().lock(), bytes)
}

fn written(out: &mut impl io::Write, bytes: &[u8]) -> Result<(), Failure> {
    out.write_all(bytes).and_then(|()| out.flush()).map_err(|source| {
        if source.kind() == io::ErrorKind::BrokenPipe {
            Failure::BrokenPipe
        } else {
            Failure::Output { source }
        }
    })
}

/// A line for the person on standard error, where it disturbs no parser.
pub(crate) fn notice(text: &str) {
    // Nobody is left to be told when standard error is closed.
    let text = plain::lines(text, io::stderr().is_terminal());
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Whether the format is for programs.
pub(crate) fn is_document(format: Option<Format>) -> bool {
    matches!(format, Some(Format::Json | Format::Yaml))
}

/// Prints `document` as YAML or, for every other format, as JSON.
pub(crate) fn print_document<T: Serialize>(format: Option<Format>, document: &T) -> Result<(), Failure> {
    let text = if format == Some(Format::Yaml) { yaml(document)? } else { json(document)? };
    print(&text)
}

/// Indented JSON with a line break at its end.
pub(crate) fn json<T: Serialize>(document: &T) -> Result<String, Failure> {
    let mut out = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut out, formatter);
    document.serialize(&mut serializer).map_err(|e| Failure::Encode { reason: e.to_string() })?;
    out.push(b'\n');
    String::from_utf8(out).map(plain::json).map_err(|e| Failure::Encode { reason: e.to_string() })
}

/// Block-style YAML; long lines stay whole.
pub(crate) fn yaml<T: Serialize>(document: &T) -> Result<String, Failure> {
    let options = serde_saphyr::ser_options! { folded_wrap_chars: 1 << 20 };
    let value: Value =
        serde_json::to_value(document).map_err(|e| Failure::Encode { reason: e.to_string() })?;
    let text = serde_saphyr::to_string_with_options(&value, options)
        .map_err(|e| Failure::Encode { reason: e.to_string() })?;
    // YAML has other escapes in other places, and JSON is YAML.
    if text.chars().any(|c| plain::acts(c) && c != '\n') { json(&value) } else { Ok(text) }
}

/// One line of JSON with a line break at its end.
pub(crate) fn json_line<T: Serialize>(document: &T) -> Result<String, Failure> {
    let mut line = serde_json::to_string(document).map_err(|e| Failure::Encode { reason: e.to_string() })?;
    line.push('\n');
    Ok(plain::json(line))
}

/// Where a chunk of a command's output goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    Stdout,
    Stderr,
}

/// Chunks that may wait between whoever gives them and a slow reader: more would only be memory.
const WAITING_CHUNKS: usize = 16;

/// Writes bytes on a thread of its own: a reader who takes his time holds the connection up to the service, not
/// the pings on it, on which it would break.
#[derive(Debug)]
pub(crate) struct Pump {
    chunks: mpsc::Sender<(Target, Vec<u8>)>,
    end: oneshot::Receiver<Result<(), Failure>>,
}

impl Pump {
    /// Starts the thread.
    pub(crate) fn start() -> Result<Self, Failure> {
        let (chunks, mut taken) = mpsc::channel::<(Target, Vec<u8>)>(WAITING_CHUNKS);
        let (ended, end) = oneshot::channel();
        let work = move || {
            let mut outcome = Ok(());
            while let Some((target, bytes)) = taken.blocking_recv() {
                outcome = match target {
                    Target::Stdout => print_bytes(&bytes),
                    Target::Stderr => written(&mut io::stderr().lock(), &bytes),
                };
                if outcome.is_err() {
                    break;
                }
            }
            // Nobody waits for the end of a command that has failed otherwise.
            let _ = ended.send(outcome);
        };
        let thread = std::thread::Builder::new().name("output".into()).spawn(work);
        thread.map_err(|source| Failure::Runtime { source })?;
        Ok(Self { chunks, end })
    }

    /// Gives bytes to the thread; waits while the reader is behind.
    ///
    /// # Errors
    /// The reader has gone, or what was given before cannot be written.
    pub(crate) async fn write(&mut self, target: Target, bytes: Vec<u8>) -> Result<(), Failure> {
        if self.chunks.send((target, bytes)).await.is_ok() {
            return Ok(());
        }
        match (&mut self.end).await {
            Ok(outcome) => outcome.and(Err(Failure::BrokenPipe)),
            Err(_) => Err(Failure::BrokenPipe),
        }
    }

    /// Waits until everything is written.
    pub(crate) async fn finish(self) -> Result<(), Failure> {
        drop(self.chunks);
        self.end.await.unwrap_or(Err(Failure::BrokenPipe))
    }
}

/// Whether to colour a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Colour(bool);

impl Colour {
    /// For standard error: a terminal, and nobody asked for plain text.
    pub(crate) fn for_stderr(no_color: bool) -> Self {
        Self(wanted(no_color) && io::stderr().is_terminal())
    }

    /// For standard output: a terminal, and nobody asked for plain text.
    pub(crate) fn for_stdout(no_color: bool) -> Self {
        Self(wanted(no_color) && io::stdout().is_terminal())
    }

    /// `text` in the colour of an SGR code, or as it is.
    pub(crate) fn paint(self, sgr: &str, text: &str) -> String {
        if self.0 && !text.is_empty() { format!("\u{1b}[{sgr}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}

fn wanted(no_color: bool) -> bool {
    !no_color && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_says_the_same_and_does_nothing_to_a_terminal() {
        let document = serde_json::json!({"metadata": {"annotations": {"note": "a\u{1b}]0;t\u{7}\u{9b}2J\u{202e}b\u{85}"}}});
        for text in [yaml(&document).unwrap(), json(&document).unwrap(), json_line(&document).unwrap()] {
            assert!(!text.chars().any(|c| plain::acts(c) && c != '\n'), "{text:?}");
            let back: Value = serde_saphyr::from_str(&text).unwrap();
            assert_eq!(back, document, "{text}");
        }
    }

    #[test]
    fn yaml_says_the_same_as_json() {
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
