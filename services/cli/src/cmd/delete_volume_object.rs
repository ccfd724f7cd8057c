//! What `keelson delete` checks before it deletes a PersistentVolume or a claim, so that no pod loses its volume by mistake.

use super::get_volume_objects::not_found;
use super::manifests::ObjectKind;
use super::volume_objects::{binding_of, name, namespace, users};
use crate::error::CliError;
use crate::pods::{self, Scope};
use crate::session::Session;

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
    if claims.iter().any(|object| format!("{}/{}", namespace(object), name(object)) == claim) {
        return Err(bound_error(&kind.label(volume), "", &claim));
    }
    Ok(())
}

/// The error for a PersistentVolume that the claim `namespace/name` has; `place` is empty, or says where.
pub(crate) fn bound_error(label: &str, place: &str, claim: &str) -> CliError {
    let (namespace, name) = claim.split_once('/').unwrap_or(("default", claim));
    CliError::Failed {
        message: format!("{label}{place} is bound to the claim {claim}"),
        hint: Some(format!("delete the claim first: `keelson delete pvc {name} -n {namespace}`")),
    }
}
