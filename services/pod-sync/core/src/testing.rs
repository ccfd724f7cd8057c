//! Builders for tests: a pod from JSON, an observation record by record.

use keelson_kube_model::{ContainerId, Pod, PodUid, SandboxId};
use serde_json::{Value, json};

use crate::Moment;
use crate::moment::SECOND;
use crate::observation::{ContainerObservation, ContainerRecordState, PodObservation, SandboxObservation};

/// A pod `web` in namespace `shop` with UID `u-1`.
pub(crate) fn pod(spec: Value) -> Pod {
    let meta = json!({"name": "web", "namespace": "shop", "uid": "u-1", "generation": 3});
    serde_json::from_value(json!({"metadata": meta, "spec": spec})).unwrap()
}

/// Marks the pod as read from a file.
pub(crate) fn from_file(mut pod: Pod) -> Pod {
    pod.metadata.annotations.insert("kubernetes.io/config.source".to_owned(), "file".to_owned());
    pod
}

/// Marks the pod as being deleted.
pub(crate) fn deleting(mut pod: Pod) -> Pod {
    pod.metadata.deletion_timestamp = Some("2023-11-14T22:13:20Z".to_owned());
    pod
}

/// A moment that many seconds after 2023-11-14T22:13:20Z.
pub(crate) fn at(seconds: i64) -> Moment {
    Moment { now_unix_nanos: nanos(seconds), agent_started_unix_nanos: nanos(-100) }
}

/// The same as a number.
pub(crate) fn nanos(seconds: i64) -> i64 {
    (1_700_000_000 + seconds) * SECOND
}

/// Builds an observation. Records are added from old to new.
pub(crate) struct ObservationBuilder(pub(crate) PodObservation);

/// A pod of which the runtime has nothing.
pub(crate) fn empty_observation() -> ObservationBuilder {
    ObservationBuilder(PodObservation::nothing(PodUid::from("u-1"), "web", "shop", nanos(0)))
}

/// A pod with one ready sandbox.
pub(crate) fn in_sandbox() -> ObservationBuilder {
    empty_observation().sandbox(0, true)
}

impl ObservationBuilder {
    pub(crate) fn sandbox(mut self, attempt: u32, ready: bool) -> Self {
        let sandbox = SandboxObservation {
            id: SandboxId(format!("sandbox-{attempt}")),
            attempt,
            ready,
            created_unix_nanos: nanos(i64::from(attempt)),
            ips: if ready { vec!["10.1.0.2".to_owned()] } else { Vec::new() },
            host_network: false,
        };
        self.0.sandboxes.insert(0, sandbox);
        self
    }

    pub(crate) fn edit_sandbox(mut self, edit: impl FnOnce(&mut SandboxObservation)) -> Self {
        edit(&mut self.0.sandboxes[0]);
        self
    }

    fn record(mut self, name: &str, state: ContainerRecordState) -> Self {
        let restart_count = u32::try_from(self.0.records(name).count()).unwrap();
        let place = i64::try_from(self.0.containers.len()).unwrap();
        let record = ContainerObservation {
            id: ContainerId(format!("{name}-{restart_count}")),
            name: name.to_owned(),
            sandbox_id: self.0.sandboxes.first().map(|sandbox| sandbox.id.clone()).unwrap_or_default(),
            attempt: restart_count,
            restart_count,
            state,
            created_unix_nanos: nanos(place),
            started_unix_nanos: nanos(place),
            image: "registry/app:v1".to_owned(),
            image_ref: "sha256:abc".to_owned(),
            ..ContainerObservation::default()
        };
        self.0.containers.insert(0, record);
        self
    }

    pub(crate) fn running(self, name: &str) -> Self {
        self.record(name, ContainerRecordState::Running)
    }

    pub(crate) fn created(self, name: &str) -> Self {
        self.record(name, ContainerRecordState::Created)
    }

    pub(crate) fn unknown(self, name: &str) -> Self {
        self.record(name, ContainerRecordState::Unknown)
    }

    pub(crate) fn exited(self, name: &str, exit_code: i32) -> Self {
        self.record(name, ContainerRecordState::Exited).edit(|record| {
            record.exit_code = exit_code;
            record.reason = if exit_code == 0 { "Completed" } else { "Error" }.to_owned();
            record.finished_unix_nanos = record.started_unix_nanos + SECOND;
        })
    }

    /// Changes the record added last.
    pub(crate) fn edit(mut self, edit: impl FnOnce(&mut ContainerObservation)) -> Self {
        edit(&mut self.0.containers[0]);
        self
    }
}
