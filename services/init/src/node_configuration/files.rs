//! The files through which pod-config, init and node-status exchange the node configuration.

use std::fs;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use keelson_config::{AssignedConfiguration, Config, ConfigurationStatus, Paths};
use keelson_files::{Replacement, remove_if_exists};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// An upper bound of the longest content in JSON, in bytes.
const MAX_FILE_BYTES: u64 = 8 * AssignedConfiguration::MAX_BYTES as u64;

/// Identifies a state of the file: device, inode, size and modification time; `None`: the file does not exist.
pub(super) type Stamp = Option<(u64, u64, u64, i64, i64)>;

/// The current stamp of the file at `path`.
pub(super) fn stamp(path: &Path) -> Stamp {
    let meta = fs::symlink_metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec()))
}

/// Reads the content of the key from pod-config; `None`: the key does not exist. The folder does not belong to root, so only a
/// regular file of limited size is read.
pub(super) fn read(path: &Path) -> io::Result<Option<AssignedConfiguration>> {
    let with_path =
        |error: io::Error| io::Error::new(error.kind(), format!("cannot read {}: {error}", path.display()));
    let opened = fs::File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    let file = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(with_path)?,
    };
    if !file.metadata().map_err(with_path)?.is_file() {
        return Err(with_path(io::Error::other("it is not a regular file")));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut bytes).map_err(with_path)?;
    serde_json::from_slice(&bytes).map(Some).map_err(|error| with_path(error.into()))
}

/// Replaces the published status, mode 0640, group of the operators; removes it if there is none.
pub(super) fn write_status(config: &Config, status: Option<&ConfigurationStatus>) -> anyhow::Result<()> {
    let Some(status) = status else { return remove_status(&config.paths) };
    let path = config.paths.configuration_status();
    let owner = crate::is_root().then_some((0, config.users.operator_gid)).unzip();
    let replacement = Replacement::new().mode(0o640).owner(owner.0).group(owner.1);
    let bytes = serde_json::to_vec(status)?;
    replacement.write(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// Removes the published status.
pub(crate) fn remove_status(paths: &Paths) -> anyhow::Result<()> {
    let path = paths.configuration_status();
    remove_if_exists(&path).with_context(|| format!("cannot remove {}", path.display()))
}

/// Watches the folder of pod-config (inotify(7)). Without it, changes are noticed at the next heartbeat.
#[derive(Debug)]
pub(super) struct Watch {
    folder: PathBuf,
    events: Option<AsyncFd<OwnedFd>>,
}

impl Watch {
    pub(super) fn new(folder: PathBuf) -> Self {
        let open = || -> io::Result<AsyncFd<OwnedFd>> {
            let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
            // SAFETY: the descriptor is open, and owned by what is registered as long as that lives.
            Ok(unsafe { AsyncFd::register_with_interest(events, Interest::READABLE) }?)
        };
        let events = open()
            .inspect_err(|error| tracing::warn!(%error, "cannot watch the node configuration: changes are noticed with a delay"))
            .ok();
        Self { folder, events }
    }

    /// Sets the watch, also if the folder was replaced.
    pub(super) fn renew(&self) {
        let mask = WatchFlags::MOVED_TO | WatchFlags::MOVED_FROM | WatchFlags::DELETE | WatchFlags::ONLYDIR;
        if let Some(events) = &self.events
            && let Err(error) = inotify::add_watch(events, &self.folder, mask)
        {
            tracing::debug!(folder = %self.folder.display(), %error, "cannot watch the folder");
        }
    }

    /// Waits until a file appears in the folder or disappears. Cancel-safe: events are only consumed when it returns.
    pub(super) async fn changed(&self) {
        let Some(events) = &self.events else { return std::future::pending().await };
        loop {
            let Ok(mut ready) = events.readable().await else { return std::future::pending().await };
            // The events are not needed: the file is read again.
            let consumed = ready.try_io(|events| Ok(rustix::io::read(events, &mut [0; 4096])?));
            if matches!(consumed, Ok(Ok(_))) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_regular_file_of_the_node_configuration_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("node-configuration.json");
        assert_eq!((read(&path).unwrap(), stamp(&path)), (None, None));
        fs::write(&path, r#"{"revision": 7, "text": "kind: X"}"#).unwrap();
        let first = stamp(&path);
        let content = read(&path).unwrap().unwrap();
        assert_eq!((content.revision, content.text.as_str()), (7, "kind: X"));

        fs::write(&path, r#"{"revision": "#).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("node-configuration.json"));
        assert_ne!(stamp(&path), first);
        fs::remove_file(&path).unwrap();
        let other = dir.path().join("other");
        fs::write(&other, r#"{"revision": 7, "text": ""}"#).unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        assert!(read(&path).is_err(), "a link");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("not a regular file"));
    }

    #[tokio::test]
    async fn the_watch_reports_created_and_removed_files() {
        let dir = tempfile::tempdir().unwrap();
        let watch = Watch::new(dir.path().to_owned());
        watch.renew();
        fs::write(dir.path().join("new"), "").unwrap();
        fs::rename(dir.path().join("new"), dir.path().join("file")).unwrap();
        watch.changed().await;
        fs::remove_file(dir.path().join("file")).unwrap();
        watch.changed().await;
    }
}
