//! One pull: back-off, credentials, a turn, a token, then the runtime's pull, watched until its end.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_cri::v1 as cri;
use keelson_config::{Config, ImagePulls};
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::image::{PullBackoff, go_duration};
use keelson_runtime_shim_core::keyring::{Credential, Origin};
use keelson_runtime_shim_core::pull_rate::PullRate;
use keelson_service_kit::status::{chain, is_unanswered};
use keelson_service_kit::{EventRing, Fairness, Metrics, ObjectRef, Turns, TurnsLook};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tonic::Status;

use crate::clock::Clock;
use crate::credentials::Credentials;
use crate::cri::{Cri, image_spec};
use crate::cri_objects::Image;
use crate::ensure_response::{EnsureImageError, Progress, image_done, send_step, unavailable};
use crate::present_images::PresentImages;
use crate::pull_records::{PullRecords, RecordError};
use crate::pull_watch::{AbortReason, PullWatcher};

/// A pull that others wait for keeps its turn for a minute, or for 10 s if its pod has several. After that it continues
/// without a turn, so that a very slow registry does not block the pulls of other pods.
const FAIRNESS: Fairness = Fairness { patience: Duration::from_secs(10), kept: Duration::from_secs(60) };

/// The credential of a pull with its origin; `None`: a pull without a credential.
type PullCredential = Option<(Credential, Origin)>;

/// Why a pull failed.
#[derive(Debug)]
enum PullError {
    /// An error of the image or its registry, with the runtime's message.
    Failed(String),
    /// The runtime does not answer.
    Unavailable(String),
    /// The caller has left.
    CallerLeft,
}

/// The parameters of a pull.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pull<'a> {
    pub pod: &'a PodRef,
    pub request: &'a pb::EnsureImageRequest,
    /// The image reference with tag or digest.
    pub reference: &'a str,
    /// The reference without tag and digest.
    pub repository: &'a str,
    pub object: &'a ObjectRef,
    pub progress: &'a Progress,
}

/// Metrics: durations of pulls, and the numbers of intent and record files.
#[derive(Debug, Clone)]
pub(crate) struct PullMetrics {
    seconds: Family<SizeLabel, Histogram>,
    intents: Gauge,
    records: Gauge,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SizeLabel {
    image_size_in_bytes: String,
}

impl PullMetrics {
    pub(crate) fn new() -> Self {
        let histogram = || {
            Histogram::new([
                1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0,
                1200.0, 1800.0, 2700.0, 3600.0,
            ])
        };
        let seconds = Family::new_with_constructor(histogram as fn() -> Histogram);
        Self { seconds, intents: Gauge::default(), records: Gauge::default() }
    }

    pub(crate) fn register(&self, metrics: &Metrics) {
        let help = "Seconds that a pull took, by the size of the image";
        metrics.register("kubelet_image_pull_duration_seconds", help, self.seconds.clone());
        let help = "Pulls that are running or were interrupted, by their intent files";
        metrics.register("kubelet_imagemanager_ondisk_pullintents", help, self.intents.clone());
        let help = "Images with a record of the credentials they were pulled with";
        metrics.register("kubelet_imagemanager_ondisk_pulledrecords", help, self.records.clone());
    }

    /// Sets the numbers of files in the two folders.
    pub(crate) fn count(&self, (intents, records): (usize, usize)) {
        self.intents.set(i64::try_from(intents).unwrap_or(i64::MAX));
        self.records.set(i64::try_from(records).unwrap_or(i64::MAX));
    }
}

/// The metric's label for the size of an image.
fn size_label(bytes: u64) -> &'static str {
    const MB: u64 = 1 << 20;
    const GB: u64 = 1 << 30;
    [
        (10 * MB, "0-10MB"),
        (100 * MB, "10MB-100MB"),
        (500 * MB, "100MB-500MB"),
        (GB, "500MB-1GB"),
        (5 * GB, "1GB-5GB"),
        (10 * GB, "5GB-10GB"),
        (20 * GB, "10GB-20GB"),
        (30 * GB, "20GB-30GB"),
        (40 * GB, "30GB-40GB"),
        (60 * GB, "40GB-60GB"),
        (100 * GB, "60GB-100GB"),
    ]
    .into_iter()
    .find(|(below, _)| bytes < *below)
    .map_or("GT100GB", |(_, label)| label)
}

