//! Validation of pods and the references of static pods.
#![allow(clippy::unwrap_used)] // helpers outside #[test] functions may unwrap too

use keelson_kube_model::*;
use serde_json::{Value, json};

mod containers;
mod pods;
mod references;
mod volumes;

/// A good pod, with `fields` laid over its spec.
fn pod_with(fields: Value) -> Value {
    let mut pod = json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    });
    for (key, value) in fields.as_object().unwrap() {
        pod["spec"][key] = value.clone();
    }
    pod
}

fn errors_of(mut pod: Value) -> Vec<String> {
    default_pod(&mut pod);
    let pod: Pod = serde_json::from_value(pod).unwrap();
    validate_pod(&pod).iter().map(ToString::to_string).collect()
}

/// Errors of a pod whose only container has `fields` besides name and image; one volume `v` exists.
fn container_errors(fields: Value) -> Vec<String> {
    let mut container = json!({"name": "c", "image": "i"});
    for (key, value) in fields.as_object().unwrap() {
        container[key] = value.clone();
    }
    errors_of(pod_with(json!({"containers": [container], "volumes": [{"name": "v"}]})))
}

/// Each error begins with the text beside it, and there are no more.
#[track_caller]
fn expect(errors: Vec<String>, beginnings: &[&str]) {
    let good =
        errors.len() == beginnings.len() && errors.iter().zip(beginnings).all(|(e, b)| e.starts_with(b));
    assert!(good, "expected {beginnings:#?}, found {errors:#?}");
}
