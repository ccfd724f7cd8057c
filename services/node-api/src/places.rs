//! How many connections a port has at a time.
//!
//! A connection begins in a place for strangers ([`crate::strangers`]), and moves to one for the known with its first request that is
//! let in. So neither strangers who say nothing nor answers that last, as a log that is followed, keep out who comes next. What has
//! become a stream of another protocol has no place any more: it is counted where it leads to.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse as _, Response};
use keelson_service_kit::{
    CancellationToken, Holder, HolderKind, NoPlace, Progress, SharedPlace, Shares, open_files_limit,
};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::strangers::{Source, StrangerPlace, Strangers};

/// A flood of strangers is over when none has been displaced for so long.
const FLOOD_ENDS: Duration = Duration::from_secs(60);
/// The figures in the condition change at most once in this time.
const REPORT_EVERY: Duration = Duration::from_secs(5);

/// Connections that a port has at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Of clients of whom no request was let in yet; for one more the oldest makes room.
    pub strangers: usize,
    /// Of others. Users and addresses have shares of them; who has more is answered 503.
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
    known: Arc<Known>,
}

/// What was reported of a port last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reported {
    /// When a shortage was, if there still is one.
    at: Option<Instant>,
    /// Clients that were let in are being refused.
    short: bool,
    /// How many of them had been refused by then.
    refused: u64,
    /// How many strangers had been displaced by then.
    displaced: u64,
    /// While strangers are displaced: how many had been before the first of them, and when the last one was.
    flood: Option<(u64, Instant)>,
}

impl Places {
    /// Of the port with this name, all free.
    pub fn new(port: &'static str, limits: Limits) -> Self {
        let strangers = Arc::new(Strangers::new(limits.strangers));
        let known = Arc::new(Known { shares: Shares::new(limits.known), refused: AtomicU64::new(0) });
        Self { port, limits, strangers, known }
    }

    /// A place for whoever has come from `address`.
    pub(crate) fn take(&self, address: IpAddr) -> Place {
        let stranger = self.strangers.take(address);
        let (source, leave) = (stranger.source(), stranger.leave());
        let held = Mutex::new(Held { stranger: Some(stranger), place: None });
        Place { held, source, leave, known: Arc::clone(&self.known), heard: Notify::new() }
    }

    /// Sets the condition that says whether places are short; `before` is what the last call returned. While the same is short, the
    /// figures in it change at most once in [`REPORT_EVERY`], so that a flood of connections is no flood of log lines.
    pub(crate) fn report(&self, progress: &Progress, before: Reported) -> Reported {
        let refused = self.known.refused.load(Ordering::Relaxed);
        let displaced = self.strangers.look().displaced;
        let short = refused > before.refused || (before.short && self.is_nearly_full());
        let flood = match before.flood {
            _ if displaced > before.displaced => {
                Some((before.flood.map_or(before.displaced, |(first, _)| first), Instant::now()))
            }
            flood => flood.filter(|(_, last)| last.elapsed() < FLOOD_ENDS),
        };
        let now = Reported { short, refused, displaced, flood, ..before };
        let same = short == before.short && flood.is_some() == before.flood.is_some();
        if same && before.at.is_some_and(|at| at.elapsed() < REPORT_EVERY) {
            return now;
        }
        let troubles: Vec<String> =
            [short.then(|| self.text_of_known()), flood.map(|(first, _)| self.text_of_flood(first))]
                .into_iter()
                .flatten()
                .collect();
        if !troubles.is_empty() || before.at.is_some() {
            let state = if troubles.is_empty() { Ok(()) } else { Err(troubles.join("; ")) };
            progress.condition(&format!("connections of the {}", self.port), state);
        }
        let at = (!troubles.is_empty()).then(Instant::now);
        Reported { at, ..now }
    }

    /// Not a quarter of the places of the known is free. The one who was refused had its share when more were, so nothing flickers.
    fn is_nearly_full(&self) -> bool {
        let (places, taken) = (self.known.shares.places(), self.known.shares.taken());
        (places - taken) * 4 < places
    }

    fn text_of_known(&self) -> String {
        let shares = &self.known.shares;
        let most = shares.most().map(|(holder, count)| format!(", {count} of them of {holder}"));
        format!(
            "the {} answers 503 to clients that it lets in and that have their share of its {} connections: {} are open{}; \
             close some, as of logs that are followed",
            self.port,
            shares.places(),
            shares.taken(),
            most.unwrap_or_default(),
        )
    }

    fn text_of_flood(&self, first: u64) -> String {
        let look = self.strangers.look();
        let most = look.most.map(|(source, count)| format!(", {count} of them by {source}"));
        format!(
            "the {} closes connections of clients that it has not let in, each for a newer one, {} so far: {} of {} places are \
             taken{}",
            self.port,
            look.displaced - first,
            look.taken,
            self.limits.strangers,
            most.unwrap_or_default(),
        )
    }
}

/// The places of clients that were let in.
#[derive(Debug)]
struct Known {
    shares: Arc<Shares>,
    /// How many were refused one.
    refused: AtomicU64,
}

