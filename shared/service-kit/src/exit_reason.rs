//! Why a service ended: a line in its run folder, written by the service and read by init.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use keelson_config::{Paths, ServiceName};

/// Maximum number of bytes that are read.
const MAX_BYTES: u64 = 1024;

/// The file of `service`: `<run-dir>/<service>/last-words`.
fn file_of(paths: &Paths, service: ServiceName) -> PathBuf {
    paths.socket_dir(service).join("last-words")
}

/// Writes the line. If that fails, only the log has it.
pub(crate) fn write(paths: &Paths, service: ServiceName, text: &str) {
    let path = file_of(paths, service);
    let _ = std::fs::remove_file(&path);
    let written =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).and_then(|mut file| {
            // No fsync: the file has to survive the process, not a power loss.
            file.write_all(text.as_bytes())
        });
    if let Err(error) = written {
        tracing::debug!(path = %path.display(), %error, "cannot write the exit reason");
    }
}

/// Reads and removes the line of `service`, without control characters. The folder belongs to the
/// service's user, so no link is followed and only a regular file is read.
pub fn take(paths: &Paths, service: ServiceName) -> Option<String> {
    let path = file_of(paths, service);
    let text = read_plain(&path)?;
    let _ = std::fs::remove_file(&path);
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    Some(line.trim().to_owned()).filter(|line| !line.is_empty())
}

fn read_plain(path: &Path) -> Option<String> {
    // Non-blocking: opening a pipe would wait for a writer.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file: File = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scene() -> (tempfile::TempDir, Paths) {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths { run_dir: dir.path().to_owned(), ..Paths::default() };
        std::fs::create_dir(paths.socket_dir(ServiceName::NodeApi)).unwrap();
        (dir, paths)
    }

    #[test]
    fn exit_reason_is_taken_once_as_one_bounded_line() {
        let (_dir, paths) = scene();
        assert_eq!(take(&paths, ServiceName::NodeApi), None);
        write(&paths, ServiceName::NodeApi, "an older end");
        write(&paths, ServiceName::NodeApi, &format!("no room\n\u{1b}[31m{}", "x".repeat(5000)));
        let line = take(&paths, ServiceName::NodeApi).unwrap();
        assert!(line.starts_with("no room  [31mxxx") && line.len() == 1024, "{line}");
        assert_eq!(take(&paths, ServiceName::NodeApi), None);
    }

    #[test]
    fn a_link_or_pipe_instead_of_the_exit_reason_is_not_read() {
        let (dir, paths) = scene();
        let secret = dir.path().join("secret");
        std::fs::write(&secret, "a secret of root").unwrap();
        let place = file_of(&paths, ServiceName::NodeApi);
        std::os::unix::fs::symlink(&secret, &place).unwrap();
        assert_eq!(take(&paths, ServiceName::NodeApi), None);
        std::fs::remove_file(&place).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &place, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert_eq!(take(&paths, ServiceName::NodeApi), None);
    }
}
