//! List and watch of a range.

use std::collections::BTreeSet;
use std::time::Duration;

use etcd_client::{EventType, WatchResponse, WatchStream};
use keelson_list_watch::{DelayBounds, ListWatch, OpenError, Read};

use crate::client::{ATTEMPT, Etcd};
use crate::connect::{KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT};
use crate::error::EtcdError;
use crate::keys::Range;
use crate::operations::Entry;

/// The longest time from a fault until changes are reported again, if a member answers: the time to detect a silent
/// connection, one attempt on another member that does not answer, and the longest back-off.
pub const RESUMES_WITHIN: Duration = KEEPALIVE_INTERVAL
    .saturating_add(KEEPALIVE_TIMEOUT)
    .saturating_add(ATTEMPT)
    .saturating_add(DELAYS.longest);
/// The bounds of the back-off.
const DELAYS: DelayBounds =
    DelayBounds { first: Duration::from_millis(100), longest: Duration::from_secs(5) };

/// A change of one key.
pub type Change = keelson_list_watch::Change<Entry, String>;
/// What a [`Follower`] reports. The changes of one message belong together.
pub type WatchEvent = keelson_list_watch::WatchEvent<Entry, Vec<Change>, EtcdError>;
/// Lists and watches a range. It never ends, eventually reports every change, and repeats a change only in a list.
pub type Follower = keelson_list_watch::Follower<EtcdListWatch>;

/// How the store behind a watch answer compares to the revisions reported so far.
enum StoreState {
    /// At or past the reported revisions.
    Current,
    /// Behind the reported revisions.
    Lagging,
    /// Another cluster id.
    Different,
}

/// The list and watch of etcd, with the position in the range.
#[derive(Debug)]
pub struct EtcdListWatch {
    etcd: Etcd,
    range: Range,
    /// The first revision that is not completely reported; 0: the range must be listed.
    next: i64,
    /// The keys of that revision that were reported.
    reported: BTreeSet<String>,
    /// The id of the listed cluster.
    cluster: u64,
    /// A member's revision is older than the reported ones: the member lags, or the store was replaced.
    must_check_revision: bool,
}

/// An open watch.
#[derive(Debug)]
pub struct EtcdWatch {
    stream: WatchStream,
    /// Of its connection.
    generation: u64,
}

impl ListWatch for EtcdListWatch {
    type Client = Etcd;
    type Range = Range;
    type Item = Entry;
    type Changes = Vec<Change>;
    type Watch = EtcdWatch;
    type Error = EtcdError;

    const DELAYS: DelayBounds = DELAYS;
    const OPEN_IS_CONTACT: bool = false;

    fn new(etcd: Etcd, range: Range) -> Self {
        Self { etcd, range, next: 0, reported: BTreeSet::new(), cluster: 0, must_check_revision: false }
    }

    async fn list(&mut self) -> Result<Vec<Entry>, EtcdError> {
        // An error may be that the revision of the first page was compacted while the others were read.
        let listing = self.etcd.list(&self.range).await?;
        self.advance_to(listing.revision + 1);
        self.cluster = listing.cluster;
        Ok(listing.entries)
    }

    async fn open(&mut self) -> Result<EtcdWatch, OpenError<EtcdError>> {
        // Without a revision the watch would begin now, and what happened before would be lost.
        if self.next == 0 || !self.is_revision_reached().await.map_err(OpenError::Failed)? {
            return Err(OpenError::Expired);
        }
        let (stream, generation) =
            self.etcd.watch(&self.range, self.next).await.map_err(OpenError::Failed)?;
        Ok(EtcdWatch { stream, generation })
    }

    async fn read(&mut self, watch: &mut EtcdWatch) -> Read<Vec<Change>, EtcdError> {
        match self.is_revision_reached().await {
            Ok(true) => {}
            Ok(false) => return Read::Expired,
            Err(error) => return Read::Failed(error),
        }
        match watch.stream.message().await {
            Ok(Some(answer)) if answer.canceled() && answer.compact_revision() > 0 => {
                let compacted = answer.compact_revision();
                tracing::info!(
                    from = self.next,
                    compacted,
                    "etcd has compacted the missed changes; listing the range again"
                );
                self.advance_to(0);
                Read::Expired
            }
            Ok(Some(answer)) if answer.canceled() => Read::Interrupted(self.ended(answer.cancel_reason())),
            Ok(Some(answer)) => self.take(&answer),
            Ok(None) => Read::Interrupted(self.ended("")),
            Err(error) => Read::Interrupted(self.etcd.failed("a watch", error)),
        }
    }

