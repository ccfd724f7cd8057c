//! The certificates of this node: the client certificate, by which it authenticates to the API server, and the serving
//! certificate of its kubelet API (node-and-api.md §6.3 to §6.5; docs/adr/0012-who-makes-and-keeps-certificates.md).
//!
//! A loop for each kind checks whether the certificate that init handed over is sufficient, and otherwise requests another: it
//! creates a key and a CertificateSigningRequest, and follows the answer. The key and the name of the request are stored before
//! the request is sent, so that a killed process does not request twice. An issued pair is left for init, which keeps it and
//! hands it over.
//!
//! | while | the client certificate is requested with |
//! |---|---|
//! | there is no valid one | the bootstrap kubeconfig, which init hands over until there is one |
//! | there is one, with `rotateCertificates` | itself |

mod files;
mod metrics;
mod x509;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use keelson_config::{CertificateKind, Kubernetes as Settings};
use keelson_kube_api::{Change, Follower, KubeApi, KubeError, Object, Range, Resource, WatchEvent};
use keelson_kube_model::base64;
use keelson_node_status_core::certificates::{
    ANSWER_TIMEOUT, Due, HeldCertificate, RequestReason, RequestState, Subject, backoff, client_subject, due,
    request_state, serving_subject, signing_request,
};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, LoopHandle, now_unix_nanos};

use self::files::{Files, PendingRequest, StoreError};
use self::metrics::CertificateMetrics;
use self::x509::X509Error;
use super::{KubernetesWriter, user_agent};

