//! The calls that make a pod run: sandbox, then containers in order (pod-lifecycle.md §9.7).

mod container;
mod errors;
mod permit;
mod request;
mod sandbox;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use keelson_kube_model::{Container, ContainerKind};
use keelson_pod_sync_core::actions::{PodActions, StartContainer};
use keelson_pod_sync_core::explain::{Cause, StepName};
use tokio::sync::SemaphorePermit;

use container::{PresentImages, post_start};
use errors::{ContainerStartError, report_container_error, report_image_error, report_volume_image_error};
use permit::{HOLD_LIMIT, start_permit};
use sandbox::Sandbox;

use crate::effects::Effects;
use crate::effects::images::{ImageTask, Images, PulledImages, VolumeImages};
use crate::effects::volumes::Mounts;
use crate::error::SyncError;
use crate::publish::StatusFacts;
use crate::state::observed::Observed;
use crate::state::pod_state::DesiredPod;
use crate::turn::Job;
use crate::turn::permit::run_with_permit;

/// Deadline of calls that only write files.
const FILES: Duration = Duration::from_secs(10);

/// What a start works with.
pub struct Start<'a> {
    /// The pods and everything that acts on them.
    pub effects: &'a Arc<Effects>,
    /// The turn.
    pub job: &'a Job,
    /// The pod.
    pub desired: &'a DesiredPod,
    /// The observation that the decision is based on.
    pub observed: &'a Observed,
    /// The mounted volumes.
    pub mounts: Mounts,
    /// The pod's cgroup.
    pub cgroup_parent: String,
    /// Containers whose image was pulled for this start.
    pub pulled: &'a PulledImages,
}

/// A container that the decision starts.
#[derive(Clone, Copy)]
struct Starting<'a> {
    action: &'a StartContainer,
    kind: ContainerKind,
    container: &'a Container,
}

/// Why a start was not completed.
#[derive(Debug)]
pub enum StartError {
    /// The turn was cancelled by something newer. That is no error: no event, no warning, no reason in the status.
    Superseded,
    /// It failed.
    Failed(SyncError),
}

impl From<SyncError> for StartError {
    fn from(error: SyncError) -> Self {
        Self::Failed(error)
    }
}

/// Makes the sandbox if the decision asks for one, and starts the containers that it names.
///
/// # Errors
/// The first error. Containers that do not depend on the failed one are started nevertheless. A cancelled turn ends at the next wait.
pub async fn start_containers(
    start: &Start<'_>,
    actions: &PodActions,
    images: Images,
) -> Result<(), StartError> {
    if actions.create_sandbox.is_none() && actions.start.is_empty() {
        return Ok(());
    }
    let mut permit = Some(start_permit(start).await?);
    let making = Box::pin(sandbox::sandbox(start, actions.create_sandbox.as_ref()));
    let sandbox = run_with_permit(&mut permit, HOLD_LIMIT, making).await?;
    let Images { containers: mut images, volumes: mut volume_images } = images;
    let mut first_error: Option<SyncError> = None;
    for action in &actions.start {
        let Some((kind, container)) = start.desired.pod.container(&action.name) else { continue };
        let Some(image) = images.remove(&action.name) else { continue };
        let starting = Starting { action, kind, container };
        let images = (image, &mut volume_images);
        if let Some(error) = start_container(start, &sandbox, starting, images, &mut permit).await? {
            first_error = first_error.or(Some(error));
            if kind == ContainerKind::Init {
                break;
            }
        }
    }
    drop(permit);
    match first_error {
        None => Ok(()),
        Some(error) => {
            let facts = StatusFacts { waiting: &actions.waiting, ..StatusFacts::default() };
            start.effects.publisher.publish(&start.job.uid, &facts);
            Err(error.into())
        }
    }
}

/// Waits for the images of a container and starts the container. Returns the error that the status and the steps of the pod show.
async fn start_container<'a>(
    start: &'a Start<'_>,
    sandbox: &Sandbox,
    starting: Starting<'_>,
    (image, volume_images): (ImageTask, &mut VolumeImages),
    permit: &mut Option<SemaphorePermit<'a>>,
) -> Result<Option<SyncError>, StartError> {
    let (pod, container) = (&start.desired.pod, starting.container);
    if !(image.is_finished() && volume_images.are_finished(pod, container)) {
        // Other pods start while this one waits for its image.
        tokio::task::yield_now().await;
        permit.take();
    }
    let volumes = match unless_cancelled(start, volume_images.of_container(pod, container)).await? {
        Ok(volumes) => volumes,
        Err(error) => return Ok(Some(report_volume_image_error(start, starting, error))),
    };
    let images = match unless_cancelled(start, image.outcome()).await? {
        Ok(own) => PresentImages { own, volumes },
        Err(error) => return Ok(Some(report_image_error(start, starting, error))),
    };
    if permit.is_none() {
        *permit = Some(start_permit(start).await?);
    }
    start.effects.publisher.metrics.container_starts(starting.kind);
    start.effects.registry.with(&start.job.uid, |state| state.start.first.container_started());
    let making = Box::pin(container::start(start, sandbox, starting, &images));
    let mut started = run_with_permit(permit, HOLD_LIMIT, making).await;
    if let Ok(id) = &started
        && starting.container.lifecycle.as_ref().is_some_and(|l| l.post_start.is_some())
    {
        // Other pods start while this hook runs.
        permit.take();
        started = match post_start(start, starting, id).await {
            Ok(()) => started,
            Err(StartError::Failed(error)) => Err(ContainerStartError::of_hook(error, id.clone())),
            Err(StartError::Superseded) => return Err(StartError::Superseded),
        };
    }
    match started {
        Ok(_) => {
            let name = &starting.action.name;
            start.effects.registry.with(&start.job.uid, |state| state.start.errors.remove(name));
            Ok(None)
        }
        Err(failed) => Ok(Some(report_container_error(start, starting, failed))),
    }
}

/// The outcome of images, unless the turn is cancelled before it is known.
async fn unless_cancelled<T>(start: &Start<'_>, outcome: impl Future<Output = T>) -> Result<T, StartError> {
    // Cancel-safe: dropping a task aborts it.
    tokio::select! {
        () = start.job.cancel.cancelled() => Err(StartError::Superseded),
        outcome = outcome => Ok(outcome),
    }
}

fn note(start: &Start<'_>, step: StepName, subject: &str, cause: Cause) {
    start.effects.registry.set_step(&start.job.uid, step, subject, cause);
}
