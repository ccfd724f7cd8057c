//! List and watch of a range.

use std::collections::BTreeSet;
use std::time::Duration;

use etcd_client::{EventType, WatchResponse, WatchStream};
use tokio::time::Instant;

use crate::client::{ATTEMPT, Entry, Etcd};
use crate::connect::{KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT};
use crate::error::EtcdError;
use crate::keys::Range;

/// The longest time from a fault until changes are reported again, if a member answers: the time to detect a silent
/// connection, one attempt on another member that does not answer, and the longest back-off.
pub const RESUMES_WITHIN: Duration =
    KEEPALIVE_INTERVAL.saturating_add(KEEPALIVE_TIMEOUT).saturating_add(ATTEMPT).saturating_add(MAX_PAUSE);
/// The back-off after the first failure; doubled with each further one.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest back-off.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// A change of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The key was created or updated.
    Put(Entry),
    /// The key was deleted.
    Deleted(String),
}

impl Change {
    /// The key that has changed.
    pub fn key(&self) -> &str {
        match self {
            Self::Put(entry) => &entry.key,
            Self::Deleted(key) => key,
        }
    }
}

/// What a [`Follower`] reports.
#[derive(Debug)]
pub enum WatchEvent {
    /// The whole range: a key that is not in the list does not exist.
    Listed(Vec<Entry>),
    /// Keys have changed since.
    Changed(Vec<Change>),
    /// The watch is open and nothing has changed.
    Contact,
    /// The watch has failed; it is retried.
    Lost(EtcdError),
}

/// How the store behind a watch answer compares to the revisions reported so far.
enum StoreState {
    /// At or past the reported revisions.
    Current,
    /// Behind the reported revisions.
    Lagging,
    /// Another cluster id.
    Different,
}

/// Lists and watches a range. It never ends, eventually reports every change, and repeats a change only in a list.
#[derive(Debug)]
pub struct Follower {
    etcd: Etcd,
    range: Range,
    watch: Option<(WatchStream, u64)>,
    /// The first revision that is not completely reported; 0: the range must be listed.
    next: i64,
    /// The keys of that revision that were reported.
    reported: BTreeSet<String>,
    /// The id of the listed cluster.
    cluster: u64,
    /// A member's revision is older than the reported ones: the member lags, or the store was replaced.
    must_check_revision: bool,
    retry: Option<Instant>,
    pause: Duration,
}

impl Follower {
    /// A follower that lists `range` first.
    pub fn new(etcd: Etcd, range: Range) -> Self {
        Self {
            etcd,
            range,
            watch: None,
            next: 0,
            reported: BTreeSet::new(),
            cluster: 0,
            must_check_revision: false,
            retry: None,
            pause: PAUSE,
        }
    }

