//! Which pod has exceeded a local storage limit (runtime-and-resources.md §12.6).

use keelson_kube_model::Quantity;
use keelson_kube_model::pod_ext::SYSTEM_CRITICAL_PRIORITY;

use crate::desire::PodDesire;

use super::usage::PodUsage;

const RESOURCE: &str = "ephemeral-storage";
const VOLUME_LIMIT: &str = "emptydirfs.limit";
const POD_LIMIT: &str = "ephemeralpodfs.limit";
const CONTAINER_LIMIT: &str = "ephemeralcontainerfs.limit";

/// The kinds of limits that an [`ExceededLimit`] can name.
pub const SIGNALS: [&str; 3] = [VOLUME_LIMIT, POD_LIMIT, CONTAINER_LIMIT];

/// A local storage limit that a pod has exceeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExceededLimit {
    /// The kubelet's name for the kind of limit, in metrics.
    pub signal: &'static str,
    /// The kubelet's message.
    pub message: String,
}

/// Whether a pod has local storage limits that are enforced. They are not for pods of system priority; they are for static
/// pods, which are not evicted for node pressure.
pub fn has_limits(desire: &PodDesire) -> bool {
    if desire.priority >= SYSTEM_CRITICAL_PRIORITY {
        return false;
    }
    let of_container = desire.containers.iter().any(|c| c.limits.contains_key(RESOURCE));
    of_container
        || desire.pod_level_limits.contains_key(RESOURCE)
        || desire.empty_dirs.iter().any(|volume| volume.size_limit.is_some())
}

/// The first limit that a pod has exceeded, in the order emptyDir, pod, container.
pub fn exceeded_limit(desire: &PodDesire, usage: &PodUsage) -> Option<ExceededLimit> {
    volume_limit(desire, usage)
        .or_else(|| pod_limit_exceeded(desire, usage))
        .or_else(|| container_limit(desire, usage))
}

fn volume_limit(desire: &PodDesire, usage: &PodUsage) -> Option<ExceededLimit> {
    desire.empty_dirs.iter().find_map(|volume| {
        let limit = volume.size_limit.filter(|limit| !limit.is_zero())?;
        let found = usage.volumes.iter().find(|found| found.name == volume.name)?;
        let exceeded = Quantity::from_bytes(found.space.bytes) > limit;
        let message = format!("Usage of EmptyDir volume \"{}\" exceeds the limit \"{limit}\". ", volume.name);
        exceeded.then_some(ExceededLimit { signal: VOLUME_LIMIT, message })
    })
}

/// The limit of the whole pod: its pod-level limit, or the sum of the limits of its regular containers and sidecars when every
/// regular container has one.
pub fn pod_limit(desire: &PodDesire) -> Option<Quantity> {
    if let Some(limit) = desire.pod_level_limits.get(RESOURCE) {
        return Some(*limit);
    }
    let mut regular = desire.containers.iter().filter(|c| !c.init && !c.sidecar).peekable();
    regular.peek()?;
    let mut sum = None;
    for container in regular {
        let limit = *container.limits.get(RESOURCE)?;
        sum = Some(sum.map_or(limit, |sum: Quantity| sum + limit));
    }
    let sidecars = desire.containers.iter().filter(|c| c.sidecar).filter_map(|c| c.limits.get(RESOURCE));
    sidecars.fold(sum, |sum, limit| sum.map(|sum| sum + *limit))
}

fn pod_limit_exceeded(desire: &PodDesire, usage: &PodUsage) -> Option<ExceededLimit> {
    let limit = pod_limit(desire)?;
    let exceeded = Quantity::from_bytes(usage.local_storage()) > limit;
    let message =
        format!("Pod ephemeral local storage usage exceeds the total limit of containers {limit}. ");
    exceeded.then_some(ExceededLimit { signal: POD_LIMIT, message })
}

fn container_limit(desire: &PodDesire, usage: &PodUsage) -> Option<ExceededLimit> {
    desire.containers.iter().find_map(|container| {
        let limit = *container.limits.get(RESOURCE)?;
        let found = usage.containers.get(&container.name)?;
        let exceeded = Quantity::from_bytes(found.local_storage()) > limit;
        let message =
            format!("Container {} exceeded its local ephemeral storage limit \"{limit}\". ", container.name);
        exceeded.then_some(ExceededLimit { signal: CONTAINER_LIMIT, message })
    })
}

#[cfg(test)]
mod tests {
    use super::super::usage::{ContainerUsage, Space, VolumeUsage};
    use super::*;
    use crate::desire::{ContainerShare, Desire as _, EmptyDirShare, PodRef};

    fn container(name: &str, limit: Option<&str>) -> ContainerShare {
        let limits = limit.map(|text| (RESOURCE.to_owned(), Quantity::parse(text).unwrap()));
        ContainerShare {
            name: name.to_owned(),
            limits: limits.into_iter().collect(),
            ..ContainerShare::default()
        }
    }

    fn pod(containers: Vec<ContainerShare>, size_limit: Option<&str>) -> PodDesire {
        let size_limit = size_limit.map(|text| Quantity::parse(text).unwrap());
        let volume = EmptyDirShare { name: "scratch".to_owned(), size_limit };
        PodDesire { containers, empty_dirs: vec![volume], ..PodDesire::forget(PodRef::default()) }
    }

    fn taking(layer: u64, logs: u64, volume: u64) -> PodUsage {
        let space = |bytes| Some(Space { bytes, inodes: 1 });
        let main = ContainerUsage { layer: space(layer), logs: space(logs), ..ContainerUsage::default() };
        let space = Space { bytes: volume, inodes: 1 };
        let volume = VolumeUsage { name: "scratch".to_owned(), space, local: true };
        PodUsage {
            containers: [("main".to_owned(), main)].into(),
            volumes: vec![volume],
            ..PodUsage::default()
        }
    }