#[derive(Debug)]
struct Held {
    stranger: Option<StrangerPlace>,
    /// Among the known.
    place: Option<SharedPlace>,
}

/// The place of a connection, free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    held: Mutex<Held>,
    source: Source,
    leave: CancellationToken,
    known: Arc<Known>,
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

    /// Moves to a place for the known, if it is not in one already. `user` is who was let in, where anybody is asked.
    ///
    /// # Errors
    /// The user, or the address, has its share of them.
    pub(crate) fn settle(&self, user: Option<&str>) -> Result<(), NoPlace> {
        let mut held = self.held();
        if held.place.is_some() {
            return Ok(());
        }
        let address = Holder::new(HolderKind::Address, self.source.to_string());
        let user = user.map(|user| Holder::new(HolderKind::User, user));
        let taken = self.known.shares.take([address].into_iter().chain(user).collect());
        let place = taken.inspect_err(|_| {
            self.known.refused.fetch_add(1, Ordering::Relaxed);
        })?;
        if let Some(stranger) = held.stranger.take() {
            stranger.remember();
        }
        held.place = Some(place);
        Ok(())
    }

    /// Whether it is one for the known.
    pub(crate) fn is_settled(&self) -> bool {
        self.held().place.is_some()
    }
}

/// The answer to somebody who is let in and for whom there is no place.
pub(crate) fn no_place(why: &NoPlace) -> Response {
    let text = format!("too many connections to this node are open: {why}; close some, or try again");
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
        assert!(one.settle(None).is_ok() && one.settle(None).is_ok(), "once is enough");
        assert!(one.is_settled());
        assert_eq!((places.strangers.look().taken, places.known.shares.taken()), (1, 1));
        assert!(other.settle(None).is_err(), "there is no place");
        assert!(!other.is_settled());
        drop(one);
        assert!(other.settle(None).is_ok());
        drop(other);
        assert_eq!((places.strangers.look().taken, places.known.shares.taken()), (0, 0));
    }

    #[tokio::test]
    async fn who_was_let_in_keeps_its_place_whoever_comes() {
        let places = Places::new("port", SMALL);
        let one = someone(&places);
        assert!(one.settle(None).is_ok());
        let strangers: Vec<Place> = (0..10).map(|_| someone(&places)).collect();
        strangers[0].left().await;
        assert!(!one.leave.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn places_that_are_short_are_told_with_whom_until_there_are_some_again() {
        let (places, progress) = (Places::new("port", SMALL), Progress::default());
        let one = someone(&places);
        let reported = places.report(&progress, Reported::default());
        assert!(
            progress.report("").conditions.is_empty(),
            "nothing is reported of a port that never was short"
        );
        let other = someone(&places);
        let reported = places.report(&progress, reported);
        let text = condition(&progress).unwrap();
        assert!(text.starts_with("the port closes connections of clients that it has not let in"), "{text}");
        assert!(text.ends_with("1 so far: 1 of 2 places are taken, 1 of them by 127.0.0.1"), "{text}");
        let again = someone(&places);
        let reported = places.report(&progress, reported);
        assert_eq!(condition(&progress).as_deref(), Some(&*text), "not each of a flood is reported");
        other.settle(Some("admin")).unwrap();
        assert!(again.settle(Some("admin")).is_err());
        tokio::time::advance(FLOOD_ENDS).await;
        let reported = places.report(&progress, reported);
        tokio::time::advance(FLOOD_ENDS).await;
        let reported = places.report(&progress, reported);
        let text = condition(&progress).unwrap();
        assert_eq!(
            text,
            "the port answers 503 to clients that it lets in and that have their share of its 1 connections: 1 are open, 1 of them \
             of user admin; close some, as of logs that are followed"
        );
        drop((one, other, again));
        tokio::time::advance(REPORT_EVERY).await;
        let reported = places.report(&progress, reported);
        assert_eq!(condition(&progress), None);
        assert_eq!((reported.at, reported.displaced), (None, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn one_user_leaves_places_to_others_and_is_told_until_a_quarter_is_free() {
        let (places, progress) =
            (Places::new("port", Limits { strangers: 160, known: 20 }), Progress::default());
        let come = |user: &str| {
            let place = someone(&places);
            place.settle(Some(user)).map(|()| place)
        };
        let mut taken: Vec<Place> = std::iter::from_fn(|| come("robot").ok()).collect();
        assert_eq!(taken.len(), 16, "four times as many as are free");
        assert!(come("admin").is_err(), "from the same address");
        let elsewhere = places.take(std::net::Ipv4Addr::new(192, 0, 2, 1).into());
        elsewhere.settle(Some("admin")).unwrap();
        let mut reported = places.report(&progress, Reported::default());
        assert!(reported.short);
        for (left, short) in [(15, true), (14, false)] {
            taken.truncate(left);
            tokio::time::advance(REPORT_EVERY).await;
            reported = places.report(&progress, reported);
            assert_eq!(reported.short, short, "{left}");
        }
    }
}
