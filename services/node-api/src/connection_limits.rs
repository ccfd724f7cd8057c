//! Limits on the connections that a port has at a time.
//!
//! A new connection gets a slot among the unauthorized ones ([`crate::unauthorized_slots`]), and its first authorized request
//! moves it to a slot among the authorized ones; on a port without authentication every request counts as authorized. So neither
//! idle clients nor long responses such as followed logs lock out new clients. A connection that was upgraded to a stream frees
//! its slot: runtime-shim limits streams.

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

use crate::unauthorized_slots::{SourceAddress, UnauthorizedSlot, UnauthorizedSlots};

/// A flood is over when no connection was displaced for this time.
const FLOOD_TIMEOUT: Duration = Duration::from_secs(60);
/// The numbers in the condition change at most once in this time.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// The connections that a port has at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Connections without an authorized request yet; one more displaces the oldest.
    pub unauthorized: usize,
    /// Connections with an authorized request. A user or an address that exceeds its share gets 503.
    pub authorized: usize,
}

impl ConnectionLimits {
    /// The limits with enough file descriptors; each connection takes some tens of KB of memory.
    const MAX: Self = Self { unauthorized: 1024, authorized: 4096 };

    /// The limits of a process that may have this many files open: three full ports leave a sixteenth of them free.
    pub fn for_open_files(files: u64) -> Self {
        let files = usize::try_from(files).unwrap_or(usize::MAX);
        let Self { unauthorized, authorized } = Self::MAX;
        Self {
            unauthorized: unauthorized.min(files / 16).max(1),
            authorized: authorized.min(files / 4).max(1),
        }
    }

    /// The limits of this process.
    pub fn for_this_process() -> Self {
        open_files_limit().map_or(Self::MAX, Self::for_open_files)
    }
}

/// Enforces the connection limits of one port.
#[derive(Debug)]
pub struct ConnectionLimiter {
    port: &'static str,
    limits: ConnectionLimits,
    unauthorized: Arc<UnauthorizedSlots>,
    authorized: Arc<AuthorizedSlots>,
}

/// What the last report of a port contained.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LastReport {
    /// When the last shortage was reported, while there is one.
    reported_at: Option<Instant>,
    /// Authorized clients are being refused.
    is_short: bool,
    /// How many of them had been refused.
    refused: u64,
    /// How many unauthorized connections had been displaced.
    displaced: u64,
    /// During a flood: how many connections had been displaced before it, and when the last one was.
    flood: Option<(u64, Instant)>,
}

impl ConnectionLimiter {
    /// All slots of the port with this name are free.
    pub fn new(port: &'static str, limits: ConnectionLimits) -> Self {
        let unauthorized = Arc::new(UnauthorizedSlots::new(limits.unauthorized));
        let authorized =
            Arc::new(AuthorizedSlots { shares: Shares::new(limits.authorized), refused: AtomicU64::new(0) });
        Self { port, limits, unauthorized, authorized }
    }

    /// A slot for a new connection from `address`.
    pub(crate) fn acquire(&self, address: IpAddr) -> ConnectionSlot {
        let slot = self.unauthorized.acquire(address);
        let (source, displaced) = (slot.source(), slot.displaced());
        let held = Mutex::new(HeldSlots { unauthorized: Some(slot), authorized: None });
        let authorized_slots = Arc::clone(&self.authorized);
        ConnectionSlot { held, source, displaced, authorized_slots, has_request: Notify::new() }
    }

    /// Sets the condition that says whether slots are short; `last` is what the previous call returned. While the shortage is the
    /// same, the numbers change at most once in [`REPORT_INTERVAL`], so that a flood of connections does not flood the log.
    pub(crate) fn report(&self, progress: &Progress, last: LastReport) -> LastReport {
        let refused = self.authorized.refused.load(Ordering::Relaxed);
        let displaced = self.unauthorized.stats().displaced;
        let is_short = refused > last.refused || (last.is_short && self.is_nearly_full());
        let flood = match last.flood {
            _ if displaced > last.displaced => {
                Some((last.flood.map_or(last.displaced, |(before, _)| before), Instant::now()))
            }
            flood => flood.filter(|(_, last)| last.elapsed() < FLOOD_TIMEOUT),
        };
        let now = LastReport { is_short, refused, displaced, flood, ..last };
        let is_same = is_short == last.is_short && flood.is_some() == last.flood.is_some();
        if is_same && last.reported_at.is_some_and(|at| at.elapsed() < REPORT_INTERVAL) {
            return now;
        }
        let shortages: Vec<String> =
            [is_short.then(|| self.shortage_text()), flood.map(|(before, _)| self.flood_text(before))]
                .into_iter()
                .flatten()
                .collect();
        if !shortages.is_empty() || last.reported_at.is_some() {
            let state = if shortages.is_empty() { Ok(()) } else { Err(shortages.join("; ")) };
            progress.condition(&format!("connections of the {}", self.port), state);
        }
        let reported_at = (!shortages.is_empty()).then(Instant::now);
        LastReport { reported_at, ..now }
    }

