//! Which pod has exceeded a limit of local storage (runtime-and-resources.md §12.6).

use keelson_kube_model::Quantity;
use keelson_kube_model::pod_ext::SYSTEM_CRITICAL_PRIORITY;

use crate::desire::PodDesire;

use super::usage::PodUsage;

const RESOURCE: &str = "ephemeral-storage";
const OF_VOLUME: &str = "emptydirfs.limit";
const OF_POD: &str = "ephemeralpodfs.limit";
const OF_CONTAINER: &str = "ephemeralcontainerfs.limit";

/// The kinds of limits, as a [`Breach`] names them.
pub const SIGNALS: [&str; 3] = [OF_VOLUME, OF_POD, OF_CONTAINER];

/// A limit that was exceeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Breach {
    /// The kubelet's name for the kind of limit, in metrics.
    pub signal: &'static str,
    /// The kubelet's text.
    pub message: String,
}

/// Whether a pod has a limit that it must keep. The limits of a pod of system priority do not end it; those of a pod from a file
/// or a URL, which is not evicted for others, do.
pub fn has_limits(desire: &PodDesire) -> bool {
    if desire.priority >= SYSTEM_CRITICAL_PRIORITY {
        return false;
    }
    let of_container = desire.containers.iter().any(|c| c.limits.contains_key(RESOURCE));
    of_container
        || desire.pod_level_limits.contains_key(RESOURCE)
        || desire.empty_dirs.iter().any(|volume| volume.size_limit.is_some())
}

/// The first limit that a pod has exceeded: of an emptyDir, of the pod, of a container, in this order.
pub fn breach(desire: &PodDesire, usage: &PodUsage) -> Option<Breach> {
    of_volumes(desire, usage).or_else(|| of_pod(desire, usage)).or_else(|| of_containers(desire, usage))
}

fn of_volumes(desire: &PodDesire, usage: &PodUsage) -> Option<Breach> {
    desire.empty_dirs.iter().find_map(|volume| {
        let limit = volume.size_limit.filter(|limit| !limit.is_zero())?;
        let found = usage.volumes.iter().find(|found| found.name == volume.name)?;
        let exceeded = Quantity::from_bytes(found.space.bytes) > limit;
        let message = format!("Usage of EmptyDir volume \"{}\" exceeds the limit \"{limit}\". ", volume.name);
        exceeded.then_some(Breach { signal: OF_VOLUME, message })
    })
}

/// The limit of the pod as a whole: its own, or the sum of those of its regular containers and sidecars when each
/// regular one has one.
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

fn of_pod(desire: &PodDesire, usage: &PodUsage) -> Option<Breach> {
    let limit = pod_limit(desire)?;
    let exceeded = Quantity::from_bytes(usage.local_storage()) > limit;
    let message =
        format!("Pod ephemeral local storage usage exceeds the total limit of containers {limit}. ");
    exceeded.then_some(Breach { signal: OF_POD, message })
}

fn of_containers(desire: &PodDesire, usage: &PodUsage) -> Option<Breach> {
    desire.containers.iter().find_map(|container| {
        let limit = *container.limits.get(RESOURCE)?;
        let found = usage.containers.get(&container.name)?;
        let exceeded = Quantity::from_bytes(found.local_storage()) > limit;
        let message =
            format!("Container {} exceeded its local ephemeral storage limit \"{limit}\". ", container.name);
        exceeded.then_some(Breach { signal: OF_CONTAINER, message })
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
    fn the_first_limit_that_is_exceeded_is_told_in_the_kubelets_words() {
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
            let found = breach(desire, &taking(layer, logs, volume));
            let expected = expected.map(|(signal, message)| Breach { signal, message: message.to_owned() });
            assert_eq!(found, expected, "{layer} {logs} {volume}");
        }
    }

    #[test]
    fn what_a_container_writes_to_its_hosts_file_and_its_termination_log_counts() {
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
            (&limited, hosts(1001), Some(OF_POD)),
            (&limited, message(1000), None),
            (&limited, message(1001), Some(OF_POD)),
            // Who has written to the file that all share is not known.
            (&half, hosts(1 << 20), None),
            (&half, message(1000), None),
            (&half, message(1001), Some(OF_CONTAINER)),
        ] {
            assert_eq!(breach(desire, &usage).map(|breach| breach.signal), signal, "{usage:?}");
        }
    }

    #[test]
    fn a_pod_from_a_file_keeps_its_limits_and_one_of_system_priority_is_not_ended_for_them() {
        let limited = pod(vec![container("main", Some("1Ki"))], None);
        for (critical, priority, kept) in
            [(false, 0, true), (true, 0, true), (true, SYSTEM_CRITICAL_PRIORITY, false)]
        {
            let desire = PodDesire { critical, priority, ..limited.clone() };
            assert_eq!(has_limits(&desire), kept, "{critical} {priority}");
        }
    }

    #[test]
    fn what_was_not_measured_exceeds_nothing() {
        let limited = pod(vec![container("main", Some("1"))], Some("1"));
        assert_eq!(breach(&limited, &PodUsage::default()), None);
    }

    #[test]
    fn a_volume_in_memory_keeps_its_limit_but_is_not_the_pods_local_storage() {
        let desire = pod(vec![container("main", Some("1Ki"))], Some("4Ki"));
        let mut usage = taking(0, 0, 4096);
        usage.volumes[0].local = false;
        assert_eq!(breach(&desire, &usage), None);
        usage.volumes[0].space.bytes += 1;
        assert_eq!(breach(&desire, &usage).unwrap().signal, "emptydirfs.limit");
    }

    #[test]
    fn the_pods_limit_is_its_own_or_the_sum_when_each_regular_container_has_one() {
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
