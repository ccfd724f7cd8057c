//! What the other services are to hold of a pod, made from the pod.

use std::collections::HashMap;
use std::sync::Arc;

use keelson_kube_model::resources::{PodCgroupValues, pod_cgroup_values, pod_requests};
use keelson_kube_model::{Pod, Quantity, qos_class};
use keelson_pod_sync_core::allocation::Allocation;
use keelson_pod_sync_core::resize::cgroup_values;
use keelson_pod_sync_core::worker::WorkerPhase;
use keelson_proto::keelson::common::v1::{PodRef, Want};
use keelson_proto::keelson::resource_manager::v1 as resource;
use keelson_proto::keelson::runtime::v1 as runtime;
use keelson_proto::keelson::volume_manager::v1 as volume;
use keelson_service_kit::Context;

use crate::node::{NodeState, has_cluster};
use crate::state::pod_state::{DesiredPod, PodState};
use crate::state::sync_streams::SyncSets;
use crate::state::{eviction_inputs, volume_messages};

/// Names a pod in messages.
pub fn pod_ref(pod: &Pod) -> PodRef {
    PodRef {
        uid: pod.metadata.uid.clone(),
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone(),
    }
}

/// Makes the desired state of each pod for the other services.
#[derive(Debug)]
pub struct DesiredState {
    context: Context,
    node: Arc<NodeState>,
    /// What each service is to hold.
    pub sets: SyncSets,
}

impl DesiredState {
    /// Without a pod yet.
    pub fn new(context: Context, node: Arc<NodeState>) -> Self {
        Self { context, node, sets: SyncSets::default() }
    }

    /// Sets what the three services are to hold of a pod in its present phase. The worker takes back step by step what later phases do
    /// not need.
    ///
    /// Call it under the lock of the registry, so that nothing stays desired after its pod was removed. A pod that waits for the removal of
    /// an earlier incarnation is not in the sets: that would prevent the removal.
    pub fn update(&self, state: &PodState) {
        let Some(desired) = state.desired.as_ref().filter(|_| !state.awaits_cleanup()) else { return };
        let (pod, phase) = (&desired.pod, state.worker.phase);
        let uid = pod.metadata.uid.as_str();
        let runtime_want = match phase {
            WorkerPhase::Sync => Want::Run,
            WorkerPhase::Terminating | WorkerPhase::Terminated => Want::Stop,
            // The node is short of the room that the dead containers and logs of an evicted pod take.
            WorkerPhase::Finished if state.worker.evicted => Want::Forget,
            WorkerPhase::Finished => Want::Unmount,
        };
        self.sets.runtime.set(
            uid,
            runtime::PodDesire {
                pod: Some(pod_ref(pod)),
                revision: desired.revision,
                want: runtime_want as i32,
                images: shrunk(images_of(pod)),
            },
        );
        if phase >= WorkerPhase::Terminated {
            return;
        }
        self.sets.volumes.set(uid, self.volumes_of(desired));
        let adopted = state.runtime.observed.any_sandbox_ready();
        let actuated = state.admission.resize.actuated.as_ref();
        self.sets.resources.set(uid, self.resources_of(desired, adopted, actuated));
    }

    /// volume-manager is to unmount the pod's volumes.
    pub fn unmount(&self, desired: &DesiredPod) {
        let desire = volume::PodDesire { want: Want::Unmount as i32, ..self.volumes_of(desired) };
        self.sets.volumes.set(&desired.pod.metadata.uid, desire);
    }

    /// resource-manager is to remove the pod's cgroup and to free its resources. `adopted`: the pod was found running.
    pub fn release(&self, desired: &DesiredPod, adopted: bool) {
        let uid = desired.pod.metadata.uid.as_str();
        let desire =
            resource::PodDesire { want: Want::Forget as i32, ..self.resources_of(desired, adopted, None) };
        self.sets.resources.set(uid, desire);
    }

