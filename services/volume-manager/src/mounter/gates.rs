//! How many processes work on one thing, such as a volume or a device, and whether one of them hangs.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// The number of processes that work on one thing at once.
const MAX_RUNNING: usize = 4;
/// A killed process normally ends within this time; one that does not hangs in the kernel.
const KILL_GRACE: Duration = Duration::from_secs(1);

/// A process that nobody waits for any more and that has not ended yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Abandoned {
    /// What it does, without secrets: `mount srv:/a on /b`.
    pub(super) what: String,
    /// Its process id.
    pub(super) pid: i32,
    /// When it was started.
    pub(super) started: Instant,
    /// When it was abandoned.
    abandoned: Instant,
}

/// Why a process may not start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Refusal {
    /// An earlier one has not ended.
    Hung(Abandoned),
    /// Too many are running.
    Busy,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hung(Abandoned { what, pid, started, .. }) => {
                let seconds = started.elapsed().as_secs();
                write!(f, "the earlier attempt to {what} (process {pid}) has not ended for {seconds} s")
            }
            Self::Busy => write!(f, "{MAX_RUNNING} processes work on it already"),
        }
    }
}

#[derive(Debug, Default)]
struct Gate {
    running: usize,
    abandoned: Option<Abandoned>,
}

/// The processes per thing. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct Gates {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    gates: Mutex<HashMap<String, Gate>>,
    ended: Notify,
}

impl Gates {
    /// Lets a process start that works on `key`. If one was killed just now, its end is awaited for a moment.
    pub(super) async fn enter(&self, key: &str) -> Result<Pass, Refusal> {
        loop {
            let ended = self.inner.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            let refusal = match self.try_enter(key) {
                Ok(pass) => return Ok(pass),
                Err(refusal) => refusal,
            };
            let Refusal::Hung(Abandoned { abandoned, .. }) = &refusal else { return Err(refusal) };
            if timeout_at(*abandoned + KILL_GRACE, ended).await.is_err() {
                return Err(refusal);
            }
        }
    }

    fn try_enter(&self, key: &str) -> Result<Pass, Refusal> {
        let mut gates = self.lock();
        let gate = gates.entry(key.to_owned()).or_default();
        if let Some(abandoned) = &gate.abandoned {
            return Err(Refusal::Hung(abandoned.clone()));
        }
        if gate.running >= MAX_RUNNING {
            return Err(Refusal::Busy);
        }
        gate.running += 1;
        drop(gates);
        Ok(Pass { gates: self.clone(), key: key.to_owned(), is_abandoned: false })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Gate>> {
        self.inner.gates.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A process that has started. It has ended when this is dropped.
#[derive(Debug)]
pub(super) struct Pass {
    gates: Gates,
    key: String,
    is_abandoned: bool,
}

impl Pass {
    /// Records that nobody waits for the process any more. Until it ends, no other one for the same thing may start.
    pub(super) fn abandon(&mut self, what: String, pid: i32, started: Instant) {
        let mut gates = self.gates.lock();
        if let Some(gate) = gates.get_mut(&self.key).filter(|gate| gate.abandoned.is_none()) {
            gate.abandoned = Some(Abandoned { what, pid, started, abandoned: Instant::now() });
            self.is_abandoned = true;
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut gates = self.gates.lock();
        if let Some(gate) = gates.get_mut(&self.key) {
            gate.running -= 1;
            if self.is_abandoned {
                gate.abandoned = None;
            }
            if gate.running == 0 {
                gates.remove(&self.key);
            }
        }
        drop(gates);
        self.gates.inner.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_abandoned_process_keeps_others_for_the_same_thing_from_starting() {
        let gates = Gates::default();
        let mut pass = gates.enter("a").await.unwrap();
        pass.abandon("mount x".to_owned(), 7, Instant::now());
        tokio::time::advance(Duration::from_secs(35)).await;
        let text = gates.enter("a").await.unwrap_err().to_string();
        assert_eq!(text, "the earlier attempt to mount x (process 7) has not ended for 35 s");
        drop(gates.enter("b").await.unwrap());
        drop(pass);
        drop(gates.enter("a").await.unwrap());
        assert!(gates.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_process_killed_just_now_is_awaited() {
        let gates = Gates::default();
        let mut pass = gates.enter("a").await.unwrap();
        pass.abandon("x".to_owned(), 7, Instant::now());
        let entering = gates.enter("a");
        tokio::pin!(entering);
        assert!(futures_util::poll!(&mut entering).is_pending());
        drop(pass);
        entering.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn only_so_many_processes_work_on_the_same_thing() {
        let gates = Gates::default();
        let mut passes = Vec::new();
        for _ in 0..MAX_RUNNING {
            passes.push(gates.enter("a").await.unwrap());
        }
        assert_eq!(gates.enter("a").await.unwrap_err(), Refusal::Busy);
        passes.pop();
        gates.enter("a").await.unwrap();
    }
}
