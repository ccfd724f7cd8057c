//! What the nodes would refuse of a PersistentVolume or a claim, so that their author gets the error before it is stored. The rules
//! are those of pod-config.

use keelson_kube_model::fill_nulls;
use keelson_kube_model::persistent_volume::{
    ClaimSpec, VolumeSpec, check_claim, check_volume, decode, remove_null_fields,
};
use serde_json::Value;

use crate::cmd::manifests::ObjectKind;

/// Fields of a claim that need an API server.
const UNSUPPORTED: [&str; 3] = ["dataSource", "dataSourceRef", "volumeAttributesClassName"];

/// Checks the `spec` of a PersistentVolume or a claim. An error has a line for each problem.
pub(super) fn check(kind: ObjectKind, object: &Value) -> Result<(), String> {
    let mut object = object.clone();
    fill_nulls(&mut object);
    remove_null_fields(&mut object);
    let spec = match &object["spec"] {
        Value::Null => serde_json::json!({}),
        spec => spec.clone(),
    };
    let mut errors = Vec::new();
    let mut fail = |field: &str, message: String| errors.push(format!("{field}: {message}"));
    let decoded = if kind == ObjectKind::PersistentVolume {
        decode::<VolumeSpec>(&spec).map(|volume| check_volume(&volume, &spec, "", &mut fail))
    } else {
        for field in UNSUPPORTED.iter().filter(|field| spec.get(**field).is_some()) {
            fail(&format!("spec.{field}"), "Forbidden: it needs an API server".into());
        }
        decode::<ClaimSpec>(&spec).map(|claim| check_claim(&claim, &mut fail))
    };
    if let Err((field, message)) = decoded {
        fail(&field, message);
    }
    if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn volume() -> Value {
        json!({"spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "local": {"path": "/srv"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["edge"]}]},
            ]}},
        }})
    }

    fn claim() -> Value {
        json!({"spec": {"resources": {"requests": {"storage": "1Gi"}}, "accessModes": ["ReadWriteMany", "ReadOnlyMany"]}})
    }

    fn changed(mut object: Value, field: &str, value: Value) -> Value {
        object["spec"][field] = value;
        object
    }

    #[test]
    fn valid_volumes_and_claims_are_accepted() {
        check(ObjectKind::PersistentVolume, &volume()).unwrap();
        check(ObjectKind::PersistentVolumeClaim, &claim()).unwrap();
        let plain = changed(volume(), "capacity", json!({"storage": 1_000_000}));
        check(ObjectKind::PersistentVolume, &plain).unwrap();
    }

    #[test]
    fn every_source_that_a_node_mounts_or_that_a_driver_has_taken_over_is_accepted() {
        for (source, value) in [
            ("hostPath", json!({"path": "/srv"})),
            ("nfs", json!({"server": "s", "path": "/p"})),
            ("iscsi", json!({"targetPortal": "10.0.0.1", "iqn": "iqn.2001-04.com.example:disk", "lun": 0})),
            ("fc", json!({"targetWWNs": ["50060e801049cfd1"], "lun": 0})),
            ("flexVolume", json!({"driver": "example.com/disk"})),
            ("csi", json!({"driver": "csi.example.com", "volumeHandle": "1"})),
            ("awsElasticBlockStore", json!({"volumeID": "vol-1"})),
            ("azureFile", json!({"secretName": "s", "shareName": "a"})),
        ] {
            let volume = changed(changed(volume(), "local", Value::Null), source, value);
            check(ObjectKind::PersistentVolume, &volume).unwrap_or_else(|error| panic!("{source}: {error}"));
        }
        let unknown = changed(changed(volume(), "local", Value::Null), "floppy", json!({}));
        assert!(
            check(ObjectKind::PersistentVolume, &unknown).unwrap_err().contains("must specify a volume type")
        );
    }

    #[test]
    fn invalid_volumes_are_refused_with_the_field() {
        for (field, value, expected) in [
            ("capacity", Value::Null, "spec.capacity.storage: Required value"),
            (
                "capacity",
                json!({"storage": "much"}),
                "spec.capacity.storage: Invalid value: quantity \"much\"",
            ),
            ("capacity", json!({"storage": "0"}), "must be greater than zero"),
            ("capacity", json!({"storage": -1}), "must be greater than zero"),
            ("accessModes", json!([]), "spec.accessModes: Required value"),
            ("accessModes", json!(["readWriteOnce"]), "Unsupported value: \"readWriteOnce\""),
            (
                "accessModes",
                json!(["ReadWriteOncePod", "ReadOnlyMany"]),
                "may not use ReadWriteOncePod with other",
            ),
            ("local", Value::Null, "must specify a volume type"),
            ("nfs", json!({}), "spec.nfs: Forbidden: may not specify more than 1 volume type"),
            ("rbd", json!({}), "spec.rbd: Forbidden: may not specify more than 1 volume type"),
            ("hostPath", json!({"path": "/srv", "type": "Folder"}), "spec.hostPath.type: Unsupported value"),
            ("nodeAffinity", Value::Null, "requires node affinity"),
        ] {
            let error = check(ObjectKind::PersistentVolume, &changed(volume(), field, value)).unwrap_err();
            assert!(error.contains(expected), "{field}: {error}");
        }
    }

    #[test]
    fn invalid_claims_are_refused_with_the_field() {
        for (field, value, expected) in [
            ("resources", json!({}), "spec.resources.requests.storage: Required value"),
            ("accessModes", Value::Null, "spec.accessModes: Required value"),
            ("dataSource", json!({"kind": "Snapshot"}), "spec.dataSource: Forbidden"),
        ] {
            let error =
                check(ObjectKind::PersistentVolumeClaim, &changed(claim(), field, value)).unwrap_err();
            assert!(error.contains(expected), "{field}: {error}");
        }
    }
}
