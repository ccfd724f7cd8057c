//! One pull: back-off, credentials, a turn, a token, then the runtime, watched until it is through.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_cri::v1 as cri;
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::image::go_duration;
use keelson_runtime_shim_core::keyring::{Credential, Origin};
use keelson_runtime_shim_core::pull_rate::PullRate;
use keelson_service_kit::status::{chain, is_unanswered};
use keelson_service_kit::{Metrics, ObjectRef, TurnsLook};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tonic::Status;

use crate::images::{Images, NoImage, Progress, away, done, step};
use crate::pull_records::RecordError;
use crate::pull_watch::Stalled;

/// What a pull is made with: a credential and where it comes from, or nothing.
type With = Option<(Credential, Origin)>;

/// Why a pull came to nothing.
#[derive(Debug)]
enum Failure {
    /// The image or its registry; as the runtime says.
    Fault(String),
    /// The runtime is away.
    Away(String),
    /// The caller has left.
    Left,
}

/// What a pull is about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pull<'a> {
    pub pod: &'a PodRef,
    pub request: &'a pb::EnsureImageRequest,
    /// With tag or digest.
    pub reference: &'a str,
    /// Without.
    pub repository: &'a str,
    pub object: &'a ObjectRef,
    pub progress: &'a Progress,
}

/// How long pulls took and how many files they have left.
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
        let help = "Pulls that go on or were cut off, by their files";
        metrics.register("kubelet_imagemanager_ondisk_pullintents", help, self.intents.clone());
        let help = "Images of which it is recorded who may use them";
        metrics.register("kubelet_imagemanager_ondisk_pulledrecords", help, self.records.clone());
    }

    /// As many files as there are in the two folders.
    pub(crate) fn count(&self, (intents, records): (usize, usize)) {
        self.intents.set(i64::try_from(intents).unwrap_or(i64::MAX));
        self.records.set(i64::try_from(records).unwrap_or(i64::MAX));
    }
}

/// The size of an image as the metric's label has it.
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

/// What a pull waits for, with whoever is in the way.
fn waits_for(look: &TurnsLook) -> String {
    let text = "waiting for other pulls (serializeImagePulls, maxParallelImagePulls)".to_owned();
    match &look.most {
        Some((pod, count)) if look.taken >= look.places => {
            format!("{text}: {} of {} run, {count} of them for {pod}", look.taken, look.places)
        }
        _ => text,
    }
}

/// A pull's token, given back unless the pull has begun.
struct Token<'a>(&'a Mutex<PullRate>, bool);

impl Drop for Token<'_> {
    fn drop(&mut self) {
        if !self.1 {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).give_back();
        }
    }
}

impl Images {
    /// Pulls an image, or says why not.
    pub(crate) async fn pull(&self, pull: Pull<'_>) -> Result<pb::ImageDone, NoImage> {
        if let Some(waits) = self.backs_off(pull) {
            return Err(waits);
        }
        let asked = Instant::now();
        step(
            pull.progress,
            "waiting",
            "waiting for credentials (imagePullSecrets, credential provider plugins)",
        );
        // Cancel-safe: what is asked for is given up, and a plugin that nobody else waits for is ended.
        let with = tokio::select! {
            () = pull.progress.closed() => return Err(NoImage::Left),
            with = self.candidates(pull) => with?,
        };
        step(pull.progress, "waiting", &waits_for(&self.turns.look()));
        let pod: Arc<str> = format!("{}/{}", pull.pod.namespace, pull.pod.name).into();
        // Cancel-safe: a turn that is not taken is another pull's.
        let turn = tokio::select! {
            () = pull.progress.closed() => return Err(NoImage::Left),
            turn = self.turns.take(&pod) => turn,
        };
        turn.work(Box::pin(self.pull_in_turn(pull, with, asked))).await
    }

