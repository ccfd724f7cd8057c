//! Whether pods run in their cgroups (runtime-and-resources.md §1.6, pod-lifecycle.md §8.1).
//!
//! They do not when the container runtime does not tell its cgroup driver and has another one than the agent, or when
//! the driver or `cgroupRoot` was changed while they ran. Nothing of a pod is bound or measured then.

use crate::driver::By;

/// How long a sandbox must have been there before it is missed, in nanoseconds: its process may be on its way.
const SETTLED_NANOS: i64 = 10_000_000_000;
/// How many pods are named; the others are counted.
const NAMED: usize = 3;

/// A pod that is to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// `<namespace>/<name>`.
    pub name: String,
    /// Since when its sandbox is ready, in nanoseconds since 1970; none without such a sandbox.
    pub ready_since_unix_nanos: Option<i64>,
    /// Whether the runtime has made a cgroup in that of the pod.
    pub inhabited: bool,
}

impl Placed {
    /// It has a sandbox, and its cgroup is empty.
    pub fn is_missed(&self) -> bool {
        self.ready_since_unix_nanos.is_some() && !self.inhabited
    }
}

/// What is told of pods that run elsewhere; none when there are none. `driver` is in force because of `by`.
pub fn misplaced(pods: &[Placed], driver: &str, by: By, now_unix_nanos: i64) -> Option<String> {
    let is_outside = |pod: &&Placed| {
        let since = pod.ready_since_unix_nanos.map(|since| now_unix_nanos.saturating_sub(since));
        pod.is_missed() && since.is_some_and(|since| since >= SETTLED_NANOS)
    };
    let outside: Vec<&str> = pods.iter().filter(is_outside).map(|pod| pod.name.as_str()).collect();
    let (named, others) = outside.split_at(outside.len().min(NAMED));
    let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
    let why = match by {
        By::Configuration => format!(
            "either the container runtime has another cgroup driver than {driver}, which cgroupDriver names (containerd: \
             SystemdCgroup), or cgroupDriver or cgroupRoot was changed while they ran, then remove these pods and add \
             them again"
        ),
        By::Runtime => format!(
            "the cgroup driver, which the container runtime names and which is {driver} now, or cgroupRoot was changed \
             while they ran: remove these pods and add them again"
        ),
    };
    (!named.is_empty()).then(|| {
        format!(
            "the containers of {}{more} run outside the cgroups of their pods, and are neither bound nor measured: {why}",
            named.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_000_000_000_000;

    fn pod(name: &str, since: Option<i64>, inhabited: bool) -> Placed {
        Placed { name: name.into(), ready_since_unix_nanos: since, inhabited }
    }

    #[test]
    fn a_pod_is_missed_in_its_cgroup_once_its_sandbox_has_settled() {
        let old = Some(NOW - SETTLED_NANOS);
        for (pod, outside) in [
            (pod("default/web", old, false), true),
            (pod("default/web", old, true), false),
            (pod("default/web", Some(NOW - SETTLED_NANOS + 1), false), false),
            (pod("default/web", Some(NOW + 1), false), false),
            (pod("default/web", None, false), false),
        ] {
            let text = misplaced(std::slice::from_ref(&pod), "systemd", By::Configuration, NOW);
            assert_eq!(text.is_some(), outside, "{pod:?} {text:?}");
        }
    }

    #[test]
    fn a_few_pods_are_named_with_the_way_out() {
        let pods: Vec<Placed> = (0..5).map(|i| pod(&format!("default/p{i}"), Some(0), false)).collect();
        let text = misplaced(&pods, "cgroupfs", By::Configuration, NOW).unwrap();
        let begin = "the containers of default/p0, default/p1, default/p2 and 2 more run outside";
        assert!(text.starts_with(begin) && text.contains("than cgroupfs"), "{text}");
        let text = misplaced(&pods[..3], "cgroupfs", By::Configuration, NOW).unwrap();
        assert!(
            text.starts_with("the containers of default/p0, default/p1, default/p2 run outside"),
            "{text}"
        );
        let text = misplaced(&pods[..1], "systemd", By::Runtime, NOW).unwrap();
        assert!(text.contains("which is systemd now") && !text.contains("cgroupDriver"), "{text}");
    }
}
