//! What the runtime has of one pod, as observed.

use keelson_kube_model::{ContainerId, PodUid, SandboxId};

/// All sandboxes and containers of one pod when the runtime was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodObservation {
    /// `metadata.uid` of the pod.
    pub uid: PodUid,
    /// `metadata.name` of the pod.
    pub name: String,
    /// `metadata.namespace` of the pod.
    pub namespace: String,
    /// Newest attempt first, of equal attempts the last created first. See [`PodObservation::sort`].
    pub sandboxes: Vec<SandboxObservation>,
    /// Newest first. See [`PodObservation::sort`].
    pub containers: Vec<ContainerObservation>,
    /// When the reads began, nanoseconds since boot.
    pub observed_boot_nanos: i64,
}

/// One sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxObservation {
    /// The runtime's id.
    pub id: SandboxId,
    /// 0 for the first sandbox of the pod, then 1, 2, ….
    pub attempt: u32,
    /// The runtime reports it READY.
    pub ready: bool,
    /// Creation, unix nanoseconds.
    pub created_unix_nanos: i64,
    /// Primary address first.
    pub ips: Vec<String>,
    /// The sandbox uses the node's network.
    pub host_network: bool,
}

/// State of a container record, as CRI names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ContainerRecordState {
    /// Created, never started.
    Created,
    /// Its process runs.
    Running,
    /// Its process has ended.
    Exited,
    /// The runtime does not know.
    #[default]
    Unknown,
}

impl ContainerRecordState {
    /// The word used in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Exited => "exited",
            Self::Unknown => "unknown",
        }
    }
}

/// User and groups of a container's first process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserObservation {
    /// Its user.
    pub uid: i64,
    /// Its primary group.
    pub gid: i64,
    /// Its supplemental groups, in the runtime's order.
    pub supplemental_groups: Vec<i64>,
}

/// The resources of a container in the kernel, as the runtime reports them. 0: not reported, or no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourcesObservation {
    /// CPU shares, 2 to 262144.
    pub cpu_shares: u64,
    /// CFS quota, microseconds.
    pub cpu_quota_us: i64,
    /// CFS period, microseconds.
    pub cpu_period_us: i64,
    /// Memory limit, bytes.
    pub memory_limit_bytes: i64,
}

/// One container record. A container that was restarted has several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerObservation {
    /// The runtime's id.
    pub id: ContainerId,
    /// Name in the spec.
    pub name: String,
    /// The sandbox it was created in.
    pub sandbox_id: SandboxId,
    /// CRI `metadata.attempt`.
    pub attempt: u32,
    /// Its state.
    pub state: ContainerRecordState,
    /// Creation, unix nanoseconds.
    pub created_unix_nanos: i64,
    /// Start of its process, unix nanoseconds; 0 when it never started.
    pub started_unix_nanos: i64,
    /// End of its process, unix nanoseconds; 0 while it runs.
    pub finished_unix_nanos: i64,
    /// Valid once exited.
    pub exit_code: i32,
    /// The runtime's reason: `Completed`, `Error`, `OOMKilled`, ….
    pub reason: String,
    /// The runtime's message.
    pub message: String,
    /// The image's name as the runtime reports it.
    pub image: String,
    /// The image's identity.
    pub image_ref: String,
    /// The container hash that it was created with; empty if the record has none.
    pub hash: String,
    /// How often it had been restarted before.
    pub restart_count: u32,
    /// `spec.terminationGracePeriodSeconds` when it was created.
    pub termination_grace_seconds: Option<i64>,
    /// Path of its log.
    pub log_path: String,
    /// Content of the termination file, or the end of the log.
    pub termination_message: String,
    /// `None` if the runtime does not report it.
    pub user: Option<Box<UserObservation>>,
    /// `None` if the runtime does not report them.
    pub resources: Option<Box<ResourcesObservation>>,
}

impl ContainerObservation {
    /// The runtime reports it running.
    pub fn is_running(&self) -> bool {
        self.state == ContainerRecordState::Running
    }

    /// Its process runs, or its state is unknown.
    pub fn may_run(&self) -> bool {
        matches!(self.state, ContainerRecordState::Running | ContainerRecordState::Unknown)
    }

