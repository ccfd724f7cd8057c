//! The certificates of this node: the client's, by which it names itself to the API server, and the serving one of its kubelet
//! API (node-and-api.md §6.3 to §6.5; docs/adr/0012-who-makes-and-keeps-certificates.md).
//!
//! A loop for each kind looks whether the one that this service was handed does, and else asks for another: a fresh key, a
//! CertificateSigningRequest, and what becomes of it. The key and the name of the request are kept before it is made, so that
//! who is killed meanwhile asks no second time. A pair that was issued is left for init, which keeps it and hands it on.
//!
//! | while | the client's is asked for by |
//! |---|---|
//! | there is none that holds | the bootstrap kubeconfig, which init hands over for as long |
//! | there is one, with `rotateCertificates` | itself |

mod files;
mod metrics;
mod x509;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use keelson_config::{CertificateKind, Kubernetes as Settings};
use keelson_kube_api::{Change, Follower, KubeApi, KubeError, News, Object, Range, Resource};
use keelson_node_status_core::certificates::{
    ANSWER_WITHIN, Answer, Due, Held, Subject, Why, answer, client_subject, due, pause, serving_subject,
    signing_request,
};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, LoopHandle, now_unix_nanos};

use self::files::{Asked, Files, KeepError};
use self::metrics::CertificateMetrics;
use self::x509::X509Error;
use super::{KubernetesWriter, user_agent};

