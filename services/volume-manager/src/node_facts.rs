//! What volumes depend on in the Node of this node, watched in pod-config.

use std::collections::{BTreeMap, BTreeSet};

use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_service_kit::{CancellationToken, Peer, Progress, Signal, follow};
use keelson_volume_manager_core::objects::Strings;
use keelson_volume_manager_core::operations::VolumeName;
use serde::Deserialize;
use tokio::sync::watch;

/// The facts about the Node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NodeFacts {
    /// Its labels.
    pub(crate) labels: Strings,
    /// The API server has the Node; otherwise pod-config has made it up.
    pub(crate) is_registered: bool,
    /// `status.volumesInUse`.
    pub(crate) in_use: BTreeSet<VolumeName>,
    /// `status.volumesAttached`: the paths of devices.
    pub(crate) attached: BTreeMap<VolumeName, String>,
}

/// A Node, as far as it is read here. A null is a missing field.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Node {
    metadata: Metadata,
    status: Option<Status>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Metadata {
    labels: Option<Strings>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    volumes_in_use: Option<Vec<String>>,
    volumes_attached: Option<Vec<Attached>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Attached {
    name: String,
    device_path: String,
}

/// Reads the facts from a Node as JSON.
pub(crate) fn parse(json: &[u8], is_registered: bool) -> Result<NodeFacts, serde_json::Error> {
    let node: Node = serde_json::from_slice(json)?;
    let status = node.status.unwrap_or_default();
    let attached = status.volumes_attached.unwrap_or_default().into_iter();
    Ok(NodeFacts {
        labels: node.metadata.labels.unwrap_or_default(),
        is_registered,
        in_use: status.volumes_in_use.unwrap_or_default().into_iter().map(VolumeName::from).collect(),
        attached: attached.map(|volume| (volume.name.into(), volume.device_path)).collect(),
    })
}

/// Watches the Node until `shutdown`. `None` until it was read once; while pod-config is down, the last facts stay in effect.
/// `connections` counts the streams to pod-config.
pub(crate) async fn watch_node(
    facts: watch::Sender<Option<NodeFacts>>,
    connections: watch::Sender<u64>,
    peer: Peer,
    progress: Progress,
    shutdown: CancellationToken,
) {
    // The watch of objects has the condition with the name of pod-config alone.
    let name = format!("the Node of {}", peer.name());
    let open = move || {
        let mut client = PodConfigClient::new(peer.channel());
        async move { client.watch_node(pb::WatchNodeRequest {}).await }
    };
    let on_message = move |signal: Signal<pb::WatchNodeResponse>| {
        match signal {
            Signal::Opened => connections.send_modify(|count| *count += 1),
            Signal::Message(message) => match parse(&message.node_json, message.registered) {
                Ok(new) => {
                    facts.send_if_modified(|old| {
                        let is_new = old.as_ref() != Some(&new);
                        *old = Some(new);
                        is_new
                    });
                }
                Err(error) => tracing::warn!(%error, "cannot read the Node that pod-config has sent"),
            },
            Signal::Lost(_) => {}
        }
        std::future::ready(())
    };
    follow(&name, &progress, &shutdown, open, on_message).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_labels_volumes_in_use_and_attached_volumes() {
        let json = br#"{"metadata": {"labels": {"zone": "a"}}, "status": {"volumesInUse": ["x"],
            "volumesAttached": [{"name": "y", "devicePath": "/dev/y"}]}}"#;
        let facts = parse(json, true).unwrap();
        assert_eq!(facts.labels["zone"], "a");
        assert!(facts.in_use.contains(&"x".into()) && facts.is_registered);
        assert_eq!(facts.attached[&VolumeName::from("y")], "/dev/y");
    }

    #[test]
    fn null_fields_of_a_node_are_empty() {
        let json =
            br#"{"metadata": {"labels": null}, "status": {"volumesInUse": null, "volumesAttached": null}}"#;
        assert_eq!(parse(json, false).unwrap(), NodeFacts::default());
        assert_eq!(parse(br#"{"metadata": {}}"#, false).unwrap(), NodeFacts::default());
        assert!(parse(b"7", false).is_err());
    }
}
