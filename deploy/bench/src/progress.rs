//! Progress of the benchmark on standard error.

use std::fmt::Display;
use std::time::Instant;

/// Prints lines with the time since its start.
#[derive(Debug)]
pub struct Progress {
    start: Instant,
}

impl Progress {
    /// Starts the clock.
    pub fn start() -> Self {
        Self { start: Instant::now() }
    }

    /// Prints a line.
    pub fn print(&self, message: impl Display) {
        eprintln!("[{:7.1} s] {message}", self.start.elapsed().as_secs_f64());
    }
}