const REQUESTS: Resource = Resource::CERTIFICATE_SIGNING_REQUEST;
/// How often it is looked while something is missing.
const LOOK: Duration = Duration::from_secs(1);
/// A pair that init has not taken after so long is told.
const TAKEN_WITHIN: Duration = Duration::from_secs(60);
/// Letters and digits of the name of a request.
const NAME: usize = 10;

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
enum AskError {
    #[error(transparent)]
    Server(#[from] KubeError),
    #[error(transparent)]
    Keep(#[from] KeepError),
    #[error("{name} is of no use")]
    Certificate { name: String, source: X509Error },
    #[error("cannot ask for a certificate")]
    Make(#[source] X509Error),
    #[error("{name} is refused: {words}")]
    Refused { name: String, words: String },
    #[error("{name} was removed before there was an answer")]
    Removed { name: String },
    #[error("{name} is somebody else's request")]
    Foreign { name: String },
    #[error("{name} was not answered within {} min", ANSWER_WITHIN.as_secs() / 60)]
    Unanswered { name: String },
}

impl AskError {
    /// Whether the request may still be answered.
    fn is_passing(&self) -> bool {
        matches!(self, Self::Server(_) | Self::Keep(_))
    }
}

/// What is to be done at a moment.
#[derive(Debug)]
enum Turn {
    /// Nothing, but look again after a while; with what is wrong, if anything is.
    Rest(Duration, Result<(), String>),
    /// Ask for a certificate, by the bootstrap kubeconfig or by the own one.
    Ask { bootstraps: bool, wanted: Subject, why: Why },
}

/// The certificate of a kind.
struct Certificate {
    kind: CertificateKind,
    condition: &'static str,
    ctx: Context,
    writer: Arc<KubernetesWriter>,
    /// Whether one that is there is replaced before it ends.
    rotates: bool,
    own: KubeApi,
    bootstrap: KubeApi,
    files: Files,
    metrics: Option<CertificateMetrics>,
    handle: LoopHandle,
    /// Chooses the moment of the rotation of the certificate that began at a moment.
    part: (i64, f64),
}

/// Starts what the settings ask for.
pub(super) fn start(ctx: &Context, settings: &Settings, writer: &Arc<KubernetesWriter>) {
    let asked = &settings.certificates;
    if asked.rotate || asked.bootstrap_kubeconfig.is_some() {
        let client = Certificate::new(ctx, settings, writer, CertificateKind::Client);
        ctx.spawn("client-certificate", client.run());
    }
    if asked.serving {
        let serving = Certificate::new(ctx, settings, writer, CertificateKind::Serving);
        ctx.spawn("serving-certificate", serving.run());
    }
}

fn now() -> i64 {
    now_unix_nanos() / 1_000_000_000
}

impl Certificate {
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
            let rest = match self.turn() {
                Turn::Rest(rest, told) => {
                    failures = 0;
                    self.ctx.progress.condition(self.condition, told);
                    rest
                }
                Turn::Ask { bootstraps, wanted, why } => match self.asked(bootstraps, &wanted, why).await {
                    Ok(()) => {
                        failures = 0;
                        Duration::ZERO
                    }
                    Err(error) => {
                        if !error.is_passing() {
                            self.files.forget_asked();
                        }
                        failures += 1;
                        self.failed(&error);
                        pause(failures, fastrand::f64())
                    }
                },
            };
            self.rest(rest).await;
        }
    }

    /// [`Certificate::ask`], and shows meanwhile that it can.
    async fn asked(&self, bootstraps: bool, wanted: &Subject, why: Why) -> Result<(), AskError> {
        // Cancel-safe: given up at the end, the next start goes on with what it has kept.
        tokio::select! {
            () = self.ctx.shutdown.cancelled() => Ok(()),
            done = self.handle.while_at(self.ask(bootstraps, wanted, why)) => done,
        }
    }

    fn failed(&self, error: &AskError) {
        // Without credentials nothing was tried.
        if let (Some(metrics), false) =
            (&self.metrics, matches!(error, AskError::Server(e) if e.is_awaited()))
        {
            metrics.failed();
        }
        let text = format!("no {} certificate: {}; it is tried again", self.kind.word(), chain(error));
        self.ctx.progress.condition(self.condition, Err(text));
    }

    /// Waits, and shows meanwhile that it can.
    async fn rest(&self, rest: Duration) {
        // Cancel-safe: both only wait.
        tokio::select! {
            () = self.ctx.shutdown.cancelled() => {}
            () = self.handle.while_at(tokio::time::sleep(rest)) => {}
        }
    }

    /// The certificate in force, or the one that is about to be.
    fn held(&self) -> (Option<Held>, Option<Duration>) {
        let (handed, issued) = (self.files.handed(), self.files.issued());
        match (handed, issued) {
            (Some(handed), Some((issued, _))) if handed.not_before > issued.not_before => {
                (Some(handed), None)
            }
            (_, Some((issued, since))) => (Some(issued), Some(since)),
            (handed, None) => (handed, None),
        }
    }

    fn wanted(&self) -> Option<Subject> {
        let node = &self.ctx.config.node_name;
        match self.kind {
            CertificateKind::Client => Some(client_subject(node)),
            CertificateKind::Serving => serving_subject(node, &self.writer.addresses()),
        }
    }

    fn turn(&mut self) -> Turn {
        let now = now();
        let (held, untaken) = self.held();
        if let Some(metrics) = &self.metrics {
            metrics.ends(held.as_ref().map(|held| held.not_after));
        }
        let Some(wanted) = self.wanted() else {
            let text = "no serving certificate: the Node has no address yet under which it could be reached";
            return Turn::Rest(LOOK, Err(text.to_owned()));
        };
        let since = held.as_ref().map_or(i64::MIN, |held| held.not_before);
        if self.part.0 != since {
            self.part = (since, fastrand::f64());
        }
        let bootstraps = self.bootstraps();
        match due(held.as_ref(), &wanted, self.part.1, now) {
            Due::Now(Why::Ended) if self.kind == CertificateKind::Client && !bootstraps => {
                let text = "the client certificate has ended, and there is nothing else by which another one could be asked for; \
                            give --bootstrap-kubeconfig a kubeconfig with a bootstrap token, or the kubeconfig a new certificate";
                Turn::Rest(LOOK, Err(text.to_owned()))
            }
            // Whose certificate is none of ours to replace, or who names himself by something else. One that holds is not
            // replaced without rotation, though the bootstrap kubeconfig may still lie there for a moment.
            Due::Now(why)
                if (why == Why::Rotation && !self.rotates)
                    || (!bootstraps && (!self.rotates || self.is_named_otherwise(held.as_ref()))) =>
            {
                let awaits = self.kind == CertificateKind::Client && !self.files.is_handed();
                Turn::Rest(if awaits { LOOK } else { LoopHandle::HEARTBEAT }, Ok(()))
            }
            Due::Now(why) => Turn::Ask { bootstraps, wanted, why },
            Due::At(at) => {
                self.files.forget_asked();
                let left = Duration::from_secs(u64::try_from(at - now).unwrap_or(0));
                let told = match untaken.filter(|since| *since > TAKEN_WITHIN) {
                    Some(_) => Err(format!(
                        "the new {} certificate lies in {} and is not taken: see the log of init, or start keelson-config.service",
                        self.kind.word(),
                        self.ctx.config.paths.issued_certificates().display()
                    )),
                    None => Ok(()),
                };
                let longest = if untaken.is_some() { LOOK } else { LoopHandle::HEARTBEAT };
                Turn::Rest(left.clamp(LOOK, longest), told)
            }
        }
    }

    /// Whether the bootstrap kubeconfig is what there is to ask by.
    fn bootstraps(&self) -> bool {
        self.kind == CertificateKind::Client && self.files.bootstrap.exists()
    }

    /// Whether the kubeconfig has no certificate to be replaced, but a token, say.
    fn is_named_otherwise(&self, held: Option<&Held>) -> bool {
        self.kind == CertificateKind::Client && held.is_none()
    }

    /// Asks for a certificate, or goes on with a request of an earlier run, and leaves what is issued for init. Returns without
    /// one where it is not wanted any more, or is to be asked for by the other kubeconfig.
    async fn ask(&self, bootstraps: bool, wanted: &Subject, why: Why) -> Result<(), AskError> {
        let by = if bootstraps { &self.bootstrap } else { &self.own };
        let kept = self.files.asked().filter(|asked| asked.subject == *wanted && is_young(asked, now()));
        let (asked, mut seen) = match kept {
            Some(asked) => {
                let seen = by.get(REQUESTS, None, &asked.name).await?;
                (asked, seen)
            }
            None => {
                let name = format!("csr-{}", random_name());
                let key = x509::new_key().map_err(AskError::Make)?;
                let asked = Asked { name, key, subject: wanted.clone(), made: now() };
                self.files.keep_asked(&asked)?;
                (asked, None)
            }
        };
        let request = STANDARD.encode(x509::request(&asked.key, wanted).map_err(AskError::Make)?);
        if seen.is_none() {
            let body = signing_request(self.kind, &asked.name, &request);
            let made = match by.create(REQUESTS, None, &body).await {
                // A first try that was cut may have made it.
                Err(error) if error.is_conflict() => by.get(REQUESTS, None, &asked.name).await?,
                made => Some(made?),
            };
            tracing::info!(
                request = asked.name,
                why = why.words(),
                "asked for a {} certificate",
                self.kind.word()
            );
            seen = made;
        }
        let Some(seen) = seen else { return Err(AskError::Removed { name: asked.name }) };
        if !x509::is_of_key(&seen.0["spec"]["request"], &asked.key) {
            return Err(AskError::Foreign { name: asked.name });
        }
        if self.judge(&asked, &seen)? { Ok(()) } else { self.follow(bootstraps, &asked).await }
    }

    /// Waits for the answer to a request, as long as there is somebody to ask for it by.
    async fn follow(&self, bootstraps: bool, asked: &Asked) -> Result<(), AskError> {
        let by = if bootstraps { &self.bootstrap } else { &self.own };
        let removed = || AskError::Removed { name: asked.name.clone() };
        let mut follower = Follower::new(by.clone(), Range::one(REQUESTS, None, &asked.name));
        loop {
            let news = {
                let mut next = pin!(follower.next());
                loop {
                    if !is_young(asked, now()) {
                        return Err(AskError::Unanswered { name: asked.name.clone() });
                    }
                    if !self.goes_on(bootstraps, asked) {
                        return Ok(());
                    }
                    // Cancel-safe: what is next is polled on.
                    tokio::select! {
                        news = &mut next => break news,
                        () = tokio::time::sleep(LOOK) => {}
                    }
                }
            };
            let found = match news {
                News::Listed(objects) => match objects.into_iter().find(|object| object.name() == asked.name)
                {
                    Some(object) => object,
                    // The list may be older than the request.
                    None => by.get(REQUESTS, None, &asked.name).await?.ok_or_else(removed)?,
                },
                News::Changed(Change::Put(object)) => object,
                News::Changed(Change::Deleted(_)) => return Err(removed()),
                News::InTouch => continue,
                News::Lost(error) => {
                    let text = format!("{} waits for its answer: {}", asked.name, chain(&error));
                    self.ctx.progress.condition(self.condition, Err(text));
                    continue;
                }
            };
            if self.judge(asked, &found)? {
                return Ok(());
            }
        }
    }

    /// Whether a request is still waited for by the same kubeconfig. A certificate may end meanwhile: what it named this
    /// node by is taken away then, and the same request goes on by the bootstrap kubeconfig.
    fn goes_on(&self, bootstraps: bool, asked: &Asked) -> bool {
        let (request, word) = (&asked.name, self.kind.word());
        if !self.is_still_wanted(&asked.subject) {
            tracing::info!(request, "the {word} certificate is not asked for any more");
            return false;
        }
        let is_same = self.bootstraps() == bootstraps;
        if !is_same {
            tracing::info!(request, "the request for a {word} certificate goes on by the other kubeconfig");
        }
        is_same
    }

    /// Whether a certificate is still needed for whom one was asked for.
    fn is_still_wanted(&self, subject: &Subject) -> bool {
        let held = self.held().0;
        let is_due = matches!(due(held.as_ref(), subject, self.part.1, now()), Due::Now(_));
        is_due && self.wanted().is_some_and(|wanted| wanted == *subject)
    }

    /// Leaves an issued pair for init; whether there is one.
    fn judge(&self, asked: &Asked, request: &Object) -> Result<bool, AskError> {
        let name = asked.name.clone();
        let encoded = match answer(&request.0) {
            Answer::Waits { approved } => {
                let text = if approved {
                    format!("{name} is approved and waits for its certificate from the signer")
                } else {
                    format!("{name} waits for its approval (kubectl certificate approve {name})")
                };
                let text = format!("no {} certificate yet: {text}", self.kind.word());
                self.ctx.progress.condition(self.condition, Err(text));
                return Ok(false);
            }
            Answer::Refused(words) => return Err(AskError::Refused { name, words }),
            Answer::Issued(encoded) => encoded,
        };
        let no_certificates =
            || AskError::Certificate { name: name.clone(), source: X509Error::NoCertificates };
        let pem = STANDARD.decode(encoded).map_err(|_| no_certificates())?;
        let pem = String::from_utf8(pem).map_err(|_| no_certificates())?;
        let held = x509::check(self.kind, pem.as_bytes(), &asked.key, &asked.subject, now())
            .map_err(|source| AskError::Certificate { name, source })?;
        let before = self.held().0;
        self.files.leave(&pem, &asked.key)?;
        self.files.forget_asked();
        if let (Some(metrics), Some(before)) = (&self.metrics, before) {
            metrics.replaced(before.not_before, now());
        }
        tracing::info!(
            request = asked.name,
            ends = held.not_after,
            "a {} certificate is issued",
            self.kind.word()
        );
        Ok(true)
    }
}

fn is_young(asked: &Asked, now: i64) -> bool {
    let age = u64::try_from(now - asked.made).unwrap_or(0);
    Duration::from_secs(age) < ANSWER_WITHIN
}

fn random_name() -> String {
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    std::iter::repeat_with(|| char::from(LETTERS[fastrand::usize(..LETTERS.len())])).take(NAME).collect()
}