    /// The next event. Cancel-safe: a cancelled call loses nothing; the next call reports it or reads it again.
    pub async fn next(&mut self) -> WatchEvent {
        loop {
            if let Some(at) = self.retry {
                tokio::time::sleep_until(at).await;
                self.retry = None;
            }
            if self.next == 0 {
                return match self.etcd.list(&self.range).await {
                    Ok(listing) => {
                        self.advance_to(listing.revision + 1);
                        self.cluster = listing.cluster;
                        self.watch = None;
                        WatchEvent::Listed(listing.entries)
                    }
                    // The revision of the first page may have been compacted while the others were read.
                    Err(error) => self.lost(error),
                };
            }
            if self.must_check_revision {
                match self.etcd.revision(&self.range).await {
                    Ok(revision) => {
                        self.must_check_revision = false;
                        if revision + 1 < self.next {
                            self.restart("its revision is lower than before");
                        }
                        continue;
                    }
                    Err(error) => return self.lost(error),
                }
            }
            if self.watch.is_none() {
                match self.etcd.watch(&self.range, self.next).await {
                    Ok(watch) => self.watch = Some(watch),
                    Err(error) => return self.lost(error),
                }
            }
            let Some((stream, generation)) = &mut self.watch else { continue };
            let generation = *generation;
            let error = match stream.message().await {
                Ok(Some(answer)) if answer.canceled() && answer.compact_revision() > 0 => {
                    let compacted = answer.compact_revision();
                    tracing::info!(
                        from = self.next,
                        compacted,
                        "etcd has compacted the missed changes; listing the range again"
                    );
                    self.watch = None;
                    self.advance_to(0);
                    continue;
                }
                Ok(Some(answer)) if answer.canceled() => self.ended(answer.cancel_reason()),
                Ok(Some(answer)) => match self.store_state(&answer) {
                    StoreState::Current => return self.take(&answer),
                    StoreState::Lagging => {
                        // Its changes are already reported.
                        self.must_check_revision = true;
                        continue;
                    }
                    StoreState::Different => {
                        self.restart("the cluster id differs");
                        continue;
                    }
                },
                Ok(None) => self.ended(""),
                Err(error) => self.etcd.failed("a watch", error),
            };
            self.watch = None;
            self.etcd.give_up(generation).await;
            // The loss of one member is not reported while another one answers.
            if self.pause > PAUSE {
                return self.lost(error);
            }
            tracing::debug!(%error, "the watch has ended; resuming it on another member");
            self.pause *= 2;
        }
    }

    fn ended(&self, reason: &str) -> EtcdError {
        let message = if reason.is_empty() { "the watch was ended" } else { reason };
        EtcdError::Unreachable { endpoints: self.etcd.endpoints(), message: message.to_owned() }
    }

    /// Marks all changes before `revision` as reported.
    fn advance_to(&mut self, revision: i64) {
        self.next = revision;
        self.reported.clear();
    }

    /// Lists the range again: the store was restored from a snapshot or recreated.
    fn restart(&mut self, why: &str) {
        tracing::warn!(known = self.next - 1, "the etcd store was replaced: {why}; listing the range again");
        self.watch = None;
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

    fn take(&mut self, answer: &WatchResponse) -> WatchEvent {
        self.pause = PAUSE;
        let mut changes = Vec::new();
        for event in answer.events() {
            let Some(kv) = event.kv() else { continue };
            let change = match event.event_type() {
                EventType::Put => Change::Put(Entry::from(kv)),
                EventType::Delete => Change::Deleted(String::from_utf8_lossy(kv.key()).into_owned()),
            };
            if self.is_unreported(kv.mod_revision(), change.key()) {
                changes.push(change);
            }
        }
        if !changes.is_empty() {
            return WatchEvent::Changed(changes);
        }
        // The answer to the creation of a watch does not report the changes between its start revision and now.
        let progress = answer.header().filter(|_| !answer.created() && answer.events().is_empty());
        if let Some(next) = progress.map(|header| header.revision() + 1).filter(|next| *next > self.next) {
            self.advance_to(next);
        }
        WatchEvent::Contact
    }

    /// Whether a change is not reported yet. The changes of one revision may arrive in several answers. If the watch ends
    /// between them, it resumes from that revision, and some changes arrive twice.
    fn is_unreported(&mut self, revision: i64, key: &str) -> bool {
        if revision > self.next {
            self.advance_to(revision);
        }
        revision == self.next && self.reported.insert(key.to_owned())
    }

    fn lost(&mut self, error: EtcdError) -> WatchEvent {
        self.watch = None;
        self.retry = Some(Instant::now() + self.pause.mul_f32(0.5 + fastrand::f32() / 2.0));
        self.pause = (self.pause * 2).min(MAX_PAUSE);
        WatchEvent::Lost(error)
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::Etcd as Settings;

    use super::*;

    #[test]
    fn changes_repeated_after_a_resumed_watch_are_reported_once() {
        let mut follower = Follower::new(Etcd::new(Settings::plain(Vec::new())), Range::prefix("/a/"));
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
