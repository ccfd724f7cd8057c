//! Reports the claims in use to pod-config (volumes.md §3.4). On a node without an API server, it binds claims, and keeps a deleted
//! one bound as long as it is in use. So no claim is mounted before pod-config has confirmed that it is in use.

use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use keelson_config::ServiceName;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_service_kit::status::reason;
use keelson_service_kit::{Backoff, CancellationToken, Context, Peer, Progress};
use keelson_volume_manager_core::claims_in_use::InUse;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout_at};
use tonic::{Code, Status};

use crate::shared_volumes::ClaimSet;

/// How large the claims of one message may be in bytes, far below the limit of 4 MiB.
const MAX_MESSAGE: usize = 256 << 10;
/// How many bytes a claim in a message has besides its texts, at most.
const CLAIM_OVERHEAD: usize = 32;

/// How long a pod waits for a confirmation until the wait is an error of the pod. The confirmation still ends it at once.
pub(crate) const CONFIRMED_WITHIN: Duration = Duration::from_secs(1);

/// What pod-config has answered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct State {
    /// The last set that was confirmed on the present stream; 0: none.
    confirmed: u64,
    /// pod-config takes no reports: it is of an earlier release, or the claims are those of an API server.
    is_off: bool,
    /// Why there is no stream; empty: there is one, or none was tried yet.
    lost: String,
}

/// What is known about the reports. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct ClaimReports(watch::Sender<State>);

/// Waits until something is confirmed.
#[derive(Debug)]
pub(crate) struct ReportChanges(watch::Receiver<State>);

/// What the reports need.
struct Reporter {
    claims: watch::Receiver<ClaimSet>,
    peer: Peer,
    /// Changes with each connection to pod-config.
    connections: watch::Receiver<u64>,
    progress: Progress,
}

/// Why there are no reports now.
enum Ended {
    /// pod-config takes none.
    Off(Status),
    Lost(Status),
}

impl ReportChanges {
    /// Changes count from now on.
    pub(crate) fn mark_unchanged(&mut self) {
        self.0.mark_unchanged();
    }

    /// Waits for a change. Cancel-safe.
    pub(crate) async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

impl ClaimReports {
    /// Starts reporting. `connections` changes with each connection to pod-config.
    pub(crate) fn start(
        ctx: &Context,
        claims: watch::Receiver<ClaimSet>,
        connections: watch::Receiver<u64>,
    ) -> Self {
        let (reports, peer) = (Self::default(), ctx.peer(ServiceName::PodConfig));
        let reporter = Reporter { claims, peer, connections, progress: ctx.progress.clone() };
        ctx.spawn("claims in use", reports.clone().follow(reporter, ctx.shutdown.clone()));
        reports
    }

    pub(crate) fn changes(&self) -> ReportChanges {
        ReportChanges(self.0.subscribe())
    }

    /// Waits until pod-config has confirmed the set of a revision, or takes no reports. `None`: it is so. Otherwise, at `deadline`,
    /// the reason.
    pub(crate) async fn unconfirmed(
        &self,
        revision: oneshot::Receiver<u64>,
        deadline: Instant,
    ) -> Option<String> {
        let (mut off, mut state) = (self.0.subscribe(), self.0.subscribe());
        let confirmed = async {
            // Cancel-safe: a dropped receiver is of no use any more.
            let revision = tokio::select! {
                _ = off.wait_for(|state| state.is_off) => return true,
                revision = revision => revision,
            };
            let Ok(revision) = revision else { return false };
            // The sender is `self`.
            state.wait_for(|state| state.is_off || state.confirmed >= revision).await.is_ok()
        };
        if timeout_at(deadline, confirmed).await == Ok(true) {
            return None;
        }
        let lost = self.0.borrow().lost.clone();
        Some(if lost.is_empty() { "it has not answered yet".to_owned() } else { lost })
    }

    /// Reports until `shutdown`, and reconnects.
    async fn follow(self, mut reporter: Reporter, shutdown: CancellationToken) {
        let condition = format!("reports of claims to {}", reporter.peer.name());
        let mut backoff = Backoff::reconnect();
        loop {
            // A connection that is made from now on may be one to another release.
            reporter.connections.mark_unchanged();
            let report = self.report(&reporter, &condition, &mut backoff);
            // Cancel-safe: the next stream sends the whole set.
            let Some(ended) = shutdown.run_until_cancelled(report).await else { return };
            let pause = async {
                match ended {
                    Ended::Off(status) => {
                        self.note_off(&status);
                        reporter.progress.condition(&condition, Ok(()));
                        // The sender ends with the service.
                        let _ = reporter.connections.changed().await;
                    }
                    Ended::Lost(status) => {
                        let peer = reporter.peer.name();
                        let text = format!(
                            "cannot report to {peer} which claims are in use, retrying: {}",
                            status.message()
                        );
                        reporter.progress.condition(&condition, Err(text));
                        self.note_lost(&status);
                        tokio::time::sleep(backoff.next_delay()).await;
                    }
                }
            };
            // Cancel-safe: nothing is consumed.
            if shutdown.run_until_cancelled(pause).await.is_none() {
                return;
            }
        }
    }

