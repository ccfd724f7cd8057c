//! What `keelson delete --etcd` checks before it deletes a PersistentVolume or a claim.

use keelson_etcd::NodeKeys;
use keelson_etcd::keys::KeyKind;
use serde_json::Value;

use super::etcd_error::from_etcd_error;
use super::nodes::Fleet;
use super::{get, objects};
use crate::cmd::delete_volume_object::{bound_error, unused};
use crate::cmd::manifests::{NamedObject, ObjectKind};
use crate::cmd::volume_objects::{claim_of, volume_of};
use crate::error::CliError;

/// Checks that nothing on the node uses the object, except the pods of the node that are `deleted`, by namespace and name.
///
/// # Errors
/// A pod uses the claim, or a claim the PersistentVolume, or etcd does not answer.
pub(super) async fn check_unused(
    fleet: &Fleet,
    node: &str,
    object: &NamedObject,
    value: Option<Value>,
    deleted: &[(&str, &str)],
) -> Result<(), CliError> {
    match object.kind {
        ObjectKind::Pod | ObjectKind::Secret | ObjectKind::ConfigMap => Ok(()),
        ObjectKind::PersistentVolumeClaim => check_claim(fleet, node, object, deleted).await,
        ObjectKind::PersistentVolume => check_volume(fleet, node, object, &value.unwrap_or_default()).await,
    }
}

async fn check_claim(
    fleet: &Fleet,
    node: &str,
    claim: &NamedObject,
    deleted: &[(&str, &str)],
) -> Result<(), CliError> {
    let pods = get::of_node(fleet, node).await?;
    let using = pods.iter().filter(|pod| {
        pod.namespace == claim.namespace
            && pod.uses_claim(&claim.name)
            // A pod that somebody has applied again meanwhile counts.
            && (pod.is_desired() || !deleted.contains(&(pod.namespace.as_str(), pod.name.as_str())))
    });
    let users: Vec<&str> = using.map(|pod| pod.name.as_str()).collect();
    unused(&claim.kind.label(&claim.name), &format!(" on {node}"), &users)
}

/// A PersistentVolume counts as used while a claim of the node names it, or is named by it: the nodes do not report what is bound.
async fn check_volume(
    fleet: &Fleet,
    node: &str,
    volume: &NamedObject,
    value: &Value,
) -> Result<(), CliError> {
    let keys = NodeKeys::new(node);
    let range = keys.objects(ObjectKind::PersistentVolumeClaim.as_str());
    let reserved_for = claim_of(value);
    for entry in fleet.etcd.list(&range).await.map_err(from_etcd_error)?.entries {
        let Some(KeyKind::Object { namespace, name, .. }) = keys.named(&entry.key) else { continue };
        let claim = format!("{namespace}/{name}");
        let named = objects::read(&entry).map(|claim| volume_of(&claim)).unwrap_or_default();
        if named == volume.name || claim == reserved_for {
            return Err(bound_error(&volume.kind.label(&volume.name), &format!(" on {node}"), &claim));
        }
    }
    Ok(())
}
