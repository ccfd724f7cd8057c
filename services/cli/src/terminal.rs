//! Raw mode and size of the terminal.

use std::io::{self, IsTerminal as _};

use keelson_proto::keelson::runtime::v1::TerminalSize;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Standard input as a terminal in raw mode, so that all keys are read, also Ctrl-C; dropping it restores the
/// previous mode.
#[derive(Debug)]
pub(crate) struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    /// Puts the terminal into raw mode; `None` when standard input is not a terminal.
    ///
    /// # Errors
    /// The terminal's settings cannot be changed.
    pub(crate) fn enable() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(&stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        Ok(Some(Self { before }))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Ignore an error: the terminal is gone.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// The size of the terminal on standard output, else on standard input; `None` where neither is a terminal or its
/// size is unknown.
pub(crate) fn size() -> Option<TerminalSize> {
    let window = tcgetwinsize(io::stdout()).or_else(|_| tcgetwinsize(io::stdin())).ok()?;
    let size = TerminalSize { width: window.ws_col.into(), height: window.ws_row.into() };
    (size.width > 0 && size.height > 0).then_some(size)
}
