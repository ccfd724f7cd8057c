//! What `keelson delete` checks before it deletes a PersistentVolume or a claim, so that no pod loses its volume by mistake, and how
//! it waits for a deleted claim.

use keelson_config::ServiceName;
use keelson_kube_model::pod_ext::annotations;
use keelson_proto::keelson::pod_config::v1::WatchVolumeObjectsRequest;
use keelson_proto::keelson::pod_config::v1::watch_volume_objects_response::Item;
use keelson_service_kit::Signal;
use serde_json::Value;
use tokio::sync::oneshot;

use super::get_volume_objects::not_found;
use super::manifests::ObjectKind;
use super::volume_objects::{binding_of, name, namespace, users};
use crate::agent::read_volume_object;
use crate::error::CliError;
use crate::pods::{self, Scope};
use crate::session::Session;
use crate::watch;

/// Checks that the claim exists in its namespace and that no pod uses it, except those whose UIDs are in `deleted`.
///
/// # Errors
/// It does not exist, a pod uses it, or pod-config or pod-sync does not answer.
pub(crate) async fn check_claim(
    session: &Session,
    of: &str,
    claim: &str,
    deleted: &[&str],
) -> Result<(), CliError> {
    let kind = ObjectKind::PersistentVolumeClaim;
    let all = session.agent.volume_objects(kind.as_str()).await?;
    if !all.iter().any(|object| name(object) == claim && namespace(object) == of) {
        return Err(not_found(&Scope { namespace: Some(of.to_owned()) }, kind, &all, claim));
    }
    let pods = pods::list(&session.agent).await?;
    unused(&kind.label(claim), "", &users(&pods, of, claim, deleted))
}

/// Refuses a claim that pods use; `place` is empty, or says where.
///
/// # Errors
/// There are `users`.
pub(crate) fn unused(label: &str, place: &str, users: &[&str]) -> Result<(), CliError> {
    let Some(first) = users.first() else { return Ok(()) };
    let (pods, them) = if users.len() == 1 { ("the pod", "it") } else { ("the pods", "them") };
    Err(CliError::Failed {
        message: format!("{label}{place} is used by {pods} {}", users.join(", ")),
        hint: Some(format!("delete {them} first, for example `keelson delete pod {first}`")),
    })
}

/// Checks that no claim is bound to the PersistentVolume.
///
/// # Errors
/// A claim has it, or it is unknown, or pod-config does not answer.
pub(crate) async fn check_volume(session: &Session, volume: &str) -> Result<(), CliError> {
    let kind = ObjectKind::PersistentVolume;
    let all = session.agent.volume_objects(kind.as_str()).await?;
    let Some(found) = all.iter().find(|object| name(object) == volume) else {
        return Err(not_found(&session.scope(), kind, &all, volume));
    };
    let Some(claim) = binding_of(found) else { return Ok(()) };
    // The release of a PersistentVolume is shown once it is stored; its deleted claim is gone at once.
    let claims = session.agent.volume_objects(ObjectKind::PersistentVolumeClaim.as_str()).await?;
    let label = kind.label(volume);
    match claims.iter().find(|object| format!("{}/{}", namespace(object), name(object)) == claim) {
        None => Ok(()),
        Some(object) => match holder(object) {
            None => Err(bound_error(&label, "", &claim)),
            Some(holder) => Err(CliError::Failed {
                message: format!(
                    "{label} is bound to the claim {claim}, which is deleted and held by {holder}"
                ),
                hint: Some(
                    "try again when its volume is unmounted; `keelson get pvc -w` shows it".to_owned(),
                ),
            }),
        },
    }
}

/// What holds a claim that is deleted; `None` for one that is not deleted.
fn holder(claim: &Value) -> Option<&str> {
    claim["metadata"]["deletionTimestamp"].as_str()?;
    Some(claim["metadata"]["annotations"][annotations::HELD_BY].as_str().unwrap_or("its pod"))
}

/// What holds a claim after its deletion; `None` if it is gone.
///
/// # Errors
/// pod-config does not answer.
pub(crate) async fn holder_of_deleted(
    session: &Session,
    of: &str,
    claim: &str,
) -> Result<Option<String>, CliError> {
    let all = session.agent.volume_objects(ObjectKind::PersistentVolumeClaim.as_str()).await?;
    let found = all.iter().find(|object| name(object) == claim && namespace(object) == of);
    Ok(found.and_then(holder).map(ToOwned::to_owned))
}

/// Waits until a claim that is deleted is gone, over restarts of pod-config.
///
/// # Errors
/// pod-config refuses the call, or an earlier release of it does not know it.
pub(crate) async fn wait_until_released(session: &Session, of: &str, claim: &str) -> Result<(), CliError> {
    let kind = ObjectKind::PersistentVolumeClaim.as_str();
    let open = || {
        let request = session.agent.request(WatchVolumeObjectsRequest { kind: kind.to_owned() });
        let mut client = session.agent.pod_config();
        async move { client.watch_volume_objects(request).await }
    };
    let (sender, released) = oneshot::channel();
    let (mut sender, mut is_complete, mut is_held) = (Some(sender), false, false);
    let end = watch::stream(&session.agent, ServiceName::PodConfig, open, |signal| {
        match signal {
            Signal::Opened => (is_complete, is_held) = (false, false),
            Signal::Lost(_) => {}
            Signal::Message(message) => match message.item {
                Some(Item::ObjectJson(json)) => {
                    let object = read_volume_object(kind, &json)?;
                    if name(&object) == claim && namespace(&object) == of {
                        is_held = holder(&object).is_some();
                    }
                }
                Some(Item::Gone(gone)) if gone.name == claim && gone.namespace == of => is_held = false,
                Some(Item::Synced(_)) => is_complete = true,
                Some(Item::Gone(_)) | None => {}
            },
        }
        if is_complete
            && !is_held
            && let Some(sender) = sender.take()
        {
            // The receiver is waiting below.
            let _ = sender.send(());
        }
        Ok(())
    });
    tokio::select! {
        error = end => Err(error),
        _ = released => Ok(()),
    }
}

/// The error for a PersistentVolume that the claim `namespace/name` has; `place` is empty, or says where.
pub(crate) fn bound_error(label: &str, place: &str, claim: &str) -> CliError {
    let (namespace, name) = claim.split_once('/').unwrap_or(("default", claim));
    CliError::Failed {
        message: format!("{label}{place} is bound to the claim {claim}"),
        hint: Some(format!("delete the claim first: `keelson delete pvc {name} -n {namespace}`")),
    }
}