    /// Its process has ended.
    pub fn has_exited(&self) -> bool {
        self.state == ContainerRecordState::Exited
    }
}

impl PodObservation {
    /// The observation of a pod of which the runtime has nothing.
    pub fn nothing(uid: PodUid, name: &str, namespace: &str, observed_boot_nanos: i64) -> Self {
        Self {
            uid,
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            observed_boot_nanos,
            ..Self::default()
        }
    }

    /// Sorts sandboxes and containers into the order that all functions here require.
    pub fn sort(&mut self) {
        self.sandboxes.sort_by(|a, b| {
            (b.attempt, b.created_unix_nanos, &b.id).cmp(&(a.attempt, a.created_unix_nanos, &a.id))
        });
        self.containers.sort_by(|a, b| {
            (b.attempt, b.created_unix_nanos, &b.id).cmp(&(a.attempt, a.created_unix_nanos, &a.id))
        });
    }

    /// Frees the excess capacity of lists. For code that keeps many observations.
    pub fn shrink_to_fit(&mut self) {
        self.sandboxes.shrink_to_fit();
        self.sandboxes.iter_mut().for_each(|sandbox| sandbox.ips.shrink_to_fit());
        self.containers.shrink_to_fit();
        let users = self.containers.iter_mut().filter_map(|container| container.user.as_mut());
        users.for_each(|user| user.supplemental_groups.shrink_to_fit());
    }

    /// The newest sandbox, ready or not.
    pub fn newest_sandbox(&self) -> Option<&SandboxObservation> {
        self.sandboxes.first()
    }

    /// The newest sandbox, if it is READY.
    pub fn ready_sandbox(&self) -> Option<&SandboxObservation> {
        self.newest_sandbox().filter(|sandbox| sandbox.ready)
    }

    /// The newest record of a container's name, in any sandbox.
    pub fn current(&self, name: &str) -> Option<&ContainerObservation> {
        self.records(name).next()
    }

    /// All records of a container's name, newest first.
    pub fn records<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a ContainerObservation> {
        let name = name.to_owned();
        self.containers.iter().filter(move |container| container.name == name)
    }

    /// The newest record of a container's name in the newest sandbox, ready or not.
    pub fn in_newest_sandbox(&self, name: &str) -> Option<&ContainerObservation> {
        let sandbox = self.newest_sandbox()?;
        self.records(name).find(|record| record.sandbox_id == sandbox.id)
    }

    /// The newest terminated record of a name: the crash-loop back-off counts from its end.
    pub fn last_exited(&self, name: &str) -> Option<&ContainerObservation> {
        self.records(name).find(|container| container.has_exited())
    }

    /// The records in the newest sandbox, if that sandbox is READY; else none.
    pub fn active(&self) -> impl Iterator<Item = &ContainerObservation> {
        let sandbox = self.ready_sandbox().map(|sandbox| &sandbox.id);
        self.containers.iter().filter(move |container| Some(&container.sandbox_id) == sandbox)
    }

    /// Some process of the pod's containers runs or may run.
    pub fn anything_running(&self) -> bool {
        self.containers.iter().any(ContainerObservation::may_run)
    }

    /// Some sandbox is READY.
    pub fn any_sandbox_ready(&self) -> bool {
        self.sandboxes.iter().any(|sandbox| sandbox.ready)
    }