    /// Reports on one stream until it ends.
    async fn report(&self, reporter: &Reporter, condition: &str, backoff: &mut Backoff) -> Ended {
        let mut client = PodConfigClient::new(reporter.peer.channel());
        let mut stream = match client.report_claims_in_use(requests(reporter.claims.clone())).await {
            Ok(response) => response.into_inner(),
            Err(status) if takes_no_reports(&status) => return Ended::Off(status),
            Err(status) => return Ended::Lost(status),
        };
        self.0.send_modify(|state| *state = State::default());
        loop {
            match stream.message().await {
                Ok(Some(pb::ReportClaimsInUseResponse { revision })) => {
                    backoff.reset();
                    reporter.progress.condition(condition, Ok(()));
                    tracing::debug!(
                        event = "claims_in_use_confirmed",
                        revision,
                        "pod-config has confirmed the claims in use"
                    );
                    self.0.send_modify(|state| state.confirmed = state.confirmed.max(revision));
                }
                Ok(None) => return Ended::Lost(Status::unavailable("the stream ended")),
                Err(status) if takes_no_reports(&status) => return Ended::Off(status),
                Err(status) => return Ended::Lost(status),
            }
        }
    }

    fn note_off(&self, status: &Status) {
        let is_new = self.0.send_if_modified(|state| {
            let off = State { is_off: true, ..State::default() };
            std::mem::replace(state, off.clone()) != off
        });
        if is_new {
            let why = status.message();
            tracing::info!(
                event = "claims_in_use_not_reported",
                "pod-config takes no reports of claims in use: {why}"
            );
        }
    }

