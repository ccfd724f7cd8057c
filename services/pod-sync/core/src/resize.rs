//! In-place resize: the CPU and memory of a running pod change (pod-lifecycle.md §16, runtime-and-resources.md §13).
//!
//! Three sets of resources of a pod are compared: those that its source asks for, those that the node has allocated to it
//! ([`crate::allocation`]), and those that were last written to the runtime (actuated).
//!
//! | module | what it decides |
//! |---|---|
//! | [`cgroup`] | the values of the pod's cgroup meanwhile |
//! | [`check`] | can this pod have these resources at all |
//! | [`order`] | which of the pending resizes is tried first |
//! | [`plan`] | which containers are updated, in which order, and which restart |
//! | [`record`] | what is stored of a resize, and its transitions |
//! | [`report`] | texts of events, and what is counted |

pub mod cgroup;
pub mod check;
pub mod order;
pub mod plan;
pub mod record;
pub mod report;

pub use cgroup::cgroup_values;
pub use check::infeasible;
pub use order::{PendingPod, sort_pending};
pub use plan::{ContainerResize, ResizePlan, plan};
pub use record::{BELOW_USAGE, PendingReason, PendingResize, ResizeInProgress, ResizeRecord};

use keelson_kube_model::{Container, Pod};

use crate::restart::ContainerKind;

/// The resources that can change while a pod runs.
pub const RESIZABLE: [&str; 2] = ["cpu", "memory"];

/// The containers of a pod that can be resized: init containers, sidecars and regular ones.
fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.init_containers.iter().chain(&pod.spec.containers)
}

/// Whether a container restarts when this resource changes.
///
/// An init container that runs does not: if it ended by itself meanwhile with exit code 0, its work would count as done.
fn restarts(pod: &Pod, container: &Container, resource: &str) -> bool {
    let is_init = pod
        .spec
        .init_containers
        .iter()
        .any(|init| init.name == container.name && ContainerKind::of_init(init) == ContainerKind::Init);
    !is_init && demands_restart(container, resource)
}

/// Whether the `resizePolicy` of a container demands a restart when this resource changes.
fn demands_restart(container: &Container, resource: &str) -> bool {
    let entries = container.resize_policy.as_ref().and_then(|policy| policy.as_array());
    let named = |entry: &&serde_json::Value| entry["resourceName"] == resource;
    entries
        .into_iter()
        .flatten()
        .find(named)
        .is_some_and(|entry| entry["restartPolicy"] == "RestartContainer")
}
