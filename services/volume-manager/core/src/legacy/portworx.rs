//! portworxVolume.

use super::fields::{Fields, LegacyError};
use super::{Migrated, Origin, Plugin, READ_ONLY_MANY, READ_WRITE_ONCE};
use crate::objects::PersistentVolume;
use crate::sources::SecretReference;

pub(super) const PLUGIN: Plugin =
    Plugin { name: "kubernetes.io/portworx-volume", driver: "pxd.portworx.com", topology: None };

/// The annotation with the name of the secret.
const SECRET_NAME: &str = "openstorage.io/auth-secret-name";
/// The annotation with the namespace of the secret.
const SECRET_NAMESPACE: &str = "openstorage.io/auth-secret-namespace";

pub(super) fn migrate(fields: &Fields<'_>) -> Result<Migrated, LegacyError> {
    let id = fields.required("volumeID")?;
    let read_only = fields.flag("readOnly")?;
    let mut csi = PLUGIN.volume(id, fields.text("fsType")?, read_only);
    if let Origin::Persistent(volume) = fields.origin {
        let secret = secret(volume);
        csi.node_stage_secret.clone_from(&secret);
        csi.node_publish_secret.clone_from(&secret);
        csi.node_expand_secret = secret;
    }
    let inline_mode = if read_only { READ_ONLY_MANY } else { READ_WRITE_ONCE };
    Ok(PLUGIN.migrated(fields.origin, csi, id, inline_mode))
}

/// The secret that both annotations name; with one alone there is none.
fn secret(volume: &PersistentVolume) -> Option<SecretReference> {
    let annotation = |key| volume.metadata.annotations.get(key).filter(|value| !value.is_empty()).cloned();
    Some(SecretReference { namespace: annotation(SECRET_NAMESPACE)?, name: annotation(SECRET_NAME)? })
}
