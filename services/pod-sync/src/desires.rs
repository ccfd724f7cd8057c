//! What the callees are to hold of a pod, made from the pod.

use keelson_kube_model::resources::{pod_cgroup_values, pod_requests};
use keelson_kube_model::{Pod, Quantity, compute_qos};
use keelson_pod_sync_core::worker::WorkerPhase;
use keelson_proto::keelson::common::v1::{PodRef, Want};
use keelson_proto::keelson::resource_manager::v1 as resource;
use keelson_proto::keelson::runtime::v1 as runtime;
use keelson_proto::keelson::volume_manager::v1 as volume;

use crate::agent::{Agent, Entry, Wanted};
use crate::cluster::has_cluster;
use crate::shares;
use crate::start::quantity;

/// Names a pod in messages.
pub fn pod_ref(pod: &Pod) -> PodRef {
    PodRef {
        uid: pod.metadata.uid.clone(),
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone(),
    }
}

/// Sets what the three callees are to hold of a pod as its entry stands now. What a phase no longer wants is
/// taken back step by step by the worker.
///
/// Called under the lock of the entries, so that what is wanted never outlives the entry that it was made from. A
/// pod that waits for the removal of its earlier life is wanted by nobody: that would keep the removal away.
pub fn want(agent: &Agent, entry: &Entry) {
    let Some(wanted) = entry.wanted.as_ref().filter(|_| !entry.again) else { return };
    let (pod, phase) = (&wanted.pod, entry.state.phase);
    let uid = pod.metadata.uid.as_str();
    let runtime_want = match phase {
        WorkerPhase::Sync => Want::Run,
        WorkerPhase::Terminating | WorkerPhase::Terminated => Want::Stop,
        // The dead containers and logs of what the node got rid of take room that is short.
        WorkerPhase::Finished if entry.state.evicted => Want::Forget,
        WorkerPhase::Finished => Want::Unmount,
    };
    agent.desired.runtime.want(
        uid,
        runtime::PodDesire {
            pod: Some(pod_ref(pod)),
            revision: wanted.revision,
            want: runtime_want as i32,
            images: pod.containers().map(|(_, container)| container.image.clone()).collect(),
        },
    );
    if phase >= WorkerPhase::Terminated {
        return;
    }
    agent.desired.volumes.want(uid, volumes(agent, wanted));
    agent.desired.resources.want(uid, resources(agent, wanted, entry.observed.any_sandbox_ready()));
}

/// The pod's volumes are to go.
pub fn unmount(agent: &Agent, wanted: &Wanted) {
    let desire = volume::PodDesire { want: Want::Unmount as i32, ..volumes(agent, wanted) };
    agent.desired.volumes.want(&wanted.pod.metadata.uid, desire);
}

/// The pod's cgroup and its share are to go.
pub fn release(agent: &Agent, wanted: &Wanted) {
    let uid = wanted.pod.metadata.uid.as_str();
    let adopted = agent.with(uid, |e| e.observed.any_sandbox_ready()).unwrap_or(false);
    let desire = resource::PodDesire { want: Want::Forget as i32, ..resources(agent, wanted, adopted) };
    agent.desired.resources.want(uid, desire);
}

fn volumes(agent: &Agent, wanted: &Wanted) -> volume::PodDesire {
    let pod = &wanted.pod;
    let machine = agent.machine.borrow().clone();
    let allocatable =
        machine.allocatable.iter().map(|(name, amount)| (name.clone(), quantity(name, *amount)));
    let config = pod_cgroup_values(pod, 100_000, true);
    volume::PodDesire {
        pod: Some(pod_ref(pod)),
        revision: wanted.revision,
        want: Want::Run as i32,
        volumes: crate::volumes::messages(pod, &allocatable.collect(), has_cluster(&agent.context.config)),
        fs_group: pod.spec.security_context.as_ref().and_then(|s| s.fs_group),
        memory_limit_bytes: config.memory_limit.unwrap_or(0),
        huge_page_sizes: crate::volumes::huge_page_sizes(pod),
        storage_limited: is_storage_limited(pod),
    }
}

/// Some limit of local storage holds for the pod.
fn is_storage_limited(pod: &Pod) -> bool {
    const RESOURCE: &str = "ephemeral-storage";
    let of_pod = pod.spec.resources.as_ref().is_some_and(|own| own.limits.contains_key(RESOURCE));
    of_pod || pod.containers().any(|(_, container)| container.resources.limits.contains_key(RESOURCE))
}

fn resources(agent: &Agent, wanted: &Wanted, adopted: bool) -> resource::PodDesire {
    let pod = &wanted.pod;
    let config = &agent.context.config.resources;
    let values = pod_cgroup_values(pod, config.cpu_cfs_period_us, config.cpu_cfs_quota);
    let amount = |name: &str, quantity: &Quantity| {
        if name == "cpu" { quantity.milli_value() } else { quantity.value() }
    };
    resource::PodDesire {
        pod: Some(pod_ref(pod)),
        revision: wanted.revision,
        want: Want::Run as i32,
        qos_class: compute_qos(pod).as_str().to_owned(),
        requests: pod_requests(pod).iter().map(|(n, q)| (n.clone(), amount(n, q))).collect(),
        cgroup: Some(resource::PodCgroup {
            cpu_shares: values.shares,
            cpu_quota_us: values.quota_us.unwrap_or(0),
            cpu_period_us: values.period_us,
            memory_limit_bytes: values.memory_limit.unwrap_or(0),
            huge_page_limits: values.hugepage_limits.into_iter().collect(),
        }),
        critical: pod.is_critical(),
        adopted,
        priority: pod.spec.priority.unwrap_or(0),
        tolerates_memory_pressure: shares::tolerates_memory_pressure(pod),
        termination_grace_seconds: pod.termination_grace(),
        created_unix_nanos: shares::created_unix_nanos(pod),
        containers: shares::containers(pod),
        empty_dirs: shares::empty_dirs(pod),
        pod_level_requests: pod
            .spec
            .resources
            .as_ref()
            .map(|r| shares::texts(&r.requests))
            .unwrap_or_default(),
        pod_level_limits: pod.spec.resources.as_ref().map(|r| shares::texts(&r.limits)).unwrap_or_default(),
    }
}
