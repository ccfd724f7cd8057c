//! EnsureImage: inspects the image, decides, and returns the image or pulls it ([`crate::pull`]).
//!
//! A pod may use a present image if the pod could pull it, as far as the records tell ([`crate::pull_records`]).
//!
//! If the runtime is down, the call fails with UNAVAILABLE, without event and back-off, because that is not an error of
//! the image. The same applies while the pod's Secrets cannot be read.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_cri::v1 as cri;
use keelson_config::{Config, ImagePulls};
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::ensure_image_response::Item;
use keelson_runtime_shim_core::image::{ImageDecision, PullBackoff, PullPolicy, decide, with_default_tag};
use keelson_runtime_shim_core::keyring::repository_of;
use keelson_runtime_shim_core::pull_rate::PullRate;
use keelson_runtime_shim_core::pull_record::Access;
use keelson_service_kit::status::{chain, error, is_cut};
use keelson_service_kit::{EventRing, Fairness, Metrics, ObjectRef, Turns};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tokio::sync::{Notify, mpsc};
use tonic::{Code, Status};

use crate::clock::Clock;
use crate::credentials::{Credentials, FoundCredentials};
use crate::cri::Cri;
use crate::pull::{Pull, PullMetrics};
use crate::pull_records::{PullRecords, RecordError};
use crate::pull_watch::{PullWatcher, send_progress};
use crate::response_checks;

/// A pull that others wait for keeps its turn for a minute, or for 10 s if its pod has several. After that it continues
/// without a turn, so that a very slow registry does not block the pulls of other pods.
const FAIRNESS: Fairness = Fairness { patience: Duration::from_secs(10), kept: Duration::from_secs(60) };

/// Ensures that images are present.
#[derive(Debug, Clone)]
pub struct Images {
    pub(crate) cri: Cri,
    pub(crate) events: EventRing,
    backoff: Arc<Mutex<PullBackoff>>,
    pub(crate) turns: Arc<Turns>,
    pub(crate) rate: Arc<Mutex<PullRate>>,
    pub(crate) clock: Clock,
    pub(crate) credentials: Credentials,
    pub(crate) records: PullRecords,
    pub(crate) watcher: PullWatcher,
    pub(crate) metrics: PullMetrics,
    requests: Family<RequestLabels, Counter>,
    access_checks: Family<CheckLabels, Counter>,
    reservations: Arc<ImageReservations>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    pull_policy: String,
    present_locally: String,
    pull_required: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CheckLabels {
    result: &'static str,
}

/// Reservations protect an image from removal between the response of `EnsureImage` and its first container.
#[derive(Debug, Default)]
struct ImageReservations {
    state: Mutex<ReservationState>,
    /// Notified when a removal has ended.
    ended: Notify,
}

#[derive(Debug, Default)]
struct ReservationState {
    /// When an image was last reported as present, nanoseconds since the boot.
    reserved_at: HashMap<String, i64>,
    removing: HashSet<String>,
}

/// Responses to the caller; closed when the caller has left.
pub type Progress = mpsc::Sender<Result<pb::EnsureImageResponse, Status>>;

/// Why an image could not be ensured.
#[derive(Debug)]
pub(crate) enum EnsureImageError {
    /// It cannot be used or pulled now.
    Failed(pb::ImageFailed),
    /// The runtime or pod-config does not answer. Not a failure of the image: no event, no back-off.
    Unavailable(Status),
    /// The caller has left: no failure, no event, no response.
    CallerLeft,
}

/// Whether a pod may use a present image.
enum Usable {
    /// The pod may use it; `verified` says that its credential was verified.
    Yes {
        verified: bool,
    },
    No,
}

impl Images {
    /// Pulls at most `parallel` images at a time, without credentials and without records.
    pub fn new(cri: Cri, events: EventRing, parallel: u32) -> Self {
        let pulls = ImagePulls::default();
        let limit = Duration::from_millis(pulls.progress_timeout_ms);
        Self {
            watcher: PullWatcher::new(cri.clone(), Clock::System, limit),
            cri,
            events,
            backoff: Arc::default(),
            turns: Turns::new(parallel.max(1) as usize, FAIRNESS),
            rate: Arc::new(Mutex::new(PullRate::new(pulls.registry_qps, pulls.registry_burst))),
            clock: Clock::System,
            credentials: Credentials::none(),
            records: PullRecords::none(),
            metrics: PullMetrics::new(),
            requests: Family::default(),
            access_checks: Family::default(),
            reservations: Arc::default(),
        }
    }

    /// Adds the limits of the configuration, credentials, and the records of earlier pulls.
    #[must_use]
    pub fn configured(mut self, config: &Config, credentials: Credentials, metrics: &Metrics) -> Self {
        let pulls = &config.image_pulls;
        let limit = Duration::from_millis(pulls.progress_timeout_ms);
        self.watcher = PullWatcher::new(self.cri.clone(), self.clock.clone(), limit);
        self.rate = Arc::new(Mutex::new(PullRate::new(pulls.registry_qps, pulls.registry_burst)));
        self.credentials = credentials;
        self.records = PullRecords::new(&config.paths.root_dir, pulls);
        self.metrics.register(metrics);
        let help =
            "Requests to ensure an image, by policy and whether the image was present and had to be pulled";
        metrics.register("kubelet_image_manager_ensure_image_requests", help, self.requests.clone());
        let help = "Checks whether a pod may use a present image, by result";
        metrics.register("kubelet_imagemanager_image_mustpull_checks", help, self.access_checks.clone());
        self
    }

