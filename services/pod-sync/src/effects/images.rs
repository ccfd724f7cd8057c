//! Images. They are requested for all containers that are about to start; each container waits only for its own and for those of the
//! volumes that it mounts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_kube_model::{Container, ContainerKind, ImageVolumeSource, Pod};
use keelson_pod_sync_core::config::image_volumes;
use keelson_pod_sync_core::explain::{Cause, StepName, YOU};
use keelson_pod_sync_core::runtime_version::ImageVolumeSupport;
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
pub struct ImageTask(JoinHandle<ImageOutcome>);

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
    pub async fn outcome(mut self) -> ImageOutcome {
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

/// The images of the volumes that containers of a pod are about to mount, by name of the volume.
#[derive(Debug, Default)]
pub struct VolumeImages {
    tasks: BTreeMap<String, ImageTask>,
    outcomes: BTreeMap<String, ImageOutcome>,
}

/// The images of the volumes of one container.
#[derive(Debug, Default)]
pub struct MountedImages {
    /// The runtime's reference of each, by name of the volume.
    pub references: BTreeMap<String, String>,
    /// The messages of those that were present and that no other container has waited for.
    pub present: Vec<String>,
}

/// The image, or why it is not present.
type ImageOutcome = Result<runtime::ImageDone, ImageError>;

impl VolumeImages {
    /// Whether the outcome of each image that the container mounts is known.
    pub fn are_finished(&self, pod: &Pod, container: &Container) -> bool {
        let names = image_volumes(pod, container).into_keys();
        names.filter_map(|name| self.tasks.get(name)).all(ImageTask::is_finished)
    }

    /// Waits for the images of the volumes that a container mounts. A volume whose image was not requested has none.
    ///
    /// # Errors
    /// One of them is not present.
    pub async fn of_container(
        &mut self,
        pod: &Pod,
        container: &Container,
    ) -> Result<MountedImages, ImageError> {
        let mut images = MountedImages::default();
        let mut first_error = None;
        for name in image_volumes(pod, container).into_keys() {
            if let Some(task) = self.tasks.remove(name) {
                let outcome = task.outcome().await;
                images
                    .present
                    .extend(outcome.iter().map(|image| image.message.clone()).filter(|m| !m.is_empty()));
                self.outcomes.insert(name.to_owned(), outcome);
            }
            match self.outcomes.get(name) {
                Some(Ok(image)) => {
                    images.references.insert(name.to_owned(), image.image_ref.clone());
                }
                Some(Err(error)) => first_error = first_error.or_else(|| Some(error.clone())),
                None => {}
            }
        }
        first_error.map_or(Ok(images), Err)
    }
}

/// The images of a start.
#[derive(Debug, Default)]
pub struct Images {
    /// Of the containers, by name.
    pub containers: BTreeMap<String, ImageTask>,
    /// Of their volumes.
    pub volumes: VolumeImages,
}

/// Starts to make the images present that these containers of a pod need. Images of volumes are requested only if the runtime is able to
/// mount them: otherwise the container is refused for that.
pub fn fetch_all<'a>(
    effects: &Arc<Effects>,
    pulled: &PulledImages,
    pod: &Arc<Pod>,
    names: impl IntoIterator<Item = &'a str>,
) -> Images {
    let mut images = Images::default();
    let mounts_images = mounts_images(effects);
    for (kind, container) in names.into_iter().filter_map(|name| pod.container(name)) {
        images.containers.insert(container.name.clone(), fetch(effects, pulled, pod, kind, container));
        let volumes = image_volumes(pod, container).into_iter().filter(|_| mounts_images);
        for (name, image) in volumes {
            let tasks = &mut images.volumes.tasks;
            tasks.entry(name.to_owned()).or_insert_with(|| fetch_volume(effects, pod, name, image));
        }
    }
    images
}

