//! Objects as the core decides about them.

use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::container_gc::{ListedContainer, ListedPod, ListedSandbox};
use keelson_runtime_shim_core::exec::{Instance, State};
use keelson_runtime_shim_core::image_gc::ListedImage;

use super::image::Image;
use super::list::ContainerEntry;

/// An observed pod for garbage collection.
pub(crate) fn gc_pod(pod: &pb::RuntimePod) -> ListedPod {
    ListedPod {
        uid: pod.uid.clone(),
        containers: pod.containers.iter().map(gc_container).collect(),
        sandboxes: pod.sandboxes.iter().map(gc_sandbox).collect(),
    }
}

fn gc_container(container: &pb::Container) -> ListedContainer {
    let state = container.state();
    ListedContainer {
        id: container.id.clone(),
        name: container.name.clone(),
        sandbox_id: container.sandbox_id.clone(),
        alive: !matches!(state, pb::ContainerState::Exited | pb::ContainerState::Created),
        pending: state == pb::ContainerState::Created,
        created_unix_nanos: container.created_unix_nanos,
    }
}

fn gc_sandbox(sandbox: &pb::Sandbox) -> ListedSandbox {
    ListedSandbox {
        id: sandbox.id.clone(),
        ready: sandbox.ready,
        attempt: sandbox.attempt,
        created_unix_nanos: sandbox.created_unix_nanos,
    }
}

/// A listed image for garbage collection.
pub(crate) fn listed_image(image: Image) -> ListedImage {
    ListedImage {
        id: image.id,
        names: image.repo_tags.into_iter().chain(image.repo_digests).collect(),
        bytes: image.bytes,
        pinned: image.pinned,
    }
}

impl ContainerEntry {
    /// The container as a possible target of a command.
    pub(crate) fn instance(&self) -> Instance<'_> {
        Instance {
            name: &self.name,
            id: &self.id,
            created: self.created_unix_nanos,
            state: match self.state {
                pb::ContainerState::Created => State::Created,
                pb::ContainerState::Running => State::Running,
                pb::ContainerState::Exited => State::Exited,
                pb::ContainerState::Unknown | pb::ContainerState::Unspecified => State::Unknown,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_in_an_unknown_state_counts_as_alive_for_garbage_collection() {
        use pb::ContainerState::{Created, Exited, Running, Unknown, Unspecified};
        for (state, alive, pending) in [
            (Created, false, true),
            (Running, true, false),
            (Exited, false, false),
            (Unknown, true, false),
            (Unspecified, true, false),
        ] {
            let listed = gc_container(&pb::Container { state: state as i32, ..Default::default() });
            assert_eq!((listed.alive, listed.pending), (alive, pending), "{state:?}");
        }
    }
}