    /// Addresses of the pod: those of the newest sandbox, if it is READY and has a network of its own. Empty if one of them
    /// cannot be parsed.
    pub fn pod_ips(&self) -> Vec<String> {
        let Some(sandbox) = self.ready_sandbox().filter(|sandbox| !sandbox.host_network) else {
            return Vec::new();
        };
        let parsed: Result<Vec<std::net::IpAddr>, _> = sandbox.ips.iter().map(|ip| ip.parse()).collect();
        parsed.map_or_else(|_| Vec::new(), |ips| ips.iter().map(ToString::to_string).collect())
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{empty_observation, in_sandbox};

    use super::*;

    #[test]
    fn the_current_container_record_is_the_newest_in_any_sandbox() {
        let seen = in_sandbox().exited("a", 1).sandbox(1, true).running("a").running("b").0;
        assert_eq!(seen.current("a").map(|record| record.id.as_str()), Some("a-1"));
        assert_eq!(seen.last_exited("a").map(|record| record.id.as_str()), Some("a-0"));
        assert_eq!(seen.current("c"), None);
        let active: Vec<&str> = seen.active().map(|record| record.id.as_str()).collect();
        assert_eq!(active, ["b-0", "a-1"]);
    }

    #[test]
    fn no_container_is_active_when_the_newest_sandbox_is_not_ready() {
        let seen = in_sandbox().running("a").sandbox(1, false).0;
        assert_eq!(seen.active().count(), 0);
        assert!(seen.anything_running() && seen.any_sandbox_ready() && seen.ready_sandbox().is_none());
    }

    #[test]
    fn a_container_in_unknown_state_may_run() {
        assert!(empty_observation().unknown("a").0.anything_running());
        assert!(!empty_observation().created("a").exited("b", 0).0.anything_running());
    }

    #[test]
    fn pod_ips_come_from_the_newest_ready_sandbox_only() {
        assert_eq!(in_sandbox().0.pod_ips(), ["10.1.0.2"]);
        assert!(in_sandbox().sandbox(1, false).0.pod_ips().is_empty());
        assert!(in_sandbox().edit_sandbox(|sandbox| sandbox.host_network = true).0.pod_ips().is_empty());
    }

    #[test]
    fn pod_ips_are_normalised_and_empty_if_one_cannot_be_parsed() {
        let with = |ips: &[&str]| {
            let ips: Vec<String> = ips.iter().map(|ip| (*ip).to_owned()).collect();
            in_sandbox().edit_sandbox(|sandbox| sandbox.ips = ips).0.pod_ips()
        };
        assert_eq!(with(&["10.1.0.3", "FD00:0:0::2"]), ["10.1.0.3", "fd00::2"]);
        assert!(with(&["10.1.0.3", "x"]).is_empty());
    }

    #[test]
    fn sorting_puts_the_newest_attempt_first() {
        let sandbox = |attempt, created| SandboxObservation {
            attempt,
            created_unix_nanos: created,
            ..SandboxObservation::default()
        };
        let record = |created, attempt| ContainerObservation {
            created_unix_nanos: created,
            attempt,
            ..ContainerObservation::default()
        };
        let mut seen = PodObservation {
            sandboxes: vec![sandbox(0, 9), sandbox(1, 1), sandbox(1, 2)],
            containers: vec![record(1, 0), record(2, 0), record(2, 1)],
            ..PodObservation::default()
        };
        seen.sort();
        assert_eq!(seen.sandboxes, [sandbox(1, 2), sandbox(1, 1), sandbox(0, 9)]);
        assert_eq!(seen.containers, [record(2, 1), record(2, 0), record(1, 0)]);
    }

    #[test]
    fn the_attempt_decides_which_record_is_newest_not_the_clock() {
        let mut seen = in_sandbox().exited("a", 1).running("a").0;
        for record in &mut seen.containers {
            // The clock was set back in between.
            record.created_unix_nanos = -i64::from(record.attempt);
        }
        seen.sort();
        assert_eq!(seen.current("a").map(|record| record.attempt), Some(1));
        seen.containers.reverse();
        seen.sort();
        assert_eq!(seen.current("a").map(|record| record.attempt), Some(1));
    }

    #[test]
    fn an_empty_observation_has_the_pod_and_the_time() {
        let nothing = PodObservation::nothing(PodUid::from("u-1"), "web", "shop", 7);
        assert_eq!(
            (nothing.uid.as_str(), nothing.name.as_str(), nothing.namespace.as_str()),
            ("u-1", "web", "shop")
        );
        assert_eq!(nothing.observed_boot_nanos, 7);
        assert!(nothing.sandboxes.is_empty() && nothing.containers.is_empty());
    }

    #[test]
    fn container_states_have_the_names_of_cri() {
        use ContainerRecordState::{Created, Exited, Running, Unknown};
        let words = [Created, Running, Exited, Unknown].map(ContainerRecordState::as_str);
        assert_eq!(words, ["created", "running", "exited", "unknown"]);
    }
}
