//! The host's end of the port to `guest-shell`.

use std::io::{self, BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

/// The output and the exit status of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// Its exit code.
    pub code: i32,
    /// Its standard output; what is not UTF-8 is replaced.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

/// A connection to the shell in the machine.
#[derive(Debug)]
pub(super) struct Shell {
    port: BufReader<UnixStream>,
    /// The number of the last request.
    last: u64,
}

/// The first line of what comes through the port.
#[derive(Debug, PartialEq, Eq)]
enum Head {
    /// The shell has started in the boot with this id.
    Boot(String),
    /// An answer: the request, the exit code, and how much output and errors follow.
    Answer { request: u64, code: i32, out: u64, err: u64 },
    /// The output that had not been read when the machine went down.
    Torn,
}

impl Head {
    fn parse(line: &str) -> Self {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let ["boot", id] = words[..] {
            return Self::Boot(id.to_owned());
        }
        let answer = || {
            let [request, code, out, err] = words[..] else { return None };
            Some(Self::Answer {
                request: request.parse().ok()?,
                code: code.parse().ok()?,
                out: out.parse().ok()?,
                err: err.parse().ok()?,
            })
        };
        answer().unwrap_or(Self::Torn)
    }
}

impl Shell {
    pub(super) fn connect(socket: &Path) -> io::Result<Self> {
        Ok(Self { port: BufReader::new(UnixStream::connect(socket)?), last: 0 })
    }

    /// Waits for the shell of a boot whose id is not `before`.
    pub(super) fn await_boot(&mut self, before: Option<&str>, limit: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            match self.head(deadline)? {
                Head::Boot(id) if Some(id.as_str()) != before => return Ok(()),
                _ => {}
            }
        }
    }

    /// Sends a line without waiting for its end.
    pub(super) fn tell(&mut self, line: &str) -> io::Result<()> {
        self.last += 1;
        let port = self.port.get_mut();
        port.write_all(format!("{} {}\n{line}", self.last, line.len()).as_bytes())?;
        port.flush()
    }

    /// Runs a line and waits for its end.
    pub(super) fn run(&mut self, line: &str, limit: Duration) -> anyhow::Result<Said> {
        let deadline = Instant::now() + limit;
        self.tell(line).context("the machine is gone")?;
        loop {
            match self.head(deadline)? {
                Head::Answer { request, code, out, err } => {
                    let (stdout, stderr) = (self.bytes(out, deadline)?, self.bytes(err, deadline)?);
                    if request == self.last {
                        return Ok(Said { code, stdout, stderr });
                    }
                }
                Head::Boot(id) => bail!("the shell has restarted (boot {id})"),
                Head::Torn => {}
            }
        }
    }

    fn head(&mut self, deadline: Instant) -> anyhow::Result<Head> {
        let mut line = Vec::new();
        loop {
            self.wait(deadline)?;
            // Bytes that were read before the time-out stay in `line`.
            match self.port.read_until(b'\n', &mut line) {
                Ok(0) => bail!("the machine is gone"),
                Ok(_) => return Ok(Head::parse(&String::from_utf8_lossy(&line))),
                Err(error) if is_timeout(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn bytes(&mut self, count: u64, deadline: Instant) -> anyhow::Result<String> {
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < count {
            self.wait(deadline)?;
            let rest = count - bytes.len() as u64;
            match self.port.by_ref().take(rest).read_to_end(&mut bytes) {
                Ok(0) => bail!("the machine is gone"),
                Ok(_) => {}
                Err(error) if is_timeout(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Lets the next read end with the time.
    fn wait(&mut self, deadline: Instant) -> anyhow::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            bail!("no answer in time");
        }
        self.port.get_ref().set_read_timeout(Some(left))?;
        Ok(())
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::Scratch;

    #[test]
    fn the_first_line_tells_a_boot_or_an_answer() {
        assert_eq!(Head::parse("boot 1-2\n"), Head::Boot("1-2".into()));
        let answer = Head::Answer { request: 7, code: 127, out: 0, err: 12 };
        assert_eq!(Head::parse("7 127 0 12\n"), answer);
        for torn in ["", "7 127\n", "7 127 x 12\n", "output 1 2 3 of before\n"] {
            assert_eq!(Head::parse(torn), Head::Torn, "{torn}");
        }
    }

    #[test]
    fn replies_to_earlier_requests_are_skipped_and_silence_times_out() {
        let scratch = Scratch::new().unwrap();
        let socket = scratch.path().join("port");
        let listener = UnixListener::bind(&socket).unwrap();
        let mut shell = Shell::connect(&socket).unwrap();
        let (mut guest, _) = listener.accept().unwrap();
        guest.write_all(b"torn\nboot old\nboot new\n").unwrap();
        shell.await_boot(Some("old"), Duration::from_secs(10)).unwrap();
        guest.write_all(b"0 0 4 0\nlate1 3 3 4\noutoops").unwrap();
        let said = shell.run("make out", Duration::from_secs(10)).unwrap();
        assert_eq!(said, Said { code: 3, stdout: "out".into(), stderr: "oops".into() });
        let mut asked = [0; 12];
        guest.read_exact(&mut asked).unwrap();
        assert_eq!(&asked, b"1 8\nmake out");
        let silent = shell.run("sleep", Duration::from_millis(50)).unwrap_err();
        assert!(silent.to_string().contains("no answer in time"), "{silent}");
    }
}
