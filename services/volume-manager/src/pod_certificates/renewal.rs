//! The task that requests and refreshes one certificate.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_service_kit::status::{chain, error};
use keelson_service_kit::{Backoff, ObjectRef};
use keelson_volume_manager_core::desire::PodRef;
use keelson_volume_manager_core::payload::{ObjectKind, ObjectLookup, ObjectName};
use keelson_volume_manager_core::pod_certificate::{
    Action, CertificateLookup, CertificateName, CertificateRequest, Credentials, JITTER_SECONDS, Notice,
    Observed, Refusal, State,
};
use keelson_volume_manager_core::wait_owner::WaitOwner;
use tokio::time::Instant;
use tonic::{Code, Status};
use zeroize::Zeroizing;

use super::metrics::CountedCertificate;
use super::{CertificateCache, CertificateClient, failed_request, keys};
use crate::objects::Subscription;

/// The pause before another request: after a failed one, a deleted one, and a certificate that has to be refreshed at once.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(120));
/// A request that comes so long after the last one needs no pause.
const QUIET: Duration = Duration::from_secs(600);
/// The longest sleep before the machine's clock is read again, since that clock may jump.
const MAX_SLEEP: Duration = Duration::from_secs(300);

/// Whose certificate it is.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) pod: PodRef,
    pub(super) service_account: String,
}

/// Requests and refreshes one certificate.
pub(super) struct Renewal {
    client: CertificateClient,
    cache: Arc<CertificateCache>,
    owner: Owner,
    name: CertificateName,
    request: CertificateRequest,
    state: State,
    /// The key of the request that is waiting for the signer.
    key: Zeroizing<String>,
    /// Follows that request.
    followed: Subscription,
    counted: CountedCertificate,
    retry: Backoff,
    last_request: Option<Instant>,
}

impl Renewal {
    pub(super) fn new(
        client: CertificateClient,
        cache: Arc<CertificateCache>,
        owner: Owner,
        (name, request): (CertificateName, CertificateRequest),
    ) -> Self {
        let followed = client.objects.subscribe();
        let counted = client.metrics.count(&request.signer);
        Self {
            client,
            cache,
            owner,
            name,
            request,
            state: State::default(),
            key: Zeroizing::default(),
            followed,
            counted,
            retry: RETRY,
            last_request: None,
        }
    }

    /// Runs until it is aborted.
    pub(super) async fn run(mut self) {
        loop {
            self.followed.has_changed();
            let observed = self.observed();
            let now = self.client.requests.now();
            let step = self.state.step(now, &observed, jitter());
            self.counted.set(Some(self.state.metric(now)));
            step.notices.iter().for_each(|notice| self.report(notice));
            match step.action {
                // On the heap, so that a sleeping task, as nearly all are, is small.
                Action::Request => Box::pin(self.request()).await,
                Action::Use { chain } => {
                    let key = std::mem::take(&mut self.key);
                    let present = CertificateLookup::Present(Arc::new(Credentials { key, chain }));
                    self.cache.set(&self.name, present);
                    self.followed.set(BTreeSet::new());
                }
                Action::Wait { until } => {
                    self.publish(&observed);
                    self.wait(until, now).await;
                }
            }
        }
    }

    /// What pod-config knows of the request.
    fn observed(&self) -> Observed {
        let Some(name) = self.state.request().map(|name| self.object_name(name)) else {
            return Observed::Unknown;
        };
        match self.client.objects.lookup(&name) {
            ObjectLookup::Unknown => Observed::Unknown,
            ObjectLookup::Missing => Observed::Missing,
            ObjectLookup::Unreadable(why) => Observed::Invalid(why),
            ObjectLookup::Present(data) => {
                data.values().next().map_or(Observed::Missing, |json| Observed::parse(json))
            }
        }
    }

    fn object_name(&self, name: &str) -> ObjectName {
        let (namespace, name) = (self.owner.pod.namespace.clone(), name.to_owned());
        ObjectName { kind: ObjectKind::PodCertificateRequest, namespace, name }
    }

    /// Makes a key and creates a request with it. A failure is published and tried again by the next step.
    async fn request(&mut self) {
        if self.last_request.is_some_and(|last| last.elapsed() < QUIET) {
            tokio::time::sleep(self.retry.next_delay()).await;
        } else {
            self.retry.reset();
        }
        let created = self.create().await;
        self.last_request = Some(Instant::now());
        match created {
            Ok((name, key)) => {
                self.key = key;
                self.followed.set([self.object_name(&name)].into());
                self.state.requested(name, self.client.requests.now(), jitter());
            }
            Err(status) => {
                let PodRef { uid, namespace, name } = &self.owner.pod;
                let (signer, error) = (&self.request.signer, status.message());
                tracing::warn!(
                    uid,
                    namespace,
                    pod = name,
                    signer,
                    error,
                    "cannot request a certificate; will retry"
                );
                let (what, owner) = failed_request(&self.request, &status);
                self.cache.set_pending(&self.name, what, owner);
            }
        }
    }