/// Why a pull waits for its turn, and which pod has the most turns.
fn turn_wait_message(look: &TurnsLook) -> String {
    let text = "waiting for other pulls (serializeImagePulls, maxParallelImagePulls)".to_owned();
    match &look.most {
        Some((pod, count)) if look.taken >= look.places => {
            format!("{text}: {} of {} run, {count} of them for {pod}", look.taken, look.places)
        }
        _ => text,
    }
}

/// A pull's token, which is returned unless the pull has begun.
struct Token<'a> {
    rate: &'a Mutex<PullRate>,
    used: bool,
}

impl Drop for Token<'_> {
    fn drop(&mut self) {
        if !self.used {
            self.rate.lock().unwrap_or_else(PoisonError::into_inner).give_back();
        }
    }
}

/// Pulls images.
#[derive(Debug, Clone)]
pub(crate) struct Puller {
    pub(crate) cri: Cri,
    pub(crate) present: PresentImages,
    events: EventRing,
    backoff: Arc<Mutex<PullBackoff>>,
    pub(crate) turns: Arc<Turns>,
    pub(crate) rate: Arc<Mutex<PullRate>>,
    pub(crate) clock: Clock,
    pub(crate) credentials: Credentials,
    records: PullRecords,
    pub(crate) watcher: PullWatcher,
    metrics: PullMetrics,
}

impl Puller {
    /// Pulls at most `parallel` images at a time, without credentials and without records.
    pub(crate) fn new(cri: Cri, events: EventRing, parallel: u32) -> Self {
        let pulls = ImagePulls::default();
        let limit = Duration::from_millis(pulls.progress_timeout_ms);
        Self {
            present: PresentImages::new(cri.clone(), Clock::System),
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
        }
    }

    /// Adds the limits of the configuration, credentials, and the records of earlier pulls.
    #[must_use]
    pub(crate) fn configured(mut self, config: &Config, credentials: Credentials, metrics: &Metrics) -> Self {
        let pulls = &config.image_pulls;
        let limit = Duration::from_millis(pulls.progress_timeout_ms);
        self.watcher = PullWatcher::new(self.cri.clone(), self.clock.clone(), limit);
        self.rate = Arc::new(Mutex::new(PullRate::new(pulls.registry_qps, pulls.registry_burst)));
        self.credentials = credentials;
        self.records = PullRecords::new(&config.paths.root_dir, pulls);
        self.metrics.register(metrics);
        self
    }

    pub(crate) fn backoff(&self) -> std::sync::MutexGuard<'_, PullBackoff> {
        self.backoff.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pulls an image.
    pub(crate) async fn pull(&self, pull: Pull<'_>) -> Result<pb::ImageDone, EnsureImageError> {
        if let Some(error) = self.backoff_error(pull) {
            return Err(error);
        }
        let requested_at = Instant::now();
        send_step(
            pull.progress,
            "waiting",
            "waiting for credentials (imagePullSecrets, credential provider plugins)",
        );
        // Cancel-safe: the requests are cancelled, and a plugin that nothing else waits for is ended.
        let credentials = tokio::select! {
            () = pull.progress.closed() => return Err(EnsureImageError::CallerLeft),
            credentials = self.credentials_to_try(pull) => credentials?,
        };
        send_step(pull.progress, "waiting", &turn_wait_message(&self.turns.look()));
        let pod: Arc<str> = format!("{}/{}", pull.pod.namespace, pull.pod.name).into();
        // Cancel-safe: a turn that is not taken goes to another pull.
        let turn = tokio::select! {
            () = pull.progress.closed() => return Err(EnsureImageError::CallerLeft),
            turn = self.turns.take(&pod) => turn,
        };
        turn.work(Box::pin(self.pull_in_turn(pull, credentials, requested_at))).await
    }