    async fn pull_in_turn(
        &self,
        pull: Pull<'_>,
        with: Vec<With>,
        asked: Instant,
    ) -> Result<pb::ImageDone, NoImage> {
        self.token(pull.progress).await?;
        step(pull.progress, "pulling", "pulling");
        let text = format!("Pulling image {:?}", pull.request.image);
        self.events.normal(pull.object.clone(), "Pulling", text);
        let begun = Instant::now();
        match self.pull_with(pull, with).await {
            Ok(image) => {
                self.book().clear(&pull.pod.uid, Some(pull.reference));
                let label = SizeLabel { image_size_in_bytes: size_label(image.size).to_owned() };
                self.metrics.seconds.get_or_create(&label).observe(begun.elapsed().as_secs_f64());
                let text = format!(
                    "Successfully pulled image {:?} in {} ({} including waiting). Image size: {} bytes.",
                    pull.request.image,
                    go_duration(begun.elapsed()),
                    go_duration(asked.elapsed()),
                    image.size
                );
                self.events.normal(pull.object.clone(), "Pulled", text);
                Ok(done(image, pull.reference, true))
            }
            Err(Failure::Left) => Err(NoImage::Left),
            Err(Failure::Away(why)) => {
                Err(away(format!("Failed to pull image {:?}: {why}", pull.request.image)))
            }
            Err(Failure::Fault(why)) => Err(self.failed_pull(pull, &why)),
        }
    }

    /// Why it is too early for another pull.
    fn backs_off(&self, pull: Pull<'_>) -> Option<NoImage> {
        let now = self.clock.read();
        let (until, error) = {
            let book = self.book();
            let (until, error) = book.waits_until(&pull.pod.uid, pull.reference, now.boot_nanos)?;
            (now.unix_nanos_of(until), error.to_owned())
        };
        let text = format!("Back-off pulling image {:?}", pull.request.image);
        self.events.normal(pull.object.clone(), "BackOff", text.clone());
        Some(NoImage::Failed(pb::ImageFailed {
            reason: "ImagePullBackOff".into(),
            message: format!("{text}: {error}"),
            next_retry_unix_nanos: until,
        }))
    }

    /// The credentials to try, in this order; without any it is tried once with nothing.
    async fn candidates(&self, pull: Pull<'_>) -> Result<Vec<With>, NoImage> {
        let found = self.credentials.find(pull.pod, &pull.request.pull_secrets, pull.repository).await;
        let found = found.map_err(|error| away(error.to_string()))?;
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
        let list: Vec<With> = found.list.into_iter().map(Some).collect();
        Ok(if list.is_empty() { vec![None] } else { list })
    }

    /// Waits until the pull may begin.
    async fn token(&self, progress: &Progress) -> Result<(), NoImage> {
        let now = self.clock.read().boot_nanos;
        let wait = self.rate.lock().unwrap_or_else(PoisonError::into_inner).take(now);
        let mut token = Token(&self.rate, false);
        if wait > 0 {
            step(progress, "waiting", "waiting for its turn (registryPullQPS)");
            let wait = Duration::from_nanos(u64::try_from(wait).unwrap_or(0));
            // Cancel-safe: the token goes back when the caller has left.
            tokio::select! {
                () = progress.closed() => return Err(NoImage::Left),
                () = tokio::time::sleep(wait) => {}
            }
        }
        token.1 = true;
        Ok(())
    }

    /// Tries one credential after the other, watched all the time; the first that succeeds is written down.
    async fn pull_with(&self, pull: Pull<'_>, candidates: Vec<With>) -> Result<cri::Image, Failure> {
        let intended = self.in_records({
            let reference = pull.reference.to_owned();
            move |records| records.begin(&reference)
        });
        let intended = intended.await.map_err(|error| {
            Failure::Fault(format!("Failed to record image pull intent: {}", chain(&error)))
        })?;
        let watch = self.watching.begin().await;
        let tries = self.try_all(pull, candidates);
        // Cancel-safe: the runtime drops a pull whose call is cut.
        let end = tokio::select! {
            biased;
            pulled = tries => pulled,
            stalled = self.watching.run(watch, pull.progress) => Err(match stalled {
                Stalled::Still(why) => Failure::Fault(why),
                Stalled::Away(status) => Failure::Away(status.message().to_owned()),
            }),
            () = pull.progress.closed() => Err(Failure::Left),
        };
        // The pull is over; a failure to say so has been logged.
        let _ = self
            .in_records(move |_| {
                drop(intended);
                Ok(())
            })
            .await;
        end
    }