    fn volumes_of(&self, desired: &DesiredPod) -> volume::PodDesire {
        let pod = &desired.pod;
        let allocatable = self.node.allocatable();
        let config = pod_cgroup_values(pod, 100_000, true);
        let security = pod.spec.security_context.as_ref();
        let tokens = has_cluster(&self.context.config);
        let trust_bundles = tokens && self.context.config.volumes.cluster_trust_bundles;
        let certificates = tokens && self.context.config.volumes.pod_certificates;
        let api = volume_messages::ApiSources { tokens, trust_bundles, certificates };
        volume::PodDesire {
            pod: Some(pod_ref(pod)),
            revision: desired.revision,
            want: Want::Run as i32,
            volumes: shrunk(volume_messages::messages(pod, &allocatable, api)),
            fs_group: security.and_then(|s| s.fs_group),
            memory_limit_bytes: config.memory_limit.unwrap_or(0),
            huge_page_sizes: volume_messages::huge_page_sizes(pod),
            storage_limited: is_storage_limited(pod),
            fs_group_change_policy: security
                .and_then(|s| s.fs_group_change_policy.clone())
                .unwrap_or_default(),
            service_account: pod.spec.service_account_name.clone(),
            se_linux_change_policy: security
                .and_then(|s| s.se_linux_change_policy.clone())
                .unwrap_or_default(),
            user_namespace: pod.spec.host_users == Some(false),
        }
    }

    /// The values of a pod's cgroup, whose containers still have the resources `actuated`; `None`: they have those of `pod`.
    pub fn cgroup_of(&self, pod: &Pod, actuated: Option<&Allocation>) -> resource::PodCgroup {
        let config = &self.context.config.resources;
        cgroup_message(cgroup_values(pod, actuated, config.cpu_cfs_period_us, config.cpu_cfs_quota))
    }

    fn resources_of(
        &self,
        desired: &DesiredPod,
        adopted: bool,
        actuated: Option<&Allocation>,
    ) -> resource::PodDesire {
        let pod = &desired.pod;
        resource::PodDesire {
            pod: Some(pod_ref(pod)),
            revision: desired.revision,
            want: Want::Run as i32,
            qos_class: qos_class(pod).as_str().to_owned(),
            requests: requests_of(pod),
            cgroup: Some(self.cgroup_of(pod, actuated)),
            critical: pod.is_critical(),
            adopted,
            priority: pod.spec.priority.unwrap_or(0),
            tolerates_memory_pressure: eviction_inputs::tolerates_memory_pressure(pod),
            termination_grace_seconds: pod.termination_grace(),
            created_unix_nanos: eviction_inputs::created_unix_nanos(pod),
            containers: shrunk(eviction_inputs::containers(pod)),
            empty_dirs: shrunk(eviction_inputs::empty_dirs(pod)),
            pod_level_requests: pod
                .spec
                .resources
                .as_ref()
                .map(|r| eviction_inputs::texts(&r.requests))
                .unwrap_or_default(),
            pod_level_limits: pod
                .spec
                .resources
                .as_ref()
                .map(|r| eviction_inputs::texts(&r.limits))
                .unwrap_or_default(),
        }
    }
}

/// The effective requests of a pod as resource-manager counts them: CPU in thousandths of a core, everything else in its unit.
pub fn requests_of(pod: &Pod) -> HashMap<String, i64> {
    let amount = |name: &str, quantity: &Quantity| {
        if name == "cpu" { quantity.milli_value() } else { quantity.value() }
    };
    pod_requests(pod).iter().map(|(name, quantity)| (name.clone(), amount(name, quantity))).collect()
}

fn cgroup_message(values: PodCgroupValues) -> resource::PodCgroup {
    resource::PodCgroup {
        cpu_shares: values.shares,
        cpu_quota_us: values.quota_us.unwrap_or(0),
        cpu_period_us: values.period_us,
        memory_limit_bytes: values.memory_limit.unwrap_or(0),
        huge_page_limits: values.hugepage_limits.into_iter().collect(),
    }
}

/// The images that the pod uses, those of its volumes included.
fn images_of(pod: &Pod) -> Vec<String> {
    let of_containers = pod.containers().map(|(_, container)| container.image.clone());
    let of_volumes =
        pod.spec.volumes.iter().filter_map(|volume| Some(volume.image.as_ref()?.reference.clone()));
    of_containers.chain(of_volumes).collect()
}

/// Without excess capacity: the sets keep the messages of every pod.
fn shrunk<T>(mut list: Vec<T>) -> Vec<T> {
    list.shrink_to_fit();
    list
}

/// Whether the pod has a limit of local storage.
fn is_storage_limited(pod: &Pod) -> bool {
    const RESOURCE: &str = "ephemeral-storage";
    let of_pod = pod.spec.resources.as_ref().is_some_and(|own| own.limits.contains_key(RESOURCE));
    of_pod || pod.containers().any(|(_, container)| container.resources.limits.contains_key(RESOURCE))
}
