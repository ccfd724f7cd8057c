//! Follows the folder, and keeps a task per socket.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _};
use inotify::{EventStream, Inotify};
use keelson_service_kit::{Backoff, CancellationToken, LoopHandle, Metrics, spawn};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

use crate::folder::{Found, SocketId, scan};
use crate::metrics::PluginMetrics;
use crate::plugin::PluginHandler;
use crate::registration::{Shared, SocketTask};

/// How often the folder is read without an event, in case that one was lost. It is also how often the loop ticks.
const RESCAN: Duration = LoopHandle::HEARTBEAT;
/// The same while inotify(7) does not report every change.
const POLL: Duration = Duration::from_secs(1);
/// How long plugins that are just unregistered delay the shutdown.
const END_WITHIN: Duration = Duration::from_secs(2);
/// Room for some events (inotify(7)).
const BUFFER: usize = 4096;

/// Finds plugins in a folder and has them registered.
pub struct PluginWatcher {
    folder: PathBuf,
    handlers: BTreeMap<String, Arc<dyn PluginHandler>>,
    others: BTreeSet<String>,
    metrics: PluginMetrics,
}

impl PluginWatcher {
    /// A watcher of a folder, which is created if it does not exist.
    pub fn new(folder: &Path, metrics: &Metrics) -> Self {
        let metrics = PluginMetrics::register(metrics);
        Self { folder: folder.to_owned(), handlers: BTreeMap::new(), others: BTreeSet::new(), metrics }
    }

    /// Has the plugins of a kind, such as `CSIPlugin`, registered by `handler`.
    #[must_use]
    pub fn with(mut self, kind: &str, handler: Arc<dyn PluginHandler>) -> Self {
        self.handlers.insert(kind.to_owned(), handler);
        self
    }

    /// Leaves the plugins of a kind to the watcher of another service. Plugins of all other kinds are refused.
    #[must_use]
    pub fn leaving(mut self, kind: &str) -> Self {
        self.others.insert(kind.to_owned());
        self
    }

    /// Follows the folder until `shutdown`. The plugins stay registered then: the next watcher registers them again. While
    /// the folder or one in it cannot be read, the plugins there stay as they are, and the log says why.
    pub async fn run(self, shutdown: CancellationToken, handle: LoopHandle) {
        self.follow(Events::open, shutdown, handle).await;
    }

    async fn follow(self, open: fn() -> Events, shutdown: CancellationToken, handle: LoopHandle) {
        let shared = Arc::new(Shared {
            handlers: self.handlers,
            others: self.others,
            metrics: self.metrics,
            unregistered: watch::Sender::default(),
            shutdown: shutdown.clone(),
        });
        let mut sockets = Sockets { shared, tasks: BTreeMap::new(), ending: JoinSet::new() };
        let mut events = open();
        let mut logged = Found::default();
        let mut backoff = Backoff::new(Duration::from_millis(100), RESCAN);
        loop {
            handle.tick();
            let wait = match list(&self.folder, &mut events).await {
                Ok(found) => {
                    backoff.reset();
                    log_changes(&found, &logged);
                    sockets.update(&found);
                    logged = found;
                    if logged.unwatched.is_some() { POLL } else { RESCAN }
                }
                Err(error) => {
                    tracing::warn!(
                        event = "plugin_folder_unreadable",
                        folder = %self.folder.display(),
                        %error,
                        "cannot read the folder of plugins; plugins stay as they are"
                    );
                    events = open();
                    backoff.next_delay()
                }
            };
            // Cancel-safe: an event that is lost here is one more reason to read the folder, which happens next.
            tokio::select! {
                () = events.next() => {}
                () = tokio::time::sleep(wait) => {}
                () = shutdown.cancelled() => break,
            }
        }
        sockets.end().await;
    }
}

/// Logs what cannot be read or watched, unless the read before has found the same.
fn log_changes(found: &Found, before: &Found) {
    for (path, error) in &found.unreadable {
        if before.unreadable.get(path) != Some(error) {
            tracing::error!(
                event = "plugin_folder_unreadable",
                path = %path.display(),
                error,
                "cannot read a folder of plugins; the plugins there stay as they are until it can be read"
            );
        }
    }
    if let Some(why) = found.unwatched.as_ref().filter(|why| before.unwatched.as_ref() != Some(why)) {
        tracing::warn!(
            event = "plugin_folder_unwatched",
            error = why,
            "the folders of plugins are read every {} s, since their changes are not reported; \
             fs.inotify.max_user_watches and max_user_instances may be too low",
            POLL.as_secs()
        );
    }
}

/// The events of the folder; without inotify none ever comes.
struct Events(Option<EventStream<Vec<u8>>>);

impl Events {
    fn open() -> Self {
        let stream = Inotify::init().and_then(|inotify| inotify.into_event_stream(vec![0; BUFFER]));
        match stream {
            Ok(stream) => Self(Some(stream)),
            Err(error) => {
                tracing::warn!(event = "no_inotify", %error, "cannot watch the folder of plugins");
                Self(None)
            }
        }
    }

