//! PersistentVolumes and PersistentVolumeClaims of manifests: what is valid, and what is added.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use keelson_pod_config_core::manifest::Kind;
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::stored::{ExpectedObject, parse_stored};
use keelson_pod_config_core::{FileContent, ManifestError, parse_file};
use serde_json::{Value, json};

const PATH: &str = "/m/volumes.yaml";

fn parse(object: &Value) -> Result<FileContent, Vec<ManifestError>> {
    parse_file(object.to_string().as_bytes(), PATH, &StaticRules::standalone("n1"))
}

fn good(object: &Value) -> (FileContent, Value) {
    let content = parse(object).unwrap_or_else(|errors| panic!("{object}: {errors:?}"));
    let value = serde_json::from_slice(&content.objects[0].json).unwrap();
    (content, value)
}

fn volume() -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "data"},
        "spec": {
            "capacity": {"storage": "1024Mi"}, "accessModes": ["ReadWriteOnce"], "local": {"path": "/srv/data"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1"]}]}]}},
        },
    })
}

fn claim() -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": 5}}},
    })
}

/// The object with another value at the pointer, below `spec` if it is relative; null removes it.
fn with(mut object: Value, pointer: &str, value: &Value) -> Value {
    let full = if pointer.starts_with('/') { pointer.to_owned() } else { format!("/spec/{pointer}") };
    let (parent, field) = full.rsplit_once('/').unwrap();
    let parent = object.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    if value.is_null() {
        parent.remove(field);
    } else {
        parent.insert(field.to_owned(), value.clone());
    }
    object
}

/// Replaces the source of a PersistentVolume.
fn with_source(source: &str, value: &Value) -> Value {
    let volume = with(volume(), "local", &Value::Null);
    with(volume, source, value)
}

fn check_errors(cases: &[(Value, &str, &str)]) {
    for (object, field, message) in cases {
        let errors = parse(object).err().unwrap_or_else(|| panic!("{field}: valid: {object}"));
        let is_it = |error: &&ManifestError| error.field == *field && error.message.contains(message);
        assert!(errors.iter().any(|error| is_it(&error)), "{field}: {message}: {errors:?}");
        assert!(errors.iter().all(|error| error.line > 0 && error.document == 1), "{errors:?}");
    }
}

#[test]
fn a_volume_and_a_claim_get_the_defaults_and_a_uid() {
    let (content, found) = good(&volume());
    assert_eq!(content.objects[0].key.to_string(), "PersistentVolume data");
    assert!(content.warnings.is_empty());
    let spec = &found["spec"];
    assert_eq!((&spec["volumeMode"], &spec["capacity"]["storage"]), (&json!("Filesystem"), &json!("1Gi")));
    assert_eq!(spec["persistentVolumeReclaimPolicy"], "Retain");
    assert_eq!(found["metadata"]["uid"].as_str().unwrap().len(), 32);

    let (content, found) = good(&claim());
    assert_eq!(content.objects[0].key.to_string(), "PersistentVolumeClaim default/data");
    assert_eq!(found["metadata"]["namespace"], "default");
    let spec = &found["spec"];
    assert_eq!((&spec["volumeMode"], &spec["storageClassName"]), (&json!("Filesystem"), &json!("")));
    assert_eq!(spec["resources"]["requests"]["storage"], "5");
}

#[test]
fn the_uid_depends_on_node_kind_namespace_and_name_alone() {
    let uid = |object: &Value| good(object).1["metadata"]["uid"].clone();
    let own = uid(&claim());
    let changed = with(claim(), "volumeName", &json!("data"));
    assert_eq!(uid(&changed), own);
    assert_ne!(uid(&with(claim(), "/metadata/namespace", &json!("other"))), own);
    assert_ne!(uid(&with(claim(), "/metadata/name", &json!("other"))), own);
    assert_ne!(uid(&volume()), own);
    let elsewhere = parse_file(claim().to_string().as_bytes(), PATH, &StaticRules::standalone("n2")).unwrap();
    assert!(!String::from_utf8_lossy(&elsewhere.objects[0].json).contains(own.as_str().unwrap()));
}

