//! What the kernel says about the folder of a source (inotify(7)), before any rescan.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use futures_util::{FutureExt as _, StreamExt as _};
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchDescriptor, WatchMask, Watches};

/// Room for some fifty short names at once (struct inotify_event of inotify(7) and the longest name).
const BUFFER: usize = 4096;

/// What has happened since the last look.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Names whose file is whole and new or changed.
    pub changed: BTreeSet<String>,
    /// Names of which only the attributes have changed, perhaps while somebody writes.
    pub touched: BTreeSet<String>,
    /// Names that have come into being; most are still being written.
    pub created: BTreeSet<String>,
    /// Names that were removed or moved away.
    pub gone: BTreeSet<String>,
    /// The kernel has dropped events, or the folder itself is another one: everything is to be looked at.
    pub everything: bool,
}

/// The one inotify instance of the service.
pub struct Watcher {
    events: EventStream<Vec<u8>>,
    current: Option<WatchDescriptor>,
}

/// The folder to watch for a source at `path`, and the only name in it that counts when `path` is a file.
pub fn folder_of(path: &Path) -> (PathBuf, Option<String>) {
    if path.is_file() {
        let name = path.file_name().and_then(|n| n.to_str()).map(ToOwned::to_owned);
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        return (parent.to_owned(), name);
    }
    (path.to_owned(), None)
}

/// Sets the watch, or finds the one that is set; blocks as long as the file system does.
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
    /// Opens the instance.
    pub fn new() -> io::Result<Self> {
        Ok(Self { events: Inotify::init()?.into_event_stream(vec![0; BUFFER])?, current: None })
    }

    /// What [`watch`] works on.
    pub fn watches(&self) -> Watches {
        self.events.watches()
    }

    /// Takes a watch into use and drops the one before, unless it is the same.
    pub fn follow(&mut self, watched: WatchDescriptor) {
        let old = self.current.replace(watched.clone());
        if let Some(old) = old.filter(|old| *old != watched) {
            // The kernel has removed it already when its folder is gone.
            let _ = self.watches().remove(old);
        }
    }

    /// Waits for the next events and takes all that are there. Cancel-safe: events are read only when they are
    /// returned.
    pub async fn next(&mut self) -> io::Result<Batch> {
        let mut batch = Batch::default();
        let mut event = self.events.next().await;
        loop {
            match event {
                Some(event) => self.sort(&event?, &mut batch),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
            event = match self.events.next().now_or_never() {
                Some(next) => next,
                None => return Ok(batch),
            };
        }
    }

    fn sort(&self, event: &EventOwned, batch: &mut Batch) {
        let name = event.name.as_deref().and_then(|name| name.to_str());
        sort(event.mask, name, self.current.as_ref() == Some(&event.wd), batch);
    }
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watcher").field("current", &self.current).finish_non_exhaustive()
    }
}

fn sort(mask: EventMask, name: Option<&str>, of_current: bool, batch: &mut Batch) {
    if mask.contains(EventMask::Q_OVERFLOW) {
        batch.everything = true;
        return;
    }
    if !of_current {
        return;
    }
    if mask
        .intersects(EventMask::IGNORED | EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::UNMOUNT)
    {
        batch.everything = true;
        return;
    }
    let Some(name) = name else {
        // The folder's own attributes: it may be readable now.
        batch.everything = true;
        return;
    };
    let name = name.to_owned();
    if mask.intersects(EventMask::CLOSE_WRITE | EventMask::MOVED_TO) {
        batch.changed.insert(name);
    } else if mask.contains(EventMask::ATTRIB) {
        batch.touched.insert(name);
    } else if mask.contains(EventMask::CREATE) {
        batch.created.insert(name);
    } else if mask.intersects(EventMask::DELETE | EventMask::MOVED_FROM) {
        batch.gone.insert(name);
    }
}
