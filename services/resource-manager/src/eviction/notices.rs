//! What the kernel tells of memory between two looks, with `kernelMemcgNotification` (runtime-and-resources.md §12.2).

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::task::{Context, Poll};

use keelson_resource_manager_core::eviction::notice::{Watched, usage_at, watched};
use keelson_resource_manager_core::eviction::signal::{Observation, Observations};
use keelson_resource_manager_core::eviction::threshold::Threshold;
use tokio::net::unix::pipe::Receiver;

use crate::cgroup::{Tree, UsageAlarm};
use crate::view::TreeState;

/// Why the kernel cannot be asked.
#[derive(Debug, thiserror::Error)]
#[error("cannot have the kernel tell when {} uses more than {bytes} bytes of memory", dir.display())]
pub(crate) struct NoticeError {
    dir: PathBuf,
    bytes: u64,
    source: io::Error,
}

/// What the kernel was asked to tell.
#[derive(Debug)]
pub(crate) struct Notices {
    alarm: Arc<dyn UsageAlarm>,
    /// Descriptors that are read as pipes are: when there is something, and never waiting for it.
    set: Vec<Receiver>,
    failing: bool,
}

impl Notices {
    pub(crate) fn new(alarm: Arc<dyn UsageAlarm>) -> Self {
        Self { alarm, set: Vec::new(), failing: false }
    }

    /// Asks anew, by what was seen last. On cgroup v2 there is nobody to ask, and nothing is told.
    ///
    /// # Errors
    /// The first one after it went well; whatever could be asked is told.
    pub(crate) async fn renew(
        &mut self,
        tree: TreeState,
        thresholds: &[Threshold],
        seen: &Observations,
    ) -> Result<(), NoticeError> {
        let TreeState::Ready(tree) = tree else { return Ok(()) };
        let line = |t: &Threshold| Some((watched(t.signal)?, *t, *seen.get(&t.signal)?));
        let lines = thresholds.iter().filter_map(line).collect();
        let alarm = Arc::clone(&self.alarm);
        let work = tokio::task::spawn_blocking(move || ask(&*alarm, &tree, lines));
        let mut problem = None;
        let mut set = Vec::new();
        for asked in work.await.unwrap_or_default() {
            let registered = asked.and_then(|(dir, bytes, fd)| {
                let failed = |source| NoticeError { dir, bytes, source };
                Receiver::from_owned_fd_unchecked(fd).map_err(failed)
            });
            match registered {
                Ok(fd) => set.push(fd),
                Err(error) => problem = problem.or(Some(error)),
            }
        }
        self.set = set;
        let was_failing = std::mem::replace(&mut self.failing, problem.is_some());
        match problem.filter(|_| !was_failing) {
            Some(problem) => Err(problem),
            None => Ok(()),
        }
    }

    /// Waits until the kernel tells something; for ever when it was not asked. Cancel-safe: what it tells is taken when
    /// this returns.
    pub(crate) async fn told(&self) {
        std::future::poll_fn(|cx| self.poll(cx)).await;
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        for alarm in &self.set {
            while let Poll::Ready(Ok(())) = alarm.poll_read_ready(cx) {
                match alarm.try_read(&mut [0; 8]) {
                    Ok(_) => return Poll::Ready(()),
                    // There was nothing after all.
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // It cannot be read, and never will.
                    Err(_) => break,
                }
            }
        }
        Poll::Pending
    }
}

type Asked = Result<(PathBuf, u64, OwnedFd), NoticeError>;

fn ask(alarm: &dyn UsageAlarm, tree: &Tree, lines: Vec<(Watched, Threshold, Observation)>) -> Vec<Asked> {
    let one = |(watched, threshold, seen): (Watched, Threshold, Observation)| {
        let path = match watched {
            Watched::Machine => "/".to_owned(),
            Watched::Pods => tree.layout().pods().to_string(),
        };
        let (dir, used) = tree.watchable(&path)?;
        let bytes = usage_at(&threshold, &seen, used);
        Some(match alarm.set(&dir, bytes) {
            Ok(fd) => Ok((dir, bytes, fd)),
            Err(source) => Err(NoticeError { dir, bytes, source }),
        })
    };
    lines.into_iter().filter_map(one).collect()
}