    /// Waits for an event, and takes all that are there.
    async fn next(&mut self) {
        let Some(stream) = &mut self.0 else { return std::future::pending().await };
        match stream.next().await {
            Some(Ok(_)) => while let Some(Some(Ok(_))) = stream.next().now_or_never() {},
            Some(Err(_)) | None => self.0 = None,
        }
    }
}

/// Reads the folder, on a thread that may block.
async fn list(folder: &Path, events: &mut Events) -> io::Result<Found> {
    let folder = folder.to_owned();
    let watches = events.0.as_ref().map(EventStream::watches);
    let work = move || scan(&folder, watches);
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

/// The tasks of sockets.
struct Sockets {
    shared: Arc<Shared>,
    tasks: BTreeMap<PathBuf, Task>,
    /// Tasks of sockets that are gone, which unregister their plugins.
    ending: JoinSet<()>,
}

struct Task {
    id: SocketId,
    gone: CancellationToken,
    task: JoinHandle<()>,
}

impl Sockets {
    /// Ends the tasks of sockets that are gone or were replaced, then starts those of new ones. Tasks of sockets in a folder
    /// that could not be read stay.
    fn update(&mut self, found: &Found) {
        while self.ending.try_join_next().is_some() {}
        let sockets = &found.sockets;
        let (current, gone): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(&mut self.tasks)
            .into_iter()
            .partition(|(path, task)| sockets.get(path) == Some(&task.id) || found.may_have(path));
        self.tasks = current;
        let mut replaced = BTreeMap::new();
        for (path, Task { gone, task, .. }) in gone {
            gone.cancel();
            if sockets.contains_key(&path) {
                replaced.insert(path, task);
            } else {
                self.shared.metrics.found(&path, false);
                self.ending.spawn(async move { drop(task.await) });
            }
        }
        for (path, id) in sockets {
            if !self.tasks.contains_key(path) {
                let earlier = replaced.remove(path);
                self.start(path.clone(), *id, earlier);
            }
        }
    }

    fn start(&mut self, path: PathBuf, id: SocketId, earlier: Option<JoinHandle<()>>) {
        self.shared.metrics.found(&path, true);
        let gone = CancellationToken::new();
        let socket = SocketTask::new(path.clone(), Arc::clone(&self.shared));
        let until = gone.clone();
        let task = spawn("plugin", async move {
            // The plugin of the replaced socket is unregistered first.
            if let Some(earlier) = earlier {
                drop(earlier.await);
            }
            socket.run(until).await;
        });
        self.tasks.insert(path, Task { id, gone, task });
    }

    /// Waits until all tasks have ended, after the shutdown, but not long for those that unregister a plugin.
    async fn end(mut self) {
        let ending = async {
            for task in std::mem::take(&mut self.tasks).into_values() {
                drop(task.task.await);
            }
            while self.ending.join_next().await.is_some() {}
        };
        let _ = timeout(END_WITHIN, ending).await;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod tests {
    use std::os::unix::net::UnixListener;

    use keelson_service_kit::Progress;

    use super::*;

    fn sockets() -> Sockets {
        let shared = Arc::new(Shared {
            handlers: BTreeMap::new(),
            others: BTreeSet::new(),
            metrics: PluginMetrics::register(&Metrics::new()),
            unregistered: watch::Sender::default(),
            shutdown: CancellationToken::new(),
        });
        Sockets { shared, tasks: BTreeMap::new(), ending: JoinSet::new() }
    }

    #[tokio::test]
    async fn plugins_in_a_folder_that_cannot_be_read_stay_until_it_can() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        let _listeners = ["a", "sub/b"].map(|name| UnixListener::bind(dir.path().join(name)).unwrap());
        let mut sockets = sockets();
        sockets.update(&scan(dir.path(), None).unwrap());
        assert_eq!(sockets.tasks.len(), 2);
        let unreadable = BTreeMap::from([(dir.path().join("sub"), "input/output error".to_owned())]);
        sockets.update(&Found { unreadable, ..Found::default() });
        assert_eq!(sockets.tasks.keys().collect::<Vec<_>>(), [&dir.path().join("sub/b")]);
        sockets.update(&Found::default());
        assert!(sockets.tasks.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn without_inotify_the_folder_is_read_every_second() {
        let dir = tempfile::tempdir().unwrap();
        let metrics = Metrics::new();
        let (shutdown, handle) = (CancellationToken::new(), Progress::default().register("plugins"));
        let watcher = PluginWatcher::new(dir.path(), &metrics);
        let started = tokio::time::Instant::now();
        let following = tokio::spawn(watcher.follow(|| Events(None), shutdown.clone(), handle));
        tokio::time::sleep(POLL / 2).await;
        let _listener = UnixListener::bind(dir.path().join("a.sock")).unwrap();
        while !metrics.text().contains("a.sock") {
            tokio::time::sleep(Duration::from_millis(10)).await;
            assert!(started.elapsed() < RESCAN, "the socket was not noticed");
        }
        shutdown.cancel();
        following.await.unwrap();
    }
}
