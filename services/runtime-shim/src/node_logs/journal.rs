//! Runs journalctl(1), and copies what it writes.
//!
//! No shell is involved: each value is an argument of its own. The command gets no input and a fixed environment, and is killed when
//! its time is over or the reader leaves.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use keelson_runtime_shim_core::node_log::LIST_UNITS;
use keelson_service_kit::plugin::{Program, RunError, end_oom_protection};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::net::unix::pipe;
use tokio::process::Command;

/// Where programs are searched, regardless of this service's environment.
const SEARCH_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Maximum length of the list of units in bytes. A journal that is kept for long has many transient units.
const UNITS_BYTES: usize = 16 << 20;

/// The units in the journal, one per line; none on a node without journalctl.
///
/// # Errors
/// journalctl does not list them. The journal may have entries of every service then.
pub(super) async fn units(journalctl: &Path, limit: Duration) -> Result<String, RunError> {
    let Some(path) = find_program(journalctl) else { return Ok(String::new()) };
    let env = BTreeMap::from([("PATH".into(), SEARCH_PATH.into())]);
    let program = Program { path, args: LIST_UNITS.map(str::to_owned).into(), env };
    let list = program.run_up_to(UNITS_BYTES, b"", limit).await?;
    Ok(String::from_utf8_lossy(&list).into_owned())
}

/// The program at an absolute path, or in a folder of [`SEARCH_PATH`].
fn find_program(name: &Path) -> Option<PathBuf> {
    let folders = SEARCH_PATH.split(':').map(Path::new);
    folders.map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Starts journalctl. Its output and its errors come from the same pipe, in the order in which they were written. The process is
/// killed when the returned value is dropped.
pub(super) fn start(journalctl: &Path, arguments: &[String]) -> io::Result<Running> {
    let path = find_program(journalctl)
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "there is no journalctl on this node"))?;
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    let mut command = Command::new(path);
    command.args(arguments).env_clear().env("PATH", SEARCH_PATH).kill_on_drop(true).process_group(0);
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let child = command.spawn()?;
    end_oom_protection(&child);
    rustix::io::ioctl_fionbio(&reader, true)?;
    Ok(Running { output: pipe::Receiver::from_owned_fd(reader)?, _child: child })
}

/// A running journalctl.
#[derive(Debug)]
pub(super) struct Running {
    /// What it writes.
    pub(super) output: pipe::Receiver,
    _child: tokio::process::Child,
}
