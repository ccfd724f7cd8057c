//! Conversion between wire types and our own types.

use std::collections::HashMap;

use keelson_kube_model::Quantity;
use keelson_pod_reconciler::Item;
use keelson_pod_reconciler::wire::{MissingField, header, positive};
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_resource_manager_core::desire::{
    ContainerShare, EmptyDirShare, PodCgroup, PodDesire, Quantities,
};
use keelson_resource_manager_core::eviction::signal::Condition;
use keelson_resource_manager_core::layout::{Qos, is_usable_uid};
use keelson_resource_manager_core::values::MIN_SHARES;

use crate::view::MachineState;

/// An invalid message, with the field that is wrong.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    /// A required field is missing.
    #[error(transparent)]
    Missing(#[from] MissingField),
    /// A UID that cannot be part of a cgroup name.
    #[error("uid {0:?} cannot be part of a cgroup name")]
    Uid(String),
    /// An unknown QoS class.
    #[error("pod.qos_class {0:?} is not Guaranteed, Burstable or BestEffort")]
    Qos(String),
    /// An invalid quantity.
    #[error("{field} of {resource} is {text:?}, which is not a quantity")]
    Quantity {
        /// The field.
        field: &'static str,
        /// The resource or volume.
        resource: String,
        /// The text.
        text: String,
    },
}

/// Checks that a UID can be part of a cgroup name.
pub(crate) fn usable_uid(uid: String) -> Result<String, WireError> {
    if is_usable_uid(&uid) { Ok(uid) } else { Err(WireError::Uid(uid)) }
}

/// A [`PodDesire`] received from the wire.
pub(crate) struct PodDesireFromWire(pub(crate) PodDesire);

impl TryFrom<pb::PodDesire> for PodDesireFromWire {
    type Error = WireError;

    fn try_from(message: pb::PodDesire) -> Result<Self, WireError> {
        let want = message.want();
        let mut header = header(message.pod, message.revision, want)?;
        header.pod.uid = usable_uid(header.pod.uid)?;
        Ok(Self(PodDesire {
            header,
            qos: Qos::parse(&message.qos_class).ok_or(WireError::Qos(message.qos_class))?,
            requests: message.requests.into_iter().collect(),
            cgroup: pod_cgroup(message.cgroup.unwrap_or_default()),
            adopted: message.adopted,
            critical: message.critical,
            priority: message.priority,
            tolerates_memory_pressure: message.tolerates_memory_pressure,
            grace_seconds: message.termination_grace_seconds.max(0),
            created: message.created_unix_nanos,
            containers: message.containers.into_iter().map(container).collect::<Result<_, _>>()?,
            empty_dirs: message.empty_dirs.into_iter().map(empty_dir).collect::<Result<_, _>>()?,
            pod_level_requests: quantities("pod.pod_level_requests", message.pod_level_requests)?,
            pod_level_limits: quantities("pod.pod_level_limits", message.pod_level_limits)?,
        }))
    }
}

/// The values of a pod's cgroup.
pub(crate) fn pod_cgroup(cgroup: pb::PodCgroup) -> PodCgroup {
    let bytes = |(size, bytes): (String, i64)| (size, u64::try_from(bytes).unwrap_or(0));
    PodCgroup {
        cpu_shares: cgroup.cpu_shares.max(MIN_SHARES),
        cpu_quota_us: positive(cgroup.cpu_quota_us),
        cpu_period_us: Some(cgroup.cpu_period_us).filter(|period| *period > 0),
        memory_limit: positive(cgroup.memory_limit_bytes),
        huge_pages: cgroup.huge_page_limits.into_iter().map(bytes).collect(),
    }
}

fn container(message: pb::ContainerShare) -> Result<ContainerShare, WireError> {
    Ok(ContainerShare {
        name: message.name,
        init: message.init,
        sidecar: message.sidecar,
        requests: quantities("pod.containers.requests", message.requests)?,
        limits: quantities("pod.containers.limits", message.limits)?,
    })
}

fn empty_dir(message: pb::EmptyDirShare) -> Result<EmptyDirShare, WireError> {
    let size_limit = match message.size_limit.as_str() {
        "" => None,
        text => Some(quantity("pod.empty_dirs.size_limit", &message.name, text)?),
    };
    Ok(EmptyDirShare { name: message.name, size_limit })
}

