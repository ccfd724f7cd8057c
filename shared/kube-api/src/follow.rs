//! List and watch of a range of objects.

use std::fmt;
use std::time::Duration;

use futures_util::StreamExt as _;
use keelson_list_watch::{DelayBounds, ListWatch, OpenError, Read, RetryDelay};
use kube::core::{Status, WatchEvent as RawEvent};
use serde_json::Value;

use crate::connect::KubeApi;
use crate::error::KubeError;
use crate::ranges::{Events, Page};
use crate::resource::{Object, Range};

/// The retry interval while there is no kubeconfig.
const KUBECONFIG_POLL: Duration = Duration::from_secs(1);

/// A change of one object; a deleted one in its last state.
pub type Change = keelson_list_watch::Change<Object, Object>;
/// What a [`Follower`] reports.
pub type WatchEvent = keelson_list_watch::WatchEvent<Object, Change, KubeError>;
/// Lists and watches a range. It never ends and eventually reports the latest state of every object.
pub type Follower = keelson_list_watch::Follower<KubeListWatch>;

/// The list and watch of an API server, with the position in the range.
pub struct KubeListWatch {
    api: KubeApi,
    range: Range,
    /// The resource version up to which all changes are reported; `None`: the range must be listed.
    version: Option<String>,
    /// The next list must be consistent, not from the server's cache: the server has refused to watch from the last version.
    needs_consistent_list: bool,
}

/// An open watch.
pub struct KubeWatch {
    events: Events,
    /// The number of its connection.
    connection: u64,
}

impl fmt::Debug for KubeListWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KubeListWatch")
            .field("range", &self.range)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for KubeWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KubeWatch").field("connection", &self.connection).finish_non_exhaustive()
    }
}

impl ListWatch for KubeListWatch {
    type Client = KubeApi;
    type Range = Range;
    type Item = Object;
    type Changes = Change;
    type Watch = KubeWatch;
    type Error = KubeError;

    /// Nodes reconnect soon after an API server restarts, and not all at once.
    const DELAYS: DelayBounds =
        DelayBounds { first: Duration::from_millis(200), longest: Duration::from_secs(15) };
    const OPEN_IS_CONTACT: bool = true;

    fn new(api: KubeApi, range: Range) -> Self {
        Self { api, range, version: None, needs_consistent_list: false }
    }

    async fn list(&mut self) -> Result<Vec<Object>, KubeError> {
        let listed = self.list_pages().await;
        if let Err(error) = &listed {
            self.needs_consistent_list |= error.needs_list();
        }
        listed
    }

    async fn open(&mut self) -> Result<KubeWatch, OpenError<KubeError>> {
        // Without a version the watch would begin now, and what happened before would be lost.
        let Some(version) = self.version.as_deref() else { return Err(OpenError::Expired) };
        match self.api.watch(&self.range, version).await {
            Ok((events, connection)) => Ok(KubeWatch { events, connection }),
            Err(error) if error.needs_list() => {
                self.expire(&error);
                Err(OpenError::Expired)
            }
            Err(error) => Err(OpenError::Failed(error)),
        }
    }

    async fn read(&mut self, watch: &mut KubeWatch) -> Read<Change, KubeError> {
        // Cancel-safe: an event that is not taken stays in the stream; `replaced` waits for a state.
        let event = tokio::select! {
            event = watch.events.next() => event,
            // With new credentials: the watch is reopened from the last version.
            () = self.api.replaced(watch.connection) => return Read::Replaced,
        };
        let error = match event {
            Some(Ok(event)) => match self.take(event) {
                Ok(read) => return read,
                Err(status) => self.refused(*status),
            },
            Some(Err(error)) => error,
            // The server ends each watch after a while.
            None => return Read::Ended,
        };
        if error.needs_list() {
            self.expire(&error);
            return Read::Expired;
        }
        Read::Failed(error)
    }

    fn retry_delay(error: &KubeError) -> RetryDelay {
        if error.is_awaited() {
            return RetryDelay::Fixed(KUBECONFIG_POLL);
        }
        RetryDelay::BackOff { at_least: Duration::from_secs(u64::from(error.retry_after())) }
    }
}

impl KubeListWatch {
    /// Lists the range. The first list comes from the server's watch cache: a list from etcd is expensive for the server, and
    /// all nodes list at once after its restart. A list after a refused version is consistent.
    async fn list_pages(&mut self) -> Result<Vec<Object>, KubeError> {
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
    fn expire(&mut self, error: &KubeError) {
        tracing::info!(range = ?self.range, from = self.version, %error, "the resource version has expired; listing the range again");
        (self.version, self.needs_consistent_list) = (None, true);
    }

    /// Takes an event and advances the position. The server ends a watch with an error event.
    fn take(&mut self, event: RawEvent<Value>) -> Result<Read<Change, KubeError>, Box<Status>> {
        let change = match event {
            RawEvent::Added(object) | RawEvent::Modified(object) => Change::Put(Object(object)),
            RawEvent::Deleted(object) => Change::Deleted(Object(object)),
            RawEvent::Bookmark(mark) => {
                self.version = Some(mark.metadata.resource_version);
                return Ok(Read::Contact);
            }
            RawEvent::Error(status) => return Err(status),
        };
        let (Change::Put(object) | Change::Deleted(object)) = &change;
        self.version = Some(object.version().to_owned());
        Ok(Read::Changed(change))
    }

    fn refused(&self, status: Status) -> KubeError {
        KubeError::refused(&self.api.server(), &format!("a watch of {}", self.range.resource.plural), status)
    }
}

#[cfg(test)]
#[path = "follow_tests.rs"]
mod tests;