    fn reservations(&self) -> std::sync::MutexGuard<'_, ReservationState> {
        self.reservations.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the removal of an image, unless it was reported as present within the last `minimum_idle` nanoseconds. Later
    /// requests for the image wait for [`Self::end_removal`].
    pub(crate) fn begin_removal(&self, id: &str, minimum_idle: i64) -> bool {
        let now = self.clock.read().boot_nanos;
        let mut reservations = self.reservations();
        reservations.reserved_at.retain(|_, at| now - *at < minimum_idle);
        !reservations.reserved_at.contains_key(id) && reservations.removing.insert(id.to_owned())
    }

    /// Ends a removal, successful or not.
    pub(crate) fn end_removal(&self, id: &str) {
        self.reservations().removing.remove(id);
        self.reservations.ended.notify_waiters();
    }

    /// Returns the image if it is present, and protects it from removal for a while.
    pub(crate) async fn reserve(&self, reference: &str) -> Result<Option<cri::Image>, Status> {
        loop {
            let ended = self.reservations.ended.notified();
            let Some(image) = self.inspect(reference).await? else { return Ok(None) };
            {
                let mut reservations = self.reservations();
                if !reservations.removing.contains(&image.id) {
                    reservations.reserved_at.insert(image.id.clone(), self.clock.read().boot_nanos);
                    return Ok(Some(image));
                }
            }
            ended.await;
        }
    }

    pub(crate) fn backoff(&self) -> std::sync::MutexGuard<'_, PullBackoff> {
        self.backoff.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the pull failures of a pod that no longer exists.
    pub fn forget(&self, uid: &str) {
        self.backoff().clear(uid, None);
    }

    /// Resolves pulls that were interrupted by the end of an earlier process.
    ///
    /// # Errors
    /// The runtime does not tell whether an image is present; the caller retries.
    pub async fn resolve_interrupted_pulls(&self) -> Result<(), Status> {
        let interrupted = self.with_records(|records| Ok(records.interrupted())).await.unwrap_or_default();
        for reference in interrupted {
            let image = self.inspect(&reference).await?;
            let resolved = self.with_records(move |records| {
                records.resolve_interrupted(&reference, image.as_ref().map(|i| i.id.as_str()))
            });
            if let Err(error) = resolved.await {
                tracing::warn!(error = chain(&error), "cannot resolve an interrupted pull");
            }
        }
        Ok(())
    }

    /// Serves one request. The last message is `done` or `failed`, or the stream ends with UNAVAILABLE because the runtime
    /// is down.
    pub async fn ensure(&self, request: pb::EnsureImageRequest, progress: Progress) {
        let pod = request.pod.clone().unwrap_or_default();
        let list = if request.spec_list.is_empty() { "containers" } else { &request.spec_list };
        let object = ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid).container(list, &request.container);
        let end = match self.try_ensure(&pod, &request, &object, &progress).await {
            Ok(done) => Ok(Item::Done(done)),
            Err(EnsureImageError::Failed(failed)) => Ok(Item::Failed(failed)),
            Err(EnsureImageError::Unavailable(status)) => {
                tracing::debug!(
                    image = request.image,
                    error = status.message(),
                    "an image cannot be ensured: a peer is not available"
                );
                Err(status)
            }
            Err(EnsureImageError::CallerLeft) => return,
        };
        let _ = progress.send(end.map(|item| pb::EnsureImageResponse { item: Some(item) })).await;
    }

    async fn try_ensure(
        &self,
        pod: &PodRef,
        request: &pb::EnsureImageRequest,
        object: &ObjectRef,
        progress: &Progress,
    ) -> Result<pb::ImageDone, EnsureImageError> {
        let reference = with_default_tag(&request.image)
            .map_err(|error| self.failed(object, "InspectFailed", "InvalidImageName", error.to_string()))?;
        let present = self.reserve(&reference).await.map_err(|status| {
            let message = format!("Failed to inspect image {:?}: {}", request.image, status.message());
            if is_cut(&status) {
                return unavailable(message);
            }
            self.failed(object, "InspectFailed", "ImageInspectError", message)
        })?;
        let policy = PullPolicy::parse(&request.pull_policy, &reference);
        let repository = repository_of(&reference);
        let pull = Pull { pod, request, reference: &reference, repository: &repository, object, progress };
        let usable = match (&present, decide(policy, present.is_some())) {
            (Some(image), ImageDecision::Use) => self.check_access(pull, &image.id).await?,
            _ => Usable::No,
        };
        let pull_required = matches!(usable, Usable::No) && policy != PullPolicy::Never;
        self.count(policy, present.is_some(), pull_required);
        match (present, usable) {
            (Some(image), Usable::Yes { verified }) => {
                let suffix = if verified { " and can be accessed by the pod" } else { "" };
                let message =
                    format!("Container image {:?} already present on machine{suffix}", request.image);
                Ok(pb::ImageDone { message, ..image_done(image, &reference, false) })
            }
            _ if pull_required => self.pull(pull).await,
            (present, _) => {
                let why = if present.is_some() {
                    "is present with pull policy of Never, and the pod has shown no credentials that it could be pulled with"
                } else {
                    "is not present with pull policy of Never"
                };
                let message = format!("Container image {:?} {why}", request.image);
                Err(self.failed(object, "ErrImageNeverPull", "ErrImageNeverPull", message))
            }
        }
    }