    /// Less than a quarter of the authorized slots is free. A client is refused when at most a fifth is free, so the condition
    /// does not flap.
    fn is_nearly_full(&self) -> bool {
        let (slots, taken) = (self.authorized.shares.places(), self.authorized.shares.taken());
        (slots - taken) * 4 < slots
    }

    fn shortage_text(&self) -> String {
        let shares = &self.authorized.shares;
        let top = shares.most().map(|(holder, count)| format!(", {count} of them by {holder}"));
        format!(
            "the {} answers 503 to authorized clients that exceed their share of its {} connections: {} are open{}; close some, such \
             as followed logs",
            self.port,
            shares.places(),
            shares.taken(),
            top.unwrap_or_default(),
        )
    }

    fn flood_text(&self, displaced_before: u64) -> String {
        let stats = self.unauthorized.stats();
        let top = stats.top_source.map(|(source, count)| format!(", {count} of them by {source}"));
        format!(
            "the {} closes old connections without an authorized request to accept new ones, {} so far: {} of {} slots are in use{}",
            self.port,
            stats.displaced - displaced_before,
            stats.taken,
            self.limits.unauthorized,
            top.unwrap_or_default(),
        )
    }
}

/// The slots of connections with an authorized request.
#[derive(Debug)]
struct AuthorizedSlots {
    shares: Arc<Shares>,
    /// How many clients were refused a slot.
    refused: AtomicU64,
}

#[derive(Debug)]
struct HeldSlots {
    unauthorized: Option<UnauthorizedSlot>,
    authorized: Option<SharedPlace>,
}

/// The slot of one connection, freed when this is dropped.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    held: Mutex<HeldSlots>,
    source: SourceAddress,
    displaced: CancellationToken,
    authorized_slots: Arc<AuthorizedSlots>,
    has_request: Notify,
}

impl ConnectionSlot {
    /// The address of the client.
    pub(crate) fn source(&self) -> SourceAddress {
        self.source
    }

    /// Waits until a newer connection displaces this one, which happens only to unauthorized ones. Cancel-safe.
    pub(crate) async fn displaced(&self) {
        self.displaced.cancelled().await;
    }

    fn held(&self) -> MutexGuard<'_, HeldSlots> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The head of a request is complete.
    pub(crate) fn notify_request(&self) {
        self.has_request.notify_one();
    }

    /// Waits for the first request. Cancel-safe.
    pub(crate) async fn first_request(&self) {
        self.has_request.notified().await;
    }

    /// Moves the connection to an authorized slot, unless it has one. `user` is the authorized user, or `None` on a port without
    /// authentication.
    ///
    /// # Errors
    /// The user, or the address, has its share of the slots.
    pub(crate) fn authorize(&self, user: Option<&str>) -> Result<(), NoPlace> {
        let mut held = self.held();
        if held.authorized.is_some() {
            return Ok(());
        }
        let address = Holder::new(HolderKind::Address, self.source.to_string());
        let user = user.map(|user| Holder::new(HolderKind::User, user));
        let taken = self.authorized_slots.shares.take([address].into_iter().chain(user).collect());
        let slot = taken.inspect_err(|_| {
            self.authorized_slots.refused.fetch_add(1, Ordering::Relaxed);
        })?;
        if let Some(unauthorized) = held.unauthorized.take() {
            unauthorized.remember_source();
        }
        held.authorized = Some(slot);
        Ok(())
    }

    /// Whether the connection has an authorized slot.
    pub(crate) fn is_authorized(&self) -> bool {
        self.held().authorized.is_some()
    }
}

