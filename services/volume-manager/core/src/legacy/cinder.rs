//! cinder.

use super::fields::{Fields, LegacyError};
use super::topology::TopologyKeys;
use super::{Migrated, Plugin, READ_WRITE_ONCE};

pub(super) const PLUGIN: Plugin = Plugin {
    name: "kubernetes.io/cinder",
    driver: "cinder.csi.openstack.org",
    topology: Some(TopologyKeys { zone: "topology.cinder.csi.openstack.org/zone", region: None }),
};

pub(super) fn migrate(fields: &Fields<'_>) -> Result<Migrated, LegacyError> {
    let id = fields.required("volumeID")?;
    let csi = PLUGIN.volume(id, fields.text("fsType")?, fields.flag("readOnly")?);
    Ok(PLUGIN.migrated(fields.origin, csi, id, READ_WRITE_ONCE))
}
