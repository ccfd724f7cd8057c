//! Images. They are requested for all containers that are about to start; each container waits only for its own.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_kube_model::{Container, ContainerKind, Pod};
use keelson_pod_sync_core::explain::{Cause, StepName, YOU};
use keelson_proto::keelson::runtime::v1 as runtime;
use keelson_proto::keelson::runtime::v1::ensure_image_response::Item;
use tokio::task::JoinHandle;
use tracing::Instrument as _;

use crate::effects::Effects;
use crate::effects::clients::bounded;
use crate::state::desired_state::pod_ref;

/// Why an image is not present.
#[derive(Debug, Clone)]
pub struct ImageError {
    /// Waiting reason of the container, `ErrImagePull`…
    pub reason: String,
    /// For people.
    pub message: String,
    /// When to retry, unix nanoseconds; 0: unknown.
    pub retry_unix_nanos: i64,
    /// runtime-shim or the runtime did not answer; the image may be present.
    pub peer_unavailable: bool,
}

/// The task that makes an image present. It is aborted when dropped.
#[derive(Debug)]
pub struct ImageTask(JoinHandle<Result<runtime::ImageDone, ImageError>>);

impl Drop for ImageTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl ImageTask {
    /// Whether the outcome is known.
    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }

    /// The outcome.
    pub async fn outcome(mut self) -> Result<runtime::ImageDone, ImageError> {
        (&mut self.0).await.unwrap_or_else(|e| {
            Err(ImageError {
                reason: "ErrImagePull".into(),
                message: e.to_string(),
                retry_unix_nanos: 0,
                peer_unavailable: true,
            })
        })
    }
}

/// The containers of a pod whose image was pulled for their next start, so that no second event reports it as present. Its worker and
/// the tasks of its images share it.
#[derive(Debug, Clone, Default)]
pub struct PulledImages(Arc<Mutex<BTreeSet<String>>>);

impl PulledImages {
    fn names(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, container: &str) {
        self.names().insert(container.to_owned());
    }

    /// A container starts. Returns whether its image was pulled for that.
    pub fn take(&self, container: &str) -> bool {
        self.names().remove(container)
    }
}

/// Starts to make the image of a container present.
pub fn fetch(
    effects: &Arc<Effects>,
    pulled: &PulledImages,
    pod: &Arc<Pod>,
    kind: ContainerKind,
    container: &Container,
) -> ImageTask {
    let request = runtime::EnsureImageRequest {
        pod: Some(pod_ref(pod)),
        container: container.name.clone(),
        image: container.image.clone(),
        pull_policy: container.image_pull_policy.clone(),
        spec_list: kind.spec_field().to_owned(),
        pull_secrets: pod.spec.image_pull_secrets.iter().map(|secret| secret.name.clone()).collect(),
    };
    let (effects, pulled, uid) = (Arc::clone(effects), pulled.clone(), pod.metadata.uid.clone());
    let span = tracing::Span::current();
    ImageTask(keelson_service_kit::spawn(
        "ensure an image",
        async move { ensure(&effects, &pulled, &uid, request).await }.instrument(span),
    ))
}

/// The kind of a wait. A pull that fails, backs off and fails again is one wait.
fn wait_kind(reason: &str) -> &'static str {
    let apart = ["InvalidImageName", "ErrImageNeverPull", "ImageInspectError"];
    apart.into_iter().find(|kind| *kind == reason).unwrap_or("Pull")
}

/// Makes the image present. The steps of the pod show how far that has come, and the record of its starts how long a pull took.
async fn ensure(
    effects: &Effects,
    pulled_images: &PulledImages,
    uid: &str,
    request: runtime::EnsureImageRequest,
) -> Result<runtime::ImageDone, ImageError> {
    let name = request.container.clone();
    let begun = effects.registry.moment().now_unix_nanos;
    let result = follow(effects, uid, request).await;
    let pulled = result.as_ref().map_or_else(|error| !error.peer_unavailable, |done| done.pulled);
    if matches!(&result, Ok(done) if done.pulled) {
        pulled_images.add(&name);
    }
    if pulled {
        let ended = effects.registry.moment().now_unix_nanos;
        effects.registry.with(uid, |state| state.start.record_pull(begun, ended));
    }
    let cause = match &result {
        Ok(_) => Cause::done("runtime-shim"),
        Err(t) if t.peer_unavailable => Cause::waiting("NoAnswer", &t.message, "runtime-shim"),
        Err(t) => Cause::failed(wait_kind(&t.reason), &t.message, YOU).retried_at(t.retry_unix_nanos),
    };
    effects.registry.set_step(uid, StepName::Image, &name, cause);
    result
}

/// Asks for the image and follows the answers until the outcome.
async fn follow(
    effects: &Effects,
    uid: &str,
    request: runtime::EnsureImageRequest,
) -> Result<runtime::ImageDone, ImageError> {
    let name = request.container.clone();
    // runtime-shim answers like this when the runtime is unavailable, too: nothing is known about the image then.
    let cut = |status: tonic::Status| ImageError {
        reason: "ErrImagePull".into(),
        message: status.message().to_owned(),
        retry_unix_nanos: 0,
        peer_unavailable: true,
    };
    let mut client = effects.clients.runtime();
    let mut answers =
        client.ensure_image(bounded(request, Duration::from_secs(10))).await.map_err(cut)?.into_inner();
    loop {
        match answers.message().await.map_err(cut)?.and_then(|a| a.item) {
            Some(Item::Progress(progress)) => {
                let text = if progress.detail.is_empty() { &progress.step } else { &progress.detail };
                let cause = Cause::waiting(progress.step.clone(), &format!("image: {text}"), "runtime-shim");
                effects.registry.set_step(uid, StepName::Image, &name, cause);
            }
            Some(Item::Done(done)) => return Ok(done),
            Some(Item::Failed(failed)) => {
                return Err(ImageError {
                    reason: failed.reason,
                    message: failed.message,
                    retry_unix_nanos: failed.next_retry_unix_nanos,
                    peer_unavailable: false,
                });
            }
            None => return Err(cut(tonic::Status::unavailable("runtime-shim ended the answer"))),
        }
    }
}