/// Starts to make the images of the volumes present that no container mounts (volumes.md §10.7). Nothing waits for them.
pub fn fetch_unused(effects: &Arc<Effects>, pod: &Arc<Pod>) -> Vec<ImageTask> {
    let is_used = |name: &str| {
        pod.containers().any(|(_, container)| container.volume_mounts.iter().any(|mount| mount.name == name))
    };
    let volumes = pod.spec.volumes.iter().filter(|volume| mounts_images(effects) && !is_used(&volume.name));
    let images = volumes.filter_map(|volume| Some((volume.name.as_str(), volume.image.as_ref()?)));
    images.map(|(name, image)| fetch_volume(effects, pod, name, image)).collect()
}

fn mounts_images(effects: &Effects) -> bool {
    effects.registry.node.runtime.borrow().image_volumes() > ImageVolumeSupport::None
}

fn fetch_volume(effects: &Arc<Effects>, pod: &Arc<Pod>, name: &str, image: &ImageVolumeSource) -> ImageTask {
    let request = runtime::EnsureImageRequest {
        pod: Some(pod_ref(pod)),
        image: image.reference.clone(),
        pull_policy: image.pull_policy.clone(),
        pull_secrets: pull_secrets(pod),
        ..runtime::EnsureImageRequest::default()
    };
    let (effects, uid, subject) = (Arc::clone(effects), pod.metadata.uid.clone(), format!("volume {name}"));
    let ensuring = async move { ensure(&effects, &uid, &subject, request).await };
    let span = tracing::Span::current();
    ImageTask(keelson_service_kit::spawn("ensure the image of a volume", ensuring.instrument(span)))
}

fn pull_secrets(pod: &Pod) -> Vec<String> {
    pod.spec.image_pull_secrets.iter().map(|secret| secret.name.clone()).collect()
}

/// Starts to make the image of a container present.
fn fetch(
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
        pull_secrets: pull_secrets(pod),
    };
    let (effects, pulled, uid) = (Arc::clone(effects), pulled.clone(), pod.metadata.uid.clone());
    let name = container.name.clone();
    let ensuring = async move {
        let result = ensure(&effects, &uid, &name, request).await;
        if matches!(&result, Ok(done) if done.pulled) {
            pulled.add(&name);
        }
        result
    };
    let span = tracing::Span::current();
    ImageTask(keelson_service_kit::spawn("ensure an image", ensuring.instrument(span)))
}

/// The kind of a wait. A pull that fails, backs off and fails again is one wait.
fn wait_kind(reason: &str) -> &'static str {
    let apart = ["InvalidImageName", "ErrImageNeverPull", "ImageInspectError"];
    apart.into_iter().find(|kind| *kind == reason).unwrap_or("Pull")
}

/// Makes the image present. The steps of the pod show under the name of the subject how far that has come, and the record of its starts
/// how long a pull took.
async fn ensure(
    effects: &Effects,
    uid: &str,
    subject: &str,
    request: runtime::EnsureImageRequest,
) -> ImageOutcome {
    let begun = effects.registry.moment().now_unix_nanos;
    let result = follow(effects, uid, subject, request).await;
    let pulled = result.as_ref().map_or_else(|error| !error.peer_unavailable, |done| done.pulled);
    if pulled {
        let ended = effects.registry.moment().now_unix_nanos;
        effects.registry.with(uid, |state| state.start.record_pull(begun, ended));
    }
    let cause = match &result {
        Ok(_) => Cause::done("runtime-shim"),
        Err(t) if t.peer_unavailable => Cause::waiting("NoAnswer", &t.message, "runtime-shim"),
        Err(t) => Cause::failed(wait_kind(&t.reason), &t.message, YOU).retried_at(t.retry_unix_nanos),
    };
    effects.registry.set_step(uid, StepName::Image, subject, cause);
    result
}

/// Asks for the image and follows the answers until the outcome.
async fn follow(
    effects: &Effects,
    uid: &str,
    subject: &str,
    request: runtime::EnsureImageRequest,
) -> ImageOutcome {
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
                effects.registry.set_step(uid, StepName::Image, subject, cause);
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
