//! Images: fetched for all containers that are about to start, awaited only by the container itself.

use std::sync::Arc;
use std::time::Duration;

use keelson_kube_model::{Container, ContainerKind, Pod};
use keelson_pod_sync_core::explain::{Cause, StepName, YOU};
use keelson_proto::keelson::runtime::v1 as runtime;
use keelson_proto::keelson::runtime::v1::ensure_image_response::Item;
use tokio::task::JoinHandle;
use tracing::Instrument as _;

use crate::agent::Agent;
use crate::clients::bounded;
use crate::desires::pod_ref;
use crate::worker::note_wait;

/// Why an image is not there.
#[derive(Debug, Clone)]
pub struct ImageTrouble {
    /// Waiting reason of the container, `ErrImagePull`…
    pub reason: String,
    /// For people.
    pub message: String,
    /// When the next attempt makes sense; 0: nobody knows.
    pub retry_unix_nanos: i64,
    /// A neighbour did not answer; the image may be fine.
    pub neighbour: bool,
}

/// An image on its way; given up when dropped.
#[derive(Debug)]
pub struct ImageTask(JoinHandle<Result<runtime::ImageDone, ImageTrouble>>);

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
    pub async fn outcome(mut self) -> Result<runtime::ImageDone, ImageTrouble> {
        (&mut self.0).await.unwrap_or_else(|e| {
            Err(ImageTrouble {
                reason: "ErrImagePull".into(),
                message: e.to_string(),
                retry_unix_nanos: 0,
                neighbour: true,
            })
        })
    }
}

/// Begins to make the image of a container present.
pub fn fetch(agent: &Arc<Agent>, pod: &Arc<Pod>, kind: ContainerKind, container: &Container) -> ImageTask {
    let request = runtime::EnsureImageRequest {
        pod: Some(pod_ref(pod)),
        container: container.name.clone(),
        image: container.image.clone(),
        pull_policy: container.image_pull_policy.clone(),
        spec_list: kind.spec_field().to_owned(),
        pull_secrets: pod.spec.image_pull_secrets.iter().map(|secret| secret.name.clone()).collect(),
    };
    let (agent, uid) = (Arc::clone(agent), pod.metadata.uid.clone());
    let span = tracing::Span::current();
    ImageTask(tokio::spawn(async move { ensure(&agent, &uid, request).await }.instrument(span)))
}

/// The kind of a failure: a pull that fails, backs off and fails again is one wait all along.
fn kind_of(reason: &str) -> &'static str {
    let apart = ["InvalidImageName", "ErrImageNeverPull", "ImageInspectError"];
    apart.into_iter().find(|kind| *kind == reason).unwrap_or("Pull")
}

async fn ensure(
    agent: &Agent,
    uid: &str,
    request: runtime::EnsureImageRequest,
) -> Result<runtime::ImageDone, ImageTrouble> {
    let name = request.container.clone();
    let begun = agent.moment().now_unix_nanos;
    // Also what runtime-shim says when the runtime is away: nobody knows anything about the image then.
    let cut = |status: tonic::Status| ImageTrouble {
        reason: "ErrImagePull".into(),
        message: status.message().to_owned(),
        retry_unix_nanos: 0,
        neighbour: true,
    };
    let mut client = agent.clients.runtime();
    let result = async {
        let mut answers =
            client.ensure_image(bounded(request, Duration::from_secs(10))).await.map_err(cut)?.into_inner();
        loop {
            match answers.message().await.map_err(cut)?.and_then(|a| a.item) {
                Some(Item::Progress(progress)) => {
                    let text = if progress.detail.is_empty() { &progress.step } else { &progress.detail };
                    let cause =
                        Cause::waiting(progress.step.clone(), &format!("image: {text}"), "runtime-shim");
                    note_wait(agent, uid, StepName::Image, &name, cause);
                }
                Some(Item::Done(done)) => return Ok(done),
                Some(Item::Failed(failed)) => {
                    return Err(ImageTrouble {
                        reason: failed.reason,
                        message: failed.message,
                        retry_unix_nanos: failed.next_retry_unix_nanos,
                        neighbour: false,
                    });
                }
                None => return Err(cut(tonic::Status::unavailable("runtime-shim ended the answer"))),
            }
        }
    }
    .await;
    let pulled = result.as_ref().map_or_else(|trouble| !trouble.neighbour, |done| done.pulled);
    if matches!(&result, Ok(done) if done.pulled) {
        agent.with(uid, |entry| entry.pulled.insert(name.clone()));
    }
    if pulled {
        let ended = agent.moment().now_unix_nanos;
        agent.with(uid, |entry| {
            if !entry.start.is_over() {
                entry.pulls.push((begun, ended));
            }
        });
    }
    let cause = match &result {
        Ok(_) => Cause::done("runtime-shim"),
        Err(t) if t.neighbour => Cause::waiting("NoAnswer", &t.message, "runtime-shim"),
        Err(t) => Cause::failed(kind_of(&t.reason), &t.message, YOU).retried_at(t.retry_unix_nanos),
    };
    note_wait(agent, uid, StepName::Image, &name, cause);
    result
}
