//! List and watch of a range of objects.

use std::fmt;
use std::time::Duration;

use futures_util::StreamExt as _;
use kube::core::{Status, WatchEvent as RawEvent};
use tokio::time::Instant;

use crate::connect::{Events, KubeApi, Page};
use crate::error::KubeError;
use crate::resource::{Object, Range};

/// The back-off after the first failure; doubled with each further one.
const PAUSE: Duration = Duration::from_millis(200);
/// The longest back-off: nodes reconnect soon after an API server restarts, and not all at once.
const MAX_PAUSE: Duration = Duration::from_secs(15);
/// The retry interval while there is no kubeconfig.
const KUBECONFIG_POLL: Duration = Duration::from_secs(1);

/// A change of one object.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// The object was created or updated.
    Put(Object),
    /// The object was deleted; its last state.
    Deleted(Object),
}

/// What a [`Follower`] reports.
#[derive(Debug)]
pub enum WatchEvent {
    /// The whole range: an object that is not in the list does not exist.
    Listed(Vec<Object>),
    /// An object has changed since.
    Changed(Change),
    /// The watch is open and nothing has changed.
    Contact,
    /// The watch has failed; it is retried.
    Lost(KubeError),
}

/// Lists and watches a range. It never ends and eventually reports the latest state of every object.
pub struct Follower {
    api: KubeApi,
    range: Range,
    /// The resource version up to which all changes are reported; `None`: the range must be listed.
    version: Option<String>,
    /// The next list must be consistent, not from the server's cache: the server has refused to watch from the last version.
    needs_consistent_list: bool,
    /// The open watch, with the number of its connection.
    watch: Option<(Events, u64)>,
    retry: Option<Instant>,
    pause: Duration,
}

impl fmt::Debug for Follower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follower")
            .field("range", &self.range)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl Follower {
    /// A follower that lists `range` first.
    pub fn new(api: KubeApi, range: Range) -> Self {
        Self {
            api,
            range,
            version: None,
            needs_consistent_list: false,
            watch: None,
            retry: None,
            pause: PAUSE,
        }
    }

    /// The next event. Cancel-safe: the next call reads what a cancelled call was about to read.
    pub async fn next(&mut self) -> WatchEvent {
        loop {
            if let Some(at) = self.retry {
                tokio::time::sleep_until(at).await;
                self.retry = None;
            }
            let Some(version) = &self.version else {
                return match self.list().await {
                    Ok(objects) => {
                        self.watch = None;
                        WatchEvent::Listed(objects)
                    }
                    Err(error) => {
                        self.needs_consistent_list |= error.needs_list();
                        self.lost(error)
                    }
                };
            };
            let Some(watch) = &mut self.watch else {
                match self.api.watch(&self.range, version).await {
                    Ok(watch) => {
                        self.watch = Some(watch);
                        return WatchEvent::Contact;
                    }
                    Err(error) if error.needs_list() => {
                        self.reset(&error);
                        continue;
                    }
                    Err(error) => return self.lost(error),
                }
            };
            let (events, number) = watch;
            // Cancel-safe: an event that is not taken stays in the stream; `replaced` waits for a state.
            let event = tokio::select! {
                event = events.next() => event,
                () = self.api.replaced(*number) => {
                    // With new credentials: the watch is reopened from the last version.
                    self.watch = None;
                    continue;
                }
            };
            let error = match event {
                Some(Ok(RawEvent::Added(object) | RawEvent::Modified(object))) => {
                    return self.take(Object(object), Change::Put);
                }
                Some(Ok(RawEvent::Deleted(object))) => return self.take(Object(object), Change::Deleted),
                Some(Ok(RawEvent::Bookmark(mark))) => {
                    self.version = Some(mark.metadata.resource_version);
                    self.pause = PAUSE;
                    return WatchEvent::Contact;
                }
                Some(Ok(RawEvent::Error(status))) => self.refused(*status),
                Some(Err(error)) => error,
                // The server ends each watch after a while.
                None => {
                    self.watch = None;
                    // A server that ends each watch at once is not called in a busy loop.
                    self.retry = Some(Instant::now() + PAUSE.mul_f32(fastrand::f32()));
                    continue;
                }
            };
            self.watch = None;
            if error.needs_list() {
                self.reset(&error);
                continue;
            }
            return self.lost(error);
        }
    }

    /// Lists the range. The first list comes from the server's watch cache: a list from etcd is expensive for the server, and
    /// all nodes list at once after its restart. A list after a refused version is consistent.
    async fn list(&mut self) -> Result<Vec<Object>, KubeError> {
        if !self.needs_consistent_list {
            let listed = self.api.page(&self.range, &Page::NotOlderThan("0")).await?;
            self.version = Some(listed.version);
            return Ok(listed.objects);
        }
        let mut objects = Vec::new();
        let mut next: Option<String> = None;
        loop {
            let listed = self.api.page(&self.range, &Page::Now(next.as_deref())).await?;
            objects.extend(listed.objects);
            if listed.next.is_empty() {
                self.version = Some(listed.version);
                self.needs_consistent_list = false;
                return Ok(objects);
            }
            next = Some(listed.next);
        }
    }

    /// The last version has expired: the range is listed consistently, as a list from the cache may be as old.
    fn reset(&mut self, error: &KubeError) {
        tracing::info!(range = ?self.range, from = self.version, %error, "the resource version has expired; listing the range again");
        (self.version, self.needs_consistent_list, self.watch) = (None, true, None);
    }

    fn take(&mut self, object: Object, change: fn(Object) -> Change) -> WatchEvent {
        self.pause = PAUSE;
        self.version = Some(object.version().to_owned());
        WatchEvent::Changed(change(object))
    }

    fn refused(&self, status: Status) -> KubeError {
        KubeError::refused(&self.api.server(), &format!("a watch of {}", self.range.resource.plural), status)
    }

    fn lost(&mut self, error: KubeError) -> WatchEvent {
        self.watch = None;
        let asked_for = Duration::from_secs(u64::from(error.retry_after()));
        if error.is_awaited() {
            // Nothing is sent, so a longer back-off would spare no server.
            self.retry = Some(Instant::now() + KUBECONFIG_POLL);
            return WatchEvent::Lost(error);
        }
        let pause = self.pause.mul_f32(0.5 + fastrand::f32() / 2.0).max(asked_for.min(MAX_PAUSE * 4));
        self.retry = Some(Instant::now() + pause);
        self.pause = (self.pause * 2).min(MAX_PAUSE);
        WatchEvent::Lost(error)
    }
}

#[cfg(test)]
#[path = "follow_tests.rs"]
mod tests;