#[test]
fn in_etcd_a_recreated_key_is_another_object_and_a_volume_has_no_namespace() {
    let rules = StaticRules::standalone("n1");
    let read = |revision, namespace| {
        let expected = ExpectedObject { kind: Kind::PersistentVolume, namespace, name: "data" };
        parse_stored(volume().to_string().as_bytes(), "/key", expected, revision, &rules)
    };
    let json = |revision| read(revision, "").unwrap().objects[0].json.clone();
    assert_eq!(json(7), json(7));
    assert_ne!(json(7), json(8));
    let errors = read(7, "default").unwrap_err();
    assert!(errors[0].message.contains("but the object is the PersistentVolume data"), "{errors:?}");
}

#[test]
fn an_invalid_volume_is_rejected_by_field() {
    let modes = |modes: Value| with(volume(), "accessModes", &modes);
    check_errors(&[
        (with(volume(), "/metadata/name", &json!("..")), "metadata.name", "DNS name"),
        (with(volume(), "/metadata/labels", &json!({"a": 1})), "metadata.labels", "quote the values"),
        (with(volume(), "capacity", &Value::Null), "spec.capacity.storage", "Required value"),
        (with(volume(), "capacity", &json!({"storage": "0"})), "spec.capacity.storage", "greater than zero"),
        (
            with(volume(), "capacity", &json!({"storage": "much"})),
            "spec.capacity.storage",
            "begin with a number",
        ),
        (with(volume(), "capacity", &json!({"storage": "1", "cpu": "1"})), "spec.capacity", "Unsupported"),
        (modes(json!([])), "spec.accessModes", "at least 1 access mode"),
        (modes(json!(["Often"])), "spec.accessModes[0]", "\"ReadWriteOnce\""),
        (
            modes(json!(["ReadWriteOncePod", "ReadOnlyMany"])),
            "spec.accessModes",
            "may not use ReadWriteOncePod",
        ),
        (with(volume(), "volumeMode", &json!("Tape")), "spec.volumeMode", "Unsupported value: \"Tape\""),
        (
            with(volume(), "persistentVolumeReclaimPolicy", &json!("Burn")),
            "spec.persistentVolumeReclaimPolicy",
            "Unsupported value: \"Burn\": supported values: \"Retain\"",
        ),
        (with(volume(), "storageClassName", &json!("A")), "spec.storageClassName", "DNS name"),
        (with(volume(), "mountOptions", &json!("ro")), "spec.mountOptions", "Invalid value"),
        (
            with(volume(), "nodeAffinity", &Value::Null),
            "spec.nodeAffinity",
            "kubernetes.io/hostname, operator: In, values: [n1]",
        ),
        (
            with(volume(), "nodeAffinity", &json!({"required": {"nodeSelectorTerms": []}})),
            "spec.nodeAffinity.required.nodeSelectorTerms",
            "at least one",
        ),
        (with(volume(), "/spec", &json!(7)), "spec", "not an object"),
    ]);
}