    async fn pull_in_turn(
        &self,
        pull: Pull<'_>,
        credentials: Vec<PullCredential>,
        requested_at: Instant,
    ) -> Result<pb::ImageDone, EnsureImageError> {
        self.wait_for_token(pull.progress).await?;
        send_step(pull.progress, "pulling", "pulling");
        let text = format!("Pulling image {:?}", pull.request.image);
        self.events.normal(pull.object.clone(), "Pulling", text);
        let begun = Instant::now();
        match self.pull_with(pull, credentials).await {
            Ok(image) => {
                self.backoff().clear(&pull.pod.uid, Some(pull.reference));
                let label = SizeLabel { image_size_in_bytes: size_label(image.bytes).to_owned() };
                self.metrics.seconds.get_or_create(&label).observe(begun.elapsed().as_secs_f64());
                let text = format!(
                    "Successfully pulled image {:?} in {} ({} including waiting). Image size: {} bytes.",
                    pull.request.image,
                    go_duration(begun.elapsed()),
                    go_duration(requested_at.elapsed()),
                    image.bytes
                );
                self.events.normal(pull.object.clone(), "Pulled", text);
                Ok(image_done(image, pull.reference, true))
            }
            Err(PullError::CallerLeft) => Err(EnsureImageError::CallerLeft),
            Err(PullError::Unavailable(why)) => {
                Err(unavailable(format!("Failed to pull image {:?}: {why}", pull.request.image)))
            }
            Err(PullError::Failed(why)) => Err(self.failed_pull(pull, &why)),
        }
    }

    /// The error if the pull is still backing off.
    fn backoff_error(&self, pull: Pull<'_>) -> Option<EnsureImageError> {
        let now = self.clock.read();
        let (until, error) = {
            let backoff = self.backoff();
            let (until, error) = backoff.retry_at(&pull.pod.uid, pull.reference, now.boot_nanos)?;
            (now.unix_nanos_of(until), error.to_owned())
        };
        let text = format!("Back-off pulling image {:?}", pull.request.image);
        self.events.normal(pull.object.clone(), "BackOff", text.clone());
        Some(EnsureImageError::Failed(pb::ImageFailed {
            reason: "ImagePullBackOff".into(),
            message: format!("{text}: {error}"),
            next_retry_unix_nanos: until,
        }))
    }

    /// The credentials to try, in this order. If there are none, one pull without a credential is tried.
    async fn credentials_to_try(&self, pull: Pull<'_>) -> Result<Vec<PullCredential>, EnsureImageError> {
        let found = self.credentials.find(pull.pod, &pull.request.pull_secrets, pull.repository).await;
        let found = found.map_err(|error| unavailable(error.to_string()))?;
        if !found.missing.is_empty() {
            let text = format!(
                "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
                found.missing.join(", ")
            );
            let PodRef { uid, namespace, name } = pull.pod;
            self.events.warning(
                ObjectRef::pod(namespace, name, uid),
                "FailedToRetrieveImagePullSecret",
                text,
            );
        }
        let list: Vec<PullCredential> = found.list.into_iter().map(Some).collect();
        Ok(if list.is_empty() { vec![None] } else { list })
    }

    /// Waits for a token of the pull rate.
    async fn wait_for_token(&self, progress: &Progress) -> Result<(), EnsureImageError> {
        let now = self.clock.read().boot_nanos;
        let wait = self.rate.lock().unwrap_or_else(PoisonError::into_inner).take(now);
        let mut token = Token { rate: &self.rate, used: false };
        if wait > 0 {
            send_step(progress, "waiting", "waiting for its turn (registryPullQPS)");
            let wait = Duration::from_nanos(u64::try_from(wait).unwrap_or(0));
            // Cancel-safe: the token is returned when the caller has left.
            tokio::select! {
                () = progress.closed() => return Err(EnsureImageError::CallerLeft),
                () = tokio::time::sleep(wait) => {}
            }
        }
        token.used = true;
        Ok(())
    }

    /// Tries the credentials one after the other while the progress is watched, and records the first that succeeds.
    async fn pull_with(&self, pull: Pull<'_>, credentials: Vec<PullCredential>) -> Result<Image, PullError> {
        let intent = self.with_records({
            let reference = pull.reference.to_owned();
            move |records| records.begin(&reference)
        });
        let intent = intent.await.map_err(|error| {
            PullError::Failed(format!("Failed to record image pull intent: {}", chain(&error)))
        })?;
        let watch = self.watcher.begin().await;
        let attempts = self.try_all(pull, credentials);
        // Cancel-safe: the runtime cancels a pull whose call is dropped.
        let end = tokio::select! {
            biased;
            pulled = attempts => pulled,
            stalled = self.watcher.run(watch, pull.progress) => Err(match stalled {
                AbortReason::NoProgress(why) => PullError::Failed(why),
                AbortReason::RuntimeUnavailable(status) => PullError::Unavailable(status.message().to_owned()),
            }),
            () = pull.progress.closed() => Err(PullError::CallerLeft),
        };
        // The pull has ended; an error of removing its intent was logged.
        let _ = self
            .with_records(move |_| {
                drop(intent);
                Ok(())
            })
            .await;
        end
    }

