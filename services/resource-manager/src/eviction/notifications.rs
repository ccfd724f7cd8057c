//! Memory notifications of the kernel, with `kernelMemcgNotification` (runtime-and-resources.md §12.2).

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::task::{Context, Poll};

use keelson_resource_manager_core::eviction::notification::{
    MemoryCgroup, memory_cgroup, notification_usage,
};
use keelson_resource_manager_core::eviction::signal::{Observation, Observations};
use keelson_resource_manager_core::eviction::threshold::Threshold;
use tokio::net::unix::pipe::Receiver;

use crate::cgroup::{MemoryNotifier, Tree};
use crate::view::TreeState;

/// A notification could not be registered.
#[derive(Debug, thiserror::Error)]
#[error("cannot register a kernel notification for {} at {bytes} bytes of memory", dir.display())]
pub(crate) struct NotificationError {
    dir: PathBuf,
    bytes: u64,
    source: io::Error,
}

/// The registered notifications.
#[derive(Debug)]
pub(crate) struct MemoryNotifications {
    notifier: Arc<dyn MemoryNotifier>,
    /// Eventfds, read like pipes: when they are readable, and without blocking.
    registered: Vec<Receiver>,
    failing: bool,
}

impl MemoryNotifications {
    pub(crate) fn new(notifier: Arc<dyn MemoryNotifier>) -> Self {
        Self { notifier, registered: Vec::new(), failing: false }
    }

    /// Replaces the notifications, computed from the last observations. cgroup v2 has no notifications.
    ///
    /// # Errors
    /// The first error after a success; notifications without an error are registered all the same.
    pub(crate) async fn renew(
        &mut self,
        tree: TreeState,
        thresholds: &[Threshold],
        observations: &Observations,
    ) -> Result<(), NotificationError> {
        let TreeState::Ready(tree) = tree else { return Ok(()) };
        let request = |t: &Threshold| Some((memory_cgroup(t.signal)?, *t, *observations.get(&t.signal)?));
        let requests = thresholds.iter().filter_map(request).collect();
        let notifier = Arc::clone(&self.notifier);
        let work = tokio::task::spawn_blocking(move || register(&*notifier, &tree, requests));
        let mut first_error = None;
        let mut registered = Vec::new();
        for result in work.await.unwrap_or_default() {
            let receiver = result.and_then(|(dir, bytes, fd)| {
                let failed = |source| NotificationError { dir, bytes, source };
                Receiver::from_owned_fd_unchecked(fd).map_err(failed)
            });
            match receiver {
                Ok(receiver) => registered.push(receiver),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        self.registered = registered;
        let was_failing = std::mem::replace(&mut self.failing, first_error.is_some());
        match first_error.filter(|_| !was_failing) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Waits for a notification; forever when none is registered. Cancel-safe: a notification is consumed only when this
    /// returns.
    pub(crate) async fn notified(&self) {
        std::future::poll_fn(|cx| self.poll(cx)).await;
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        for receiver in &self.registered {
            while let Poll::Ready(Ok(())) = receiver.poll_read_ready(cx) {
                match receiver.try_read(&mut [0; 8]) {
                    Ok(_) => return Poll::Ready(()),
                    // A spurious wakeup.
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // It can never be read.
                    Err(_) => break,
                }
            }
        }
        Poll::Pending
    }
}

type Registration = Result<(PathBuf, u64, OwnedFd), NotificationError>;

fn register(
    notifier: &dyn MemoryNotifier,
    tree: &Tree,
    requests: Vec<(MemoryCgroup, Threshold, Observation)>,
) -> Vec<Registration> {
    let one = |(cgroup, threshold, observed): (MemoryCgroup, Threshold, Observation)| {
        let path = match cgroup {
            MemoryCgroup::Machine => "/".to_owned(),
            MemoryCgroup::Pods => tree.layout().pods().to_string(),
        };
        let (dir, used) = tree.memory_usage(&path)?;
        let bytes = notification_usage(&threshold, &observed, used);
        Some(match notifier.register(&dir, bytes) {
            Ok(fd) => Ok((dir, bytes, fd)),
            Err(source) => Err(NotificationError { dir, bytes, source }),
        })
    };
    requests.into_iter().filter_map(one).collect()
}