    /// As long as pod-config is down, it releases no claim, and nothing is confirmed. If it takes no reports, that holds until it
    /// is back.
    fn note_lost(&self, status: &Status) {
        self.0.send_if_modified(|state| {
            let lost = State { confirmed: 0, lost: status.message().to_owned(), ..state.clone() };
            std::mem::replace(state, lost.clone()) != lost
        });
    }
}

/// The claims are those of an API server, or pod-config is of an earlier release.
fn takes_no_reports(status: &Status) -> bool {
    match status.code() {
        Code::Unimplemented => true,
        Code::FailedPrecondition => reason(status).as_deref() == Some("API_SERVER"),
        _ => false,
    }
}

/// The whole set, then the whole set after each change. A change that comes while an earlier set is still being sent is sent with
/// the next one.
fn requests(claims: watch::Receiver<ClaimSet>) -> impl Stream<Item = pb::ReportClaimsInUseRequest> + Send {
    let sets = futures_util::stream::unfold((claims, 0), |(mut claims, sent)| async move {
        let set = claims.wait_for(|set| set.revision > sent).await.ok()?.clone();
        let revision = set.revision;
        Some((set, (claims, revision)))
    });
    sets.flat_map(|set| futures_util::stream::iter(messages(&set, MAX_MESSAGE)))
}

/// A set as messages of at most `limit` bytes; the last one completes it.
fn messages(set: &ClaimSet, limit: usize) -> Vec<pb::ReportClaimsInUseRequest> {
    let message = || pb::ReportClaimsInUseRequest { revision: set.revision, ..Default::default() };
    let (mut messages, mut last, mut size) = (Vec::new(), message(), 0);
    for claim in set.claims.iter().map(|(claim, user)| wire(claim, user)) {
        let texts = [&claim.namespace, &claim.name, &claim.persistent_volume, &claim.user];
        let added = CLAIM_OVERHEAD + texts.iter().map(|text| text.len()).sum::<usize>();
        if size + added > limit && !last.claims.is_empty() {
            messages.push(std::mem::replace(&mut last, message()));
            size = 0;
        }
        size += added;
        last.claims.push(claim);
    }
    last.complete = true;
    messages.push(last);
    messages
}

fn wire(claim: &InUse, user: &str) -> pb::ClaimInUse {
    let user = user.to_owned();
    match claim.clone() {
        InUse::Claim { namespace, name } => pb::ClaimInUse { namespace, name, user, ..Default::default() },
        InUse::PersistentVolume(persistent_volume) => {
            pb::ClaimInUse { persistent_volume, user, ..Default::default() }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn set(revision: u64, names: &[&str]) -> ClaimSet {
        let claims = names.iter().map(|name| (InUse::PersistentVolume((*name).into()), "x".to_owned()));
        ClaimSet { revision, claims: Arc::new(claims.collect()) }
    }

    fn names(message: &pb::ReportClaimsInUseRequest) -> Vec<&str> {
        message.claims.iter().map(|claim| claim.persistent_volume.as_str()).collect()
    }

    #[test]
    fn a_set_is_spread_over_messages_of_which_the_last_completes_it() {
        let set = set(7, &["a", "b", "c"]);
        for (limit, expected) in [
            (1000, vec![vec!["a", "b", "c"]]),
            (70, vec![vec!["a", "b"], vec!["c"]]),
            (1, vec![vec!["a"], vec!["b"], vec!["c"]]),
        ] {
            let messages = messages(&set, limit);
            assert_eq!(messages.iter().map(names).collect::<Vec<_>>(), expected, "{limit}");
            let ends = messages.iter().map(|message| (message.revision, message.complete));
            let expected = (1..=messages.len()).map(|number| (7, number == messages.len()));
            assert!(ends.eq(expected), "{messages:?}");
        }
        assert_eq!(
            messages(&ClaimSet { revision: 1, ..ClaimSet::default() }, 1),
            [pb::ReportClaimsInUseRequest { revision: 1, claims: vec![], complete: true }]
        );
    }

    #[tokio::test]
    async fn requests_begin_with_the_first_known_set_and_only_the_latest_follows() {
        let (sender, receiver) = watch::channel(ClaimSet::default());
        let mut requests = Box::pin(requests(receiver.clone()));
        assert!(futures_util::poll!(requests.next()).is_pending(), "nothing is known yet");
        sender.send_replace(set(1, &[]));
        assert_eq!(requests.next().await.unwrap().revision, 1);
        assert!(futures_util::poll!(requests.next()).is_pending(), "nothing has changed");
        for revision in 2..=3 {
            sender.send_replace(set(revision, &["a"]));
        }
        assert_eq!(requests.next().await.unwrap().revision, 3);
        let mut later = Box::pin(super::requests(receiver));
        assert_eq!(names(&later.next().await.unwrap()), ["a"], "a new stream begins with the whole set");
    }

    #[test]
    fn only_an_api_server_or_an_earlier_release_ends_the_reports() {
        let refused = |code, name: &str| keelson_service_kit::status::error(code, name, "no");
        for (status, is_off) in [
            (Status::unimplemented("no"), true),
            (refused(Code::FailedPrecondition, "API_SERVER"), true),
            (refused(Code::FailedPrecondition, "OTHER"), false),
            (Status::failed_precondition("no"), false),
            (refused(Code::Aborted, "NEWER_STREAM"), false),
            (Status::unavailable("no"), false),
        ] {
            assert_eq!(takes_no_reports(&status), is_off, "{status:?}");
        }
    }

    /// Why the set of this revision is not confirmed; without a revision: why the claims of a pod that are in no set yet are not.
    async fn unconfirmed(reports: &ClaimReports, revision: Option<u64>) -> Option<String> {
        let (sender, receiver) = oneshot::channel();
        let waiting = match revision {
            Some(revision) => {
                sender.send(revision).unwrap();
                None
            }
            None => Some(sender),
        };
        let why = reports.unconfirmed(receiver, Instant::now() + CONFIRMED_WITHIN).await;
        drop(waiting);
        why
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_waits_until_a_set_that_has_it_is_confirmed_on_the_present_stream() {
        let reports = ClaimReports::default();
        let silent = Some("it has not answered yet".to_owned());
        assert_eq!(unconfirmed(&reports, Some(1)).await, silent);
        reports.0.send_modify(|state| state.confirmed = 2);
        assert_eq!(unconfirmed(&reports, Some(2)).await, None);
        assert_eq!(unconfirmed(&reports, Some(3)).await, silent);
        assert_eq!(unconfirmed(&reports, None).await, silent);
        reports.note_lost(&Status::unavailable("no connection"));
        assert_eq!(unconfirmed(&reports, Some(2)).await, Some("no connection".to_owned()));
    }

    #[tokio::test(start_paused = true)]
    async fn no_claim_waits_while_pod_config_takes_no_reports_also_when_it_is_down_then() {
        let reports = ClaimReports::default();
        reports.note_off(&Status::unimplemented("an earlier release"));
        for revision in [None, Some(1)] {
            assert_eq!(unconfirmed(&reports, revision).await, None);
        }
        reports.note_lost(&Status::unavailable("no connection"));
        assert_eq!(unconfirmed(&reports, Some(1)).await, None);
    }
}