    async fn interrupted(&mut self, watch: EtcdWatch) {
        self.etcd.give_up(watch.generation).await;
    }
}

impl EtcdListWatch {
    fn ended(&self, reason: &str) -> EtcdError {
        let message = if reason.is_empty() { "the watch was ended" } else { reason };
        EtcdError::Unreachable { endpoints: self.etcd.endpoints(), message: message.to_owned() }
    }

    /// Marks all changes before `revision` as reported.
    fn advance_to(&mut self, revision: i64) {
        self.next = revision;
        self.reported.clear();
    }

    /// Checks the revision of the store after an answer of a lagging member. False: the store was replaced, and the range must be
    /// listed again.
    async fn is_revision_reached(&mut self) -> Result<bool, EtcdError> {
        if !self.must_check_revision {
            return Ok(true);
        }
        let revision = self.etcd.revision(&self.range).await?;
        self.must_check_revision = false;
        let is_reached = revision + 1 >= self.next;
        if !is_reached {
            self.restart("its revision is lower than before");
        }
        Ok(is_reached)
    }

    /// Discards the position: the store was restored from a snapshot or recreated.
    fn restart(&mut self, why: &str) {
        tracing::warn!(known = self.next - 1, "the etcd store was replaced: {why}; listing the range again");
        self.advance_to(0);
    }

    fn store_state(&self, answer: &WatchResponse) -> StoreState {
        let Some(header) = answer.header() else { return StoreState::Current };
        if header.cluster_id() != self.cluster {
            StoreState::Different
        } else if header.revision() + 1 < self.next {
            StoreState::Lagging
        } else {
            StoreState::Current
        }
    }

    fn take(&mut self, answer: &WatchResponse) -> Read<Vec<Change>, EtcdError> {
        match self.store_state(answer) {
            StoreState::Current => self.take_changes(answer),
            StoreState::Lagging => {
                // Its changes are already reported.
                self.must_check_revision = true;
                Read::Nothing
            }
            StoreState::Different => {
                self.restart("the cluster id differs");
                Read::Expired
            }
        }
    }

    fn take_changes(&mut self, answer: &WatchResponse) -> Read<Vec<Change>, EtcdError> {
        let mut changes = Vec::new();
        for event in answer.events() {
            let Some(kv) = event.kv() else { continue };
            let key = String::from_utf8_lossy(kv.key()).into_owned();
            if self.is_unreported(kv.mod_revision(), &key) {
                changes.push(match event.event_type() {
                    EventType::Put => Change::Put(Entry::from(kv)),
                    EventType::Delete => Change::Deleted(key),
                });
            }
        }
        if !changes.is_empty() {
            return Read::Changed(changes);
        }
        // The answer to the creation of a watch does not report the changes between its start revision and now.
        let progress = answer.header().filter(|_| !answer.created() && answer.events().is_empty());
        if let Some(next) = progress.map(|header| header.revision() + 1).filter(|next| *next > self.next) {
            self.advance_to(next);
        }
        Read::Contact
    }

    /// Whether a change is not reported yet. The changes of one revision may arrive in several answers. If the watch ends
    /// between them, it resumes from that revision, and some changes arrive twice.
    fn is_unreported(&mut self, revision: i64, key: &str) -> bool {
        if revision > self.next {
            self.advance_to(revision);
        }
        revision == self.next && self.reported.insert(key.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::Etcd as Settings;

    use super::*;

    #[test]
    fn changes_repeated_after_a_resumed_watch_are_reported_once() {
        let mut follower = EtcdListWatch::new(Etcd::new(Settings::plain(Vec::new())), Range::prefix("/a/"));
        follower.advance_to(5);
        let mut is_new = |revision, key| follower.is_unreported(revision, key);
        assert!(is_new(5, "/a/x") && is_new(5, "/a/y"));
        assert!(!is_new(4, "/a/z"), "it is in the list already");
        // The watch ends here and resumes from 5.
        assert!(!is_new(5, "/a/x") && !is_new(5, "/a/y"));
        assert!(is_new(5, "/a/z"), "the rest of the revision");
        assert!(is_new(7, "/a/x") && !is_new(7, "/a/x") && is_new(8, "/a/x"));
    }
}
