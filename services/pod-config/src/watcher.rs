//! Watches the folder of a source with inotify(7).

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use futures_util::{FutureExt as _, StreamExt as _};
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchDescriptor, WatchMask, Watches};

/// Room for about fifty short names (struct inotify_event of inotify(7) and the longest name).
const BUFFER: usize = 4096;

/// The events since the last call.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Names of complete files that are new or changed.
    pub changed: BTreeSet<String>,
    /// Names of files whose attributes have changed, possibly while they are being written.
    pub attributes_changed: BTreeSet<String>,
    /// Names of new files; most are still being written.
    pub created: BTreeSet<String>,
    /// Names of files that were deleted or moved away.
    pub removed: BTreeSet<String>,
    /// The kernel has dropped events, or the folder itself was replaced: rescan it.
    pub rescan: bool,
}

/// The one inotify instance of the service.
pub struct Watcher {
    events: EventStream<Vec<u8>>,
    current: Option<WatchDescriptor>,
}

/// The folder to watch for a source at `path`, and the only relevant name in it if `path` is a file.
pub fn folder_of(path: &Path) -> (PathBuf, Option<String>) {
    if path.is_file() {
        let name = path.file_name().and_then(|n| n.to_str()).map(ToOwned::to_owned);
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        return (parent.to_owned(), name);
    }
    (path.to_owned(), None)
}

/// Adds the watch, or returns the existing one. Blocks as long as the file system does.
pub fn watch(watches: &mut Watches, folder: &Path) -> io::Result<WatchDescriptor> {
    let mask = WatchMask::CLOSE_WRITE
        | WatchMask::MOVED_TO
        | WatchMask::MOVED_FROM
        | WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::ATTRIB
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF
        | WatchMask::ONLYDIR;
    watches.add(folder, mask)
}

impl Watcher {
    /// Creates the inotify instance.
    pub fn new() -> io::Result<Self> {
        Ok(Self { events: Inotify::init()?.into_event_stream(vec![0; BUFFER])?, current: None })
    }

    /// The handle for [`watch`].
    pub fn watches(&self) -> Watches {
        self.events.watches()
    }

    /// Switches to a watch and removes the previous one, unless it is the same.
    pub fn use_watch(&mut self, watched: WatchDescriptor) {
        let old = self.current.replace(watched.clone());
        if let Some(old) = old.filter(|old| *old != watched) {
            // If the folder was deleted, the kernel has removed the watch already.
            let _ = self.watches().remove(old);
        }
    }

    /// Waits for events and returns all that are queued. Cancel-safe: events are read only when they are returned.
    pub async fn next(&mut self) -> io::Result<Batch> {
        let mut batch = Batch::default();
        let mut event = self.events.next().await;
        loop {
            match event {
                Some(event) => self.classify(&event?, &mut batch),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
            event = match self.events.next().now_or_never() {
                Some(next) => next,
                None => return Ok(batch),
            };
        }
    }

    fn classify(&self, event: &EventOwned, batch: &mut Batch) {
        let name = event.name.as_deref().and_then(|name| name.to_str());
        classify(event.mask, name, self.current.as_ref() == Some(&event.wd), batch);
    }
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watcher").field("current", &self.current).finish_non_exhaustive()
    }
}

fn classify(mask: EventMask, name: Option<&str>, is_current_watch: bool, batch: &mut Batch) {
    if mask.contains(EventMask::Q_OVERFLOW) {
        batch.rescan = true;
        return;
    }
    if !is_current_watch {
        return;
    }
    if mask
        .intersects(EventMask::IGNORED | EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::UNMOUNT)
    {
        batch.rescan = true;
        return;
    }
    let Some(name) = name else {
        // An attribute of the folder has changed: it may be readable now.
        batch.rescan = true;
        return;
    };
    let name = name.to_owned();
    if mask.intersects(EventMask::CLOSE_WRITE | EventMask::MOVED_TO) {
        batch.changed.insert(name);
    } else if mask.contains(EventMask::ATTRIB) {
        batch.attributes_changed.insert(name);
    } else if mask.contains(EventMask::CREATE) {
        batch.created.insert(name);
    } else if mask.intersects(EventMask::DELETE | EventMask::MOVED_FROM) {
        batch.removed.insert(name);
    }
}
