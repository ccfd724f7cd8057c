//! A range of objects and every change of it.

use std::fmt;
use std::time::Duration;

use futures_util::StreamExt as _;
use kube::core::{Status, WatchEvent};
use tokio::time::Instant;

use crate::connect::{Events, KubeApi, Page};
use crate::error::KubeError;
use crate::resource::{Object, Range};

/// After the first failure; doubled with each further one.
const PAUSE: Duration = Duration::from_millis(200);
/// The longest pause, so that an API server which comes back is heard soon, and not by all nodes at once.
const MAX_PAUSE: Duration = Duration::from_secs(15);
/// The pause while there is no kubeconfig.
const AWAITED: Duration = Duration::from_secs(1);

/// One object has changed.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// It is there as this.
    Put(Object),
    /// It is gone; as it was last.
    Deleted(Object),
}

/// What a [`Follower`] tells.
#[derive(Debug)]
pub enum News {
    /// The whole range as it is; what is not in it is not there.
    Listed(Vec<Object>),
    /// An object has changed since.
    Changed(Change),
    /// Nothing has changed, and nothing is missed.
    InTouch,
    /// Nothing is heard; it is tried again.
    Lost(KubeError),
}

/// Follows a range. It never ends and misses nothing for good.
pub struct Follower {
    api: KubeApi,
    range: Range,
    /// The version up to which all is known; none: nothing is, or what is known is too old to go on from.
    known: Option<String>,
    /// The next list has to be of this moment: the server has refused to go on from what was known.
    afresh: bool,
    /// With the number of its connection.
    watch: Option<(Events, u64)>,
    retry: Option<Instant>,
    pause: Duration,
}

impl fmt::Debug for Follower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follower")
            .field("range", &self.range)
            .field("known", &self.known)
            .finish_non_exhaustive()
    }
}

impl Follower {
    /// Of a range of which nothing is known.
    pub fn new(api: KubeApi, range: Range) -> Self {
        Self { api, range, known: None, afresh: false, watch: None, retry: None, pause: PAUSE }
    }

    /// The next news. Cancel-safe: what a call that was cancelled was about to read is read by the next one.
    pub async fn next(&mut self) -> News {
        loop {
            if let Some(at) = self.retry {
                tokio::time::sleep_until(at).await;
                self.retry = None;
            }
            let Some(known) = &self.known else {
                return match self.list().await {
                    Ok(objects) => {
                        self.watch = None;
                        News::Listed(objects)
                    }
                    Err(error) => {
                        self.afresh |= error.wants_a_list();
                        self.lost(error)
                    }
                };
            };
            let Some(watch) = &mut self.watch else {
                match self.api.watch(&self.range, known).await {
                    Ok(watch) => {
                        self.watch = Some(watch);
                        return News::InTouch;
                    }
                    Err(error) if error.wants_a_list() => {
                        self.forget(&error);
                        continue;
                    }
                    Err(error) => return self.lost(error),
                }
            };
            let (events, number) = watch;
            // Cancel-safe: an event that is not taken stays; being replaced is a state.
            let event = tokio::select! {
                event = events.next() => event,
                () = self.api.replaced(*number) => {
                    // By other credentials: the same is watched with those, from where it stands.
                    self.watch = None;
                    continue;
                }
            };
            let error = match event {
                Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object))) => {
                    return self.take(Object(object), Change::Put);
                }
                Some(Ok(WatchEvent::Deleted(object))) => return self.take(Object(object), Change::Deleted),
                Some(Ok(WatchEvent::Bookmark(mark))) => {
                    self.known = Some(mark.metadata.resource_version);
                    self.pause = PAUSE;
                    return News::InTouch;
                }
                Some(Ok(WatchEvent::Error(status))) => self.refused(*status),
                Some(Err(error)) => error,
                // The server ends each watch after a while.
                None => {
                    self.watch = None;
                    // One that ends each watch at once is not asked without a pause.
                    self.retry = Some(Instant::now() + PAUSE.mul_f32(fastrand::f32()));
                    continue;
                }
            };
            self.watch = None;
            if error.wants_a_list() {
                self.forget(&error);
                continue;
            }
            return self.lost(error);
        }
    }

    /// All of it. The first time as the server has it in memory: a list of the store is expensive for it, and all nodes
    /// come at once after its restart; later not older than what was known.
    async fn list(&mut self) -> Result<Vec<Object>, KubeError> {
        if !self.afresh {
            let listed = self.api.page(&self.range, &Page::NotOlderThan("0")).await?;
            self.known = Some(listed.version);
            return Ok(listed.objects);
        }
        let mut objects = Vec::new();
        let mut next: Option<String> = None;
        loop {
            let listed = self.api.page(&self.range, &Page::Now(next.as_deref())).await?;
            objects.extend(listed.objects);
            if listed.next.is_empty() {
                self.known = Some(listed.version);
                self.afresh = false;
                return Ok(objects);
            }
            next = Some(listed.next);
        }
    }

    /// What is known is too old: all of it is read, as it is now. A list out of a server's memory may be as old.
    fn forget(&mut self, error: &KubeError) {
        tracing::info!(range = ?self.range, from = self.known, %error, "what was missed is forgotten; reading all of it");
        (self.known, self.afresh, self.watch) = (None, true, None);
    }

    fn take(&mut self, object: Object, change: fn(Object) -> Change) -> News {
        self.pause = PAUSE;
        self.known = Some(object.version().to_owned());
        News::Changed(change(object))
    }

    fn refused(&self, status: Status) -> KubeError {
        KubeError::refused(&self.api.server(), &format!("a watch of {}", self.range.resource.plural), status)
    }

    fn lost(&mut self, error: KubeError) -> News {
        self.watch = None;
        let asked_for = Duration::from_secs(u64::from(error.retry_after()));
        if error.is_awaited() {
            // Nobody is asked, so nobody is spared by a longer pause.
            self.retry = Some(Instant::now() + AWAITED);
            return News::Lost(error);
        }
        let pause = self.pause.mul_f32(0.5 + fastrand::f32() / 2.0).max(asked_for.min(MAX_PAUSE * 4));
        self.retry = Some(Instant::now() + pause);
        self.pause = (self.pause * 2).min(MAX_PAUSE);
        News::Lost(error)
    }
}

#[cfg(test)]
#[path = "follow_tests.rs"]
mod tests;