const REQUESTS: Resource = Resource::CERTIFICATE_SIGNING_REQUEST;
/// How often the state is checked while something is missing.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// An issued pair that init has not picked up after this long is reported.
const PICKUP_TIMEOUT: Duration = Duration::from_secs(60);
/// How many random characters the name of a request has.
const NAME_LENGTH: usize = 10;

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
enum RequestError {
    #[error(transparent)]
    Server(#[from] KubeError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the certificate of {name} is unusable")]
    Invalid { name: String, source: X509Error },
    #[error("cannot create a certificate request")]
    Create(#[source] X509Error),
    #[error("{name} is refused: {message}")]
    Refused { name: String, message: String },
    #[error("{name} was removed before there was an answer")]
    Removed { name: String },
    #[error("{name} is another client's request")]
    Foreign { name: String },
    #[error("{name} was not answered within {} min", ANSWER_TIMEOUT.as_secs() / 60)]
    Unanswered { name: String },
}

impl RequestError {
    /// Whether the request may still be answered.
    fn is_retryable(&self) -> bool {
        matches!(self, Self::Server(_) | Self::Store(_))
    }
}

/// What to do now.
#[derive(Debug)]
enum Step {
    /// Wait and check again; with the error, if there is one.
    Wait(Duration, Result<(), String>),
    /// Request a certificate, with the bootstrap kubeconfig or with the node's own.
    Request { bootstraps: bool, wanted: Subject, reason: RequestReason },
}

/// The loop for a kind of certificate.
struct CertificateLoop {
    kind: CertificateKind,
    condition: &'static str,
    ctx: Context,
    writer: Arc<KubernetesWriter>,
    /// Whether a certificate is replaced before it expires.
    rotates: bool,
    /// Whether a serving certificate is requested for names alone.
    by_name: bool,
    own: KubeApi,
    bootstrap: KubeApi,
    files: Files,
    metrics: Option<CertificateMetrics>,
    handle: LoopHandle,
    /// When the current certificate began, and the random part that chooses its rotation time.
    part: (i64, f64),
}

/// Starts the loops that the settings need.
pub(super) fn start(ctx: &Context, settings: &Settings, writer: &Arc<KubernetesWriter>) {
    let wanted = &settings.certificates;
    if wanted.rotate || wanted.bootstrap_kubeconfig.is_some() {
        let client = CertificateLoop::new(ctx, settings, writer, CertificateKind::Client);
        ctx.spawn("client-certificate", client.run());
    }
    if wanted.serving {
        let serving = CertificateLoop::new(ctx, settings, writer, CertificateKind::Serving);
        ctx.spawn("serving-certificate", serving.run());
    }
}

fn now() -> i64 {
    now_unix_nanos() / 1_000_000_000
}

impl CertificateLoop {
    fn new(
        ctx: &Context,
        settings: &Settings,
        writer: &Arc<KubernetesWriter>,
        kind: CertificateKind,
    ) -> Self {
        let rotates = kind == CertificateKind::Serving || settings.certificates.rotate;
        let (condition, turn) = match kind {
            CertificateKind::Client => ("client certificate", "client-certificate"),
            CertificateKind::Serving => ("serving certificate", "serving-certificate"),
        };
        let files = Files::of(&ctx.config, settings, kind);
        Self {
            kind,
            condition,
            handle: ctx.progress.register(turn),
            writer: Arc::clone(writer),
            rotates,
            by_name: settings.certificates.serving_by_name,
            own: super::connection(ctx, settings, writer.requests.clone()),
            bootstrap: KubeApi::counted(files.bootstrap.clone(), &user_agent(ctx), writer.requests.clone()),
            files,
            metrics: rotates.then(|| CertificateMetrics::register(&ctx.metrics, kind)),
            ctx: ctx.clone(),
            part: (i64::MIN, 0.0),
        }
    }

    async fn run(mut self) {
        let mut failures = 0;
        while !self.ctx.shutdown.is_cancelled() {
            self.handle.tick();
            let wait = match self.next_step() {
                Step::Wait(wait, result) => {
                    failures = 0;
                    self.ctx.progress.condition(self.condition, result);
                    wait
                }
                Step::Request { bootstraps, wanted, reason } => {
                    match self.request_with_heartbeat(bootstraps, &wanted, reason).await {
                        Ok(()) => {
                            failures = 0;
                            Duration::ZERO
                        }
                        Err(error) => {
                            if !error.is_retryable() {
                                self.files.remove_pending();
                            }
                            failures += 1;
                            self.failed(&error);
                            backoff(failures, fastrand::f64())
                        }
                    }
                }
            };
            self.wait(wait).await;
        }
    }

    /// [`CertificateLoop::request`], with heartbeats meanwhile.
    async fn request_with_heartbeat(
        &self,
        bootstraps: bool,
        wanted: &Subject,
        reason: RequestReason,
    ) -> Result<(), RequestError> {
        // Cancel-safe: after the shutdown the next start continues with the stored request.
        tokio::select! {
            () = self.ctx.shutdown.cancelled() => Ok(()),
            done = self.handle.while_at(self.request(bootstraps, wanted, reason)) => done,
        }
    }

    fn failed(&self, error: &RequestError) {
        // Without credentials no request was made.
        if let (Some(metrics), false) =
            (&self.metrics, matches!(error, RequestError::Server(e) if e.is_awaited()))
        {
            metrics.count_error();
        }
        let text = format!("no {} certificate: {}; it is retried", self.kind.word(), chain(error));
        self.ctx.progress.condition(self.condition, Err(text));
    }

    /// Waits, with heartbeats meanwhile.
    async fn wait(&self, wait: Duration) {
        // Cancel-safe: both only wait.
        tokio::select! {
            () = self.ctx.shutdown.cancelled() => {}
            () = self.handle.while_at(tokio::time::sleep(wait)) => {}
        }
    }

    /// The current certificate, or the issued one that init has not picked up, with its age.
    fn held(&self) -> (Option<HeldCertificate>, Option<Duration>) {
        let (current, issued) = (self.files.current(), self.files.issued());
        match (current, issued) {
            (Some(current), Some((issued, _))) if current.not_before > issued.not_before => {
                (Some(current), None)
            }
            (_, Some((issued, since))) => (Some(issued), Some(since)),
            (current, None) => (current, None),
        }
    }

    fn wanted(&self) -> Option<Subject> {
        let node = &self.ctx.config.node_name;
        match self.kind {
            CertificateKind::Client => Some(client_subject(node)),
            CertificateKind::Serving => serving_subject(node, &self.writer.addresses(), self.by_name),
        }
    }

    fn next_step(&mut self) -> Step {
        let now = now();
        let (held, unclaimed_for) = self.held();
        if let Some(metrics) = &self.metrics {
            metrics.set_expiry(held.as_ref().map(|held| held.not_after));
        }
        let Some(wanted) = self.wanted() else {
            let text = "no serving certificate: the Node has no address yet for it";
            return Step::Wait(POLL_INTERVAL, Err(text.to_owned()));
        };
        let since = held.as_ref().map_or(i64::MIN, |held| held.not_before);
        if self.part.0 != since {
            self.part = (since, fastrand::f64());
        }
        let bootstraps = self.bootstraps();
        match due(held.as_ref(), &wanted, self.part.1, now) {
            Due::Now(RequestReason::Expired) if self.kind == CertificateKind::Client && !bootstraps => {
                let text = "the client certificate has expired, and there are no other credentials to request a new one; \
                            give --bootstrap-kubeconfig a kubeconfig with a bootstrap token, or the kubeconfig a new certificate";
                Step::Wait(POLL_INTERVAL, Err(text.to_owned()))
            }
            // The certificate is not ours to replace, or the node uses other credentials. A valid certificate is not replaced
            // without rotation, although the bootstrap kubeconfig may exist a moment longer.
            Due::Now(reason)
                if (reason == RequestReason::Rotation && !self.rotates)
                    || (!bootstraps && (!self.rotates || self.uses_other_credentials(held.as_ref()))) =>
            {
                let is_awaiting = self.kind == CertificateKind::Client && !self.files.has_kubeconfig();
                Step::Wait(if is_awaiting { POLL_INTERVAL } else { LoopHandle::HEARTBEAT }, Ok(()))
            }
            Due::Now(reason) => Step::Request { bootstraps, wanted, reason },
            Due::At(at) => {
                self.files.remove_pending();
                let left = Duration::from_secs(u64::try_from(at - now).unwrap_or(0));
                let result = match unclaimed_for.filter(|since| *since > PICKUP_TIMEOUT) {
                    Some(_) => Err(format!(
                        "the new {} certificate is in {} and init has not picked it up: see the log of init, or start keelson-config.service",
                        self.kind.word(),
                        self.ctx.config.paths.issued_certificates().display()
                    )),
                    None => Ok(()),
                };
                let longest = if unclaimed_for.is_some() { POLL_INTERVAL } else { LoopHandle::HEARTBEAT };
                Step::Wait(left.clamp(POLL_INTERVAL, longest), result)
            }
        }
    }

    /// Whether a certificate is requested with the bootstrap kubeconfig.
    fn bootstraps(&self) -> bool {
        self.kind == CertificateKind::Client && self.files.bootstrap.exists()
    }

    /// Whether the kubeconfig has no certificate to replace, but a token, for example.
    fn uses_other_credentials(&self, held: Option<&HeldCertificate>) -> bool {
        self.kind == CertificateKind::Client && held.is_none()
    }

    /// Requests a certificate, or continues a request of an earlier run, and stores what is issued for init. Returns early if it
    /// is not wanted any more, or must be requested with the other kubeconfig.
    async fn request(
        &self,
        bootstraps: bool,
        wanted: &Subject,
        reason: RequestReason,
    ) -> Result<(), RequestError> {
        let api = if bootstraps { &self.bootstrap } else { &self.own };
        let stored =
            self.files.pending().filter(|pending| pending.subject == *wanted && is_fresh(pending, now()));
        let (pending, mut found) = match stored {
            Some(pending) => {
                let found = api.get(REQUESTS, None, &pending.name).await?;
                (pending, found)
            }
            None => {
                let name = format!("csr-{}", random_name());
                let key = x509::new_key().map_err(RequestError::Create)?;
                let pending = PendingRequest { name, key, subject: wanted.clone(), created: now() };
                self.files.store_pending(&pending)?;
                (pending, None)
            }
        };
        let request =
            base64::encode(x509::request(&pending.key, wanted).map_err(RequestError::Create)?.as_bytes());
        if found.is_none() {
            let body = signing_request(self.kind, &pending.name, &request);
            let created = match api.create(REQUESTS, None, &body).await {
                // A first try whose answer was lost may have created it.
                Err(error) if error.is_conflict() => api.get(REQUESTS, None, &pending.name).await?,
                created => Some(created?),
            };
            tracing::info!(
                request = pending.name,
                reason = reason.as_str(),
                "requested a {} certificate",
                self.kind.word()
            );
            found = created;
        }
        let Some(found) = found else { return Err(RequestError::Removed { name: pending.name }) };
        if !x509::is_for_key(&found.0["spec"]["request"], &pending.key) {
            return Err(RequestError::Foreign { name: pending.name });
        }
        if self.check_answer(&pending, &found)? { Ok(()) } else { self.follow(bootstraps, &pending).await }
    }

    /// Waits for the answer to a request, as long as the same kubeconfig is to be used.
    async fn follow(&self, bootstraps: bool, pending: &PendingRequest) -> Result<(), RequestError> {
        let api = if bootstraps { &self.bootstrap } else { &self.own };
        let removed = || RequestError::Removed { name: pending.name.clone() };
        let mut follower = Follower::new(api.clone(), Range::one(REQUESTS, None, &pending.name));
        loop {
            let change = {
                let mut next = pin!(follower.next());
                loop {
                    if !is_fresh(pending, now()) {
                        return Err(RequestError::Unanswered { name: pending.name.clone() });
                    }
                    if !self.should_continue(bootstraps, pending) {
                        return Ok(());
                    }
                    // Cancel-safe: `next` is polled on.
                    tokio::select! {
                        change = &mut next => break change,
                        () = tokio::time::sleep(POLL_INTERVAL) => {}
                    }
                }
            };
            let found = match change {
                WatchEvent::Listed(objects) => {
                    match objects.into_iter().find(|object| object.name() == pending.name) {
                        Some(object) => object,
                        // The list may be older than the request.
                        None => api.get(REQUESTS, None, &pending.name).await?.ok_or_else(removed)?,
                    }
                }
                WatchEvent::Changed(Change::Put(object)) => object,
                WatchEvent::Changed(Change::Deleted(_)) => return Err(removed()),
                WatchEvent::Contact => continue,
                WatchEvent::Lost(error) => {
                    let text = format!(
                        "{} waits for its answer, but the watch is lost: {}",
                        pending.name,
                        chain(&error)
                    );
                    self.ctx.progress.condition(self.condition, Err(text));
                    continue;
                }
            };
            if self.check_answer(pending, &found)? {
                return Ok(());
            }
        }
    }

    /// Whether the request is still wanted, with the same kubeconfig. If the client certificate expires meanwhile, init takes it
    /// away, and the request continues with the bootstrap kubeconfig.
    fn should_continue(&self, bootstraps: bool, pending: &PendingRequest) -> bool {
        let (request, word) = (&pending.name, self.kind.word());
        if !self.is_still_wanted(&pending.subject) {
            tracing::info!(request, "the {word} certificate is not needed any more");
            return false;
        }
        let is_same = self.bootstraps() == bootstraps;
        if !is_same {
            tracing::info!(
                request,
                "the request for a {word} certificate continues with the other kubeconfig"
            );
        }
        is_same
    }

    /// Whether a certificate with this subject is still needed.
    fn is_still_wanted(&self, subject: &Subject) -> bool {
        let held = self.held().0;
        let is_due = matches!(due(held.as_ref(), subject, self.part.1, now()), Due::Now(_));
        is_due && self.wanted().is_some_and(|wanted| wanted == *subject)
    }

    /// Stores an issued pair for init; returns whether there is one.
    fn check_answer(&self, pending: &PendingRequest, request: &Object) -> Result<bool, RequestError> {
        let name = pending.name.clone();
        let encoded = match request_state(&request.0) {
            RequestState::Pending { approved } => {
                let text = if approved {
                    format!("{name} is approved and waits for its certificate from the signer")
                } else {
                    format!("{name} waits for its approval (kubectl certificate approve {name})")
                };
                let text = format!("no {} certificate yet: {text}", self.kind.word());
                self.ctx.progress.condition(self.condition, Err(text));
                return Ok(false);
            }
            RequestState::Refused(message) => return Err(RequestError::Refused { name, message }),
            RequestState::Issued(encoded) => encoded,
        };
        let no_certificates =
            || RequestError::Invalid { name: name.clone(), source: X509Error::NoCertificates };
        let pem = base64::decode(&encoded).ok_or_else(no_certificates)?;
        let pem = String::from_utf8(pem).map_err(|_| no_certificates())?;
        let held = x509::check(self.kind, pem.as_bytes(), &pending.key, &pending.subject, now())
            .map_err(|source| RequestError::Invalid { name, source })?;
        let before = self.held().0;
        self.files.store_issued(&pem, &pending.key)?;
        self.files.remove_pending();
        if let (Some(metrics), Some(before)) = (&self.metrics, before) {
            metrics.replaced(before.not_before, now());
        }
        tracing::info!(
            request = pending.name,
            ends = held.not_after,
            "a {} certificate was issued",
            self.kind.word()
        );
        Ok(true)
    }
}

fn is_fresh(pending: &PendingRequest, now: i64) -> bool {
    let age = u64::try_from(now - pending.created).unwrap_or(0);
    Duration::from_secs(age) < ANSWER_TIMEOUT
}

fn random_name() -> String {
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    std::iter::repeat_with(|| char::from(LETTERS[fastrand::usize(..LETTERS.len())]))
        .take(NAME_LENGTH)
        .collect()
}
