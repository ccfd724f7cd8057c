//! A range and every change of it.

use std::time::Duration;

use etcd_client::{EventType, WatchResponse, WatchStream};
use tokio::time::Instant;

use crate::client::{Entry, Etcd};
use crate::error::EtcdError;
use crate::keys::Range;

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

/// Follows a range. It never ends, and misses nothing for good.
#[derive(Debug)]
pub struct Follower {
    etcd: Etcd,
    range: Range,
    watch: Option<(WatchStream, u64)>,
    /// The first revision that is not known yet; 0: nothing is known.
    next: i64,
    retry: Option<Instant>,
    pause: Duration,
}

impl Follower {
    /// Of a range of which nothing is known.
    pub fn new(etcd: Etcd, range: Range) -> Self {
        Self { etcd, range, watch: None, next: 0, retry: None, pause: PAUSE }
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
                        self.next = listing.revision + 1;
                        self.watch = None;
                        News::Listed(listing.entries)
                    }
                    // The revision of the first page may have been compacted while the others were read.
                    Err(error) => self.lost(error),
                };
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
                    self.next = 0;
                    continue;
                }
                Ok(Some(answer)) if answer.canceled() => self.ended(answer.cancel_reason()),
                Ok(Some(answer)) => return self.take(&answer),
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

    fn take(&mut self, answer: &WatchResponse) -> News {
        self.pause = PAUSE;
        let changes: Vec<Change> = answer
            .events()
            .iter()
            .filter_map(|event| {
                let kv = event.kv()?;
                Some(match event.event_type() {
                    EventType::Put => Change::Put(Entry::from(kv)),
                    EventType::Delete => Change::Deleted(String::from_utf8_lossy(kv.key()).into_owned()),
                })
            })
            .collect();
        let last = answer.events().iter().filter_map(|event| event.kv()).map(|kv| kv.mod_revision()).max();
        match last {
            // Not the one after it: the changes of one revision may come in several answers.
            Some(last) => {
                self.next = self.next.max(last);
                News::Changed(changes)
            }
            None => {
                // The answer that a watch was made tells nothing of what lies between its start and now.
                let told = answer.header().filter(|_| !answer.created()).map_or(0, |h| h.revision() + 1);
                self.next = self.next.max(told);
                News::InTouch
            }
        }
    }

    fn lost(&mut self, error: EtcdError) -> News {
        self.watch = None;
        self.retry = Some(Instant::now() + self.pause.mul_f32(0.5 + fastrand::f32() / 2.0));
        self.pause = (self.pause * 2).min(MAX_PAUSE);
        News::Lost(error)
    }
}
