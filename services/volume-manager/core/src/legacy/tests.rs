use keelson_testkit::Reached;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::objects::Strings;
use crate::sources::SecretReference;

mod topology;

/// A valid source of each migrated kind, with one of its required fields.
fn valid_sources() -> [(&'static str, Value, &'static [&'static str]); 7] {
    [
        ("awsElasticBlockStore", json!({"volumeID": "vol-1"}), &["volumeID"]),
        ("azureDisk", json!({"diskName": "d", "diskURI": "/u/d"}), &["diskName", "diskURI"]),
        ("azureFile", json!({"secretName": "s", "shareName": "f"}), &["secretName", "shareName"]),
        ("cinder", json!({"volumeID": "c"}), &["volumeID"]),
        ("gcePersistentDisk", json!({"pdName": "g"}), &["pdName"]),
        ("portworxVolume", json!({"volumeID": "p"}), &["volumeID"]),
        ("vsphereVolume", json!({"volumePath": "[ds] v"}), &["volumePath"]),
    ]
}

fn inline(kind: &str, spec: Value) -> Result<Translation, LegacyError> {
    translate(kind, &spec, Origin::Inline { pod_namespace: "shop", volume: "data" })
}

fn persistent(kind: &str, spec: Value, volume: &PersistentVolume) -> Result<Translation, LegacyError> {
    translate(kind, &spec, Origin::Persistent(volume))
}

fn migrated(result: Result<Translation, LegacyError>) -> Migrated {
    match result {
        Ok(Translation::Migrated(volume)) => *volume,
        other => panic!("{other:?}"),
    }
}

fn refused(result: Result<Translation, LegacyError>) -> String {
    match result {
        Err(error) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// A PersistentVolume "pv" of the claim shop/claim, with these fields on top.
fn volume(metadata: Value, spec: Value) -> PersistentVolume {
    let mut object = json!({
        "metadata": {"name": "pv"},
        "spec": {"accessModes": ["ReadWriteOnce"], "claimRef": {"namespace": "shop", "name": "claim"}},
    });
    for (part, fields) in [("metadata", metadata), ("spec", spec)] {
        for (key, value) in fields.as_object().unwrap() {
            object[part][key] = value.clone();
        }
    }
    serde_json::from_value(object).unwrap()
}

fn strings(pairs: &[(&str, &str)]) -> Strings {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn secret(namespace: &str, name: &str) -> Option<SecretReference> {
    Some(SecretReference { namespace: namespace.to_owned(), name: name.to_owned() })
}

#[test]
fn the_annotation_lists_the_seven_migrated_plugins_sorted() {
    assert!(MIGRATED_PLUGINS.is_sorted());
    assert_eq!(
        migrated_plugins_annotation(),
        "kubernetes.io/aws-ebs,kubernetes.io/azure-disk,kubernetes.io/azure-file,kubernetes.io/cinder,\
         kubernetes.io/gce-pd,kubernetes.io/portworx-volume,kubernetes.io/vsphere-volume"
    );
}

#[test]
fn each_migrated_source_has_a_plugin_of_its_own() {
    let plugins: Vec<&str> =
        valid_sources().into_iter().map(|(kind, spec, _)| migrated(inline(kind, spec)).plugin).collect();
    assert_eq!(plugins, MIGRATED_PLUGINS);
}

#[test]
fn present_sources_are_native_whatever_their_fields() {
    let names = "emptyDir hostPath nfs secret iscsi downwardAPI fc configMap projected local csi flexVolume image \
                 persistentVolumeClaim ephemeral";
    for kind in names.split_whitespace() {
        for spec in [json!({}), json!({"volumeID": 7}), Value::Null] {
            assert_eq!(inline(kind, spec.clone()), Ok(Translation::Native), "{kind}");
            let result = persistent(kind, spec, &volume(json!({}), json!({})));
            assert_eq!(result, Ok(Translation::Native), "{kind}");
        }
    }
}

#[test]
fn removed_sources_name_the_volume_the_release_and_the_way_out() {
    let table = [
        ("scaleIO", "1.22", "csi-vxflexos.dellemc.com"),
        ("flocker", "1.25", "a CSI driver"),
        ("storageos", "1.25", "a CSI driver"),
        ("quobyte", "1.25", "csi.quobyte.com"),
        ("glusterfs", "1.26", "a CSI driver"),
        ("cephfs", "1.31", "cephfs.csi.ceph.com"),
        ("rbd", "1.31", "rbd.csi.ceph.com"),
        ("photonPersistentDisk", "1.16", "a CSI driver"),
    ];
    let pv = volume(json!({}), json!({}));
    for (kind, since, advice) in table {
        let in_pod = (inline(kind, Value::Null), "the volume \"data\"");
        let in_volume = (persistent(kind, json!({}), &pv), "the PersistentVolume \"pv\"");
        for (result, object) in [in_pod, in_volume] {
            let Ok(Translation::Removed(removed)) = result else { panic!("{kind}: {result:?}") };
            assert_eq!((removed.kind, removed.since), (kind, since));
            assert!(removed.advice.contains(advice), "{removed:?}");
            let text = removed.to_string();
            let start = format!(
                "no volume plugin matched {object}: its source {kind} was removed in Kubernetes {since}; "
            );
            assert!(text.starts_with(&start) && text.ends_with(removed.advice), "{text}");
        }
    }
}

#[test]
fn a_git_repo_is_disabled_and_its_text_says_so() {
    let Ok(Translation::Disabled(disabled)) = inline("gitRepo", json!({"repository": "x"})) else { panic!() };
    let text = disabled.to_string();
    for part in ["the volume \"data\"", "gitRepo", "has been disabled", "GitRepoVolumeDriver", "emptyDir"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn an_unknown_source_is_an_error_that_names_it() {
    for kind in ["", "EmptyDir", "awsElasticBlockstore", "rbd ", "kubernetes.io/rbd"] {
        let error = inline(kind, json!({})).unwrap_err();
        assert_eq!((error.field.as_str(), &error.error), (kind, &FieldError::UnknownSource));
        assert!(error.to_string().contains("the volume \"data\""), "{error}");
    }
}

#[test]
fn a_source_that_is_no_object_is_an_error_that_names_it() {
    for (kind, ..) in valid_sources() {
        for spec in [json!(7), json!("x"), json!([]), json!([{"volumeID": "vol-1"}]), json!(true)] {
            assert!(refused(inline(kind, spec)).ends_with(&format!("{kind} must be an object")));
        }
        assert!(refused(inline(kind, Value::Null)).contains(&format!("{kind} is missing or empty; ")));
    }
}

#[test]
fn a_missing_empty_or_mistyped_required_field_is_named() {
    let pv = volume(json!({}), json!({}));
    for (kind, valid, required) in valid_sources() {
        for field in required {
            let name = format!("{kind}.{field}");
            let mut specs: Vec<(Value, FieldError)> = Vec::new();
            for empty in [Value::Null, json!("")] {
                let mut spec = valid.clone();
                spec[field] = empty;
                specs.push((spec, FieldError::Missing));
            }
            let mut spec = valid.clone();
            spec.as_object_mut().unwrap().remove(*field);
            specs.push((spec, FieldError::Missing));
            for wrong in [json!(7), json!(["vol-1"]), json!({}), json!(true)] {
                let mut spec = valid.clone();
                spec[field] = wrong;
                specs.push((spec, FieldError::WrongType { wanted: "a string" }));
            }
            for (spec, expected) in specs {
                for result in [inline(kind, spec.clone()), persistent(kind, spec.clone(), &pv)] {
                    let error = result.unwrap_err();
                    assert_eq!((&error.field, &error.error), (&name, &expected), "{spec}");
                }
            }
        }
    }
}

#[test]
fn a_mistyped_optional_field_is_named_and_null_or_unknown_ones_are_ignored() {
    let read_only =
        ["awsElasticBlockStore", "azureDisk", "azureFile", "cinder", "gcePersistentDisk", "portworxVolume"];
    for (kind, valid, _) in valid_sources() {
        let mut spec = valid.clone();
        for field in
            ["fsType", "readOnly", "partition", "kind", "cachingMode", "storagePolicyName", "unknown"]
        {
            spec[field] = Value::Null;
        }
        assert_eq!(inline(kind, spec), inline(kind, valid.clone()), "{kind}");
        if read_only.contains(&kind) {
            for wrong in [json!("true"), json!(1), json!({})] {
                let mut spec = valid.clone();
                spec["readOnly"] = wrong;
                assert!(
                    refused(inline(kind, spec)).ends_with(&format!("{kind}.readOnly must be true or false"))
                );
            }
        }
        if kind != "azureFile" {
            let mut spec = valid.clone();
            spec["fsType"] = json!(4);
            assert!(refused(inline(kind, spec)).ends_with(&format!("{kind}.fsType must be a string")));
        }
    }
    for (kind, field) in
        [("azureDisk", "kind"), ("azureDisk", "cachingMode"), ("vsphereVolume", "storagePolicyName")]
    {
        let (_, mut spec, _) = valid_sources().into_iter().find(|(name, ..)| *name == kind).unwrap();
        spec[field] = json!(false);
        assert!(refused(inline(kind, spec)).ends_with(&format!("{kind}.{field} must be a string")));
    }
}

#[test]
fn read_only_and_the_filesystem_are_copied() {
    for (kind, valid, _) in valid_sources() {
        let mut spec = valid.clone();
        spec["fsType"] = json!("xfs");
        spec["readOnly"] = json!(true);
        for result in [inline(kind, spec.clone()), persistent(kind, spec, &volume(json!({}), json!({})))] {
            let csi = migrated(result).csi;
            // An SMB share has no filesystem of the node's choice, and vsphereVolume no readOnly.
            assert_eq!(csi.fs_type, if kind == "azureFile" { "" } else { "xfs" }, "{kind}");
            assert_eq!(csi.read_only, kind != "vsphereVolume", "{kind}");
        }
        let csi = migrated(inline(kind, valid)).csi;
        assert!(csi.fs_type.is_empty() && !csi.read_only, "{kind}");
    }
}

#[test]
fn an_inline_volume_has_a_synthetic_name_and_cannot_be_expanded() {
    let names = [
        ("awsElasticBlockStore", "ebs.csi.aws.com-vol-1"),
        ("azureDisk", "disk.csi.azure.com-d"),
        ("azureFile", "file.csi.azure.com-f"),
        ("cinder", "cinder.csi.openstack.org-c"),
        ("gcePersistentDisk", "pd.csi.storage.gke.io-g"),
        ("portworxVolume", "pxd.portworx.com-p"),
        ("vsphereVolume", "csi.vsphere.vmware.com-[ds] v"),
    ];
    for ((kind, spec, _), (expected_kind, name)) in valid_sources().into_iter().zip(names) {
        assert_eq!(kind, expected_kind);
        let found = migrated(inline(kind, spec));
        assert_eq!(found.inline_name.as_deref(), Some(name));
        assert!(!found.is_expandable() && found.node_affinity.is_none(), "{kind}");
        let mode = if kind == "azureFile" { "ReadWriteMany" } else { "ReadWriteOnce" };
        assert_eq!(found.access_modes, [mode], "{kind}");
    }
}

#[test]
fn only_gce_and_portworx_make_a_read_only_inline_volume_read_only_many() {
    for (kind, mut spec, _) in valid_sources() {
        spec["readOnly"] = json!(true);
        let mode = match kind {
            "gcePersistentDisk" | "portworxVolume" => "ReadOnlyMany",
            "azureFile" => "ReadWriteMany",
            _ => "ReadWriteOnce",
        };
        assert_eq!(migrated(inline(kind, spec)).access_modes, [mode], "{kind}");
    }
}

#[test]
fn a_persistent_volume_keeps_its_name_and_access_modes() {
    let modes = ["ReadOnlyMany", "ReadWriteMany"];
    let pv = volume(json!({}), json!({"accessModes": modes}));
    for (kind, spec, _) in valid_sources() {
        let found = migrated(persistent(kind, spec, &pv));
        assert!(found.inline_name.is_none() && found.is_expandable(), "{kind}");
        if kind != "gcePersistentDisk" {
            assert_eq!(found.access_modes, modes, "{kind}");
        }
    }
}

#[test]
fn only_azure_file_and_portworx_have_secrets() {
    let annotations = json!({
        "openstorage.io/auth-secret-name": "px", "openstorage.io/auth-secret-namespace": "portworx",
    });
    let pv = volume(json!({"annotations": annotations}), json!({}));
    for (kind, spec, _) in valid_sources() {
        let csi = migrated(persistent(kind, spec, &pv)).csi;
        let found = (csi.node_stage_secret, csi.node_publish_secret, csi.node_expand_secret);
        let px = secret("portworx", "px");
        let expected = match kind {
            "azureFile" => (secret("shop", "s"), None, None),
            "portworxVolume" => (px.clone(), px.clone(), px),
            _ => (None, None, None),
        };
        assert_eq!(found, expected, "{kind}");
    }
}

#[test]
fn an_ebs_volume_id_loses_its_zone_and_must_begin_with_vol() {
    let table = [
        ("vol-0af", Some("vol-0af")),
        ("aws://eu-west-1a/vol-0af", Some("vol-0af")),
        ("aws:///vol-0af", Some("vol-0af")),
        ("aws://eu-west-1a/vol-0af/", Some("vol-0af")),
        // Without a zone it is taken as it is.
        ("snap-1", Some("snap-1")),
        ("AWS://a/vol-1", Some("AWS://a/vol-1")),
        ("aws://", None),
        ("aws:///", None),
        ("aws://vol-0af", None),
        ("aws://eu-west-1a/snap-1", None),
        ("aws://eu-west-1a/x/vol-1", None),
        ("aws://eu-west-1a/vol-1/x", None),
        ("aws://eu-west-1a/vol-1?x", None),
        ("aws://eu?west/vol-1", None),
        ("aws://eu-west-1a/vol-%31", None),
        ("aws://eu-west-1a/vol-1#x", None),
    ];
    for (id, expected) in table {
        let result = inline("awsElasticBlockStore", json!({"volumeID": id}));
        match expected {
            Some(handle) => {
                let found = migrated(result);
                assert_eq!(
                    (found.csi.volume_handle.as_str(), found.csi.driver.as_str()),
                    (handle, "ebs.csi.aws.com")
                );
            }
            None => {
                let text = refused(result);
                let start = format!(
                    "the volume \"data\" cannot be translated to CSI: awsElasticBlockStore.volumeID has the value {id:?}"
                );
                assert!(text.starts_with(&start), "{text}");
            }
        }
    }
}

#[test]
fn a_partition_is_zero_for_ebs_and_empty_for_gce_when_it_is_the_whole_disk() {
    for (partition, ebs, gce) in
        [(Value::Null, "0", ""), (json!(0), "0", ""), (json!(1), "1", "1"), (json!(255), "255", "255")]
    {
        for (kind, id, expected) in
            [("awsElasticBlockStore", "volumeID", ebs), ("gcePersistentDisk", "pdName", gce)]
        {
            let csi = migrated(inline(kind, json!({id: "vol-1", "partition": partition}))).csi;
            assert_eq!(csi.attributes, strings(&[("partition", expected)]), "{kind} {partition}");
        }
    }
}

#[test]
fn a_partition_that_no_disk_has_is_an_error() {
    for (kind, id) in [("awsElasticBlockStore", "volumeID"), ("gcePersistentDisk", "pdName")] {
        for partition in [json!(-1), json!(256), json!(1.5), json!(u64::MAX)] {
            let text = refused(inline(kind, json!({id: "vol-1", "partition": partition})));
            assert!(text.contains(&format!("{kind}.partition has the value \"{partition}\"")), "{text}");
        }
        for partition in [json!("1"), json!(true), json!([])] {
            let text = refused(inline(kind, json!({id: "vol-1", "partition": partition})));
            assert!(text.ends_with(&format!("{kind}.partition must be an integer")), "{text}");
        }
    }
}

#[test]
fn a_gce_disk_is_zonal_regional_or_at_an_unspecified_place() {
    const GA: &str = "topology.kubernetes.io/zone";
    const BETA: &str = "failure-domain.beta.kubernetes.io/zone";
    let table = [
        (json!({}), "zones/UNSPECIFIED"),
        (json!({GA: ""}), "zones/UNSPECIFIED"),
        (json!({GA: "europe-west1-b"}), "zones/europe-west1-b"),
        (json!({BETA: "europe-west1-b"}), "zones/europe-west1-b"),
        (json!({BETA: "europe-west1-b", GA: "europe-west1-c"}), "zones/europe-west1-b"),
        (json!({BETA: "", GA: "europe-west1-c"}), "zones/europe-west1-c"),
        (json!({GA: "europe-west1-b__europe-west1-c"}), "regions/europe-west1"),
        (json!({GA: "odd"}), "zones/odd"),
    ];
    for (labels, place) in table {
        let pv = volume(json!({"labels": labels}), json!({}));
        let csi = migrated(persistent("gcePersistentDisk", json!({"pdName": "g"}), &pv)).csi;
        assert_eq!(csi.volume_handle, format!("projects/UNSPECIFIED/{place}/disks/g"), "{labels}");
        assert_eq!(csi.driver, "pd.csi.storage.gke.io");
    }
    let csi = migrated(inline("gcePersistentDisk", json!({"pdName": "g"}))).csi;
    assert_eq!(csi.volume_handle, "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/g");
}

#[test]
fn zones_of_a_gce_disk_without_a_common_region_are_an_error_that_names_the_label() {
    for zones in
        ["europe-west1-b__europe-west2-b", "europe-west1-b__", "__", "a__b", "europe-west1-b__eu-west-1-b"]
    {
        for label in ["topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"] {
            let pv = volume(json!({"labels": {label: zones}}), json!({}));
            let error = persistent("gcePersistentDisk", json!({"pdName": "g"}), &pv).unwrap_err();
            assert_eq!(error.field, format!("the label {label}"));
            assert!(matches!(&error.error, FieldError::Invalid { value, .. } if value == zones), "{error}");
            assert!(error.to_string().starts_with("the PersistentVolume \"pv\" cannot be "), "{error}");
        }
    }
}

#[test]
fn a_gce_disk_has_the_one_access_mode_that_its_driver_can_do() {
    let table: [(&[&str], &[&str]); 9] = [
        (&[], &[]),
        (&["ReadWriteOnce"], &["ReadWriteOnce"]),
        (&["ReadWriteMany"], &["ReadWriteOnce"]),
        (&["ReadOnlyMany"], &["ReadOnlyMany"]),
        (&["ReadOnlyMany", "ReadWriteOnce"], &["ReadWriteOnce"]),
        (&["ReadOnlyMany", "ReadWriteMany"], &["ReadWriteOnce"]),
        (&["ReadWriteOnce", "ReadWriteOnce"], &["ReadWriteOnce"]),
        (&["ReadWriteOncePod"], &["ReadWriteOncePod"]),
        (&["ReadWriteMany", "ReadWriteOncePod"], &["ReadWriteOncePod"]),
    ];
    for (modes, expected) in table {
        let pv = volume(json!({}), json!({"accessModes": modes}));
        let found = migrated(persistent("gcePersistentDisk", json!({"pdName": "g"}), &pv));
        assert_eq!(found.access_modes, expected, "{modes:?}");
    }
    let pv = volume(json!({}), json!({"accessModes": ["ReadWriteOnce", "ReadWriteTwice"]}));
    let text = refused(persistent("gcePersistentDisk", json!({"pdName": "g"}), &pv));
    assert!(text.contains("spec.accessModes has the value \"ReadWriteTwice\""), "{text}");
}

#[test]
fn a_cinder_volume_has_no_attributes() {
    let spec = json!({"volumeID": "573e024d", "secretRef": {"name": "s"}});
    let csi = migrated(inline("cinder", spec)).csi;
    assert_eq!((csi.driver.as_str(), csi.volume_handle.as_str()), ("cinder.csi.openstack.org", "573e024d"));
    assert!(csi.attributes.is_empty());
}

#[test]
fn an_azure_disk_has_its_kind_caching_mode_and_filesystem_as_attributes() {
    let spec = json!({
        "diskName": "d", "diskURI": "/subscriptions/s/disks/d", "kind": "managed", "cachingMode": "ReadOnly",
        "fsType": "ext4",
    });
    let csi = migrated(inline("azureDisk", spec)).csi;
    assert_eq!(
        (csi.driver.as_str(), csi.volume_handle.as_str()),
        ("disk.csi.azure.com", "/subscriptions/s/disks/d")
    );
    let expected = strings(&[("kind", "Managed"), ("cachingmode", "ReadOnly"), ("fstype", "ext4")]);
    assert_eq!(csi.attributes, expected);
    let spec = json!({"diskName": "d", "diskURI": "u", "kind": "", "cachingMode": "", "fsType": ""});
    assert_eq!(migrated(inline("azureDisk", spec)).csi.attributes, strings(&[("kind", "Managed")]));
}

#[test]
fn an_azure_disk_that_is_not_managed_is_an_error() {
    for kind in ["Shared", "Dedicated", "managed "] {
        let text = refused(inline("azureDisk", json!({"diskName": "d", "diskURI": "u", "kind": kind})));
        assert!(text.contains(&format!("azureDisk.kind has the value {kind:?}")), "{text}");
        assert!(text.contains("convert the disk to a managed one"), "{text}");
    }
}

#[test]
fn an_inline_azure_file_takes_its_secret_from_the_namespace_of_the_pod() {
    let spec = json!({
        "secretName": "azure-storage-account-acc-secret", "shareName": "f", "secretNamespace": "kube-system",
    });
    let csi = migrated(inline("azureFile", spec)).csi;
    assert_eq!((csi.driver.as_str(), csi.volume_handle.as_str()), ("file.csi.azure.com", "#acc#f#data#shop"));
    assert_eq!(csi.node_stage_secret, secret("shop", "azure-storage-account-acc-secret"));
    assert_eq!(csi.attributes, strings(&[("sharename", "f")]));
    let origin = Origin::Inline { pod_namespace: "", volume: "data" };
    let error = translate("azureFile", &json!({"secretName": "s", "shareName": "f"}), origin).unwrap_err();
    assert_eq!(error.error, FieldError::NoSecretNamespace);
}

#[test]
fn an_azure_file_of_a_persistent_volume_prefers_its_own_secret_namespace() {
    let claimed =
        volume(json!({"annotations": {"kubernetes.io/azure-file-resource-group": "rg"}}), json!({}));
    let unclaimed = volume(json!({}), json!({"claimRef": null}));
    let table = [
        (&claimed, Value::Null, Some("rg#s#f#pv#shop")),
        (&claimed, json!("vault"), Some("rg#s#f#pv#vault")),
        (&claimed, json!(""), None),
        (&unclaimed, json!("vault"), Some("#s#f#pv#vault")),
        (&unclaimed, Value::Null, None),
    ];
    for (pv, namespace, expected) in table {
        let spec = json!({"secretName": "s", "shareName": "f", "secretNamespace": namespace});
        let result = persistent("azureFile", spec, pv);
        match expected {
            Some(handle) => {
                let csi = migrated(result).csi;
                assert_eq!(csi.volume_handle, handle);
                let expected_namespace = handle.rsplit('#').next().unwrap();
                assert_eq!(csi.node_stage_secret, secret(expected_namespace, "s"));
            }
            None => {
                let text = refused(result);
                assert!(text.contains("the PersistentVolume \"pv\""), "{text}");
                assert!(
                    text.contains("azureFile.secretNamespace is missing and no claim is bound"),
                    "{text}"
                );
            }
        }
    }
    let text = refused(persistent(
        "azureFile",
        json!({"secretName": "s", "shareName": "f", "secretNamespace": 7}),
        &claimed,
    ));
    assert!(text.ends_with("azureFile.secretNamespace must be a string"), "{text}");
}

#[test]
fn the_storage_account_comes_from_the_name_of_the_secret() {
    let table = [
        ("azure-storage-account-acc-secret", "acc"),
        ("azure-storage-account-a-secret-b-secret", "a-secret-b"),
        ("x-azure-storage-account-acc-secret-y", "acc"),
        ("azure-storage-account--secret", "azure-storage-account--secret"),
        ("azure-storage-account-acc", "azure-storage-account-acc"),
        ("acc-secret", "acc-secret"),
        ("acc", "acc"),
    ];
    for (name, account) in table {
        let csi = migrated(inline("azureFile", json!({"secretName": name, "shareName": "f"}))).csi;
        assert_eq!(csi.volume_handle, format!("#{account}#f#data#shop"));
    }
}

#[test]
fn a_part_of_an_azure_file_handle_with_a_separator_is_named() {
    let plain = volume(json!({}), json!({}));
    let grouped =
        volume(json!({"annotations": {"kubernetes.io/azure-file-resource-group": "r#g"}}), json!({}));
    let table = [
        (&plain, json!({"secretName": "s", "shareName": "f#x#other"}), "azureFile.shareName", "f#x#other"),
        (&plain, json!({"secretName": "s#x", "shareName": "f"}), "azureFile.secretName", "s#x"),
        (
            &plain,
            json!({"secretName": "s", "shareName": "f", "secretNamespace": "n#"}),
            "the namespace of the secret",
            "n#",
        ),
        (
            &grouped,
            json!({"secretName": "s", "shareName": "f"}),
            "the annotation kubernetes.io/azure-file-resource-group",
            "r#g",
        ),
    ];
    for (pv, spec, field, part) in table {
        let error = persistent("azureFile", spec, pv).unwrap_err();
        assert_eq!(error.field, field);
        assert!(matches!(&error.error, FieldError::Invalid { value, .. } if value == part), "{error}");
    }
}

#[test]
fn the_handle_of_an_inline_azure_file_always_ends_with_the_namespace_of_the_pod() {
    let reached = &Reached::default();
    let name = || prop_oneof!["[a-z]{0,3}", "[a-z#]{1,4}", Just("azure-storage-account-x-secret".to_owned())];
    proptest!(ProptestConfig::with_cases(1024), |(share in name(), secret in name())| {
        let result = inline("azureFile", json!({"shareName": share, "secretName": secret}));
        let is_valid = [&share, &secret].iter().all(|part| !part.is_empty() && !part.contains('#'));
        prop_assert_eq!(result.is_ok(), is_valid, "{:?}", result);
        if is_valid {
            let handle = migrated(result).csi.volume_handle;
            let parts: Vec<&str> = handle.split('#').collect();
            prop_assert_eq!(parts.len(), 5);
            prop_assert_eq!((parts[0], parts[2], parts[3], parts[4]), ("", share.as_str(), "data", "shop"));
        }
        reached.case([("valid", is_valid), ("separator", share.contains('#')), ("empty", share.is_empty())]);
    });
    // The rarest: "empty", in one case of 12.
    reached.assert_each();
}

#[test]
fn a_vsphere_storage_policy_is_copied_also_from_an_inline_volume() {
    let spec = json!({"volumePath": "[ds] a/b.vmdk", "storagePolicyName": "gold", "storagePolicyID": "7"});
    for result in [
        inline("vsphereVolume", spec.clone()),
        persistent("vsphereVolume", spec, &volume(json!({}), json!({}))),
    ] {
        let csi = migrated(result).csi;
        assert_eq!(
            (csi.driver.as_str(), csi.volume_handle.as_str()),
            ("csi.vsphere.vmware.com", "[ds] a/b.vmdk")
        );
        assert_eq!(csi.attributes, strings(&[("storagepolicyname", "gold")]));
    }
    assert!(migrated(inline("vsphereVolume", json!({"volumePath": "v"}))).csi.attributes.is_empty());
}

#[test]
fn a_portworx_volume_needs_both_annotations_for_its_secrets() {
    const NAME: &str = "openstorage.io/auth-secret-name";
    const NAMESPACE: &str = "openstorage.io/auth-secret-namespace";
    let table = [
        (json!({NAME: "n", NAMESPACE: "s"}), secret("s", "n")),
        (json!({NAME: "n"}), None),
        (json!({NAMESPACE: "s"}), None),
        (json!({NAME: "", NAMESPACE: "s"}), None),
        (json!({NAME: "n", NAMESPACE: ""}), None),
        (json!({}), None),
    ];
    for (annotations, expected) in table {
        let pv = volume(json!({"annotations": annotations}), json!({}));
        let csi = migrated(persistent("portworxVolume", json!({"volumeID": "p"}), &pv)).csi;
        assert_eq!((csi.driver.as_str(), csi.volume_handle.as_str()), ("pxd.portworx.com", "p"));
        for found in [csi.node_stage_secret, csi.node_publish_secret, csi.node_expand_secret] {
            assert_eq!(found, expected, "{annotations}");
        }
    }
    assert_eq!(migrated(inline("portworxVolume", json!({"volumeID": "p"}))).csi.node_publish_secret, None);
}
