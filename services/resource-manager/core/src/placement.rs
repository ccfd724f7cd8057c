//! Whether pods run in their cgroups (runtime-and-resources.md §1.6, pod-lifecycle.md §8.1).
//!
//! Containers end up elsewhere when the container runtime does not report its cgroup driver and uses another one than
//! the agent, or when the driver or `cgroupRoot` was changed while they ran. Such a pod is neither limited nor measured.

use crate::driver::DriverSource;

/// How long a sandbox must be ready before its pod is reported, in nanoseconds: its process may not have started yet.
const SETTLED_NANOS: i64 = 10_000_000_000;
/// How many pods the message names; the others are counted.
const NAMED: usize = 3;

/// A pod that should run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodPlacement {
    /// `<namespace>/<name>`.
    pub name: String,
    /// Since when its sandbox is ready, in nanoseconds since 1970; none without a ready sandbox.
    pub ready_since_unix_nanos: Option<i64>,
    /// Whether the runtime has made a cgroup in the pod's cgroup.
    pub has_containers: bool,
}

impl PodPlacement {
    /// Whether the pod has a ready sandbox and an empty cgroup.
    pub fn is_outside(&self) -> bool {
        self.ready_since_unix_nanos.is_some() && !self.has_containers
    }
}

/// The message about pods that run outside their cgroups; none when there are no such pods. `driver` is the driver in use
/// and `source` says where it comes from.
pub fn outside_message(
    pods: &[PodPlacement],
    driver: &str,
    source: DriverSource,
    now_unix_nanos: i64,
) -> Option<String> {
    let is_outside = |pod: &&PodPlacement| {
        let since = pod.ready_since_unix_nanos.map(|since| now_unix_nanos.saturating_sub(since));
        pod.is_outside() && since.is_some_and(|since| since >= SETTLED_NANOS)
    };
    let outside: Vec<&str> = pods.iter().filter(is_outside).map(|pod| pod.name.as_str()).collect();
    let (named, others) = outside.split_at(outside.len().min(NAMED));
    let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
    let why = match source {
        DriverSource::Configuration => format!(
            "either the container runtime uses another cgroup driver than {driver}, which cgroupDriver names (containerd: \
             SystemdCgroup); or cgroupDriver or cgroupRoot was changed while they ran: then remove these pods and add \
             them again"
        ),
        DriverSource::Runtime => format!(
            "the cgroup driver, which the container runtime reports and which is {driver} now, or cgroupRoot was changed \
             while they ran: remove these pods and add them again"
        ),
    };
    (!named.is_empty()).then(|| {
        format!(
            "the containers of {}{more} run outside the cgroups of their pods and are neither limited nor measured: {why}",
            named.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_000_000_000_000;

    fn pod(name: &str, since: Option<i64>, has_containers: bool) -> PodPlacement {
        PodPlacement { name: name.into(), ready_since_unix_nanos: since, has_containers }
    }

    #[test]
    fn a_pod_outside_its_cgroup_is_reported_after_ten_seconds() {
        let old = Some(NOW - SETTLED_NANOS);
        for (pod, outside) in [
            (pod("default/web", old, false), true),
            (pod("default/web", old, true), false),
            (pod("default/web", Some(NOW - SETTLED_NANOS + 1), false), false),
            (pod("default/web", Some(NOW + 1), false), false),
            (pod("default/web", None, false), false),
        ] {
            let text =
                outside_message(std::slice::from_ref(&pod), "systemd", DriverSource::Configuration, NOW);
            assert_eq!(text.is_some(), outside, "{pod:?} {text:?}");
        }
    }

    #[test]
    fn pods_outside_their_cgroups_are_reported_with_a_remedy() {
        let pods: Vec<PodPlacement> = (0..5).map(|i| pod(&format!("default/p{i}"), Some(0), false)).collect();
        let text = outside_message(&pods, "cgroupfs", DriverSource::Configuration, NOW).unwrap();
        let begin = "the containers of default/p0, default/p1, default/p2 and 2 more run outside";
        assert!(text.starts_with(begin) && text.contains("than cgroupfs"), "{text}");
        let text = outside_message(&pods[..3], "cgroupfs", DriverSource::Configuration, NOW).unwrap();
        assert!(
            text.starts_with("the containers of default/p0, default/p1, default/p2 run outside"),
            "{text}"
        );
        let text = outside_message(&pods[..1], "systemd", DriverSource::Runtime, NOW).unwrap();
        assert!(text.contains("which is systemd now") && !text.contains("cgroupDriver"), "{text}");
    }
}
