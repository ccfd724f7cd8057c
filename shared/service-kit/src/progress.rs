use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use keelson_proto::keelson::admin::v1 as pb;

use crate::now_unix_nanos;

/// Progress of this service's loops, and the state of its dependencies. A service that accepts connections but has a stuck
/// loop is not healthy.
#[derive(Debug, Clone)]
pub struct Progress(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    origin: Instant,
    started_unix_nanos: i64,
    loops: Mutex<Vec<Arc<LoopEntry>>>,
    conditions: Mutex<BTreeMap<String, Condition>>,
}

#[derive(Debug)]
struct LoopEntry {
    name: &'static str,
    stuck_after: Duration,
    last_ms: AtomicU64,
}

#[derive(Debug, Clone)]
struct Condition {
    message: Option<String>,
    since_unix_nanos: i64,
}

/// Handle of a loop, which calls [`LoopHandle::tick`] in each iteration.
#[derive(Debug, Clone)]
pub struct LoopHandle {
    entry: Arc<LoopEntry>,
    origin: Instant,
}

impl LoopHandle {
    /// How often an idle loop wakes up only to tick.
    pub const HEARTBEAT: Duration = Duration::from_secs(10);

    /// Records that the loop makes progress.
    pub fn tick(&self) {
        self.entry.last_ms.store(millis(self.origin.elapsed()), Ordering::Relaxed);
    }

    /// Runs `work` and ticks meanwhile. `work` must be bounded: a call with a deadline, a pause. Cancel-safe if `work` is.
    pub async fn while_at<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            self.tick();
            if let Ok(done) = tokio::time::timeout(Self::HEARTBEAT, &mut work).await {
                return done;
            }
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Default for Progress {
    fn default() -> Self {
        Self(Arc::new(Inner {
            origin: Instant::now(),
            started_unix_nanos: now_unix_nanos(),
            loops: Mutex::default(),
            conditions: Mutex::default(),
        }))
    }
}

impl Progress {
    /// Registers a loop that counts as stuck after 30 s without a tick (architecture §5).
    pub fn register(&self, name: &'static str) -> LoopHandle {
        self.register_within(name, Duration::from_secs(30))
    }

    /// [`Progress::register`] with another timeout.
    pub(crate) fn register_within(&self, name: &'static str, stuck_after: Duration) -> LoopHandle {
        let entry = Arc::new(LoopEntry {
            name,
            stuck_after,
            last_ms: AtomicU64::new(millis(self.0.origin.elapsed())),
        });
        self.0.loops.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&entry));
        LoopHandle { entry, origin: self.0.origin }
    }

    /// Sets the condition of a dependency: `Ok`, or a message with what is wrong and what the service does about it.
    pub fn condition(&self, name: &str, state: Result<(), String>) {
        let message = state.err();
        let mut conditions = self.0.conditions.lock().unwrap_or_else(PoisonError::into_inner);
        let since_unix_nanos = match conditions.get(name) {
            Some(old) if old.message == message => return,
            Some(old) if old.message.is_some() == message.is_some() => old.since_unix_nanos,
            _ => now_unix_nanos(),
        };
        match &message {
            Some(text) => tracing::warn!(condition = name, "{text}"),
            None => tracing::debug!(condition = name, "recovered"),
        }
        conditions.insert(name.to_owned(), Condition { message, since_unix_nanos });
    }

    /// Start time of this process.
    pub(crate) fn started_unix_nanos(&self) -> i64 {
        self.0.started_unix_nanos
    }

    /// The name of a loop that is stuck.
    pub fn stuck(&self) -> Option<&'static str> {
        let now = millis(self.0.origin.elapsed());
        let loops = self.0.loops.lock().unwrap_or_else(PoisonError::into_inner);
        loops
            .iter()
            .find(|l| now.saturating_sub(l.last_ms.load(Ordering::Relaxed)) > millis(l.stuck_after))
            .map(|l| l.name)
    }

    /// The response to `GetProgress`.
    pub fn report(&self, version: &str) -> pb::GetProgressResponse {
        let now = millis(self.0.origin.elapsed());
        let loops = self.0.loops.lock().unwrap_or_else(PoisonError::into_inner);
        let conditions = self.0.conditions.lock().unwrap_or_else(PoisonError::into_inner);
        pb::GetProgressResponse {
            loops: loops
                .iter()
                .map(|l| pb::Loop {
                    name: l.name.to_owned(),
                    silent_ms: now.saturating_sub(l.last_ms.load(Ordering::Relaxed)),
                    stuck_after_ms: millis(l.stuck_after),
                })
                .collect(),
            conditions: conditions
                .iter()
                .map(|(name, c)| pb::Condition {
                    name: name.clone(),
                    ok: c.message.is_none(),
                    message: c.message.clone().unwrap_or_default(),
                    since_unix_nanos: c.since_unix_nanos,
                })
                .collect(),
            started_unix_nanos: self.0.started_unix_nanos,
            version: version.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_loop_ticks_during_long_work() {
        let progress = Progress::default();
        let handle = progress.register("writer");
        let began = tokio::time::Instant::now();
        let ticks = || handle.entry.last_ms.swap(u64::MAX, Ordering::Relaxed) != u64::MAX;
        let work = async {
            for _ in 0..7 {
                tokio::time::sleep(LoopHandle::HEARTBEAT + Duration::from_millis(1)).await;
                assert!(ticks(), "after {:?}", began.elapsed());
            }
            "done"
        };
        assert_eq!(handle.while_at(work).await, "done");
        assert!(began.elapsed() > 2 * Duration::from_secs(30));
    }

    #[test]
    fn condition_start_time_is_kept_while_only_the_message_changes() {
        let progress = Progress::default();
        progress.condition("runtime", Err("no answer".into()));
        let first = progress.report("0").conditions[0].since_unix_nanos;
        progress.condition("runtime", Err("still no answer".into()));
        let report = progress.report("0");
        assert_eq!(report.conditions[0].since_unix_nanos, first);
        assert_eq!(report.conditions[0].message, "still no answer");
        progress.condition("runtime", Ok(()));
        assert!(progress.report("0").conditions[0].ok);
    }
}
