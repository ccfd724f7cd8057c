//! vsphereVolume.

use super::fields::{Fields, LegacyError};
use super::topology::TopologyKeys;
use super::{Migrated, Plugin, READ_WRITE_ONCE};

pub(super) const PLUGIN: Plugin = Plugin {
    name: "kubernetes.io/vsphere-volume",
    driver: "csi.vsphere.vmware.com",
    topology: Some(TopologyKeys {
        zone: "topology.csi.vmware.com/zone",
        region: Some("topology.csi.vmware.com/region"),
    }),
};

pub(super) fn migrate(fields: &Fields<'_>) -> Result<Migrated, LegacyError> {
    let path = fields.required("volumePath")?;
    // The source has no readOnly.
    let mut csi = PLUGIN.volume(path, fields.text("fsType")?, false);
    let policy = fields.text("storagePolicyName")?;
    if !policy.is_empty() {
        csi.attributes.insert("storagepolicyname".to_owned(), policy.to_owned());
    }
    Ok(PLUGIN.migrated(fields.origin, csi, path, READ_WRITE_ONCE))
}
