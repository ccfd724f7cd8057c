//! The certificates in pods' volumes: requested through pod-config, followed there, and refreshed before they expire
//! (volumes.md §9.6).
//!
//! Keys are in memory only. After a restart of this service every certificate is requested anew; until it is issued the files of a volume
//! stay as they are.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_service_kit::status::reason;
use keelson_service_kit::{EventRing, Fairness, Metrics, Peer, Turns, now_unix_nanos};
use keelson_volume_manager_core::desire::{PodDesire, Volume, Want};
use keelson_volume_manager_core::payload::FileSource;
use keelson_volume_manager_core::pod_certificate::{CertificateLookup, CertificateName, CertificateRequest};
use keelson_volume_manager_core::wait_owner::WaitOwner;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tonic::{Request, Response, Status};

use self::metrics::CertificateMetrics;
use self::renewal::{Owner, Renewal};
use crate::objects::ObjectCache;

mod keys;
mod metrics;
mod renewal;

/// The timeout of a call: longer than pod-config waits for the API server, which it calls twice.
const CALL_TIMEOUT: Duration = Duration::from_secs(65);
/// The limit of concurrent keys and requests. A key may need seconds of a processor.
const MAX_CONCURRENT: usize = 4;
/// The pod with the fewest running requests comes first.
const FAIRNESS: Fairness = Fairness { patience: Duration::from_secs(2), kept: CALL_TIMEOUT };

/// Creates requests at the API server.
pub(crate) trait Requests: Send + Sync + std::fmt::Debug {
    /// Creates a request and returns its name.
    fn create(&self, message: pb::RequestPodCertificateRequest) -> BoxFuture<'_, Result<String, Status>>;

    /// Seconds since 1970.
    fn now(&self) -> i64;
}

/// Requests through pod-config, with the clock of the machine.
#[derive(Debug)]
struct PodConfigRequests(Peer);

impl Requests for PodConfigRequests {
    fn create(&self, message: pb::RequestPodCertificateRequest) -> BoxFuture<'_, Result<String, Status>> {
        let mut request = Request::new(message);
        request.set_timeout(CALL_TIMEOUT);
        let mut client = PodConfigClient::new(self.0.channel());
        Box::pin(async move {
            client
                .request_pod_certificate(request)
                .await
                .map(Response::into_inner)
                .map(|created| created.name)
        })
    }

    fn now(&self) -> i64 {
        now_unix_nanos().div_euclid(1_000_000_000)
    }
}

/// What the certificates of all pods share. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct CertificateClient {
    requests: Arc<dyn Requests>,
    objects: ObjectCache,
    events: EventRing,
    metrics: CertificateMetrics,
    turns: Arc<Turns>,
}

impl CertificateClient {
    pub(crate) fn new(pod_config: Peer, objects: ObjectCache, events: EventRing, metrics: &Metrics) -> Self {
        Self::with_requests(Arc::new(PodConfigRequests(pod_config)), objects, events, metrics)
    }

    fn with_requests(
        requests: Arc<dyn Requests>,
        objects: ObjectCache,
        events: EventRing,
        metrics: &Metrics,
    ) -> Self {
        let metrics = CertificateMetrics::register(metrics);
        Self { requests, objects, events, metrics, turns: Turns::new(MAX_CONCURRENT, FAIRNESS) }
    }
}

/// The certificates of one pod. Dropping it ends their renewal and forgets their keys.
#[derive(Debug)]
pub(crate) struct PodCertificates {
    client: CertificateClient,
    cache: Arc<CertificateCache>,
    changes: watch::Receiver<()>,
    /// The task that renews each certificate, and what it requests.
    renewals: BTreeMap<CertificateName, (CertificateRequest, AbortHandle)>,
    tasks: JoinSet<()>,
}

/// What is known of the certificates of one pod.
#[derive(Debug)]
struct CertificateCache {
    certificates: Mutex<BTreeMap<CertificateName, CertificateLookup>>,
    changed: watch::Sender<()>,
}

impl CertificateCache {
    fn certificates(&self) -> MutexGuard<'_, BTreeMap<CertificateName, CertificateLookup>> {
        self.certificates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores what is known about a certificate, and notifies of a change.
    fn set(&self, name: &CertificateName, lookup: CertificateLookup) {
        let old = self.certificates().insert(name.clone(), lookup.clone());
        if old.is_none_or(|old| old != lookup) {
            self.changed.send_replace(());
        }
    }

