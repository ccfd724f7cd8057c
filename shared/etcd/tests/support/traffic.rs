//! Two counting writers and a follower, as load while faults are injected into etcd.

#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

use std::collections::BTreeMap;
use std::time::Duration;

use keelson_config::Etcd as Settings;
use keelson_etcd::{
    CALL_ENDS_WITHIN, Change, Entry, Etcd, Expect, Follower, RESUMES_WITHIN, Range, WatchEvent, Written,
};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::put;

const KEY: &str = "/count/all";
/// The time of a leader election, with an election timeout of a second on a busy machine.
const ELECTION: Duration = Duration::from_secs(5);
/// The pause between two writes of one writer, so that the cluster has time for its own work.
const PAUSE: Duration = Duration::from_millis(5);

/// The count of each writer.
type Count = BTreeMap<String, u64>;

/// The result of a writer.
#[derive(Debug, Default)]
struct Counted {
    /// Updates known to be made.
    done: u64,
    /// Calls whose error leaves open whether the update was made.
    unclear: u64,
    /// The longest call.
    longest: Duration,
}

/// What the follower has reported.
#[derive(Debug, Default)]
struct Seen {
    /// Sum and revision of each change, in the order of the reports.
    history: Vec<(u64, i64)>,
    lists: usize,
    losses: usize,
}

impl Seen {
    fn sum(&self) -> u64 {
        self.history.last().map_or(0, |(sum, _)| *sum)
    }
}

/// Two writers, each with a connection of its own, and a follower with another.
pub struct Traffic {
    stop: watch::Sender<bool>,
    seen: watch::Receiver<Seen>,
    writers: Vec<(String, JoinHandle<Counted>)>,
    follower: JoinHandle<()>,
}

impl Traffic {
    /// Starts the writers and the follower, and waits for the first changes.
    pub async fn start(endpoints: &[String]) -> Self {
        let etcd = || Etcd::new(Settings::plain(endpoints.to_vec()));
        let (stop, stopped) = watch::channel(false);
        let (sender, seen) = watch::channel(Seen::default());
        let follower = tokio::spawn(follow(etcd(), sender));
        // The list comes before the first change, so that the follower reports all of them.
        let mut own = Self { stop, seen, writers: Vec::new(), follower };
        let listed = own.seen.wait_for(|seen| seen.lists == 1);
        timeout(RESUMES_WITHIN, listed).await.expect("the follower begins").unwrap();
        for name in ["one", "two"] {
            let writer = count(etcd(), name.to_owned(), stopped.clone());
            own.writers.push((name.to_owned(), tokio::spawn(writer)));
        }
        own.assert_progress("at the beginning").await;
        own
    }

    /// Asserts that new changes are reported within the time that the crate documents.
    pub async fn assert_progress(&mut self, when: &str) {
        let (begun, now) = (Instant::now(), self.seen.borrow().sum());
        let limit = RESUMES_WITHIN + ELECTION;
        let more = timeout(limit, self.seen.wait_for(|seen| seen.sum() > now + 10)).await.is_ok();
        assert!(more, "{when}: nothing is seen within {limit:?}; losses: {}", self.seen.borrow().losses);
        println!("{when}: seen after {} ms", begun.elapsed().as_millis());
    }

    /// Waits until no more changes are reported.
    pub async fn wait_until_idle(&mut self) {
        while timeout(Duration::from_secs(2), self.seen.changed()).await.is_ok() {}
    }