    async fn try_all(&self, pull: Pull<'_>, credentials: Vec<PullCredential>) -> Result<Image, PullError> {
        let mut refusals: Vec<String> = Vec::new();
        for credential in credentials {
            match self.try_one(pull.reference, credential.as_ref()).await {
                Ok(image) => {
                    let (repository, id) = (pull.repository.to_owned(), image.id.clone());
                    let recorded =
                        self.with_records(move |records| records.add(&repository, &id, credential.as_ref()));
                    if let Err(error) = recorded.await {
                        // Without a record every pod could use the image.
                        return Err(PullError::Failed(format!(
                            "Failed to record image pull: {}",
                            chain(&error)
                        )));
                    }
                    return Ok(image);
                }
                // An error from the runtime itself is about the image or its registry, with any code.
                Err(status) if is_unanswered(&status) => {
                    return Err(PullError::Unavailable(status.message().to_owned()));
                }
                Err(status) => {
                    let text = status.message().to_owned();
                    if !refusals.contains(&text) {
                        refusals.push(text);
                    }
                }
            }
        }
        Err(PullError::Failed(match refusals.as_slice() {
            [one] => one.clone(),
            several => format!("[{}]", several.join(", ")),
        }))
    }

    async fn try_one(
        &self,
        reference: &str,
        credential: Option<&(Credential, Origin)>,
    ) -> Result<Image, Status> {
        let auth = |credential: &Credential| cri::AuthConfig {
            username: credential.username.clone(),
            password: credential.password.clone(),
            identity_token: credential.identity_token.clone(),
            registry_token: credential.registry_token.clone(),
            ..Default::default()
        };
        let request = cri::PullImageRequest {
            image: image_spec(reference),
            auth: credential.map(|(credential, _)| auth(credential)),
            ..Default::default()
        };
        let pulled = self.cri.images().pull_image(self.cri.unbounded(request)).await?.into_inner();
        if pulled.image_ref.is_empty() {
            return Err(Status::unknown("the container runtime returned no image reference for the pull"));
        }
        let known = self.present.reserve(reference).await?;
        Ok(known.unwrap_or(Image { id: pulled.image_ref, ..Default::default() }))
    }

    fn failed_pull(&self, pull: Pull<'_>, why: &str) -> EnsureImageError {
        let reason = pull_reason(why);
        let text = format!("Failed to pull image {:?}: {why}", pull.request.image);
        self.events.warning(pull.object.clone(), "Failed", text.clone());
        let last_error = format!("{reason}: {why}");
        let now = self.clock.read();
        let until = self.backoff().record_failure(&pull.pod.uid, pull.reference, &last_error, now.boot_nanos);
        let next_retry_unix_nanos = now.unix_nanos_of(until);
        EnsureImageError::Failed(pb::ImageFailed {
            reason: reason.to_owned(),
            message: text,
            next_retry_unix_nanos,
        })
    }

    /// Reads or writes records in a blocking task.
    pub(crate) async fn with_records<T: Send + 'static>(
        &self,
        work: impl FnOnce(&PullRecords) -> Result<T, RecordError> + Send + 'static,
    ) -> Result<T, RecordError> {
        let (records, metrics) = (self.records.clone(), self.metrics.clone());
        let work = move || {
            let result = work(&records);
            metrics.count(records.counts());
            result
        };
        tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(RecordError::from_join(error)))
    }
}

/// The reason for a failed pull. The runtime prefixes its message with one of these two reasons
/// (runtime-and-resources.md §1.3); otherwise it is `ErrImagePull`.
pub(crate) fn pull_reason(why: &str) -> &'static str {
    ["RegistryUnavailable", "SignatureValidationFailed"]
        .into_iter()
        .find(|reason| why.trim_start_matches('[').starts_with(reason))
        .unwrap_or("ErrImagePull")
}
