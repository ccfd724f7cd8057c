//! How many connections a port has at a time.
//!
//! A connection begins in a place for strangers ([`crate::strangers`]), and moves to one for the known with its first request that is
//! let in. So neither strangers who say nothing nor answers that last, as a log that is followed, keep out who comes next. What has
//! become a stream of another protocol has no place any more: it is counted where it leads to.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse as _, Response};
use keelson_service_kit::{CancellationToken, Progress, open_files_limit};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::strangers::{Source, StrangerPlace, Strangers};

/// So long after the last stranger that was displaced it is told.
const FLOOD_ENDS: Duration = Duration::from_secs(60);

/// Connections that a port has at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Of clients of whom no request was let in yet; for one more the oldest makes room.
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
    strangers: Arc<Strangers>,
    known: Arc<Semaphore>,
}

/// What was told of a port last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Told {
    /// Something is short.
    short: bool,
    /// How many strangers had been displaced by then.
    displaced: u64,
    /// Since strangers are displaced, one after the other within a minute: how many had been before, and when the last one was.
    flood: Option<(u64, Instant)>,
}

impl Places {
    /// Of the port with this name, all free.
    pub fn new(port: &'static str, limits: Limits) -> Self {
        let strangers = Arc::new(Strangers::new(limits.strangers));
        let known = Arc::new(Semaphore::new(limits.known));
        Self { port, limits, strangers, known }
    }

    /// A place for whoever has come from `address`.
    pub(crate) fn take(&self, address: IpAddr) -> Place {
        let stranger = self.strangers.take(address);
        let (source, leave) = (stranger.source(), stranger.leave());
        let held = Mutex::new(Held { stranger: Some(stranger), permit: None });
        Place { held, source, leave, known: Arc::clone(&self.known), heard: Notify::new() }
    }

    /// Shows whether places are short, after what was told `before`; what is told now. Places of the known are short until an eighth
    /// is free again, so that nothing flickers.
    pub(crate) fn tell(&self, progress: &Progress, before: Told) -> Told {
        let Self { port, limits: Limits { strangers, known }, .. } = self;
        let mut troubles = Vec::new();
        let free = self.known.available_permits();
        if free == 0 || (before.short && free <= known / 8) {
            troubles.push(format!(
                "the {port} has {known} connections of clients that it has let in, and takes no more: who comes next is \
                 answered 503; close some, as of logs that are followed"
            ));
        }
        let look = self.strangers.look();
        let flood = match before.flood {
            _ if look.displaced > before.displaced => {
                Some((before.flood.map_or(before.displaced, |(first, _)| first), Instant::now()))
            }
            flood => flood.filter(|(_, last)| last.elapsed() < FLOOD_ENDS),
        };
        if let Some((first, _)) = flood {
            let by =
                look.most.map(|(source, count)| format!(", {count} of them by {source}")).unwrap_or_default();
            troubles.push(format!(
                "the {port} closes connections of clients that it has not let in, each for a newer one, {} so far: {} of \
                 {strangers} places are taken{by}",
                look.displaced - first,
                look.taken,
            ));
        }
        let short = !troubles.is_empty();
        if short || before.short {
            let state = if short { Err(troubles.join("; ")) } else { Ok(()) };
            progress.condition(&format!("connections of the {port}"), state);
        }
        Told { short, displaced: look.displaced, flood }
    }
}

#[derive(Debug)]
struct Held {
    stranger: Option<StrangerPlace>,
    /// Among the known.
    permit: Option<OwnedSemaphorePermit>,
}

/// The place of a connection, free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    held: Mutex<Held>,
    source: Source,
    leave: CancellationToken,
    known: Arc<Semaphore>,
    heard: Notify,
}

impl Place {
    /// Where the client comes from.
    pub(crate) fn source(&self) -> Source {
        self.source
    }

    /// Waits until somebody else has the place, which happens only to strangers. Cancel-safe.
    pub(crate) async fn left(&self) {
        self.leave.cancelled().await;
    }

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
        if held.permit.is_none() {
            let Ok(permit) = Arc::clone(&self.known).try_acquire_owned() else { return false };
            if let Some(stranger) = held.stranger.take() {
                stranger.remember();
            }
            held.permit = Some(permit);
        }
        true
    }

    /// Whether it is one for the known.
    pub(crate) fn is_settled(&self) -> bool {
        self.held().permit.is_some()
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

    fn someone(places: &Places) -> Place {
        places.take(std::net::Ipv4Addr::LOCALHOST.into())
    }

    #[test]
    fn whoever_is_let_in_leaves_a_place_to_the_next_stranger() {
        let places = Places::new("port", SMALL);
        let (one, other) = (someone(&places), someone(&places));
        assert!(one.settle() && one.settle(), "once is enough");
        assert!(one.is_settled());
        assert_eq!((places.strangers.look().taken, places.known.available_permits()), (1, 0));
        assert!(!other.settle(), "there is no place");
        assert!(!other.is_settled());
        drop(one);
        assert!(other.settle());
        drop(other);
        assert_eq!((places.strangers.look().taken, places.known.available_permits()), (0, 1));
    }

    #[tokio::test]
    async fn who_was_let_in_keeps_its_place_whoever_comes() {
        let places = Places::new("port", SMALL);
        let one = someone(&places);
        assert!(one.settle());
        let strangers: Vec<Place> = (0..10).map(|_| someone(&places)).collect();
        strangers[0].left().await;
        assert!(!one.leave.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn places_that_are_short_are_told_with_whom_until_there_are_some_again() {
        let (places, progress) = (Places::new("port", SMALL), Progress::default());
        let one = someone(&places);
        let told = places.tell(&progress, Told::default());
        assert!(progress.report("").conditions.is_empty(), "nothing is told of a port that never was short");
        let other = someone(&places);
        let told = places.tell(&progress, told);
        let text = condition(&progress).unwrap();
        assert!(text.starts_with("the port closes connections of clients that it has not let in"), "{text}");
        assert!(text.ends_with("1 so far: 1 of 2 places are taken, 1 of them by 127.0.0.1"), "{text}");
        other.settle();
        tokio::time::advance(FLOOD_ENDS).await;
        let told = places.tell(&progress, told);
        let text = condition(&progress).unwrap();
        assert!(text.starts_with("the port has 1 connections of clients that it has let in"), "{text}");
        drop((one, other));
        let told = places.tell(&progress, told);
        assert_eq!(condition(&progress), None);
        assert_eq!(told.displaced, 1);
    }

    #[tokio::test]
    async fn a_port_that_was_full_is_so_until_an_eighth_is_free() {
        let (places, progress) =
            (Places::new("port", Limits { strangers: 160, known: 16 }), Progress::default());
        let mut taken: Vec<Place> = (0..16).map(|_| someone(&places)).collect();
        assert!(taken.iter().all(Place::settle));
        let told = places.tell(&progress, Told::default());
        assert!(told.short);
        taken.truncate(14);
        let told = places.tell(&progress, told);
        assert!(told.short);
        taken.truncate(13);
        assert!(!places.tell(&progress, told).short);
    }
}
