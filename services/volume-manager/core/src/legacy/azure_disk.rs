//! azureDisk.

use super::fields::{Fields, LegacyError};
use super::{Migrated, Plugin, READ_WRITE_ONCE};

pub(super) const PLUGIN: Plugin =
    Plugin { name: "kubernetes.io/azure-disk", driver: "disk.csi.azure.com", topology: None };

/// The only kind of disk that the driver serves.
const MANAGED: &str = "Managed";

pub(super) fn migrate(fields: &Fields<'_>) -> Result<Migrated, LegacyError> {
    let kind = fields.text("kind")?;
    if !kind.is_empty() && !kind.eq_ignore_ascii_case(MANAGED) {
        let rule = "disk.csi.azure.com serves only the kind Managed; convert the disk to a managed one";
        return Err(fields.invalid("kind", kind, rule));
    }
    let name = fields.required("diskName")?;
    let fs_type = fields.text("fsType")?;
    let mut csi = PLUGIN.volume(fields.required("diskURI")?, fs_type, fields.flag("readOnly")?);
    csi.attributes.insert("kind".to_owned(), MANAGED.to_owned());
    for (attribute, value) in [("cachingmode", fields.text("cachingMode")?), ("fstype", fs_type)] {
        if !value.is_empty() {
            csi.attributes.insert(attribute.to_owned(), value.to_owned());
        }
    }
    Ok(PLUGIN.migrated(fields.origin, csi, name, READ_WRITE_ONCE))
}
