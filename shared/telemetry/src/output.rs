//! Where lines go: standard error, or with split streams errors to standard error and all others to standard output.
//!
//! The lines for standard output can be buffered (`infoBufferSize`): they are written when the buffer is full, with each error,
//! regularly (`flushFrequency`), and at the end of the process, also after a panic. A process that is killed loses those in its
//! buffer, as a kubelet does.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

use crate::line::Format;

/// Where lines go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Output {
    /// Whether all lines but errors go to standard output.
    pub split_stream: bool,
    /// How many bytes for standard output are buffered; 0: none.
    pub buffer_bytes: usize,
    /// How long lines may stay in the buffer.
    pub flush_every: Duration,
}

impl Default for Output {
    fn default() -> Self {
        Self { split_stream: false, buffer_bytes: 0, flush_every: Duration::from_secs(5) }
    }
}

/// How many bytes a pipe takes in one piece: `PIPE_BUF` of Linux (pipe(7)). All services may write to the same pipe, and the kernel
/// may write parts of others between the parts of a longer piece.
const PIPE_BUF: usize = 4096;

/// The lines for standard output that are not written yet.
#[derive(Clone)]
pub(crate) struct Buffer(Arc<Mutex<Buffered>>);

struct Buffered {
    lines: Vec<u8>,
    capacity: usize,
    to: Box<dyn Write + Send>,
}

impl Buffer {
    fn new(capacity: usize, to: Box<dyn Write + Send>) -> Self {
        Self(Arc::new(Mutex::new(Buffered { lines: Vec::new(), capacity, to })))
    }

    fn lock(&self) -> MutexGuard<'_, Buffered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what is buffered.
    pub(crate) fn flush(&self) {
        self.lock().flush();
    }

    /// Writes what is buffered, and from now on each line at once: the process ends.
    pub(crate) fn close(&self) {
        let mut buffered = self.lock();
        buffered.flush();
        buffered.capacity = 0;
    }

    /// Flushes regularly until the other owners are gone.
    fn flush_regularly(&self, every: Duration) {
        let buffer = Arc::downgrade(&self.0);
        // A thread and no task: an async runtime may be busy or ended. Without it, lines wait for the buffer to fill.
        let _ = std::thread::Builder::new().name("log-flush".to_owned()).spawn(move || {
            loop {
                std::thread::sleep(every);
                let Some(buffer) = buffer.upgrade() else { return };
                Self(buffer).flush();
            }
        });
    }
}

impl Buffered {
    fn add(&mut self, line: &[u8]) {
        if self.lines.len() + line.len() > self.capacity {
            self.flush();
        }
        if line.len() >= self.capacity {
            // A log that cannot be written cannot be reported either.
            let _ = self.to.write_all(line).and_then(|()| self.to.flush());
        } else {
            self.lines.extend_from_slice(line);
        }
    }

    fn flush(&mut self) {
        for piece in pieces(&self.lines) {
            let _ = self.to.write_all(piece).and_then(|()| self.to.flush());
        }
        self.lines.clear();
    }
}

/// Splits lines into pieces that a pipe takes as a whole. Each piece ends with a line; a line that is longer than a piece may be is
/// a piece of its own.
fn pieces(mut lines: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let line_end = |part: &[u8]| part.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
        let last_end = |part: &[u8]| part.iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
        let whole = last_end(&lines[..lines.len().min(PIPE_BUF)]).or_else(|| line_end(lines));
        let (piece, rest) = lines.split_at(whole.unwrap_or(lines.len()));
        lines = rest;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Writes each event as a line.
pub(crate) struct Lines {
    format: Format,
    pid: u32,
    /// Where all lines but errors go; `None`: where errors go.
    info: Option<Buffer>,
}

impl Lines {
    /// `format` is `json` or otherwise text.
    pub(crate) fn new(format: &str, output: Output) -> Self {
        let format = if format == "json" { Format::Json } else { Format::Text(TimeZone::system()) };
        let info = output.split_stream.then(|| Buffer::new(output.buffer_bytes, Box::new(io::stdout())));
        if let Some(buffer) = info.as_ref().filter(|_| output.buffer_bytes > 0) {
            buffer.flush_regularly(output.flush_every);
        }
        Self { format, pid: std::process::id(), info }
    }

    /// The buffer, to flush it at the end of the process.
    pub(crate) fn buffer(&self) -> Option<Buffer> {
        self.info.clone()
    }
}

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut line = String::with_capacity(256);
        self.format.write(event, Timestamp::now(), self.pid, &mut line);
        match &self.info {
            Some(info) if *event.metadata().level() != Level::ERROR => info.lock().add(line.as_bytes()),
            info => {
                // What has led to the error comes first.
                info.iter().for_each(Buffer::flush);
                let _ = io::stderr().lock().write_all(line.as_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Written {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    #[test]
    fn buffered_lines_are_written_whole_when_the_buffer_is_full_or_flushed() {
        let written = Written::default();
        let buffer = Buffer::new(10, Box::new(written.clone()));
        buffer.lock().add(b"12345\n");
        assert_eq!(written.text(), "");
        buffer.lock().add(b"6789\n");
        assert_eq!(written.text(), "12345\n", "the second line did not fit");
        buffer.flush();
        assert_eq!(written.text(), "12345\n6789\n");
        buffer.lock().add(b"longer than the buffer\n");
        assert_eq!(written.text(), "12345\n6789\nlonger than the buffer\n");
    }

    #[test]
    fn flush_writes_pieces_of_whole_lines_that_a_pipe_takes_at_once() {
        let line = |length: usize| "x".repeat(length - 1) + "\n";
        let lines = [line(4000), line(96), line(1), line(9000), line(10), line(4096), line(3)].concat();
        let split: Vec<&[u8]> = pieces(lines.as_bytes()).collect();
        assert_eq!(split.concat(), lines.as_bytes());
        let lengths: Vec<usize> = split.iter().map(|piece| piece.len()).collect();
        assert_eq!(lengths, [4096, 1, 9000, 10, 4096, 3]);
        assert!(split.iter().all(|piece| piece.ends_with(b"\n")));
        assert_eq!(pieces(b"").count(), 0);
        assert_eq!(pieces(b"no line feed").count(), 1);
    }

    #[test]
    fn closed_buffer_writes_what_it_has_and_each_later_line_at_once() {
        let written = Written::default();
        let buffer = Buffer::new(100, Box::new(written.clone()));
        buffer.lock().add(b"1\n");
        assert_eq!(written.text(), "");
        buffer.close();
        assert_eq!(written.text(), "1\n");
        buffer.lock().add(b"2\n");
        assert_eq!(written.text(), "1\n2\n");
    }

    #[test]
    fn without_a_buffer_each_line_is_written_at_once() {
        let written = Written::default();
        let buffer = Buffer::new(0, Box::new(written.clone()));
        buffer.lock().add(b"1\n");
        assert_eq!(written.text(), "1\n");
    }

    #[test]
    fn buffer_is_flushed_regularly() {
        let written = Written::default();
        let buffer = Buffer::new(100, Box::new(written.clone()));
        buffer.flush_regularly(Duration::from_millis(1));
        buffer.lock().add(b"1\n");
        while written.text().is_empty() {
            std::thread::yield_now();
        }
    }
}
