//! Errors of starts: reasons in the status, events, steps.

use keelson_kube_model::Container;
use keelson_pod_sync_core::explain::{Cause, StepName, YOU};

use super::{Start, Starting, note};
use crate::effects::images::ImageError;
use crate::error::SyncError;
use crate::publish::objects::container_object;

/// The next attempt at an image for which runtime-shim names no time, in nanoseconds.
const IMAGE_RETRY_NANOS: i64 = 10_000_000_000;

/// Why one container did not start. Its status shows the reason.
pub(super) struct ContainerStartError {
    pub(super) reason: &'static str,
    pub(super) error: SyncError,
    /// The service that has to act if the pod is not at fault.
    pub(super) peer: &'static str,
    /// The container, if there is one already.
    pub(super) id: Option<String>,
}

impl ContainerStartError {
    /// An error of a call of `peer`, before there is a container.
    pub(super) fn of(reason: &'static str, peer: &'static str, error: SyncError) -> Self {
        Self { reason, error, peer, id: None }
    }

    /// An error of a call of the runtime, before there is a container.
    pub(super) fn of_runtime(reason: &'static str, error: SyncError) -> Self {
        Self::of(reason, "runtime-shim", error)
    }

    /// The postStart hook of a container failed.
    pub(super) fn of_hook(error: SyncError, id: String) -> Self {
        Self { id: Some(id), ..Self::of_runtime("PostStartHookError", error) }
    }
}

/// The image of a container is not present.
pub(super) fn report_image_error(start: &Start<'_>, starting: Starting<'_>, error: ImageError) -> SyncError {
    let event = error.reason.clone();
    report_missing_image(start, starting, error, &event, "waits for its image")
}

/// The image of a volume that a container mounts is not present. The container has the reason of the image, and its event the message
/// (volumes.md §10.7).
pub(super) fn report_volume_image_error(
    start: &Start<'_>,
    starting: Starting<'_>,
    error: ImageError,
) -> SyncError {
    let event = error.message.clone();
    report_missing_image(start, starting, error, &event, "waits for the image of a volume")
}

fn report_missing_image(
    start: &Start<'_>,
    starting: Starting<'_>,
    error: ImageError,
    event: &str,
    wait: &str,
) -> SyncError {
    let container = starting.container;
    if !error.peer_unavailable {
        record_start_error(start, container, &error.reason, &error.message);
        let object = container_object(&start.desired.pod, starting.kind, &container.name);
        start.effects.context.events.warning(object, "Failed", format!("Error: {event}"));
    }
    let cause = Cause::waiting("Image", wait, "runtime-shim");
    note(start, StepName::Container, &container.name, cause);
    let retry = (error.retry_unix_nanos > 0).then_some(error.retry_unix_nanos);
    let retry = retry.or_else(|| {
        (!error.peer_unavailable).then(|| keelson_service_kit::now_unix_nanos() + IMAGE_RETRY_NANOS)
    });
    SyncError {
        retry_unix_nanos: retry,
        peer_unavailable: error.peer_unavailable,
        ..SyncError::new(error.message)
    }
}

/// A container did not start.
pub(super) fn report_container_error(
    start: &Start<'_>,
    starting: Starting<'_>,
    failed: ContainerStartError,
) -> SyncError {
    let ContainerStartError { reason, error, peer, id } = failed;
    let Starting { container, kind, .. } = starting;
    // An unavailable service is no failure of the container: no reason in its status, no event.
    if !error.peer_unavailable {
        start.effects.publisher.metrics.container_failed(kind, reason);
        record_start_error(start, container, reason, &error.message);
        let object = container_object(&start.desired.pod, kind, &container.name);
        let text = with_name(&error.message, id.as_deref(), &container.name);
        start.effects.context.events.warning(object, "Failed", format!("Error: {text}"));
    }
    let owner = if error.peer_unavailable { peer } else { YOU };
    let cause = Cause::failed(reason, &error.message, owner);
    note(start, StepName::Container, &container.name, cause);
    error
}

/// A text for an event, with the container's name in place of its id, so that repeated events have the same text.
fn with_name(text: &str, id: Option<&str>, name: &str) -> String {
    id.filter(|id| !id.is_empty()).map_or_else(|| text.to_owned(), |id| text.replace(id, name))
}

/// Keeps the reason in the container's status until a start succeeds.
fn record_start_error(start: &Start<'_>, container: &Container, reason: &str, message: &str) {
    let value = (reason.to_owned(), message.to_owned());
    let registry = &start.effects.registry;
    registry.with(&start.job.uid, |state| state.start.errors.insert(container.name.clone(), value));
}
