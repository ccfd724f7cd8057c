//! EnsureImage: inspect, decide, and either give the image or have it pulled ([`crate::pull`]).
//!
//! An image that is there is for the pods that could pull it, as far as that is known ([`crate::pull_records`]).
//!
//! A runtime that is away is no fault of an image: the call fails with UNAVAILABLE, without event and back-off. So does
//! one whose Secrets nobody can read at the moment.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_cri::v1 as cri;
use keelson_config::{Config, ImagePulls};
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::ensure_image_response::Item;
use keelson_runtime_shim_core::image::{ImageDecision, PullBook, PullPolicy, decide, with_default_tag};
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
use crate::credentials::{Credentials, Found};
use crate::cri::Cri;
use crate::pull::{Pull, PullMetrics};
use crate::pull_records::{RecordError, Records};
use crate::pull_watch::{Watching, tell};
use crate::whole;

/// A pull that others wait for keeps its turn for a minute, one of a pod with several for 10 s. It goes on without one, so that a
/// registry that sends a byte now and then holds up nobody else's pulls.
const FAIRNESS: Fairness = Fairness { patience: Duration::from_secs(10), kept: Duration::from_secs(60) };

/// Makes images present.
#[derive(Debug, Clone)]
pub struct Images {
    pub(crate) cri: Cri,
    pub(crate) events: EventRing,
    book: Arc<Mutex<PullBook>>,
    pub(crate) turns: Arc<Turns>,
    pub(crate) rate: Arc<Mutex<PullRate>>,
    pub(crate) clock: Clock,
    pub(crate) credentials: Credentials,
    pub(crate) records: Records,
    pub(crate) watching: Watching,
    pub(crate) metrics: PullMetrics,
    asked: Family<AskedLabels, Counter>,
    checked: Family<CheckLabels, Counter>,
    claims: Arc<Claims>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AskedLabels {
    pull_policy: String,
    present_locally: String,
    pull_required: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CheckLabels {
    result: &'static str,
}

/// What keeps an image from being removed between the answer that it is there and its first container.
#[derive(Debug, Default)]
struct Claims {
    state: Mutex<ClaimState>,
    /// A removal has ended.
    ended: Notify,
}

#[derive(Debug, Default)]
struct ClaimState {
    /// When an image was last said to be there, nanoseconds since the boot.
    promised: HashMap<String, i64>,
    removing: HashSet<String>,
}

/// Where progress goes; closed when the caller has left.
pub type Progress = mpsc::Sender<Result<pb::EnsureImageResponse, Status>>;

/// Why there is no image.
#[derive(Debug)]
pub(crate) enum NoImage {
    /// It cannot be had now.
    Failed(pb::ImageFailed),
    /// The runtime is away, and nobody knows: neither a failure nor an event.
    Away(Status),
    /// The caller has left: neither a failure nor an event, and nobody to tell.
    Left,
}

/// What is to be done with an image that is there.
enum Usable {
    /// It is used; `asked` says that somebody had to show a credential.
    Yes {
        asked: bool,
    },
    No,
}

impl Images {
    /// Pulls at most `parallel` images at the same time, without credentials and without records.
    pub fn new(cri: Cri, events: EventRing, parallel: u32) -> Self {
        let pulls = ImagePulls::default();
        let limit = Duration::from_millis(pulls.progress_timeout_ms);
        Self {
            watching: Watching::new(cri.clone(), Clock::System, limit),
            cri,
            events,
            book: Arc::default(),
            turns: Turns::new(parallel.max(1) as usize, FAIRNESS),
            rate: Arc::new(Mutex::new(PullRate::new(pulls.registry_qps, pulls.registry_burst))),
            clock: Clock::System,
            credentials: Credentials::none(),
            records: Records::none(),
            metrics: PullMetrics::new(),
            asked: Family::default(),
            checked: Family::default(),
            claims: Arc::default(),
        }
    }

    /// With the limits of the configuration, credentials, and the records of earlier pulls.
    #[must_use]
    pub fn configured(mut self, config: &Config, credentials: Credentials, metrics: &Metrics) -> Self {
        let pulls = &config.image_pulls;
        let limit = Duration::from_millis(pulls.progress_timeout_ms);
        self.watching = Watching::new(self.cri.clone(), self.clock.clone(), limit);
        self.rate = Arc::new(Mutex::new(PullRate::new(pulls.registry_qps, pulls.registry_burst)));
        self.credentials = credentials;
        self.records = Records::new(&config.paths.root_dir, pulls);
        self.metrics.register(metrics);
        let help = "Images that were asked for, by policy and whether they were there and had to be pulled";
        metrics.register("kubelet_image_manager_ensure_image_requests", help, self.asked.clone());
        let help =
            "Times that it was looked whether a pod may use an image that is there, by what came of it";
        metrics.register("kubelet_imagemanager_image_mustpull_checks", help, self.checked.clone());
        self
    }

    fn claims(&self) -> std::sync::MutexGuard<'_, ClaimState> {
        self.claims.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the removal of an image, unless somebody was told within `spare` nanoseconds that it is there. Whoever
    /// asks for it from now on waits for [`Self::end_removal`].
    pub(crate) fn begin_removal(&self, id: &str, spare: i64) -> bool {
        let now = self.clock.read().boot_nanos;
        let mut claims = self.claims();
        claims.promised.retain(|_, at| now - *at < spare);
        !claims.promised.contains_key(id) && claims.removing.insert(id.to_owned())
    }

    /// The removal is over, whatever has come of it.
    pub(crate) fn end_removal(&self, id: &str) {
        self.claims().removing.remove(id);
        self.claims.ended.notify_waiters();
    }

    /// The image, if it is there, and from now on it stays for a while.
    pub(crate) async fn claim(&self, reference: &str) -> Result<Option<cri::Image>, Status> {
        loop {
            let ended = self.claims.ended.notified();
            let Some(image) = self.inspect(reference).await? else { return Ok(None) };
            {
                let mut claims = self.claims();
                if !claims.removing.contains(&image.id) {
                    claims.promised.insert(image.id.clone(), self.clock.read().boot_nanos);
                    return Ok(Some(image));
                }
            }
            ended.await;
        }
    }

    pub(crate) fn book(&self) -> std::sync::MutexGuard<'_, PullBook> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the failures of a pod that is gone.
    pub fn forget(&self, uid: &str) {
        self.book().clear(uid, None);
    }

    /// Settles the pulls that the end of an earlier agent cut off.
    ///
    /// # Errors
    /// The runtime does not say whether an image is there; to be tried again.
    pub async fn settle_cut_off(&self) -> Result<(), Status> {
        let cut_off = self.in_records(|records| Ok(records.cut_off())).await.unwrap_or_default();
        for reference in cut_off {
            let image = self.inspect(&reference).await?;
            let settled = self
                .in_records(move |records| records.settle(&reference, image.as_ref().map(|i| i.id.as_str())));
            if let Err(error) = settled.await {
                tracing::warn!(error = chain(&error), "cannot settle a pull that was cut off");
            }
        }
        Ok(())
    }

    /// Carries out one request; the last message is `done` or `failed`, or UNAVAILABLE ends the answer because
    /// the runtime is away.
    pub async fn ensure(&self, request: pb::EnsureImageRequest, progress: Progress) {
        let pod = request.pod.clone().unwrap_or_default();
        let list = if request.spec_list.is_empty() { "containers" } else { &request.spec_list };
        let object = ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid).container(list, &request.container);
        let end = match self.ensure_inner(&pod, &request, &object, &progress).await {
            Ok(done) => Ok(Item::Done(done)),
            Err(NoImage::Failed(failed)) => Ok(Item::Failed(failed)),
            Err(NoImage::Away(status)) => {
                tracing::debug!(image = request.image, error = status.message(), "the runtime is away");
                Err(status)
            }
            Err(NoImage::Left) => return,
        };
        let _ = progress.send(end.map(|item| pb::EnsureImageResponse { item: Some(item) })).await;
    }

    async fn ensure_inner(
        &self,
        pod: &PodRef,
        request: &pb::EnsureImageRequest,
        object: &ObjectRef,
        progress: &Progress,
    ) -> Result<pb::ImageDone, NoImage> {
        let reference = with_default_tag(&request.image)
            .map_err(|error| self.failed(object, "InspectFailed", "InvalidImageName", error.to_string()))?;
        let present = self.claim(&reference).await.map_err(|status| {
            let message = format!("Failed to inspect image {:?}: {}", request.image, status.message());
            if is_cut(&status) {
                return away(message);
            }
            self.failed(object, "InspectFailed", "ImageInspectError", message)
        })?;
        let policy = PullPolicy::parse(&request.pull_policy, &reference);
        let repository = repository_of(&reference);
        let pull = Pull { pod, request, reference: &reference, repository: &repository, object, progress };
        let usable = match (&present, decide(policy, present.is_some())) {
            (Some(image), ImageDecision::Use) => self.usable(pull, &image.id).await?,
            _ => Usable::No,
        };
        let pulls = matches!(usable, Usable::No) && policy != PullPolicy::Never;
        self.count(policy, present.is_some(), pulls);
        match (present, usable) {
            (Some(image), Usable::Yes { asked }) => {
                let shown = if asked { " and can be accessed by the pod" } else { "" };
                let message =
                    format!("Container image {:?} already present on machine{shown}", request.image);
                Ok(pb::ImageDone { message, ..done(image, &reference, false) })
            }
            _ if pulls => self.pull(pull).await,
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

    /// Whether the pod may use an image that is there, counted.
    async fn usable(&self, pull: Pull<'_>, id: &str) -> Result<Usable, NoImage> {
        let found = self.look_up(pull, id).await;
        let result = match &found {
            Ok(Usable::Yes { asked: false }) => "credentialPolicyAllowed",
            Ok(Usable::Yes { asked: true }) => "credentialRecordFound",
            Ok(Usable::No) => "mustAuthenticate",
            Err(_) => "error",
        };
        self.checked.get_or_create(&CheckLabels { result }).inc();
        found
    }

    /// Whether the pod may use an image that is there. Its Secrets are asked for only when it depends on them.
    async fn look_up(&self, pull: Pull<'_>, id: &str) -> Result<Usable, NoImage> {
        let ask = |credentials: Found| {
            let (reference, repository) = (pull.reference.to_owned(), pull.repository.to_owned());
            let id = id.to_owned();
            self.in_records(move |records| {
                Ok(records.access(&reference, &repository, &id, &credentials.list))
            })
        };
        let unreadable = |error: RecordError| away(chain(&error));
        match ask(Found::default()).await.map_err(unreadable)? {
            Access::Open => return Ok(Usable::Yes { asked: false }),
            Access::Verified { .. } => return Ok(Usable::Yes { asked: true }),
            Access::Unknown => {}
        }
        let found = self.credentials.of_pod(pull.pod, &pull.request.pull_secrets, pull.repository).await;
        let found = found.map_err(|error| away(error.to_string()))?;
        let Access::Verified { note } = ask(found).await.map_err(unreadable)? else { return Ok(Usable::No) };
        if let Some(used) = note {
            let (repository, id) = (pull.repository.to_owned(), id.to_owned());
            let noted = self.in_records(move |records| records.note(&repository, &id, Some(&used)));
            if let Err(error) = noted.await {
                tracing::warn!(error = chain(&error), "cannot note that a Secret is good for an image");
            }
        }
        Ok(Usable::Yes { asked: true })
    }

    fn count(&self, policy: PullPolicy, present: bool, pulls: bool) {
        let policy = match policy {
            PullPolicy::Always => "always",
            PullPolicy::IfNotPresent => "ifnotpresent",
            PullPolicy::Never => "never",
        };
        let labels = AskedLabels {
            pull_policy: policy.to_owned(),
            present_locally: present.to_string(),
            pull_required: pulls.to_string(),
        };
        self.asked.get_or_create(&labels).inc();
    }

    /// What the runtime knows of a reference; `None`: the image is not there.
    pub(crate) async fn inspect(&self, reference: &str) -> Result<Option<cri::Image>, Status> {
        let request = cri::ImageStatusRequest {
            image: Some(cri::ImageSpec { image: reference.to_owned(), ..Default::default() }),
            verbose: false,
        };
        match self.cri.images().image_status(self.cri.quick(request)).await {
            Ok(response) => {
                let image = response.into_inner().image;
                image.as_ref().map_or(Ok(()), |image| whole::image(reference, image)).map(|()| image)
            }
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status),
        }
    }

    fn failed(&self, object: &ObjectRef, event: &str, reason: &str, message: String) -> NoImage {
        self.events.warning(object.clone(), event, message.clone());
        NoImage::Failed(pb::ImageFailed { reason: reason.to_owned(), message, next_retry_unix_nanos: 0 })
    }
}

/// The runtime is away, as `message` says.
pub(crate) fn away(message: String) -> NoImage {
    NoImage::Away(error(Code::Unavailable, "RUNTIME_UNAVAILABLE", message))
}

pub(crate) fn step(progress: &Progress, step: &str, detail: &str) {
    let (step, detail) = (step.to_owned(), detail.to_owned());
    tell(progress, pb::ImageProgress { step, detail, ..Default::default() });
}

pub(crate) fn done(image: cri::Image, reference: &str, pulled: bool) -> pb::ImageDone {
    let image_ref = if image.id.is_empty() { reference.to_owned() } else { image.id };
    let uid = image.uid.map(|u| u.value);
    pb::ImageDone { image_ref, uid, username: image.username, pulled, message: String::new() }
}

#[cfg(test)]
mod tests;
