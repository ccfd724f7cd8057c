//! A command on a pseudo-terminal.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

use keelson_testkit::eventually;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::LIMIT;

/// The output of a command on its own terminal.
#[derive(Debug)]
pub struct Screen {
    keys: File,
    shown: Arc<Mutex<String>>,
    /// The command.
    pub child: Child,
}

impl Drop for Screen {
    fn drop(&mut self) {
        // It has ended already in a test that passed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Screen {
    /// Starts the command on a terminal of this size.
    ///
    /// # Errors
    /// There is no terminal, or the command cannot be started.
    pub fn start(mut command: Command, columns: u16, rows: u16) -> anyhow::Result<Self> {
        let person = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
        grantpt(&person)?;
        unlockpt(&person)?;
        let name = ptsname(&person, Vec::new())?.into_string()?;
        let side = || OpenOptions::new().read(true).write(true).open(&name);
        tcsetwinsize(side()?, Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 })?;
        let child = command.stdin(side()?).stdout(side()?).stderr(side()?).spawn()?;
        let keys = File::from(person);
        let mut reader = keys.try_clone()?;
        let shown = Arc::new(Mutex::new(String::new()));
        let to = Arc::clone(&shown);
        std::thread::spawn(move || {
            let mut some = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut some) {
                to.lock().expect("nobody panics with it").push_str(&String::from_utf8_lossy(&some[..count]));
            }
        });
        Ok(Self { keys, shown, child })
    }

    /// Sends keys.
    ///
    /// # Errors
    /// The terminal is closed.
    pub fn press(&mut self, keys: &str) -> anyhow::Result<()> {
        Ok(self.keys.write_all(keys.as_bytes())?)
    }

    /// The whole output so far.
    pub fn shown(&self) -> String {
        self.shown.lock().expect("nobody panics with it").clone()
    }

    /// Waits until the output after the first `from` bytes satisfies the condition.
    ///
    /// # Errors
    /// It does not within [`LIMIT`].
    pub async fn until(&self, what: &str, from: usize, good: impl Fn(&str) -> bool) -> anyhow::Result<()> {
        let shows = eventually(LIMIT, what.to_owned(), async || self.shown().get(from..).is_some_and(&good));
        shows.await.map_err(|error| error.context(self.shown()))
    }
}
