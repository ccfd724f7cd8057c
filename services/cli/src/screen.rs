//! A screen that is drawn again and again, and the keys of the person before it.

use std::io::Read as _;

use tokio::sync::mpsc;

use crate::error::Failure;
use crate::figures::cut;
use crate::output;
use crate::plain;
use crate::terminal::{self, RawTerminal};

/// The second screen of the terminal, no cursor.
const BEGIN: &str = "\u{1b}[?1049h\u{1b}[?25l";
/// As it was before.
const END: &str = "\u{1b}[?25h\u{1b}[?1049l";

/// The terminal while a live view has it; it is as it was before when this is dropped.
#[derive(Debug)]
pub(crate) struct Screen {
    /// `None`: standard input is no terminal, so there are no keys.
    _raw: Option<RawTerminal>,
    keys: mpsc::Receiver<u8>,
}

impl Screen {
    /// Takes the terminal.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub(crate) fn take() -> Result<Self, Failure> {
        output::print_bytes(BEGIN.as_bytes())?;
        // From here on the drop undoes what was done.
        let (sender, keys) = mpsc::channel(8);
        let screen = Self { _raw: RawTerminal::take().ok().flatten(), keys };
        if screen._raw.is_some() {
            let read = move || {
                let mut key = [0];
                while matches!(std::io::stdin().read(&mut key), Ok(1)) && sender.blocking_send(key[0]).is_ok()
                {
                }
            };
            // Without the thread there are no keys, and Ctrl-C is one: better none than an end by force alone.
            let thread = std::thread::Builder::new().name("keys".into()).spawn(read);
            thread.map_err(|source| Failure::Runtime { source })?;
        }
        Ok(screen)
    }

    /// The next key. For ever without any. Cancel-safe.
    pub(crate) async fn key(&mut self) -> u8 {
        match self.keys.recv().await {
            Some(key) => key,
            None => std::future::pending().await,
        }
    }

    /// Draws `text` in place of what was there, as far as it fits.
    pub(crate) fn draw(&self, text: &str) -> Result<(), Failure> {
        let size = terminal::size();
        let of = |figure: u32| usize::try_from(figure).unwrap_or(usize::MAX);
        let (width, height) = size.map_or((80, 24), |size| (of(size.width), of(size.height)));
        // From the top, each line to its end, then what is below.
        let mut out = String::from("\u{1b}[H");
        for (at, line) in cut(text, width, height).into_iter().enumerate() {
            out.push_str(if at == 0 { "" } else { "\r\n" });
            out.push_str(&plain::lines(&line, true));
            out.push_str("\u{1b}[K");
        }
        out.push_str("\u{1b}[J");
        output::print_bytes(out.as_bytes())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Whoever has closed the output sees nothing of it anyway.
        let _ = output::print_bytes(END.as_bytes());
    }
}
