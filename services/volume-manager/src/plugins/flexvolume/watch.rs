//! Watches the folder of drivers, so that a driver that is added, changed or removed is noticed at once (volumes.md §10.8).
//! Each use of a driver looks at its executable, too, so nothing depends on the watch.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::StreamExt as _;
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchDescriptor, WatchMask};
use keelson_service_kit::{Backoff, CancellationToken, Progress};
use keelson_volume_manager_core::flexvolume::driver::{Driver, FileEvent, PluginChange, plugin_change};

use super::FlexVolume;
use crate::listing::names_in;
use crate::plugins::PluginError;
use crate::plugins::host::blocking;

/// The mode of the folder of drivers.
const FOLDER_MODE: u32 = 0o755;
/// Room for some events with long names.
const BUFFER: usize = 16 << 10;
/// The back-off of a watch or a driver that fails.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// The name of the condition in the service's status.
const CONDITION: &str = "flexvolume-drivers";

/// Watches of the folder of drivers and of the folders in it.
struct Watch {
    events: EventStream<Vec<u8>>,
    /// The folder of each watch, relative to the folder of drivers.
    folders: BTreeMap<WatchDescriptor, PathBuf>,
}

/// What has happened.
enum Change {
    /// These drivers are new or have changed.
    Init(Vec<Driver>),
    /// Everything has to be read again.
    Rescan,
}

impl FlexVolume {
    /// Watches the folder of drivers until `shutdown`.
    pub(crate) async fn watch(self, progress: Progress, shutdown: CancellationToken) {
        let mut retry = RETRY;
        loop {
            let watched = async {
                let watch = self.open_watch().await?;
                progress.condition(CONDITION, Ok(()));
                self.follow(watch).await
            };
            // Cancel-safe: a new watch reads everything again.
            let error = tokio::select! {
                result = watched => result.err(),
                () = shutdown.cancelled() => return,
            };
            match error {
                Some(error) => progress.condition(CONDITION, Err(error.to_string())),
                None => retry.reset(),
            }
            tokio::select! {
                () = tokio::time::sleep(retry.next_delay()) => {}
                () = shutdown.cancelled() => return,
            }
        }
    }

    /// Creates the folder if it is missing, and watches it and the folders in it.
    async fn open_watch(&self) -> Result<Watch, PluginError> {
        let folder = self.0.drivers.folder.clone();
        let what = format!("watch the folder {} of flexVolume drivers", folder.display());
        let opened = blocking(&what, move || {
            fs::DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(&folder)?;
            let events = Inotify::init()?.into_event_stream(vec![0; BUFFER])?;
            let mut watch = Watch { events, folders: BTreeMap::new() };
            watch.add(&folder, Path::new(""))?;
            for name in names_in(&folder)? {
                watch.add_driver(&folder, &name)?;
            }
            Ok(watch)
        });
        opened.await
    }

    /// Calls `init` of every driver and follows the events. Returns when everything has to be read again.
    async fn follow(&self, mut watch: Watch) -> Result<(), PluginError> {
        let present = self.0.drivers.list().await?;
        self.0.drivers.retain(&present);
        let mut retry = RETRY;
        let mut failed = self.init(present).await;
        loop {
            let pause = async {
                if failed.is_empty() {
                    std::future::pending().await
                } else {
                    tokio::time::sleep(retry.next_delay()).await
                }
            };
            // Cancel-safe: an event is taken from the stream only when it is returned.
            let event = tokio::select! {
                event = watch.events.next() => event,
                () = pause => {
                    let again = std::mem::take(&mut failed);
                    failed = self.init(again).await;
                    continue;
                }
            };
            let event = event.unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()));
            let event =
                event.map_err(|error| PluginError::new(format!("cannot watch the drivers: {error}")))?;
            match self.change(&mut watch, &event).await? {
                Change::Init(drivers) => failed.extend(self.init(drivers).await),
                Change::Rescan => return Ok(()),
            }
        }
    }

    /// Calls `init` of drivers at the same time. Those that fail.
    async fn init(&self, drivers: Vec<Driver>) -> Vec<Driver> {
        let calls = drivers.into_iter().map(|driver| async move {
            let result = self.0.drivers.get(&driver).await;
            (driver, result.err())
        });
        let mut failed = Vec::new();
        for (driver, error) in futures_util::future::join_all(calls).await {
            if let Some(error) = error {
                // A driver without an executable is one that is being installed: an event follows.
                let name = driver.name();
                tracing::warn!(event = "flexvolume_driver_failed", driver = name, %error, "a driver cannot be used");
                if self.0.drivers.folder.join(driver.executable()).exists() {
                    failed.push(driver);
                }
            }
        }
        failed
    }

    async fn change(&self, watch: &mut Watch, event: &EventOwned) -> Result<Change, PluginError> {
        let Some(base) = watch.folders.get(&event.wd).cloned() else {
            let is_lost = event.mask.contains(EventMask::Q_OVERFLOW);
            return Ok(if is_lost { Change::Rescan } else { Change::Init(Vec::new()) });
        };
        if event.mask.contains(EventMask::IGNORED) {
            watch.folders.remove(&event.wd);
        }
        let path = event.name.as_ref().map_or(base.clone(), |name| base.join(name));
        let is_gone = EventMask::DELETE
            | EventMask::MOVED_FROM
            | EventMask::DELETE_SELF
            | EventMask::MOVE_SELF
            | EventMask::IGNORED;
        let kind = if event.mask.intersects(is_gone) { FileEvent::Removed } else { FileEvent::Changed };
        match plugin_change(&path, kind) {
            PluginChange::None => Ok(Change::Init(Vec::new())),
            PluginChange::CreateFolder => Ok(Change::Rescan),
            PluginChange::Init(driver) => {
                // The kernel knows a folder that is watched already.
                let root = self.0.drivers.folder.clone();
                watch.add_driver(&root, &driver.folder()).map_err(|error| {
                    PluginError::new(format!("cannot watch the driver {}: {error}", driver.name()))
                })?;
                Ok(Change::Init(vec![driver]))
            }
            PluginChange::Forget(driver) => {
                self.0.drivers.forget(&driver);
                Ok(Change::Init(Vec::new()))
            }
        }
    }
}

impl Watch {
    fn add(&mut self, folder: &Path, relative: &Path) -> io::Result<()> {
        let mask = WatchMask::CLOSE_WRITE
            | WatchMask::ATTRIB
            | WatchMask::CREATE
            | WatchMask::MOVED_TO
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        let descriptor = self.events.watches().add(folder, mask)?;
        self.folders.insert(descriptor, relative.to_owned());
        Ok(())
    }

    /// Watches the folder of a driver; one that is gone again or is no folder is left out.
    fn add_driver(&mut self, root: &Path, name: &str) -> io::Result<()> {
        if Driver::in_folder(name).is_none() {
            return Ok(());
        }
        match self.add(&root.join(name), Path::new(name)) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                Ok(())
            }
            other => other,
        }
    }
}
