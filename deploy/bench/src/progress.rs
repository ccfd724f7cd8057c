//! Saying on standard error how far it is.

use std::fmt::Display;
use std::time::Instant;

/// The time since the start, before each line.
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
    pub fn say(&self, what: impl Display) {
        eprintln!("[{:7.1} s] {what}", self.start.elapsed().as_secs_f64());
    }
}