    /// Stops the load and checks that every update was made once and reported once, in one history with one list.
    pub async fn check(mut self, endpoints: &[String]) {
        self.stop.send(true).unwrap();
        let (mut expected, mut unclear) = (Count::new(), 0);
        for (name, writer) in self.writers {
            let counted = timeout(CALL_ENDS_WITHIN * 3, writer).await.expect("the writer ends").unwrap();
            let longest = counted.longest;
            // Twice the limit for a busy machine: what matters is that a call ends.
            let limit = CALL_ENDS_WITHIN * 2;
            assert!(longest <= limit, "a call took {longest:?}, more than {limit:?}");
            unclear += counted.unclear;
            expected.insert(name, counted.done);
        }
        let etcd = Etcd::new(Settings::plain(endpoints.to_vec()));
        let found = decode(&etcd.get(KEY).await.unwrap().unwrap());
        assert_eq!(found, expected, "an update is lost or was made twice");
        let sum: u64 = found.values().sum();
        let all = timeout(RESUMES_WITHIN, self.seen.wait_for(|seen| seen.sum() == sum)).await.is_ok();
        assert!(all, "the last change is not seen");
        self.follower.abort();
        let seen = self.seen.borrow();
        assert_eq!(seen.lists, 1, "the watch resumes from its revision");
        let sums: Vec<u64> = seen.history.iter().map(|(sum, _)| *sum).collect();
        assert_eq!(sums, (1..=sum).collect::<Vec<_>>(), "a change is lost or was reported twice");
        assert!(seen.history.is_sorted_by(|(_, a), (_, b)| a < b), "in the order of their revisions");
        println!("{sum} updates, {unclear} unclear answers, {} losses reported", seen.losses);
    }
}

fn decode(entry: &Entry) -> Count {
    let text = std::str::from_utf8(&entry.value).unwrap();
    text.split_whitespace()
        .map(|part| part.split_once('=').unwrap())
        .map(|(name, count)| (name.to_owned(), count.parse().unwrap()))
        .collect()
}

fn encode(count: &Count) -> String {
    count.iter().map(|(name, count)| format!("{name}={count} ")).collect()
}

/// Increments its own count in a shared value until it is stopped and the outcome of each update is known. The value holds a
/// count per writer, so an update whose answer was lost is found there even after another writer's update.
async fn count(etcd: Etcd, name: String, stop: watch::Receiver<bool>) -> Counted {
    let mut own = Counted::default();
    let mut is_clear = true;
    loop {
        let begun = Instant::now();
        let read = etcd.get(KEY).await;
        own.longest = own.longest.max(begun.elapsed());
        let entry = match read {
            Ok(entry) => entry,
            Err(error) => {
                assert!(error.is_transient(), "{error}");
                continue;
            }
        };
        let mut now = entry.as_ref().map(decode).unwrap_or_default();
        let mine = now.get(&name).copied().unwrap_or_default();
        assert!(mine == own.done || (!is_clear && mine == own.done + 1), "{mine} instead of {}", own.done);
        own.done = mine;
        // An update still in flight names a revision: once that is replaced, the update cannot be made any more.
        if is_clear && *stop.borrow() {
            return own;
        }
        now.insert(name.clone(), mine + 1);
        let expect = entry.map_or(Expect::Absent, |entry| Expect::Revision(entry.mod_revision));
        let begun = Instant::now();
        let written = etcd.write(&[(KEY.to_owned(), expect)], &[put(KEY, &encode(&now))]).await;
        own.longest = own.longest.max(begun.elapsed());
        match written {
            Ok(Written::Done(_)) => {
                own.done += 1;
                is_clear = true;
            }
            // Another writer was faster; the value shows whether our earlier attempt was made.
            Ok(Written::Conflict(_)) => is_clear = false,
            Err(error) => {
                assert!(error.is_transient(), "{error}");
                own.unclear += 1;
                is_clear = false;
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn follow(etcd: Etcd, sender: watch::Sender<Seen>) {
    let mut follower = Follower::new(etcd, Range::prefix("/count/"));
    loop {
        let event = follower.next().await;
        sender.send_modify(|seen| match event {
            WatchEvent::Listed(_) => seen.lists += 1,
            WatchEvent::Changed(changes) => {
                for change in changes {
                    let Change::Put(entry) = change else { panic!("nobody deletes: {change:?}") };
                    seen.history.push((decode(&entry).values().sum(), entry.mod_revision));
                }
            }
            WatchEvent::Contact => {}
            WatchEvent::Lost(_) => seen.losses += 1,
        });
    }
}
