//! azureFile.

use super::fields::{FieldError, Fields, LegacyError};
use super::{Migrated, Origin, Plugin, READ_WRITE_MANY};
use crate::objects::PersistentVolume;
use crate::sources::SecretReference;

pub(super) const PLUGIN: Plugin =
    Plugin { name: "kubernetes.io/azure-file", driver: "file.csi.azure.com", topology: None };

/// The annotation with the resource group of the storage account.
const RESOURCE_GROUP: &str = "kubernetes.io/azure-file-resource-group";
/// Separates the parts of a volume handle.
const SEPARATOR: char = '#';

pub(super) fn migrate(fields: &Fields<'_>) -> Result<Migrated, LegacyError> {
    let share = fields.required("shareName")?;
    let secret = fields.required("secretName")?;
    let (group, name, namespace) = match fields.origin {
        Origin::Inline { pod_namespace, volume } => ("", volume, pod_namespace),
        Origin::Persistent(volume) => {
            let group = volume.metadata.annotations.get(RESOURCE_GROUP).map_or("", String::as_str);
            (group, volume.metadata.name.as_str(), secret_namespace(fields, volume)?)
        }
    };
    if namespace.is_empty() {
        return Err(fields.error("secretNamespace", FieldError::NoSecretNamespace));
    }
    let handle = handle(fields, [group, account(secret), share, name, namespace])?;
    let mut csi = PLUGIN.volume(handle, "", fields.flag("readOnly")?);
    csi.attributes.insert("sharename".to_owned(), share.to_owned());
    csi.node_stage_secret =
        Some(SecretReference { namespace: namespace.to_owned(), name: secret.to_owned() });
    Ok(PLUGIN.migrated(fields.origin, csi, share, READ_WRITE_MANY))
}

/// The namespace of the secret of a PersistentVolume: its own field, else that of the claim.
fn secret_namespace<'a>(fields: &Fields<'a>, volume: &'a PersistentVolume) -> Result<&'a str, LegacyError> {
    let claim_namespace = || volume.spec.claim_ref.as_ref().map_or("", |claim| claim.namespace.as_str());
    Ok(fields.optional("secretNamespace")?.unwrap_or_else(claim_namespace))
}

/// The volume handle. A part with a separator is refused: it would move the parts after it, and the share name of a pod
/// could point the driver at the secrets of another namespace.
fn handle(fields: &Fields<'_>, parts: [&str; 5]) -> Result<String, LegacyError> {
    let names = [
        "the annotation kubernetes.io/azure-file-resource-group",
        "azureFile.secretName",
        "azureFile.shareName",
        "the name of the volume",
        "the namespace of the secret",
    ];
    match names.into_iter().zip(parts).find(|(_, part)| part.contains(SEPARATOR)) {
        Some((name, part)) => {
            let rule = "the character # separates the parts of the volume handle";
            let error = FieldError::Invalid { value: part.to_owned(), rule };
            Err(LegacyError::new(&fields.origin, name, error))
        }
        None => Ok(parts.join("#")),
    }
}

/// The storage account in a secret's name such as `azure-storage-account-<account>-secret`; else the name itself.
fn account(secret: &str) -> &str {
    secret
        .split_once("azure-storage-account-")
        .and_then(|(_, rest)| rest.rsplit_once("-secret"))
        .map(|(account, _)| account)
        .filter(|account| !account.is_empty())
        .unwrap_or(secret)
}
