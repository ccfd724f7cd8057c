//! What the runtime was seen to hold of one pod.

use keelson_kube_model::{ContainerId, PodUid, SandboxId};

/// Everything of one pod that the runtime knew when it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodObservation {
    /// `metadata.uid` of the pod.
    pub uid: PodUid,
    /// `metadata.name` of the pod.
    pub name: String,
    /// `metadata.namespace` of the pod.
    pub namespace: String,
    /// Newest attempt first, of equal attempts the later created first. See [`PodObservation::sort`].
    pub sandboxes: Vec<SandboxObservation>,
    /// Newest first. See [`PodObservation::sort`].
    pub containers: Vec<ContainerObservation>,
    /// When the reads that this is made of began.
    pub observed_boot_nanos: i64,
}

/// One sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxObservation {
    /// The runtime's id.
    pub id: SandboxId,
    /// 0 for the first sandbox of the pod, then 1, 2, ….
    pub attempt: u32,
    /// The runtime says READY.
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
    /// Made, but never started.
    Created,
    /// Its process runs.
    Running,
    /// Its process has ended.
    Exited,
    /// The runtime cannot tell.
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

/// Whom the first process of a container was started as.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserObservation {
    /// Its user.
    pub uid: i64,
    /// Its primary group.
    pub gid: i64,
    /// Its other groups, as the runtime lists them.
    pub supplemental_groups: Vec<i64>,
}

/// One container record. A container that was restarted has several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerObservation {
    /// The runtime's id.
    pub id: ContainerId,
    /// Name in the spec.
    pub name: String,
    /// The sandbox it was made in.
    pub sandbox_id: SandboxId,
    /// CRI `metadata.attempt`.
    pub attempt: u32,
    /// What it is doing.
    pub state: ContainerRecordState,
    /// Creation, unix nanoseconds.
    pub created_unix_nanos: i64,
    /// Start of its process, unix nanoseconds; 0 when it never started.
    pub started_unix_nanos: i64,
    /// End of its process, unix nanoseconds; 0 while it has not ended.
    pub finished_unix_nanos: i64,
    /// Valid once exited.
    pub exit_code: i32,
    /// The runtime's word: `Completed`, `Error`, `OOMKilled`, ….
    pub reason: String,
    /// The runtime's own text.
    pub message: String,
    /// The image's name as the runtime reports it.
    pub image: String,
    /// The image's identity.
    pub image_ref: String,
    /// The container hash that it was made with; empty when the record carries none.
    pub hash: String,
    /// How often it had been restarted before.
    pub restart_count: u32,
    /// `spec.terminationGracePeriodSeconds` when it was made.
    pub termination_grace_seconds: Option<i64>,
    /// Path of its log.
    pub log_path: String,
    /// Content of the termination file, or the end of the log.
    pub termination_message: String,
    /// `None` where the runtime does not tell it.
    pub user: Option<Box<UserObservation>>,
}

impl ContainerObservation {
    /// The runtime says it runs.
    pub fn is_running(&self) -> bool {
        self.state == ContainerRecordState::Running
    }

    /// Its process runs, or the runtime cannot tell.
    pub fn may_run(&self) -> bool {
        matches!(self.state, ContainerRecordState::Running | ContainerRecordState::Unknown)
    }

    /// Its process has ended.
    pub fn has_exited(&self) -> bool {
        self.state == ContainerRecordState::Exited
    }
}

impl PodObservation {
    /// An observation of a pod of which the runtime knows nothing.
    pub fn nothing(uid: PodUid, name: &str, namespace: &str, observed_boot_nanos: i64) -> Self {
        Self {
            uid,
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            observed_boot_nanos,
            ..Self::default()
        }
    }

    /// Puts sandboxes and containers into the order that everything here relies on.
    pub fn sort(&mut self) {
        self.sandboxes.sort_by(|a, b| {
            (b.attempt, b.created_unix_nanos, &b.id).cmp(&(a.attempt, a.created_unix_nanos, &a.id))
        });
        self.containers.sort_by(|a, b| {
            (b.attempt, b.created_unix_nanos, &b.id).cmp(&(a.attempt, a.created_unix_nanos, &a.id))
        });
    }

    /// The newest sandbox, ready or not.
    pub fn newest_sandbox(&self) -> Option<&SandboxObservation> {
        self.sandboxes.first()
    }

    /// The newest sandbox, if it is READY.
    pub fn ready_sandbox(&self) -> Option<&SandboxObservation> {
        self.newest_sandbox().filter(|sandbox| sandbox.ready)
    }

