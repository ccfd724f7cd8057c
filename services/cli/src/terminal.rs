//! The terminal of a person whose keys go to a command in a container.

use std::io::{self, IsTerminal as _};

use keelson_proto::keelson::runtime::v1::TerminalSize;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Standard input as a terminal whose keys are handed on as they are, Ctrl-C among them; it is as it was before when
/// this is dropped.
#[derive(Debug)]
pub(crate) struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    /// Takes the terminal; `None` when standard input is none.
    ///
    /// # Errors
    /// Its settings cannot be changed.
    pub(crate) fn take() -> io::Result<Option<Self>> {
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
        // A terminal that has gone needs nothing more.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// How large the terminal is: standard output's, else standard input's; `None` where neither is one or it does not
/// tell.
pub(crate) fn size() -> Option<TerminalSize> {
    let told = tcgetwinsize(io::stdout()).or_else(|_| tcgetwinsize(io::stdin())).ok()?;
    let size = TerminalSize { width: told.ws_col.into(), height: told.ws_row.into() };
    (size.width > 0 && size.height > 0).then_some(size)
}
