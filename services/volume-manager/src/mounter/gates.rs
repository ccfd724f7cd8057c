//! How many processes or threads work on one thing, such as a volume or a device, and whether one of them hangs.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// The number of processes or threads that work on one thing at once.
const MAX_RUNNING: usize = 4;
/// A killed process normally ends within this time; one that does not hangs in the kernel.
const KILL_GRACE: Duration = Duration::from_secs(1);

/// A process or thread that nobody waits for any more and that has not ended yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Abandoned {
    /// What it does, without secrets: `mount srv:/a on /b`.
    pub(super) what: String,
    /// The id of the process; `None` for a thread of this service.
    pub(super) pid: Option<i32>,
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
    /// All places have been taken for as long as the caller was ready to wait.
    Busy,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hung(Abandoned { what, pid, started, .. }) => {
                let seconds = started.elapsed().as_secs();
                let process = pid.map(|pid| format!(" (process {pid})")).unwrap_or_default();
                write!(f, "the earlier attempt to {what}{process} has not ended for {seconds} s")
            }
            Self::Busy => write!(f, "{MAX_RUNNING} accesses to it have not ended yet"),
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
    /// A process has ended, or was abandoned.
    changed: Notify,
}

impl Gates {
    /// Lets a process start that works on `key`. Waits at most `patience` for a free place, and if a process was killed just
    /// now, a moment for its end.
    pub(super) async fn enter(&self, key: &str, patience: Duration) -> Result<Pass, Refusal> {
        let give_up = Instant::now() + patience;
        loop {
            let changed = self.inner.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let refusal = match self.try_enter(key) {
                Ok(pass) => return Ok(pass),
                Err(refusal) => refusal,
            };
            let until = match &refusal {
                Refusal::Hung(Abandoned { abandoned, .. }) => *abandoned + KILL_GRACE,
                Refusal::Busy => give_up,
            };
            // Cancel-safe: nothing is taken before `try_enter`.
            if timeout_at(until, changed).await.is_err() {
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
    pub(super) fn abandon(&mut self, what: String, pid: Option<i32>, started: Instant) {
        let mut gates = self.gates.lock();
        if let Some(gate) = gates.get_mut(&self.key).filter(|gate| gate.abandoned.is_none()) {
            gate.abandoned = Some(Abandoned { what, pid, started, abandoned: Instant::now() });
            self.is_abandoned = true;
        }
        drop(gates);
        // Who waits for a place learns that it hangs.
        self.gates.inner.changed.notify_waiters();
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
        self.gates.inner.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(120);

    #[tokio::test(start_paused = true)]
    async fn one_abandoned_process_keeps_others_for_the_same_thing_from_starting() {
        let gates = Gates::default();
        let mut pass = gates.enter("a", LONG).await.unwrap();
        pass.abandon("mount x".to_owned(), Some(7), Instant::now());
        tokio::time::advance(Duration::from_secs(35)).await;
        let text = gates.enter("a", LONG).await.unwrap_err().to_string();
        assert_eq!(text, "the earlier attempt to mount x (process 7) has not ended for 35 s");
        drop(gates.enter("b", LONG).await.unwrap());
        drop(pass);
        drop(gates.enter("a", LONG).await.unwrap());
        assert!(gates.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_process_killed_just_now_is_awaited() {
        let gates = Gates::default();
        let mut pass = gates.enter("a", LONG).await.unwrap();
        pass.abandon("x".to_owned(), Some(7), Instant::now());
        let entering = gates.enter("a", LONG);
        tokio::pin!(entering);
        assert!(futures_util::poll!(&mut entering).is_pending());
        drop(pass);
        entering.await.unwrap();
    }

    async fn take_all(gates: &Gates) -> Vec<Pass> {
        let mut passes = Vec::new();
        for _ in 0..MAX_RUNNING {
            passes.push(gates.enter("a", LONG).await.unwrap());
        }
        passes
    }

    #[tokio::test(start_paused = true)]
    async fn a_further_process_waits_for_a_free_place() {
        let gates = Gates::default();
        let mut passes = take_all(&gates).await;
        let entering = gates.enter("a", LONG);
        tokio::pin!(entering);
        assert!(futures_util::poll!(&mut entering).is_pending());
        tokio::time::advance(LONG / 2).await;
        assert!(futures_util::poll!(&mut entering).is_pending());
        passes.pop();
        let pass = entering.await.unwrap();
        drop((pass, passes));
        assert!(gates.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_a_place_longer_than_its_deadline() {
        let gates = Gates::default();
        let _passes = take_all(&gates).await;
        let started = Instant::now();
        let refusal = gates.enter("a", LONG).await.unwrap_err();
        assert_eq!((refusal, started.elapsed()), (Refusal::Busy, LONG));
        drop(gates.enter("b", LONG).await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_is_abandoned_meanwhile_ends_the_wait_for_a_place() {
        let gates = Gates::default();
        let mut passes = take_all(&gates).await;
        let entering = gates.enter("a", LONG);
        tokio::pin!(entering);
        assert!(futures_util::poll!(&mut entering).is_pending());
        passes[0].abandon("mount x".to_owned(), Some(7), Instant::now());
        assert!(matches!(entering.await.unwrap_err(), Refusal::Hung(_)));
    }
}