    async fn try_all(&self, pull: Pull<'_>, candidates: Vec<With>) -> Result<cri::Image, Failure> {
        let mut refusals: Vec<String> = Vec::new();
        for with in candidates {
            match self.try_one(pull.reference, with.as_ref()).await {
                Ok(image) => {
                    let (repository, id) = (pull.repository.to_owned(), image.id.clone());
                    let noted = self.in_records(move |records| records.note(&repository, &id, with.as_ref()));
                    if let Err(error) = noted.await {
                        // Without a record the image would be for everybody.
                        return Err(Failure::Fault(format!(
                            "Failed to record image pull: {}",
                            chain(&error)
                        )));
                    }
                    return Ok(image);
                }
                // What the runtime itself answers is about the image or its registry, whatever the code.
                Err(status) if is_unanswered(&status) => {
                    return Err(Failure::Away(status.message().to_owned()));
                }
                Err(status) => {
                    let text = status.message().to_owned();
                    if !refusals.contains(&text) {
                        refusals.push(text);
                    }
                }
            }
        }
        Err(Failure::Fault(match refusals.as_slice() {
            [one] => one.clone(),
            several => format!("[{}]", several.join(", ")),
        }))
    }

    async fn try_one(
        &self,
        reference: &str,
        with: Option<&(Credential, Origin)>,
    ) -> Result<cri::Image, Status> {
        let auth = |credential: &Credential| cri::AuthConfig {
            username: credential.username.clone(),
            password: credential.password.clone(),
            identity_token: credential.identity_token.clone(),
            registry_token: credential.registry_token.clone(),
            ..Default::default()
        };
        let request = cri::PullImageRequest {
            image: Some(cri::ImageSpec { image: reference.to_owned(), ..Default::default() }),
            auth: with.map(|(credential, _)| auth(credential)),
            ..Default::default()
        };
        let pulled = self.cri.images().pull_image(self.cri.unbounded(request)).await?.into_inner();
        if pulled.image_ref.is_empty() {
            return Err(Status::unknown("the container runtime names no image that it has pulled"));
        }
        let known = self.claim(reference).await?;
        Ok(known.unwrap_or(cri::Image { id: pulled.image_ref, ..Default::default() }))
    }

    fn failed_pull(&self, pull: Pull<'_>, why: &str) -> NoImage {
        let reason = pull_reason(why);
        let text = format!("Failed to pull image {:?}: {why}", pull.request.image);
        self.events.warning(pull.object.clone(), "Failed", text.clone());
        let last = format!("{reason}: {why}");
        let now = self.clock.read();
        let until = self.book().failed(&pull.pod.uid, pull.reference, &last, now.boot_nanos);
        let next_retry_unix_nanos = now.unix_nanos_of(until);
        NoImage::Failed(pb::ImageFailed { reason: reason.to_owned(), message: text, next_retry_unix_nanos })
    }

    /// Reads or writes records where that may block.
    pub(crate) async fn in_records<T: Send + 'static>(
        &self,
        work: impl FnOnce(&crate::pull_records::Records) -> Result<T, RecordError> + Send + 'static,
    ) -> Result<T, RecordError> {
        let (records, metrics) = (self.records.clone(), self.metrics.clone());
        let work = move || {
            let result = work(&records);
            metrics.count(records.counts());
            result
        };
        tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(RecordError::lost(error)))
    }
}

/// Texts that the runtime puts in front of its message for these two reasons
/// (runtime-and-resources.md §1.3).
pub(crate) fn pull_reason(why: &str) -> &'static str {
    ["RegistryUnavailable", "SignatureValidationFailed"]
        .into_iter()
        .find(|reason| why.trim_start_matches('[').starts_with(reason))
        .unwrap_or("ErrImagePull")
}