    #[test]
    fn the_first_exceeded_local_storage_limit_is_reported_in_the_kubelets_words() {
        let limited = pod(vec![container("main", Some("1Ki"))], Some("2Ki"));
        let half = pod(vec![container("main", Some("1Ki")), container("other", None)], None);
        type Case<'a> = (&'a PodDesire, (u64, u64, u64), Option<(&'static str, &'static str)>);
        let cases: [Case<'_>; 8] = [
            (&limited, (500, 24, 500), None),
            (
                &limited,
                (0, 0, 2048),
                Some((
                    "ephemeralpodfs.limit",
                    "Pod ephemeral local storage usage exceeds the total limit of containers 1Ki. ",
                )),
            ),
            (
                &limited,
                (0, 0, 2049),
                Some((
                    "emptydirfs.limit",
                    "Usage of EmptyDir volume \"scratch\" exceeds the limit \"2Ki\". ",
                )),
            ),
            (
                &limited,
                (500, 25, 500),
                Some((
                    "ephemeralpodfs.limit",
                    "Pod ephemeral local storage usage exceeds the total limit of containers 1Ki. ",
                )),
            ),
            (&half, (1024, 0, 4096), None),
            (
                &half,
                (1000, 25, 0),
                Some((
                    "ephemeralcontainerfs.limit",
                    "Container main exceeded its local ephemeral storage limit \"1Ki\". ",
                )),
            ),
            (&half, (1000, 24, 0), None),
            (&limited, (512, 512, 0), None),
        ];
        for (desire, (layer, logs, volume), expected) in cases {
            let found = exceeded_limit(desire, &taking(layer, logs, volume));
            let expected =
                expected.map(|(signal, message)| ExceededLimit { signal, message: message.to_owned() });
            assert_eq!(found, expected, "{layer} {logs} {volume}");
        }
    }

    #[test]
    fn hosts_file_and_termination_log_count_toward_local_storage_limits() {
        let space = |bytes| Some(Space { bytes, inodes: 1 });
        let limited = pod(vec![container("main", Some("1Ki"))], None);
        let half = pod(vec![container("main", Some("1Ki")), container("other", None)], None);
        let hosts = |bytes| PodUsage { hosts_file: space(bytes), ..taking(0, 0, 24) };
        let message = |bytes| {
            let mut usage = taking(0, 24, 0);
            usage.containers.get_mut("main").unwrap().termination_log = space(bytes);
            usage
        };
        for (desire, usage, signal) in [
            (&limited, hosts(1000), None),
            (&limited, hosts(1001), Some(POD_LIMIT)),
            (&limited, message(1000), None),
            (&limited, message(1001), Some(POD_LIMIT)),
            // The hosts file is shared: its usage belongs to no single container.
            (&half, hosts(1 << 20), None),
            (&half, message(1000), None),
            (&half, message(1001), Some(CONTAINER_LIMIT)),
        ] {
            assert_eq!(
                exceeded_limit(desire, &usage).map(|exceeded_limit| exceeded_limit.signal),
                signal,
                "{usage:?}"
            );
        }
    }

    #[test]
    fn local_storage_limits_apply_to_static_pods_but_not_to_system_priority_pods() {
        let limited = pod(vec![container("main", Some("1Ki"))], None);
        for (critical, priority, kept) in
            [(false, 0, true), (true, 0, true), (true, SYSTEM_CRITICAL_PRIORITY, false)]
        {
            let desire = PodDesire { critical, priority, ..limited.clone() };
            assert_eq!(has_limits(&desire), kept, "{critical} {priority}");
        }
    }

    #[test]
    fn unmeasured_usage_exceeds_no_limit() {
        let limited = pod(vec![container("main", Some("1"))], Some("1"));
        assert_eq!(exceeded_limit(&limited, &PodUsage::default()), None);
    }

    #[test]
    fn a_memory_backed_volume_has_its_size_limit_but_is_not_local_storage() {
        let desire = pod(vec![container("main", Some("1Ki"))], Some("4Ki"));
        let mut usage = taking(0, 0, 4096);
        usage.volumes[0].local = false;
        assert_eq!(exceeded_limit(&desire, &usage), None);
        usage.volumes[0].space.bytes += 1;
        assert_eq!(exceeded_limit(&desire, &usage).unwrap().signal, "emptydirfs.limit");
    }

    #[test]
    fn the_pod_storage_limit_is_pod_level_or_the_sum_of_all_container_limits() {
        let sidecar = |limit| ContainerShare { sidecar: true, ..container("side", limit) };
        let init = ContainerShare { init: true, ..container("init", Some("1Gi")) };
        for (containers, limit) in [
            (vec![container("a", Some("1Ki")), container("b", Some("1Ki"))], Some("2Ki")),
            (vec![container("a", Some("1Ki")), container("b", None)], None),
            (vec![container("a", Some("1Ki")), sidecar(None), init.clone()], Some("1Ki")),
            (vec![container("a", Some("1Ki")), sidecar(Some("3Ki"))], Some("4Ki")),
            (vec![init], None),
        ] {
            let desire = pod(containers, None);
            assert_eq!(pod_limit(&desire).map(|limit| limit.to_string()).as_deref(), limit);
        }
        let mut desire = pod(vec![container("a", Some("1Ki"))], None);
        desire.pod_level_limits.insert(RESOURCE.to_owned(), Quantity::from_bytes(10 << 10));
        assert_eq!(pod_limit(&desire), Some(Quantity::from_bytes(10 << 10)));
        assert!(has_limits(&desire));
        assert!(!has_limits(&pod(vec![container("a", None)], None)));
    }
}
