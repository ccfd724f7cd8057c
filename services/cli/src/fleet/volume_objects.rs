//! What the nodes would refuse of a PersistentVolume or a claim, so that their author gets the error before it is stored. A node
//! checks more of them; `keelson get sources` there shows what it refuses.

use keelson_kube_model::Quantity;
use serde_json::Value;

use crate::cmd::manifests::ObjectKind;

/// The sources of PersistentVolumes that a node without an API server has.
const SOURCES: [&str; 4] = ["local", "hostPath", "nfs", "csi"];
const ACCESS_MODES: [&str; 4] = ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"];
/// Fields of a claim that need an API server.
const UNSUPPORTED: [&str; 3] = ["dataSource", "dataSourceRef", "volumeAttributesClassName"];

/// Checks a PersistentVolume or a claim. An error has a line for each problem.
pub(super) fn check(kind: ObjectKind, object: &Value) -> Result<(), String> {
    let spec = &object["spec"];
    let mut errors = Vec::new();
    check_access_modes(&spec["accessModes"], &mut errors);
    if kind == ObjectKind::PersistentVolume {
        check_storage(&spec["capacity"], "spec.capacity.storage", &mut errors);
        check_source(spec, &mut errors);
    } else {
        check_storage(&spec["resources"]["requests"], "spec.resources.requests.storage", &mut errors);
        let unsupported = UNSUPPORTED.iter().filter(|field| !spec[**field].is_null());
        errors.extend(unsupported.map(|field| format!("spec.{field}: Forbidden: it needs an API server")));
    }
    if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
}

fn check_access_modes(modes: &Value, errors: &mut Vec<String>) {
    let modes = modes.as_array().map(Vec::as_slice).unwrap_or_default();
    if modes.is_empty() {
        errors.push("spec.accessModes: Required value".into());
    }
    for mode in modes.iter().filter(|mode| !ACCESS_MODES.iter().any(|known| *mode == known)) {
        errors.push(format!(
            "spec.accessModes: Unsupported value: {mode}: supported values: {}",
            ACCESS_MODES.join(", ")
        ));
    }
    if modes.len() > 1 && modes.iter().any(|mode| mode == "ReadWriteOncePod") {
        errors.push("spec.accessModes: Forbidden: ReadWriteOncePod cannot be combined with another".into());
    }
}

fn check_storage(amounts: &Value, field: &str, errors: &mut Vec<String>) {
    match &amounts["storage"] {
        Value::Null => errors.push(format!("{field}: Required value")),
        Value::String(text) => match Quantity::parse(text) {
            Ok(amount) if amount > Quantity::ZERO => {}
            Ok(_) => {
                errors.push(format!("{field}: Invalid value: {text:?}: must be greater than zero"));
            }
            Err(error) => errors.push(format!("{field}: Invalid value: {text:?}: {error}")),
        },
        Value::Number(number) if number.as_f64().is_some_and(|number| number > 0.0) => {}
        other => errors.push(format!("{field}: Invalid value: {other}: must be an amount such as 10Gi")),
    }
}

fn check_source(spec: &Value, errors: &mut Vec<String>) {
    let found: Vec<&str> = SOURCES.into_iter().filter(|source| !spec[*source].is_null()).collect();
    match found.as_slice() {
        ["local"] if spec["nodeAffinity"]["required"].is_null() => {
            errors.push("spec.nodeAffinity: Required value: Local volume requires node affinity".into());
        }
        [_] => {}
        [] => errors
            .push(format!("spec: Required value: must specify a volume type: one of {}", SOURCES.join(", "))),
        several => errors.push(format!(
            "spec: Forbidden: may not specify more than 1 volume type: {}",
            several.join(", ")
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn volume() -> Value {
        json!({"spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "local": {"path": "/srv"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": []}},
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
    fn invalid_volumes_are_refused_with_the_field() {
        for (field, value, expected) in [
            ("capacity", Value::Null, "spec.capacity.storage: Required value"),
            ("capacity", json!({"storage": "much"}), "spec.capacity.storage: Invalid value: \"much\""),
            ("capacity", json!({"storage": "0"}), "must be greater than zero"),
            ("capacity", json!({"storage": -1}), "must be an amount"),
            ("accessModes", json!([]), "spec.accessModes: Required value"),
            ("accessModes", json!(["readWriteOnce"]), "Unsupported value: \"readWriteOnce\""),
            ("accessModes", json!(["ReadWriteOncePod", "ReadOnlyMany"]), "cannot be combined"),
            ("local", Value::Null, "must specify a volume type"),
            ("nfs", json!({}), "may not specify more than 1 volume type: local, nfs"),
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