#[test]
fn a_volume_has_exactly_one_valid_source() {
    check_errors(&[
        (with(volume(), "local", &Value::Null), "spec", "must specify a volume type"),
        (with(volume(), "rbd", &json!({})), "spec.rbd", "more than 1 volume type"),
        (with(volume(), "nfs", &json!({"server": "s", "path": "/p"})), "spec.nfs", "more than 1 volume type"),
        (with_source("iscsi", &json!({})), "spec.iscsi.targetPortal", "Required value"),
        (with_source("rbd", &json!({})), "spec.rbd.image", "Required value"),
        (with_source("fc", &json!({"targetWWNs": ["a"]})), "spec.fc.lun", "lun is required"),
        (with_source("flexVolume", &json!({})), "spec.flexVolume.driver", "Required value"),
        (with_source("local", &json!({})), "spec.local.path", "Required value"),
        (with_source("local", &json!({"path": "/a/../b"})), "spec.local.path", "must not contain '..'"),
        (with_source("hostPath", &json!({})), "spec.hostPath.path", "Required value"),
        (with_source("hostPath", &json!({"path": "/a/.."})), "spec.hostPath.path", "must not contain '..'"),
        (with_source("hostPath", &json!({"path": "/a", "type": "X"})), "spec.hostPath.type", "Unsupported"),
        (with_source("nfs", &json!({"path": "/a"})), "spec.nfs.server", "Required value"),
        (with_source("nfs", &json!({"server": "s", "path": "a"})), "spec.nfs.path", "absolute path"),
        (with_source("csi", &json!({"volumeHandle": "h"})), "spec.csi.driver", "Required value"),
        (with_source("csi", &json!({"driver": "a b", "volumeHandle": "h"})), "spec.csi.driver", "at most 63"),
        (with_source("csi", &json!({"driver": "d.example.com"})), "spec.csi.volumeHandle", "Required value"),
    ]);
    for (source, value) in [
        ("hostPath", json!({"path": "/a..b", "type": "Directory"})),
        ("nfs", json!({"server": "s", "path": "/p"})),
        ("csi", json!({"driver": "d.example.com", "volumeHandle": "h"})),
        // volume-manager says which of these it cannot mount, when a pod uses the claim.
        ("iscsi", json!({"targetPortal": "10.0.0.1", "iqn": "iqn.2001-04.com.example:x", "lun": 0})),
        ("fc", json!({"wwids": ["3600"]})),
        ("flexVolume", json!({"driver": "vendor/driver", "secretRef": {"name": "s", "namespace": "n"}})),
        ("awsElasticBlockStore", json!({"volumeID": "vol-1"})),
        ("azureDisk", json!({"diskName": "d", "diskURI": "https://a.blob.core.windows.net/c/d.vhd"})),
        ("azureFile", json!({"secretName": "s", "shareName": "s", "secretNamespace": "n"})),
        ("cephfs", json!({"monitors": ["m"]})),
        ("cinder", json!({"volumeID": "v"})),
        ("flocker", json!({"datasetName": "d"})),
        ("gcePersistentDisk", json!({"pdName": "d"})),
        ("glusterfs", json!({"endpoints": "e", "path": "p"})),
        ("photonPersistentDisk", json!({"pdID": "p"})),
        ("portworxVolume", json!({"volumeID": "v"})),
        ("quobyte", json!({"registry": "r:1", "volume": "v"})),
        ("rbd", json!({"monitors": ["m"], "image": "i"})),
        ("scaleIO", json!({"gateway": "g", "system": "s", "volumeName": "v"})),
        ("storageos", json!({"volumeName": "v"})),
        ("vsphereVolume", json!({"volumePath": "p"})),
    ] {
        let (content, found) = good(&with_source(source, &value));
        assert_eq!((&found["spec"][source], &content.warnings[..]), (&value, &[][..]), "{source}");
    }
}

#[test]
fn what_an_api_server_accepts_without_effect_is_accepted_with_a_warning() {
    for (object, expected) in [
        (with(volume(), "/metadata/namespace", &json!("a")), "metadata.namespace is ignored"),
        (with(volume(), "claimRef", &json!({"name": "c"})), "spec.claimRef needs the namespace and the name"),
        (with(volume(), "claimRef", &json!({})), "until then no claim gets the PersistentVolume"),
        (with_source("hostPath", &json!({"path": "data"})), "spec.hostPath.path \"data\" is not absolute"),
        (with(volume(), "/spec/local/path", &json!("data")), "spec.local.path \"data\" is not absolute"),
    ] {
        let (content, found) = good(&object);
        let messages: Vec<&str> = content.warnings.iter().map(|warning| warning.message.as_str()).collect();
        assert!(messages.len() == 1 && messages[0].contains(expected), "{expected}: {messages:?}");
        assert_eq!(found["metadata"].get("namespace"), None);
    }
}

