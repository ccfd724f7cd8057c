//! The runtime's lists of sandboxes and containers.

use std::collections::{BTreeMap, HashMap};

use k8s_cri::v1 as cri;
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::runtime::v1 as pb;

use super::labels;
use super::status::container_state;

/// The pod of an object, from its labels. Objects that neither a kubelet nor Keelson has created have no such labels.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodLabels {
    /// The pod's UID.
    pub uid: Option<String>,
    /// The pod's namespace; empty without the label.
    pub namespace: String,
    /// The pod's name; empty without the label.
    pub name: String,
}

impl PodLabels {
    fn take(labels: &mut HashMap<String, String>) -> Self {
        Self {
            uid: labels.remove(labels::UID),
            namespace: labels.remove(labels::NAMESPACE).unwrap_or_default(),
            name: labels.remove(labels::NAME).unwrap_or_default(),
        }
    }
}

impl From<PodLabels> for PodRef {
    fn from(labels: PodLabels) -> Self {
        Self { uid: labels.uid.unwrap_or_default(), namespace: labels.namespace, name: labels.name }
    }
}

/// A sandbox in the runtime's list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SandboxEntry {
    /// Runtime id.
    pub id: String,
    /// Its pod.
    pub pod: PodLabels,
    /// Whether it is READY.
    pub ready: bool,
    /// Creation time, nanoseconds since 1970.
    pub created_unix_nanos: i64,
}

impl From<cri::PodSandbox> for SandboxEntry {
    fn from(mut listed: cri::PodSandbox) -> Self {
        Self {
            id: listed.id,
            pod: PodLabels::take(&mut listed.labels),
            ready: listed.state == cri::PodSandboxState::SandboxReady as i32,
            created_unix_nanos: listed.created_at,
        }
    }
}

/// A container in the runtime's list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerEntry {
    /// Runtime id.
    pub id: String,
    /// The sandbox that it belongs to.
    pub sandbox_id: String,
    /// Its pod.
    pub pod: PodLabels,
    /// Name in the spec; empty without the label.
    pub name: String,
    /// Its state.
    pub state: pb::ContainerState,
    /// Creation time, nanoseconds since 1970.
    pub created_unix_nanos: i64,
    /// Its image as named in the request that created it.
    pub image_name: String,
    /// The runtime's reference of the image that it was created from.
    pub image_ref: String,
}

impl From<cri::Container> for ContainerEntry {
    fn from(mut listed: cri::Container) -> Self {
        Self {
            id: listed.id,
            sandbox_id: listed.pod_sandbox_id,
            pod: PodLabels::take(&mut listed.labels),
            name: listed.labels.remove(labels::CONTAINER).unwrap_or_default(),
            state: container_state(listed.state),
            created_unix_nanos: listed.created_at,
            image_name: listed.image.unwrap_or_default().image,
            image_ref: listed.image_ref,
        }
    }
}

/// The sandboxes and containers that the runtime lists: all of them, or those of one pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Listing {
    /// The sandboxes.
    pub sandboxes: Vec<SandboxEntry>,
    /// The containers.
    pub containers: Vec<ContainerEntry>,
}

impl Listing {
    /// The same objects by the UID of their pods. Objects without a UID are left out.
    pub fn by_pod(self) -> BTreeMap<String, Self> {
        let mut pods: BTreeMap<String, Self> = BTreeMap::new();
        for sandbox in self.sandboxes {
            if let Some(uid) = sandbox.pod.uid.clone() {
                pods.entry(uid).or_default().sandboxes.push(sandbox);
            }
        }
        for container in self.containers {
            if let Some(uid) = container.pod.uid.clone() {
                pods.entry(uid).or_default().containers.push(container);
            }
        }
        pods
    }

    /// The labels of the first object; `None` for an empty list.
    pub fn pod(&self) -> Option<&PodLabels> {
        let sandboxes = self.sandboxes.iter().map(|sandbox| &sandbox.pod);
        sandboxes.chain(self.containers.iter().map(|container| &container.pod)).next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod_labels(uid: Option<&str>) -> HashMap<String, String> {
        let uid = uid.map(|uid| (labels::UID.to_owned(), uid.to_owned()));
        [(labels::NAME.to_owned(), "web".to_owned())].into_iter().chain(uid).collect()
    }

    #[test]
    fn listed_objects_are_grouped_by_pod_uid_and_those_without_are_left_out() {
        let sandbox = |id: &str, uid| {
            SandboxEntry::from(cri::PodSandbox {
                id: id.into(),
                labels: pod_labels(uid),
                ..Default::default()
            })
        };
        let container = |id: &str, uid| {
            ContainerEntry::from(cri::Container {
                id: id.into(),
                labels: pod_labels(uid),
                ..Default::default()
            })
        };
        let listing = Listing {
            sandboxes: vec![sandbox("s1", Some("u1")), sandbox("foreign", None), sandbox("s2", Some("u2"))],
            containers: vec![
                container("c1", Some("u1")),
                container("foreign", None),
                container("c3", Some("u3")),
            ],
        };
        let pods = listing.by_pod();
        let ids: Vec<(&str, Vec<&str>)> = pods
            .iter()
            .map(|(uid, pod)| {
                let sandboxes = pod.sandboxes.iter().map(|s| s.id.as_str());
                (uid.as_str(), sandboxes.chain(pod.containers.iter().map(|c| c.id.as_str())).collect())
            })
            .collect();
        assert_eq!(ids, [("u1", vec!["s1", "c1"]), ("u2", vec!["s2"]), ("u3", vec!["c3"])]);
        assert_eq!(pods["u3"].pod().unwrap().name, "web");
        assert_eq!(Listing::default().pod(), None);
    }

    #[test]
    fn listed_container_without_labels_has_empty_names_and_no_uid() {
        let entry = ContainerEntry::from(cri::Container {
            id: "c".into(),
            pod_sandbox_id: "s".into(),
            state: 99,
            created_at: 7,
            image: Some(cri::ImageSpec { image: "a:1".into(), ..Default::default() }),
            image_ref: "sha256:1".into(),
            ..Default::default()
        });
        let expected = ContainerEntry {
            id: "c".into(),
            sandbox_id: "s".into(),
            state: pb::ContainerState::Unknown,
            created_unix_nanos: 7,
            image_name: "a:1".into(),
            image_ref: "sha256:1".into(),
            ..ContainerEntry::default()
        };
        assert_eq!(entry, expected);
        assert_eq!(PodRef::from(entry.pod), PodRef::default());
    }
}