    /// The newest record of a container's name, in whichever sandbox it was made.
    pub fn current(&self, name: &str) -> Option<&ContainerObservation> {
        self.records(name).next()
    }

    /// All records of a container's name, newest first.
    pub fn records<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a ContainerObservation> {
        let name = name.to_owned();
        self.containers.iter().filter(move |container| container.name == name)
    }

    /// The newest record of a container's name that was made in the newest sandbox, ready or not.
    pub fn in_newest_sandbox(&self, name: &str) -> Option<&ContainerObservation> {
        let sandbox = self.newest_sandbox()?;
        self.records(name).find(|record| record.sandbox_id == sandbox.id)
    }

    /// The newest record of a name whose process has ended: the reference of the crash-loop back-off.
    pub fn last_exited(&self, name: &str) -> Option<&ContainerObservation> {
        self.records(name).find(|container| container.has_exited())
    }

    /// The records made in the newest sandbox, if that sandbox is READY; else none.
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

    /// Addresses of the pod: those of the newest sandbox, if it is READY and has a network of its own. One address
    /// that cannot be read makes the answer empty.
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
    use crate::testing::{in_sandbox, seen};

    use super::*;

    #[test]
    fn the_current_record_is_the_newest_in_any_sandbox() {
        let seen = in_sandbox().exited("a", 1).sandbox(1, true).running("a").running("b").0;
        assert_eq!(seen.current("a").map(|record| record.id.as_str()), Some("a-1"));
        assert_eq!(seen.last_exited("a").map(|record| record.id.as_str()), Some("a-0"));
        assert_eq!(seen.current("c"), None);
        let active: Vec<&str> = seen.active().map(|record| record.id.as_str()).collect();
        assert_eq!(active, ["b-0", "a-1"]);
    }

    #[test]
    fn nothing_is_active_when_the_newest_sandbox_is_not_ready() {
        let seen = in_sandbox().running("a").sandbox(1, false).0;
        assert_eq!(seen.active().count(), 0);
        assert!(seen.anything_running() && seen.any_sandbox_ready() && seen.ready_sandbox().is_none());
    }

    #[test]
    fn a_process_whose_state_is_unknown_may_run() {
        assert!(seen().unknown("a").0.anything_running());
        assert!(!seen().created("a").exited("b", 0).0.anything_running());
    }

    #[test]
    fn addresses_come_from_the_newest_ready_sandbox_only() {
        assert_eq!(in_sandbox().0.pod_ips(), ["10.1.0.2"]);
        assert!(in_sandbox().sandbox(1, false).0.pod_ips().is_empty());
        assert!(in_sandbox().edit_sandbox(|sandbox| sandbox.host_network = true).0.pod_ips().is_empty());
    }

    #[test]
    fn one_address_that_cannot_be_read_makes_the_answer_empty_and_others_are_normalised() {
        let with = |ips: &[&str]| {
            let ips: Vec<String> = ips.iter().map(|ip| (*ip).to_owned()).collect();
            in_sandbox().edit_sandbox(|sandbox| sandbox.ips = ips).0.pod_ips()
        };
        assert_eq!(with(&["10.1.0.3", "FD00:0:0::2"]), ["10.1.0.3", "fd00::2"]);
        assert!(with(&["10.1.0.3", "x"]).is_empty());
    }

    #[test]
    fn sorting_puts_the_newest_first() {
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
    fn the_attempt_says_which_record_is_newest_whatever_the_clock_said() {
        let mut seen = in_sandbox().exited("a", 1).running("a").0;
        for record in &mut seen.containers {
            // The clock was set back between the two.
            record.created_unix_nanos = -i64::from(record.attempt);
        }
        seen.sort();
        assert_eq!(seen.current("a").map(|record| record.attempt), Some(1));
        seen.containers.reverse();
        seen.sort();
        assert_eq!(seen.current("a").map(|record| record.attempt), Some(1));
    }

    #[test]
    fn an_observation_of_nothing_says_of_whom_and_when() {
        let nothing = PodObservation::nothing(PodUid::from("u-1"), "web", "shop", 7);
        assert_eq!(
            (nothing.uid.as_str(), nothing.name.as_str(), nothing.namespace.as_str()),
            ("u-1", "web", "shop")
        );
        assert_eq!(nothing.observed_boot_nanos, 7);
        assert!(nothing.sandboxes.is_empty() && nothing.containers.is_empty());
    }

    #[test]
    fn states_have_the_runtimes_words() {
        use ContainerRecordState::{Created, Exited, Running, Unknown};
        let words = [Created, Running, Exited, Unknown].map(ContainerRecordState::as_str);
        assert_eq!(words, ["created", "running", "exited", "unknown"]);
    }
}