#[test]
fn what_an_api_server_does_not_check_is_not_checked() {
    let gt = json!({"required": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "cores", "operator": "Gt", "values": ["many"]}]}]}});
    let limited = json!({"requests": {"storage": "2"}, "limits": {"storage": "1"}});
    for object in [
        with(volume(), "nodeAffinity", &gt),
        with(volume(), "volumeAttributesClassName", &json!("gold")),
        with(claim(), "volumeAttributesClassName", &json!("gold")),
        with(claim(), "volumeName", &json!("Not_A_Name")),
        with(claim(), "resources", &limited),
        with(claim(), "dataSource", &json!({"kind": "PersistentVolumeClaim", "name": "other"})),
        with(claim(), "dataSourceRef", &json!({"kind": "PersistentVolumeClaim", "name": "other"})),
    ] {
        let (content, _) = good(&object);
        assert_eq!(content.warnings, [], "{object}");
    }
}

#[test]
fn an_invalid_claim_is_rejected_by_field() {
    let selector = |selector: Value| with(claim(), "selector", &selector);
    check_errors(&[
        (with(claim(), "/metadata/namespace", &json!("a.b")), "metadata.namespace", "DNS label"),
        (with(claim(), "accessModes", &Value::Null), "spec.accessModes", "at least 1 access mode"),
        (with(claim(), "resources", &Value::Null), "spec.resources.requests.storage", "Required value"),
        (
            with(claim(), "resources", &json!({"requests": {"storage": "-1"}})),
            "spec.resources.requests.storage",
            "greater than zero",
        ),
        (
            with(claim(), "volumeAttributesClassName", &json!("A")),
            "spec.volumeAttributesClassName",
            "DNS name",
        ),
        (selector(json!({"matchLabels": {"a b": "c"}})), "spec.selector.matchLabels[a b]", "key of a label"),
        (
            selector(json!({"matchExpressions": [{"key": "a", "operator": "In"}]})),
            "spec.selector.matchExpressions[0].values",
            "must be specified",
        ),
        (
            selector(json!({"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]})),
            "spec.selector.matchExpressions[0].operator",
            "Unsupported",
        ),
    ]);
}

#[test]
fn a_policy_that_deletes_and_control_plane_fields_are_warned_about() {
    let exported = with(volume(), "persistentVolumeReclaimPolicy", &json!("Delete"));
    let mut exported = with(exported, "/status", &json!({"phase": "Bound"}));
    for (field, value) in [
        ("uid", json!("u")),
        ("finalizers", json!(["kubernetes.io/pv-protection"])),
        ("deletionTimestamp", json!("2026-01-01T00:00:00Z")),
        ("resourceVersion", json!("7")),
    ] {
        exported = with(exported, &format!("/metadata/{field}"), &value);
    }
    let (content, found) = good(&exported);
    let messages: Vec<&str> = content.warnings.iter().map(|warning| warning.message.as_str()).collect();
    assert!(messages[0].ends_with("metadata.deletionTimestamp, metadata.uid"), "{messages:?}");
    assert!(messages[1].contains("Delete has the effect of Retain"), "{messages:?}");
    assert_eq!(found["metadata"].as_object().unwrap().keys().collect::<Vec<_>>(), ["name", "uid"]);
    assert_ne!(found["metadata"]["uid"], "u");
    assert!(found.get("status").is_none());
    // What the checkpoint stores gives the same object.
    let again = parse_file(&content.checkpoint, PATH, &StaticRules::standalone("n1")).unwrap();
    assert_eq!(again.objects, content.objects);
}

#[test]
fn a_node_with_an_api_server_refuses_volumes_and_claims_of_manifests() {
    for object in [volume(), claim()] {
        let errors =
            parse_file(object.to_string().as_bytes(), PATH, &StaticRules::new("n1", true)).unwrap_err();
        assert!(errors[0].message.contains("of its API server"), "{errors:?}");
    }
}

#[test]
fn an_error_in_a_yaml_document_has_its_line_and_document() {
    let text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n---\napiVersion: v1\nkind: PersistentVolume\n\
                metadata: {name: v}\nspec:\n  capacity:\n    storage: 1Gi\n  accessModes: [ReadWriteOnce]\n  hostPath:\n    path: /a/../b\n";
    let errors = parse_file(text.as_bytes(), PATH, &StaticRules::standalone("n1")).unwrap_err();
    assert_eq!((errors.len(), errors[0].document, errors[0].line), (1, 2, 13), "{errors:?}");
    assert_eq!(errors[0].field, "spec.hostPath.path");
}
