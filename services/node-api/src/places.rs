//! How many connections a port has at a time.
//!
//! A connection begins in a place for strangers, and moves to one for the known with its first request that is let in. So
//! neither strangers who say nothing nor answers that last, as a log that is followed, keep out who comes next. What has become
//! a stream of another protocol has no place any more: it is counted where it leads to.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse as _, Response};
use keelson_service_kit::{Progress, open_files_limit};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Connections that a port has at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Of clients of whom no request was let in yet; one more waits.
    pub strangers: usize,
    /// Of others; one more is answered 503.
    pub known: usize,
}

impl Limits {
    /// Where there are files enough; each connection takes some tens of KB.
    const MOST: Self = Self { strangers: 1024, known: 4096 };

    /// For a process that may have so many files open: with three ports that are full, a sixteenth of them is left.
    pub fn of(files: u64) -> Self {
        let files = usize::try_from(files).unwrap_or(usize::MAX);
        let Self { strangers, known } = Self::MOST;
        Self { strangers: strangers.min(files / 16).max(1), known: known.min(files / 4).max(1) }
    }

    /// For this process.
    pub fn of_this_process() -> Self {
        open_files_limit().map_or(Self::MOST, Self::of)
    }
}

/// The places of a port.
#[derive(Debug)]
pub struct Places {
    port: &'static str,
    limits: Limits,
    strangers: Arc<Semaphore>,
    known: Arc<Semaphore>,
}

impl Places {
    /// Of the port with this name, all free.
    pub fn new(port: &'static str, limits: Limits) -> Self {
        let strangers = Arc::new(Semaphore::new(limits.strangers));
        let known = Arc::new(Semaphore::new(limits.known));
        Self { port, limits, strangers, known }
    }

    /// A place for somebody who is about to come; waits for it. Cancel-safe: what is dropped is free again.
    pub(crate) async fn take(&self) -> Place {
        // Nobody closes it.
        let permit = Arc::clone(&self.strangers).acquire_owned().await.ok();
        let held = Mutex::new(Held { _permit: permit, is_known: false });
        Place { held, known: Arc::clone(&self.known), heard: Notify::new() }
    }

    /// Shows whether places have run out; whether they have. Those that have run out do so until an eighth is free again, so
    /// that nothing flickers.
    pub(crate) fn tell(&self, progress: &Progress, have_run_out: bool) -> bool {
        let Self { port, limits: Limits { strangers, known }, .. } = self;
        let has_run_out = |places: &Semaphore, of: usize| {
            let free = places.available_permits();
            free == 0 || (have_run_out && free <= of / 8)
        };
        let mut troubles = Vec::new();
        if has_run_out(&self.known, *known) {
            troubles.push(format!(
                "the {port} has {known} connections of clients that it has let in, and takes no more: who comes next is \
                 answered 503; close some, as of logs that are followed"
            ));
        }
        if has_run_out(&self.strangers, *strangers) {
            troubles.push(format!(
                "the {port} has {strangers} connections of clients that it has not let in yet, and takes no more: who comes \
                 next waits until one is closed, after 10 s without a whole request at the latest"
            ));
        }
        let now = !troubles.is_empty();
        if now || have_run_out {
            let state = if now { Err(troubles.join("; ")) } else { Ok(()) };
            progress.condition(&format!("connections of the {port}"), state);
        }
        now
    }
}

#[derive(Debug)]
struct Held {
    _permit: Option<OwnedSemaphorePermit>,
    is_known: bool,
}

/// The place of a connection, free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    held: Mutex<Held>,
    known: Arc<Semaphore>,
    heard: Notify,
}

impl Place {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request has come whole.
    pub(crate) fn hear(&self) {
        self.heard.notify_one();
    }

    /// Waits for the first request. Cancel-safe.
    pub(crate) async fn heard(&self) {
        self.heard.notified().await;
    }

    /// Moves to a place for the known, if it is not in one already; whether there was one.
    pub(crate) fn settle(&self) -> bool {
        let mut held = self.held();
        if !held.is_known {
            let Ok(permit) = Arc::clone(&self.known).try_acquire_owned() else { return false };
            *held = Held { _permit: Some(permit), is_known: true };
        }
        true
    }

    /// Whether it is one for the known.
    pub(crate) fn is_settled(&self) -> bool {
        self.held().is_known
    }
}

/// The answer to somebody who is let in and for whom there is no place.
pub(crate) fn no_place() -> Response {
    let text = "too many connections to this node are open; close some, or try again";
    let mut answer = (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Limits = Limits { strangers: 2, known: 1 };

    fn condition(progress: &Progress) -> Option<String> {
        let conditions = progress.report("").conditions;
        let found = conditions.into_iter().find(|condition| condition.name == "connections of the port")?;
        (!found.ok).then_some(found.message)
    }

    #[test]
    fn three_ports_that_are_full_leave_files_for_everything_else() {
        for (files, strangers, known) in
            [(1_048_576, 1024, 4096), (65_536, 1024, 4096), (16_384, 1024, 4096), (1024, 64, 256), (3, 1, 1)]
        {
            assert_eq!(Limits::of(files), Limits { strangers, known }, "{files}");
            let all = 3 * (strangers + known) as u64;
            assert!(all < files || files == 3, "{files}");
        }
    }

    #[tokio::test]
    async fn whoever_is_let_in_leaves_a_place_to_the_next_stranger() {
        let places = Places::new("port", SMALL);
        let (one, other) = (places.take().await, places.take().await);
        assert_eq!(places.strangers.available_permits(), 0);
        assert!(one.settle() && one.settle(), "once is enough");
        assert!(one.is_settled());
        assert_eq!((places.strangers.available_permits(), places.known.available_permits()), (1, 0));
        assert!(!other.settle(), "there is no place");
        assert!(!other.is_settled());
        drop(one);
        assert!(other.settle());
        drop(other);
        assert_eq!((places.strangers.available_permits(), places.known.available_permits()), (2, 1));
    }

    #[tokio::test]
    async fn places_that_have_run_out_are_told_with_their_number_until_there_are_some_again() {
        let (places, progress) = (Places::new("port", SMALL), Progress::default());
        let one = places.take().await;
        assert!(!places.tell(&progress, false));
        assert!(progress.report("").conditions.is_empty(), "nothing is told of a port that never was full");
        let other = places.take().await;
        assert!(places.tell(&progress, false));
        let told = condition(&progress).unwrap();
        assert!(told.starts_with("the port has 2 connections of clients that it has not let in"), "{told}");
        one.settle();
        assert!(places.tell(&progress, true));
        let told = condition(&progress).unwrap();
        assert!(told.starts_with("the port has 1 connections of clients that it has let in"), "{told}");
        drop((one, other));
        assert!(!places.tell(&progress, true));
        assert_eq!(condition(&progress), None);
    }

    #[tokio::test]
    async fn a_port_that_was_full_is_so_until_an_eighth_is_free() {
        let (places, progress) =
            (Places::new("port", Limits { strangers: 16, known: 1 }), Progress::default());
        let mut taken = Vec::new();
        for _ in 0..16 {
            taken.push(places.take().await);
        }
        assert!(places.tell(&progress, false));
        taken.truncate(14);
        assert!(places.tell(&progress, true));
        taken.truncate(13);
        assert!(!places.tell(&progress, true));
    }
}