    /// Stores what a certificate waits for, unless there is one in use.
    fn set_pending(&self, name: &CertificateName, what: String, owner: WaitOwner) {
        if !matches!(self.certificates().get(name), Some(CertificateLookup::Present(_))) {
            self.set(name, CertificateLookup::Pending { what, owner });
        }
    }
}

impl PodCertificates {
    /// Creates the certificates of a pod, none at first.
    pub(crate) fn new(client: CertificateClient) -> Self {
        let changed = watch::Sender::new(());
        let changes = changed.subscribe();
        let cache = Arc::new(CertificateCache { certificates: Mutex::default(), changed });
        Self { client, cache, changes, renewals: BTreeMap::new(), tasks: JoinSet::new() }
    }

    /// Replaces the certificates with those in `desire`.
    pub(crate) fn set(&mut self, desire: &PodDesire) {
        let desired = desired_certificates(desire);
        let cache = &self.cache;
        self.renewals.retain(|name, (request, task)| {
            let is_desired = desired.get(name) == Some(request);
            if !is_desired {
                task.abort();
                cache.certificates().remove(name);
            }
            is_desired
        });
        for (name, request) in desired {
            if !self.renewals.contains_key(&name) {
                let owner =
                    Owner { pod: desire.header.pod.clone(), service_account: desire.service_account.clone() };
                let renewal = Renewal::new(
                    self.client.clone(),
                    Arc::clone(&self.cache),
                    owner,
                    (name.clone(), request.clone()),
                );
                self.renewals.insert(name, (request, self.tasks.spawn(renewal.run())));
            }
        }
    }

    /// Returns a function that looks up certificates and may outlive `self`.
    pub(crate) fn lookup(&self) -> impl Fn(&CertificateName) -> CertificateLookup + Send + use<> {
        let cache = Arc::clone(&self.cache);
        move |name| {
            cache.certificates().get(name).cloned().unwrap_or_else(|| CertificateLookup::Pending {
                what: format!("a key for the certificate in the volume {:?}", name.volume),
                owner: WaitOwner::VolumeManager,
            })
        }
    }

    /// Whether a certificate has changed since the last call.
    pub(crate) fn has_changed(&mut self) -> bool {
        let changed = self.changes.has_changed().unwrap_or(false);
        self.changes.mark_unchanged();
        changed
    }

    /// Waits until [`Self::has_changed`] is true. Cancel-safe: it does not mark the change as seen.
    pub(crate) async fn changed(&self) -> bool {
        let mut changes = self.changes.clone();
        // The sender lives as long as `self`.
        changes.changed().await.is_ok()
    }
}

/// The certificates that a desire names.
fn desired_certificates(desire: &PodDesire) -> BTreeMap<CertificateName, CertificateRequest> {
    if matches!(desire.header.want, Want::Unmount | Want::Forget) {
        return BTreeMap::new();
    }
    let sources = desire.volumes.iter().filter_map(Volume::files).flat_map(|files| &files.sources);
    let certificate = |source: &FileSource| match source {
        FileSource::Certificate(files) => Some((files.name.clone(), files.request.clone())),
        _ => None,
    };
    sources.filter_map(certificate).collect()
}

/// The names of the certificates in a volume.
pub(crate) fn certificate_names(volume: &Volume) -> impl Iterator<Item = &CertificateName> {
    let sources = volume.files().into_iter().flat_map(|files| &files.sources);
    sources.filter_map(
        |source| if let FileSource::Certificate(files) = source { Some(&files.name) } else { None },
    )
}

/// What a failed request waits for, and who has to act.
fn failed_request(request: &CertificateRequest, status: &Status) -> (String, WaitOwner) {
    let error = status.message();
    // pod-config gives a reason for each of its errors.
    let what = format!("pod-config to request a certificate from the signer {}: {error}", request.signer);
    let owner = if reason(status).is_none() { WaitOwner::PodConfig } else { WaitOwner::ApiServer };
    (what, owner)
}

#[cfg(test)]
mod tests;
