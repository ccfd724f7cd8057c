//! A range and every change of it.

use std::collections::BTreeSet;
use std::time::Duration;

use etcd_client::{EventType, WatchResponse, WatchStream};
use tokio::time::Instant;

use crate::client::{ATTEMPT, Entry, Etcd};
use crate::connect::{ALIVE_EVERY, ALIVE_WITHIN};
use crate::error::EtcdError;
use crate::keys::Range;

/// When changes are told again after a fault at the latest, once a member answers: the time in which a silent connection is
/// noticed, one member that does not answer, either, and the longest pause.
pub const RESUMES_WITHIN: Duration =
    ALIVE_EVERY.saturating_add(ALIVE_WITHIN).saturating_add(ATTEMPT).saturating_add(MAX_PAUSE);
/// After the first failure; doubled with each further one.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest pause.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// One key has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// It is there with this value.
    Put(Entry),
    /// It is gone.
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

/// What a [`Follower`] tells.
#[derive(Debug)]
pub enum News {
    /// The whole range as it is; what is not in it is not there.
    Listed(Vec<Entry>),
    /// Keys have changed since.
    Changed(Vec<Change>),
    /// Nothing has changed, and nothing is missed.
    InTouch,
    /// Nothing is heard; it is tried again.
    Lost(EtcdError),
}

/// How the store of a watch is to what was told.
enum Standing {
    Follows,
    Lags,
    Another,
}

/// Follows a range. It never ends, misses nothing for good, and tells nothing twice but in a list.
#[derive(Debug)]
pub struct Follower {
    etcd: Etcd,
    range: Range,
    watch: Option<(WatchStream, u64)>,
    /// The first revision of which not all is known; 0: nothing is known.
    next: i64,
    /// The keys of that revision that were told.
    told: BTreeSet<String>,
    /// The id of the cluster that was listed.
    cluster: u64,
    /// A member knows less than was told already: it lags, or the store is another one.
    in_doubt: bool,
    retry: Option<Instant>,
    pause: Duration,
}

impl Follower {
    /// Of a range of which nothing is known.
    pub fn new(etcd: Etcd, range: Range) -> Self {
        Self {
            etcd,
            range,
            watch: None,
            next: 0,
            told: BTreeSet::new(),
            cluster: 0,
            in_doubt: false,
            retry: None,
            pause: PAUSE,
        }
    }

    /// The next news. Cancel-safe: what was read is told by the next call that is not cancelled, or read again.
    pub async fn next(&mut self) -> News {
        loop {
            if let Some(at) = self.retry {
                tokio::time::sleep_until(at).await;
                self.retry = None;
            }
            if self.next == 0 {
                return match self.etcd.list(&self.range).await {
                    Ok(listing) => {
                        self.turn_to(listing.revision + 1);
                        self.cluster = listing.cluster;
                        self.watch = None;
                        News::Listed(listing.entries)
                    }
                    // The revision of the first page may have been compacted while the others were read.
                    Err(error) => self.lost(error),
                };
            }
            if self.in_doubt {
                match self.etcd.revision(&self.range).await {
                    Ok(revision) => {
                        self.in_doubt = false;
                        if revision + 1 < self.next {
                            self.begin_anew("it has fewer revisions than before");
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
                        "etcd has compacted what was missed; reading all of it"
                    );
                    self.watch = None;
                    self.turn_to(0);
                    continue;
                }
                Ok(Some(answer)) if answer.canceled() => self.ended(answer.cancel_reason()),
                Ok(Some(answer)) => match self.standing(&answer) {
                    Standing::Follows => return self.take(&answer),
                    Standing::Lags => {
                        // None of its changes is news.
                        self.in_doubt = true;
                        continue;
                    }
                    Standing::Another => {
                        self.begin_anew("it is another cluster");
                        continue;
                    }
                },
                Ok(None) => self.ended(""),
                Err(error) => self.etcd.failed("a watch", error),
            };
            self.watch = None;
            self.etcd.give_up(generation).await;
            // A member that goes is nothing to tell of while another one is there.
            if self.pause > PAUSE {
                return self.lost(error);
            }
            tracing::debug!(%error, "a watch has ended; it goes on elsewhere");
            self.pause *= 2;
        }
    }

    fn ended(&self, reason: &str) -> EtcdError {
        let message = if reason.is_empty() { "the watch was ended" } else { reason };
        EtcdError::Unreachable { endpoints: self.etcd.endpoints(), message: message.to_owned() }
    }

    /// All before `revision` is known.
    fn turn_to(&mut self, revision: i64) {
        self.next = revision;
        self.told.clear();
    }

    /// The store is not the one that was listed: it was restored from a snapshot, or made anew.
    fn begin_anew(&mut self, why: &str) {
        tracing::warn!(known = self.next - 1, "what etcd has is not what it had: {why}; reading all of it");
        self.watch = None;
        self.turn_to(0);
    }

    fn standing(&self, answer: &WatchResponse) -> Standing {
        let Some(header) = answer.header() else { return Standing::Follows };
        if header.cluster_id() != self.cluster {
            Standing::Another
        } else if header.revision() + 1 < self.next {
            Standing::Lags
        } else {
            Standing::Follows
        }
    }

    fn take(&mut self, answer: &WatchResponse) -> News {
        self.pause = PAUSE;
        let mut changes = Vec::new();
        for event in answer.events() {
            let Some(kv) = event.kv() else { continue };
            let change = match event.event_type() {
                EventType::Put => Change::Put(Entry::from(kv)),
                EventType::Delete => Change::Deleted(String::from_utf8_lossy(kv.key()).into_owned()),
            };
            if self.is_news(kv.mod_revision(), change.key()) {
                changes.push(change);
            }
        }
        if !changes.is_empty() {
            return News::Changed(changes);
        }
        // The answer that a watch was made tells nothing of what lies between its start and now.
        let told = answer.header().filter(|_| !answer.created() && answer.events().is_empty());
        if let Some(next) = told.map(|header| header.revision() + 1).filter(|next| *next > self.next) {
            self.turn_to(next);
        }
        News::InTouch
    }

    /// Whether a change has not been told before. The changes of one revision may come in several answers, with an end of
    /// the watch between them; the watch goes on from that revision then, and a part of it comes twice.
    fn is_news(&mut self, revision: i64, key: &str) -> bool {
        if revision > self.next {
            self.turn_to(revision);
        }
        revision == self.next && self.told.insert(key.to_owned())
    }

    fn lost(&mut self, error: EtcdError) -> News {
        self.watch = None;
        self.retry = Some(Instant::now() + self.pause.mul_f32(0.5 + fastrand::f32() / 2.0));
        self.pause = (self.pause * 2).min(MAX_PAUSE);
        News::Lost(error)
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::Etcd as Settings;

    use super::*;

    #[test]
    fn what_comes_twice_after_an_end_of_the_watch_is_told_once() {
        let mut follower = Follower::new(Etcd::new(Settings::plain(Vec::new())), Range::prefix("/a/"));
        follower.turn_to(5);
        let mut told = |revision, key| follower.is_news(revision, key);
        assert!(told(5, "/a/x") && told(5, "/a/y"));
        assert!(!told(4, "/a/z"), "it is in the list already");
        // The watch ends here and goes on from 5.
        assert!(!told(5, "/a/x") && !told(5, "/a/y"));
        assert!(told(5, "/a/z"), "the rest of the revision");
        assert!(told(7, "/a/x") && !told(7, "/a/x") && told(8, "/a/x"));
    }
}
