//! awsElasticBlockStore.

use super::fields::{Fields, LegacyError};
use super::topology::TopologyKeys;
use super::{Migrated, Plugin, READ_WRITE_ONCE};

pub(super) const PLUGIN: Plugin = Plugin {
    name: "kubernetes.io/aws-ebs",
    driver: "ebs.csi.aws.com",
    topology: Some(TopologyKeys { zone: "topology.ebs.csi.aws.com/zone", region: None }),
};

/// The scheme of a volume id that names the zone, too.
const SCHEME: &str = "aws://";

pub(super) fn migrate(fields: &Fields<'_>) -> Result<Migrated, LegacyError> {
    let handle = handle(fields)?;
    let mut csi = PLUGIN.volume(handle, fields.text("fsType")?, fields.flag("readOnly")?);
    csi.attributes.insert("partition".to_owned(), fields.partition()?.to_string());
    Ok(PLUGIN.migrated(fields.origin, csi, handle, READ_WRITE_ONCE))
}

/// The id of the volume: `vol-x`, from `aws://<zone>/vol-x`, `aws:///vol-x` or as it is. Other parts of a URL are
/// refused.
fn handle<'a>(fields: &Fields<'a>) -> Result<&'a str, LegacyError> {
    const FIELD: &str = "volumeID";
    let id = fields.required(FIELD)?;
    let Some(zone_and_volume) = id.strip_prefix(SCHEME) else {
        return Ok(id);
    };
    zone_and_volume
        .split_once('/')
        .map(|(_, volume)| volume.trim_matches('/'))
        .filter(|volume| volume.starts_with("vol-") && !volume.contains('/'))
        .filter(|_| !zone_and_volume.contains(['?', '#', '%']))
        .ok_or_else(|| {
            fields.invalid(FIELD, id, "an EBS volume is written vol-<id> or aws://<zone>/vol-<id>")
        })
}
