//! gcePersistentDisk.

use std::collections::BTreeSet;

use super::fields::{FieldError, Fields, LegacyError};
use super::topology::{BETA_ZONE, TopologyKeys, ZONE, ZONE_SEPARATOR};
use super::{
    Migrated, Origin, Plugin, READ_ONLY_MANY, READ_WRITE_MANY, READ_WRITE_ONCE, READ_WRITE_ONCE_POD,
};
use crate::objects::PersistentVolume;

pub(super) const PLUGIN: Plugin = Plugin {
    name: "kubernetes.io/gce-pd",
    driver: "pd.csi.storage.gke.io",
    topology: Some(TopologyKeys { zone: "topology.gke.io/zone", region: None }),
};

/// The place of a disk that the driver finds out.
const UNSPECIFIED_PLACE: &str = "zones/UNSPECIFIED";

pub(super) fn migrate(fields: &Fields<'_>) -> Result<Migrated, LegacyError> {
    let disk = fields.required("pdName")?;
    let read_only = fields.flag("readOnly")?;
    let place = match fields.origin {
        Origin::Inline { .. } => UNSPECIFIED_PLACE.to_owned(),
        Origin::Persistent(volume) => place(volume, &fields.origin)?,
    };
    let handle = format!("projects/UNSPECIFIED/{place}/disks/{disk}");
    let mut csi = PLUGIN.volume(handle, fields.text("fsType")?, read_only);
    let partition = match fields.partition()? {
        0 => String::new(),
        partition => partition.to_string(),
    };
    csi.attributes.insert("partition".to_owned(), partition);
    let inline_mode = if read_only { READ_ONLY_MANY } else { READ_WRITE_ONCE };
    let mut migrated = PLUGIN.migrated(fields.origin, csi, disk, inline_mode);
    migrated.access_modes = access_modes(&migrated.access_modes, &fields.origin)?;
    Ok(migrated)
}

/// The zone or region of the disk, by the zone label of the PersistentVolume; the beta label takes precedence.
fn place(volume: &PersistentVolume, origin: &Origin<'_>) -> Result<String, LegacyError> {
    let label = [BETA_ZONE, ZONE]
        .into_iter()
        .filter_map(|key| volume.metadata.labels.get_key_value(key))
        .find(|(_, zones)| !zones.is_empty());
    let Some((key, label)) = label else {
        return Ok(UNSPECIFIED_PLACE.to_owned());
    };
    let zones: Vec<&str> = label.split(ZONE_SEPARATOR).collect();
    if let [zone] = zones.as_slice() {
        return Ok(format!("zones/{zone}"));
    }
    region(&zones).map(|region| format!("regions/{region}")).ok_or_else(|| {
        let rule = "the zones of a regional disk are written <continent>-<region>-<zone> and have one region";
        let error = FieldError::Invalid { value: label.clone(), rule };
        LegacyError::new(origin, format!("the label {key}"), error)
    })
}

/// The region of zones such as `europe-west1-b`; `None` if they have no region in common.
fn region(zones: &[&str]) -> Option<String> {
    let regions: Option<BTreeSet<String>> = zones
        .iter()
        .map(|zone| match zone.split('-').collect::<Vec<_>>().as_slice() {
            [continent, region, _] => Some(format!("{continent}-{region}")),
            _ => None,
        })
        .collect();
    let mut regions = regions?.into_iter();
    regions.next().filter(|_| regions.next().is_none())
}

/// The legacy plugin attached every disk that was not only read to one node, whatever its modes. The driver refuses what
/// it cannot do, so such a disk gets the mode that it always had.
fn access_modes(modes: &[String], origin: &Origin<'_>) -> Result<Vec<String>, LegacyError> {
    const STRICTEST_FIRST: [(&str, &str); 4] = [
        (READ_WRITE_ONCE_POD, READ_WRITE_ONCE_POD),
        (READ_WRITE_ONCE, READ_WRITE_ONCE),
        (READ_WRITE_MANY, READ_WRITE_ONCE),
        (READ_ONLY_MANY, READ_ONLY_MANY),
    ];
    if let Some(unknown) = modes.iter().find(|mode| STRICTEST_FIRST.iter().all(|(known, _)| known != mode)) {
        let rule = "Kubernetes has no such access mode";
        let error = FieldError::Invalid { value: unknown.clone(), rule };
        return Err(LegacyError::new(origin, "spec.accessModes", error));
    }
    let mode = STRICTEST_FIRST.iter().find(|(legacy, _)| modes.iter().any(|mode| mode == legacy));
    Ok(mode.map(|(_, mode)| (*mode).to_owned()).into_iter().collect())
}