    /// Checks whether the pod may use a present image, and counts the result.
    async fn check_access(&self, pull: Pull<'_>, id: &str) -> Result<Usable, EnsureImageError> {
        let found = self.access_of_pod(pull, id).await;
        let result = match &found {
            Ok(Usable::Yes { verified: false }) => "credentialPolicyAllowed",
            Ok(Usable::Yes { verified: true }) => "credentialRecordFound",
            Ok(Usable::No) => "mustAuthenticate",
            Err(_) => "error",
        };
        self.access_checks.get_or_create(&CheckLabels { result }).inc();
        found
    }

    /// Checks whether the pod may use a present image. Its Secrets are read only if the decision depends on them.
    async fn access_of_pod(&self, pull: Pull<'_>, id: &str) -> Result<Usable, EnsureImageError> {
        let check = |credentials: FoundCredentials| {
            let (reference, repository) = (pull.reference.to_owned(), pull.repository.to_owned());
            let id = id.to_owned();
            self.with_records(move |records| {
                Ok(records.access(&reference, &repository, &id, &credentials.list))
            })
        };
        let records_error = |error: RecordError| unavailable(chain(&error));
        match check(FoundCredentials::default()).await.map_err(records_error)? {
            Access::Open => return Ok(Usable::Yes { verified: false }),
            Access::Verified { .. } => return Ok(Usable::Yes { verified: true }),
            Access::Unknown => {}
        }
        let found =
            self.credentials.pod_credentials(pull.pod, &pull.request.pull_secrets, pull.repository).await;
        let found = found.map_err(|error| unavailable(error.to_string()))?;
        let Access::Verified { to_record } = check(found).await.map_err(records_error)? else {
            return Ok(Usable::No);
        };
        if let Some(used) = to_record {
            let (repository, id) = (pull.repository.to_owned(), id.to_owned());
            let recorded = self.with_records(move |records| records.add(&repository, &id, Some(&used)));
            if let Err(error) = recorded.await {
                tracing::warn!(error = chain(&error), "cannot record that a Secret is valid for an image");
            }
        }
        Ok(Usable::Yes { verified: true })
    }

    fn count(&self, policy: PullPolicy, present: bool, pull_required: bool) {
        let policy = match policy {
            PullPolicy::Always => "always",
            PullPolicy::IfNotPresent => "ifnotpresent",
            PullPolicy::Never => "never",
        };
        let labels = RequestLabels {
            pull_policy: policy.to_owned(),
            present_locally: present.to_string(),
            pull_required: pull_required.to_string(),
        };
        self.requests.get_or_create(&labels).inc();
    }

    /// The runtime's status of an image; `None`: it is not present.
    pub(crate) async fn inspect(&self, reference: &str) -> Result<Option<cri::Image>, Status> {
        let request = cri::ImageStatusRequest {
            image: Some(cri::ImageSpec { image: reference.to_owned(), ..Default::default() }),
            verbose: false,
        };
        match self.cri.images().image_status(self.cri.quick(request)).await {
            Ok(response) => {
                let image = response.into_inner().image;
                image
                    .as_ref()
                    .map_or(Ok(()), |image| response_checks::check_image(reference, image))
                    .map(|()| image)
            }
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status),
        }
    }

    fn failed(&self, object: &ObjectRef, event: &str, reason: &str, message: String) -> EnsureImageError {
        self.events.warning(object.clone(), event, message.clone());
        EnsureImageError::Failed(pb::ImageFailed {
            reason: reason.to_owned(),
            message,
            next_retry_unix_nanos: 0,
        })
    }
}

/// The error for a runtime or pod-config that does not answer.
pub(crate) fn unavailable(message: String) -> EnsureImageError {
    EnsureImageError::Unavailable(error(Code::Unavailable, "RUNTIME_UNAVAILABLE", message))
}

pub(crate) fn send_step(progress: &Progress, step: &str, detail: &str) {
    let (step, detail) = (step.to_owned(), detail.to_owned());
    send_progress(progress, pb::ImageProgress { step, detail, ..Default::default() });
}

pub(crate) fn image_done(image: cri::Image, reference: &str, pulled: bool) -> pb::ImageDone {
    let image_ref = if image.id.is_empty() { reference.to_owned() } else { image.id };
    let uid = image.uid.map(|u| u.value);
    pb::ImageDone { image_ref, uid, username: image.username, pulled, message: String::new() }
}

#[cfg(test)]
mod tests;
