//! Detailed usage of cgroups: those of the node, the system cgroups, and of each running pod, its sandbox and its containers.

use std::fs;

use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_resource_manager_core::detail::DeviceNumber;
use keelson_resource_manager_core::layout::{Qos, is_usable_uid};
use keelson_resource_manager_core::system_cgroups::SystemCgroup;
use keelson_service_kit::now_unix_nanos;

use crate::cgroup::Tree;
use crate::procfs::{boot_unix_nanos, network};
use crate::runtime_pods::newest_running;
use crate::wire_stats as wire;

/// All cgroups: from the root down to the QoS classes, then the system cgroups, then pods. Blocks.
pub(crate) fn cgroup_stats(
    tree: &Tree,
    running: &[rt::RuntimePod],
    system: &[SystemCgroup],
) -> Vec<pb::CgroupStatsResponse> {
    let taken = now_unix_nanos();
    let root = pb::CgroupStatsResponse {
        usage: Some(wire::usage(tree.node_usage(), taken, |_| None)),
        network: network("/proc/self/net/dev"),
        started_unix_nanos: boot_unix_nanos(),
        ..read(tree, "/".to_owned())
    };
    let mut all = vec![root, with_creation_time(tree, tree.layout().pods().to_string())];
    let classes = [Qos::Burstable, Qos::BestEffort].map(|qos| tree.layout().class(qos).to_string());
    all.extend(classes.map(|class| with_creation_time(tree, class)));
    for SystemCgroup { path, .. } in system {
        // This process may be in the root cgroup, and one cgroup may be configured twice.
        if tree.has(path) && all.iter().all(|cgroup| cgroup.path != *path) {
            all.push(with_creation_time(tree, path.clone()));
        }
    }
    all.extend(running.iter().flat_map(|pod| pod_cgroups(tree, pod)));
    all
}

/// The cgroups of a pod; none without running containers, or without a cgroup.
fn pod_cgroups(tree: &Tree, pod: &rt::RuntimePod) -> Vec<pb::CgroupStatsResponse> {
    let sandbox = pod.sandboxes.iter().find(|sandbox| sandbox.ready);
    let running = newest_running(&pod.containers);
    if (sandbox.is_none() && running.is_empty()) || !is_usable_uid(&pod.uid) {
        return Vec::new();
    }
    let Some(pod_cgroup) = tree.find_pod(&pod.uid) else { return Vec::new() };
    let named = PodRef { uid: pod.uid.clone(), namespace: pod.namespace.clone(), name: pod.name.clone() };
    let started_unix_nanos = pod.sandboxes.first().map_or(0, |sandbox| sandbox.created_unix_nanos);
    let of = |found: pb::CgroupStatsResponse| pb::CgroupStatsResponse { pod: Some(named.clone()), ..found };
    let mut all = vec![of(pb::CgroupStatsResponse { started_unix_nanos, ..read(tree, pod_cgroup.clone()) })];
    all.extend(sandbox.and_then(|sandbox| {
        let path = tree.find_container(&pod_cgroup, &sandbox.id)?;
        let pid = tree.processes(&path).0.filter(|_| !sandbox.host_network);
        Some(of(pb::CgroupStatsResponse {
            id: sandbox.id.clone(),
            started_unix_nanos: sandbox.created_unix_nanos,
            network: pid.and_then(|pid| network(&format!("/proc/{pid}/net/dev"))),
            ..read(tree, path)
        }))
    }));
    all.extend(running.into_iter().filter_map(|container| {
        let path = tree.find_container(&pod_cgroup, &container.id)?;
        Some(of(pb::CgroupStatsResponse {
            id: container.id.clone(),
            container: container.name.clone(),
            image: container.image.clone(),
            started_unix_nanos: container.started_unix_nanos,
            ..read(tree, path)
        }))
    }));
    all
}

/// A cgroup that no container runtime has started, with its creation time.
fn with_creation_time(tree: &Tree, path: String) -> pb::CgroupStatsResponse {
    let started_unix_nanos = tree.created_unix_nanos(&path);
    pb::CgroupStatsResponse { started_unix_nanos, ..read(tree, path) }
}

fn read(tree: &Tree, path: String) -> pb::CgroupStatsResponse {
    pb::CgroupStatsResponse {
        usage: Some(wire::usage(tree.usage(&path), now_unix_nanos(), |_| None)),
        detail: Some(wire::detail(tree.detail(&path), device_name)),
        path,
        ..Default::default()
    }
}

/// `/dev/<name>`, by the kernel's link from the device numbers (sysfs(5)).
fn device_name(number: DeviceNumber) -> String {
    let link = format!("/sys/dev/block/{}:{}", number.major, number.minor);
    let target = fs::read_link(link).ok();
    let name = target.as_deref().and_then(|target| target.file_name()?.to_str());
    name.map_or_else(String::new, |name| format!("/dev/{name}"))
}
