//! Legacy in-tree sources: those that a CSI driver serves become volumes of that driver, and those that are gone are refused
//! (volumes.md §12). The rules are in the core's `legacy`.

use std::sync::Arc;

use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::legacy::{self, Migrated, Origin, Translation};
use keelson_volume_manager_core::names;
use keelson_volume_manager_core::objects::{Metadata, PersistentVolume, PersistentVolumeSpec};

use crate::plugins::{PluginError, VolumeSpec};

/// The field of the source of a CSI volume.
const CSI: &str = "csi";

/// The spec with the CSI source that serves its legacy source; any other spec as it is.
///
/// # Errors
/// The source is gone, disabled, unknown, or against a rule. A person has to act.
pub(crate) fn translate(spec: VolumeSpec) -> Result<VolumeSpec, PluginError> {
    let origin = match &spec.persistent {
        Some(volume) => Origin::Persistent(volume),
        None => Origin::Inline { pod_namespace: &spec.pod.namespace, volume: &spec.outer_name },
    };
    let refused = |text: String| Err(PluginError::new(text).for_you());
    match legacy::translate(&spec.field, &spec.source, origin) {
        Ok(Translation::Native) => Ok(spec),
        Ok(Translation::Migrated(migrated)) => migrate(spec, *migrated),
        Ok(Translation::Removed(removed)) => refused(removed.to_string()),
        Ok(Translation::Disabled(disabled)) => refused(disabled.to_string()),
        Err(error) => refused(error.to_string()),
    }
}

/// The spec of a volume that a CSI driver serves. An inline volume gets a synthetic PersistentVolume without a claim.
fn migrate(spec: VolumeSpec, migrated: Migrated) -> Result<VolumeSpec, PluginError> {
    let Migrated { csi, inline_name, access_modes, node_affinity, .. } = migrated;
    let source = serde_json::to_value(&csi).map_err(|error| PluginError::new(error.to_string()))?;
    let mut volume = match (&spec.persistent, &inline_name) {
        (Some(volume), _) => (**volume).clone(),
        (None, name) => PersistentVolume {
            metadata: Metadata { name: name.clone().unwrap_or_default(), ..Metadata::default() },
            spec: PersistentVolumeSpec {
                volume_mode: Some(VolumeMode::Filesystem.as_str().to_owned()),
                ..PersistentVolumeSpec::default()
            },
        },
    };
    volume.spec.access_modes = access_modes;
    volume.spec.node_affinity = node_affinity;
    volume.spec.other.remove(&spec.field);
    volume.spec.other.insert(CSI.to_owned(), source.clone());
    // An inline volume has no claim that could say so: its own field counts.
    let read_only = spec.read_only || (inline_name.is_some() && csi.read_only);
    // The name may contain slashes, as an Azure disk's does.
    let inner_name = inline_name.map_or(spec.inner_name, |name| names::escape(&name));
    Ok(VolumeSpec {
        inner_name,
        field: CSI.to_owned(),
        source,
        persistent: Some(Arc::new(volume)),
        read_only,
        is_migrated: true,
        ..spec
    })
}

#[cfg(test)]
mod tests {
    use keelson_volume_manager_core::wait_owner::WaitOwner;
    use serde_json::{Value, json};

    use super::*;
    use crate::plugins::fake::inline;

    fn persistent(field: &str, source: Value) -> VolumeSpec {
        let volume = json!({"metadata": {"name": "pv1", "labels": {"topology.kubernetes.io/zone": "z1"}},
            "spec": {"accessModes": ["ReadWriteOnce"], "mountOptions": ["noatime"], field: source}});
        VolumeSpec {
            inner_name: "pv1".into(),
            persistent: Some(Arc::new(serde_json::from_value(volume).unwrap())),
            claim: Some("claim".into()),
            ..inline(field, source)
        }
    }

    #[test]
    fn sources_with_a_plugin_of_their_own_stay_as_they_are() {
        for field in ["nfs", "iscsi", "fc", "csi", "flexVolume", "local", "hostPath"] {
            let spec = inline(field, json!({"server": "s"}));
            let read = translate(spec.clone()).unwrap();
            assert!(read == spec && !read.is_migrated, "{field}");
        }
    }

    #[test]
    fn a_persistent_volume_keeps_its_name_and_gets_the_csi_source() {
        let spec = persistent("awsElasticBlockStore", json!({"volumeID": "aws://z1/vol-1", "fsType": "xfs"}));
        let read = translate(spec).unwrap();
        assert_eq!((read.field.as_str(), read.inner_name.as_str()), ("csi", "pv1"));
        assert_eq!(read.source["driver"], "ebs.csi.aws.com");
        assert_eq!((&read.source["volumeHandle"], &read.source["fsType"]), (&json!("vol-1"), &json!("xfs")));
        let volume = read.persistent.unwrap();
        assert_eq!(volume.spec.other["csi"], read.source);
        assert!(!volume.spec.other.contains_key("awsElasticBlockStore"));
        assert_eq!(volume.spec.mount_options, ["noatime"]);
        let affinity = volume.spec.node_affinity.as_ref().unwrap().required.as_ref().unwrap();
        let requirement = &affinity.node_selector_terms[0].match_expressions[0];
        assert_eq!(requirement.key, "topology.ebs.csi.aws.com/zone");
        assert_eq!((read.claim.as_deref(), read.is_migrated), (Some("claim"), true));
    }

    #[test]
    fn an_inline_volume_gets_a_synthetic_persistent_volume_whose_name_is_a_folder() {
        let uri = "/subscriptions/s/disks/d";
        let source = json!({"diskName": "d", "diskURI": uri, "kind": "Managed", "readOnly": true});
        let read = translate(inline("azureDisk", source)).unwrap();
        assert!(names::is_path_component(&read.inner_name), "{}", read.inner_name);
        assert_eq!(read.source["volumeHandle"], uri);
        let volume = read.persistent.unwrap();
        assert_eq!(names::escape(&volume.metadata.name), read.inner_name);
        assert_eq!(volume.spec.volume_mode.as_deref(), Some("Filesystem"));
        assert!(read.read_only, "the source is read-only");
        assert_eq!((read.claim, read.outer_name.as_str()), (None, "data"));
    }

    #[test]
    fn a_secret_of_a_legacy_volume_is_named_in_the_csi_source() {
        let source = json!({"secretName": "azure", "shareName": "files"});
        let read = translate(inline("azureFile", source)).unwrap();
        assert_eq!(read.source["nodeStageSecretRef"], json!({"name": "azure", "namespace": "shop"}));
    }

    #[test]
    fn removed_disabled_unknown_and_wrong_sources_are_refused_for_a_person() {
        let cases = [
            ("rbd", json!({}), "no volume plugin matched"),
            ("glusterfs", json!({}), "1.26"),
            ("scaleIO", json!({}), "1.22"),
            ("gitRepo", json!({"repository": "r"}), "has been disabled"),
            ("floppy", json!({}), "not a volume source"),
            ("cinder", json!({}), "volumeID"),
        ];
        for (field, source, text) in cases {
            for spec in [inline(field, source.clone()), persistent(field, source.clone())] {
                let error = translate(spec).unwrap_err();
                assert!(error.message.contains(text), "{field}: {error}");
                assert_eq!(error.owner, WaitOwner::You, "{field}");
            }
        }
    }
}