    async fn create(&self) -> Result<(String, Zeroizing<String>), Status> {
        let kind = self.request.key_type;
        let PodRef { uid, namespace, name } = &self.owner.pod;
        let turn = self.client.turns.take(&uid.as_str().into()).await;
        turn.work(async {
            let key = tokio::task::spawn_blocking(move || keys::generate(kind)).await;
            let key = key.map_err(|cause| chain(&cause)).and_then(|key| key.map_err(|cause| chain(&cause)));
            let key = key.map_err(|text| error(Code::Internal, "NO_KEY", text))?;
            let message = pb::RequestPodCertificateRequest {
                namespace: namespace.clone(),
                pod_name: name.clone(),
                pod_uid: uid.clone(),
                service_account: self.owner.service_account.clone(),
                signer_name: self.request.signer.clone(),
                max_expiration_seconds: self.request.max_expiration_seconds,
                stub_pkcs10_request: key.request,
                user_annotations: self.request.user_annotations.clone().into_iter().collect(),
            };
            Ok((self.client.requests.create(message).await?, key.pem))
        })
        .await
    }

    /// Publishes what the certificate waits for, or that the signer refuses.
    fn publish(&self, observed: &Observed) {
        let signer = &self.request.signer;
        if let Some(why) = self.state.refusal(signer) {
            return self.cache.set(&self.name, CertificateLookup::Refused(why));
        }
        let Some(request) = self.state.request() else { return };
        let request = format!("PodCertificateRequest {}/{request}", self.owner.pod.namespace);
        let of_signer = WaitOwner::Signer(signer.clone());
        let (what, owner) = match observed {
            Observed::Unknown => (format!("pod-config to send the {request}"), WaitOwner::PodConfig),
            Observed::Missing => (format!("the API server to show the {request}"), WaitOwner::ApiServer),
            Observed::Invalid(why) => (format!("the {request}, which is not valid: {why}"), of_signer),
            Observed::Pending | Observed::Issued(_) | Observed::Denied(_) | Observed::Failed(_) => {
                (format!("the signer {signer} to issue the {request}"), of_signer)
            }
        };
        self.cache.set_pending(&self.name, what, owner);
    }

    /// Waits until the request changes, at most until `until`.
    async fn wait(&self, until: Option<i64>, now: i64) {
        let left = until.and_then(|until| u64::try_from(until.saturating_sub(now)).ok());
        let left = left.map_or(MAX_SLEEP, |left| Duration::from_secs(left).min(MAX_SLEEP));
        // Cancel-safe: neither arm consumes anything.
        tokio::select! {
            _ = self.followed.changed() => {}
            () = tokio::time::sleep(left) => {}
        }
    }

    /// Logs a notice, and records it as an event of the pod.
    fn report(&self, notice: &Notice) {
        let PodRef { uid, namespace, name } = &self.owner.pod;
        let signer = &self.request.signer;
        match event_of(notice, namespace) {
            Some((reason, message)) => {
                tracing::warn!(uid, namespace, pod = name, signer, "{message}");
                self.client.events.warning(ObjectRef::pod(namespace, name, uid), reason, message);
            }
            None => {
                tracing::warn!(
                    uid,
                    namespace,
                    pod = name,
                    signer,
                    "the certificate request is gone; will request anew"
                );
            }
        }
    }
}

/// Reason and message of the event about a notice, if it is one for the pod.
pub(super) fn event_of(notice: &Notice, namespace: &str) -> Option<(&'static str, String)> {
    match notice {
        Notice::Overdue => {
            Some(("CertificateOverdueForRefresh", "PodCertificate refresh overdue".to_owned()))
        }
        Notice::Expired => Some(("CertificateExpired", "PodCertificate expired".to_owned())),
        Notice::Denied(request, Refusal { reason, message }) => Some((
            "Denied",
            format!(
                "PodCertificateRequest {namespace}/{request} was denied, reason={reason:?}, message={message:?}"
            ),
        )),
        Notice::Failed(request, Refusal { reason, message }) => Some((
            "Failed",
            format!(
                "PodCertificateRequest {namespace}/{request} failed, reason={reason:?}, message={message:?}"
            ),
        )),
        Notice::Deleted(_) => None,
    }
}

fn jitter() -> i64 {
    fastrand::i64(0..=JITTER_SECONDS)
}