fn quantities(field: &'static str, texts: HashMap<String, String>) -> Result<Quantities, WireError> {
    let parsed = texts.into_iter().map(|(resource, text)| {
        let amount = quantity(field, &resource, &text)?;
        Ok((resource, amount))
    });
    parsed.collect()
}

fn quantity(field: &'static str, resource: &str, text: &str) -> Result<Quantity, WireError> {
    let invalid = |_| WireError::Quantity { field, resource: resource.to_owned(), text: text.to_owned() };
    Quantity::parse(text).map_err(invalid)
}

/// Converts a message of the `Sync` stream.
pub(crate) fn item(message: pb::SyncRequest) -> Option<Item<PodDesire, WireError>> {
    Some(match message.item? {
        pb::sync_request::Item::Pod(pod) => Item::Pod(PodDesireFromWire::try_from(pod).map(|pod| pod.0)),
        pb::sync_request::Item::DroppedUid(uid) => Item::Dropped(uid),
        pb::sync_request::Item::Complete(set) => Item::Complete(set),
    })
}

/// Converts the state of the machine.
pub(crate) fn machine(state: MachineState) -> pb::Machine {
    let identity = &*state.identity;
    pb::Machine {
        capacity: state.capacity.into_iter().collect(),
        allocatable: state.allocatable.into_iter().collect(),
        memory_pressure: state.conditions.contains(&Condition::Memory),
        disk_pressure: state.conditions.contains(&Condition::Disk),
        pid_pressure: state.conditions.contains(&Condition::Pid),
        cgroup_version: state.cgroup_version.to_owned(),
        cgroup_driver: state.cgroup_driver.to_owned(),
        machine_id: identity.machine_id.clone(),
        system_uuid: identity.system_uuid.clone(),
        boot_id: identity.boot_id.clone(),
        kernel_version: identity.kernel_version.clone(),
        os_image: identity.os_image.clone(),
        architecture: identity.architecture.clone(),
        swap_bytes: i64::try_from(state.swap).unwrap_or(i64::MAX),
        swap_accounting: state.swap_accounting,
        physical_cores: identity.topology.cores,
        sockets: identity.topology.sockets,
        node_memory: identity.topology.node_memory.clone().into_iter().collect(),
        shutting_down: state.shutting_down,
        drained: state.drained,
    }
}

#[cfg(test)]
mod tests {
    use keelson_proto::keelson::common::v1 as common;
    use keelson_resource_manager_core::desire::Want;

    use super::*;

    fn message() -> pb::PodDesire {
        pb::PodDesire {
            pod: Some(common::PodRef { uid: "u".into(), ..Default::default() }),
            revision: 3,
            want: common::Want::Run.into(),
            qos_class: "Burstable".into(),
            requests: [("cpu".to_owned(), 100)].into(),
            cgroup: Some(pb::PodCgroup { cpu_shares: 102, memory_limit_bytes: -1, ..Default::default() }),
            ..Default::default()
        }
    }

    #[test]
    fn machine_swap_is_sent() {
        for swap in [0, 3 << 30] {
            let state = MachineState { swap, ..MachineState::default() };
            assert_eq!(u64::try_from(machine(state).swap_bytes), Ok(swap));
        }
    }

    #[test]
    fn a_complete_pod_desire_is_parsed() {
        let desire = PodDesireFromWire::try_from(message()).unwrap().0;
        assert_eq!((desire.header.revision, desire.header.want, desire.qos), (3, Want::Run, Qos::Burstable));
        assert_eq!(desire.cgroup, PodCgroup { cpu_shares: 102, ..PodCgroup::default() });
        assert_eq!(desire.requests["cpu"], 100);
    }

    #[test]
    fn invalid_pod_desire_fields_are_named() {
        type Spoil = fn(&mut pb::PodDesire);
        let cases: [(&str, Spoil); 6] = [
            ("pod.pod", |m| m.pod = None),
            ("pod.want", |m| m.want = 0),
            ("uid", |m| m.pod.as_mut().unwrap().uid = "../x".into()),
            ("pod.qos_class", |m| m.qos_class = "Best".into()),
            ("pod.pod_level_limits", |m| {
                m.pod_level_limits = [("memory".to_owned(), "much".to_owned())].into()
            }),
            ("pod.empty_dirs.size_limit", |m| {
                m.empty_dirs = vec![pb::EmptyDirShare { size_limit: "x".into(), ..Default::default() }];
            }),
        ];
        for (field, spoil) in cases {
            let mut message = message();
            spoil(&mut message);
            let error = PodDesireFromWire::try_from(message).err().unwrap().to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}
