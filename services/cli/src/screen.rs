//! A full-screen view that is redrawn, and the keys that are pressed.

use std::io::Read as _;

use tokio::sync::mpsc;

use crate::error::CliError;
use crate::metrics::fit_to_screen;
use crate::output;
use crate::sanitize;
use crate::terminal::{self, RawTerminal};

/// Switches to the alternate screen and hides the cursor.
const ENTER: &str = "\u{1b}[?1049h\u{1b}[?25l";
/// Shows the cursor and switches back.
const LEAVE: &str = "\u{1b}[?25h\u{1b}[?1049l";

/// The terminal during a live view; dropping it restores the terminal.
#[derive(Debug)]
pub(crate) struct Screen {
    /// `None`: standard input is not a terminal, so there are no keys.
    _raw: Option<RawTerminal>,
    keys: mpsc::Receiver<u8>,
}

impl Screen {
    /// Enters the alternate screen and puts the terminal into raw mode.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub(crate) fn enter() -> Result<Self, CliError> {
        output::print_bytes(ENTER.as_bytes())?;
        // From here on the drop restores the terminal.
        let (sender, keys) = mpsc::channel(8);
        let screen = Self { _raw: RawTerminal::enable().ok().flatten(), keys };
        if screen._raw.is_some() {
            let read = move || {
                let mut key = [0];
                while matches!(std::io::stdin().read(&mut key), Ok(1)) && sender.blocking_send(key[0]).is_ok()
                {
                }
            };
            // Without this thread not even Ctrl-C would work, so its absence is an error.
            let thread = std::thread::Builder::new().name("keys".into()).spawn(read);
            thread.map_err(|source| CliError::AsyncRuntime { source })?;
        }
        Ok(screen)
    }

    /// The next key; never returns without one. Cancel-safe.
    pub(crate) async fn key(&mut self) -> u8 {
        match self.keys.recv().await {
            Some(key) => key,
            None => std::future::pending().await,
        }
    }

    /// Replaces the content of the screen by `text`, cut to its size.
    pub(crate) fn draw(&self, text: &str) -> Result<(), CliError> {
        let size = terminal::size();
        let to_usize = |value: u32| usize::try_from(value).unwrap_or(usize::MAX);
        let (width, height) = size.map_or((80, 24), |size| (to_usize(size.width), to_usize(size.height)));
        // Overwrite from the top, clear each line to its end, then clear the rest of the screen.
        let mut out = String::from("\u{1b}[H");
        for (at, line) in fit_to_screen(text, width, height).into_iter().enumerate() {
            out.push_str(if at == 0 { "" } else { "\r\n" });
            out.push_str(&sanitize::lines(&line, true));
            out.push_str("\u{1b}[K");
        }
        out.push_str("\u{1b}[J");
        output::print_bytes(out.as_bytes())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Ignore an error: the output is closed.
        let _ = output::print_bytes(LEAVE.as_bytes());
    }
}