/// The 503 for an authorized client that gets no slot.
pub(crate) fn too_many_connections(error: &NoPlace) -> Response {
    let text = format!("too many connections to this node are open: {error}; close some, or try again");
    let mut response = (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: ConnectionLimits = ConnectionLimits { unauthorized: 2, authorized: 1 };

    fn condition(progress: &Progress) -> Option<String> {
        let conditions = progress.report("").conditions;
        let found = conditions.into_iter().find(|condition| condition.name == "connections of the port")?;
        (!found.ok).then_some(found.message)
    }

    #[test]
    fn limits_of_three_full_ports_leave_file_descriptors_for_the_rest() {
        for (files, unauthorized, authorized) in
            [(1_048_576, 1024, 4096), (65_536, 1024, 4096), (16_384, 1024, 4096), (1024, 64, 256), (3, 1, 1)]
        {
            let limits = ConnectionLimits { unauthorized, authorized };
            assert_eq!(ConnectionLimits::for_open_files(files), limits, "{files}");
            let all = 3 * (unauthorized + authorized) as u64;
            assert!(all < files || files == 3, "{files}");
        }
    }

    fn local_connection(limiter: &ConnectionLimiter) -> ConnectionSlot {
        limiter.acquire(std::net::Ipv4Addr::LOCALHOST.into())
    }

    fn taken(limiter: &ConnectionLimiter) -> (usize, usize) {
        (limiter.unauthorized.stats().taken, limiter.authorized.shares.taken())
    }

    #[test]
    fn authorized_connection_frees_its_unauthorized_slot() {
        let limiter = ConnectionLimiter::new("port", SMALL);
        let (one, other) = (local_connection(&limiter), local_connection(&limiter));
        assert!(one.authorize(None).is_ok() && one.authorize(None).is_ok(), "a second call changes nothing");
        assert!(one.is_authorized());
        assert_eq!(taken(&limiter), (1, 1));
        assert!(other.authorize(None).is_err(), "no slot is free");
        assert!(!other.is_authorized());
        drop(one);
        assert!(other.authorize(None).is_ok());
        drop(other);
        assert_eq!(taken(&limiter), (0, 0));
    }

    #[tokio::test]
    async fn authorized_connection_is_never_displaced() {
        let limiter = ConnectionLimiter::new("port", SMALL);
        let one = local_connection(&limiter);
        assert!(one.authorize(None).is_ok());
        let unauthorized: Vec<ConnectionSlot> = (0..10).map(|_| local_connection(&limiter)).collect();
        unauthorized[0].displaced().await;
        assert!(!one.displaced.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn connection_shortage_is_a_condition_that_names_the_top_holder() {
        let (limiter, progress) = (ConnectionLimiter::new("port", SMALL), Progress::default());
        let first = local_connection(&limiter);
        let report = limiter.report(&progress, LastReport::default());
        assert!(progress.report("").conditions.is_empty(), "a port that never was short has no condition");
        let second = local_connection(&limiter);
        let report = limiter.report(&progress, report);
        let text = condition(&progress).unwrap();
        assert!(text.starts_with("the port closes old connections without an authorized request"), "{text}");
        assert!(text.ends_with("1 so far: 1 of 2 slots are in use, 1 of them by 127.0.0.1"), "{text}");
        let third = local_connection(&limiter);
        let report = limiter.report(&progress, report);
        assert_eq!(condition(&progress).as_deref(), Some(&*text), "the numbers do not change yet");
        second.authorize(Some("admin")).unwrap();
        assert!(third.authorize(Some("admin")).is_err());
        tokio::time::advance(FLOOD_TIMEOUT).await;
        let report = limiter.report(&progress, report);
        tokio::time::advance(FLOOD_TIMEOUT).await;
        let report = limiter.report(&progress, report);
        let text = condition(&progress).unwrap();
        assert_eq!(
            text,
            "the port answers 503 to authorized clients that exceed their share of its 1 connections: 1 are open, 1 of them by user \
             admin; close some, such as followed logs"
        );
        drop((first, second, third));
        tokio::time::advance(REPORT_INTERVAL).await;
        let report = limiter.report(&progress, report);
        assert_eq!(condition(&progress), None);
        assert_eq!((report.reported_at, report.displaced), (None, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn one_user_is_limited_and_reported_until_a_quarter_is_free() {
        let limits = ConnectionLimits { unauthorized: 160, authorized: 20 };
        let (limiter, progress) = (ConnectionLimiter::new("port", limits), Progress::default());
        let connect = |user: &str| {
            let slot = local_connection(&limiter);
            slot.authorize(Some(user)).map(|()| slot)
        };
        let mut connections: Vec<ConnectionSlot> = std::iter::from_fn(|| connect("robot").ok()).collect();
        assert_eq!(connections.len(), 16, "four times as many as are free");
        assert!(connect("admin").is_err(), "from the same address");
        let elsewhere = limiter.acquire(std::net::Ipv4Addr::new(192, 0, 2, 1).into());
        elsewhere.authorize(Some("admin")).unwrap();
        let mut report = limiter.report(&progress, LastReport::default());
        assert!(report.is_short);
        for (open, is_short) in [(15, true), (14, false)] {
            connections.truncate(open);
            tokio::time::advance(REPORT_INTERVAL).await;
            report = limiter.report(&progress, report);
            assert_eq!(report.is_short, is_short, "{open}");
        }
    }
}
