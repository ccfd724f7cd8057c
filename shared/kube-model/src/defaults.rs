//! API defaulting of a v1 Pod on raw JSON.
//!
//! Working on JSON instead of on structs keeps fields that this crate does not know. `null`, empty text and, where
//! the API's own structs cannot tell the difference, zero count as not set. Values of a wrong type are left alone:
//! decoding names them afterwards. Defaulting is idempotent.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::pod_ext::is_pod_level_resource;
use crate::resources::container_requests;
use crate::types::{Pod, PullPolicy};

type Object = Map<String, Value>;

/// File mode of projected files, 0644 in decimal as JSON has no octal.
const DEFAULT_MODE: i32 = 420;
/// Lifetime of a projected service account token in seconds.
const TOKEN_SECONDS: i64 = 3600;

/// Fills in what the API server would fill in when the pod is created, so that a manifest from a file means what
/// the same manifest means in the API. Admission plugins are not included.
pub fn default_pod(pod: &mut Value) {
    let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut) else { return };
    default_spec(spec);
    let host_network = spec.get("hostNetwork").and_then(Value::as_bool).unwrap_or(false);
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        for container in objects(spec.get_mut(list)) {
            default_container(container, host_network);
        }
    }
    for volume in objects(spec.get_mut("volumes")) {
        default_volume(volume);
    }
    default_pod_level_requests(pod);
}

fn default_spec(spec: &mut Object) {
    set_text(spec, "restartPolicy", "Always");
    set(spec, "terminationGracePeriodSeconds", json!(30));
    set_text(spec, "dnsPolicy", "ClusterFirst");
    set(spec, "securityContext", json!({}));
    set_text(spec, "schedulerName", "default-scheduler");
    set(spec, "enableServiceLinks", json!(true));
    // The old name of the field still reads as the new one.
    let old_name = spec.get("serviceAccount").and_then(Value::as_str).unwrap_or_default().to_owned();
    if !old_name.is_empty() {
        set_text(spec, "serviceAccountName", &old_name);
    }
}

fn default_container(container: &mut Object, host_network: bool) {
    let image = container.get("image").and_then(Value::as_str).unwrap_or_default();
    let pull = PullPolicy::default_for(image).as_str();
    set(container, "resources", json!({}));
    set_text(container, "terminationMessagePath", "/dev/termination-log");
    set_text(container, "terminationMessagePolicy", "File");
    set_text(container, "imagePullPolicy", pull);
    if let Some(resources) = object(container.get_mut("resources")) {
        default_requests_from_limits(resources);
    }
    for port in objects(container.get_mut("ports")) {
        set_text(port, "protocol", "TCP");
        if host_network && let Some(number) = port.get("containerPort").cloned() {
            set_number(port, "hostPort", number);
        }
    }
    for env in objects(container.get_mut("env")) {
        if let Some(source) = object(env.get_mut("valueFrom")) {
            default_field_ref(source);
        }
    }
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if let Some(probe) = object(container.get_mut(probe)) {
            default_probe(probe);
        }
    }
    if let Some(lifecycle) = object(container.get_mut("lifecycle")) {
        for hook in ["postStart", "preStop"] {
            if let Some(handler) = object(lifecycle.get_mut(hook)) {
                default_http_get(handler);
            }
        }
    }
}

fn default_requests_from_limits(resources: &mut Object) {
    let Some(limits) = resources.get("limits").and_then(Value::as_object).filter(|l| !l.is_empty()).cloned()
    else {
        return;
    };
    set(resources, "requests", json!({}));
    if let Some(requests) = object(resources.get_mut("requests")) {
        for (name, limit) in limits {
            requests.entry(name).or_insert(limit);
        }
    }
}

fn default_probe(probe: &mut Object) {
    set_number(probe, "timeoutSeconds", json!(1));
    set_number(probe, "periodSeconds", json!(10));
    set_number(probe, "successThreshold", json!(1));
    set_number(probe, "failureThreshold", json!(3));
    default_http_get(probe);
    if let Some(grpc) = object(probe.get_mut("grpc")) {
        set(grpc, "service", json!(""));
    }
}

fn default_http_get(handler: &mut Object) {
    if let Some(http) = object(handler.get_mut("httpGet")) {
        set_text(http, "path", "/");
        set_text(http, "scheme", "HTTP");
    }
}

fn default_field_ref(source: &mut Object) {
    if let Some(field) = object(source.get_mut("fieldRef")) {
        set_text(field, "apiVersion", "v1");
    }
}

fn default_volume(volume: &mut Object) {
    if volume.iter().all(|(key, value)| key == "name" || value.is_null()) {
        volume.insert("emptyDir".to_owned(), json!({}));
    }
    for source in ["secret", "configMap", "downwardAPI", "projected"] {
        if let Some(source) = object(volume.get_mut(source)) {
            set(source, "defaultMode", json!(DEFAULT_MODE));
        }
    }
    if let Some(host_path) = object(volume.get_mut("hostPath")) {
        set(host_path, "type", json!(""));
    }
    if let Some(downward) = object(volume.get_mut("downwardAPI")) {
        default_downward_items(downward);
    }
    if let Some(image) = object(volume.get_mut("image")) {
        let reference = image.get("reference").and_then(Value::as_str).unwrap_or_default();
        let pull = PullPolicy::default_for(reference).as_str();
        set_text(image, "pullPolicy", pull);
    }
    if let Some(projected) = object(volume.get_mut("projected")) {
        for source in objects(projected.get_mut("sources")) {
            if let Some(token) = object(source.get_mut("serviceAccountToken")) {
                set(token, "expirationSeconds", json!(TOKEN_SECONDS));
            }
            if let Some(downward) = object(source.get_mut("downwardAPI")) {
                default_downward_items(downward);
            }
        }
    }
    if let Some(claim) = volume.get_mut("ephemeral").and_then(|e| e.pointer_mut("/volumeClaimTemplate/spec"))
        && let Some(claim) = claim.as_object_mut()
    {
        set_text(claim, "volumeMode", "Filesystem");
    }
}

fn default_downward_items(downward: &mut Object) {
    for item in objects(downward.get_mut("items")) {
        default_field_ref(item);
    }
}

/// Requests of the pod level, when it names limits: CPU and memory come from the containers where these request
/// any, everything else from the pod-level limit. Runs last, as it needs the containers' own defaults.
fn default_pod_level_requests(pod: &mut Value) {
    let has_limits = pod
        .pointer("/spec/resources/limits")
        .and_then(Value::as_object)
        .is_some_and(|limits| !limits.is_empty());
    if !has_limits {
        return;
    }
    let of_containers = Pod::deserialize(&*pod).map(|pod| container_requests(&pod)).unwrap_or_default();
    let Some(resources) = pod.pointer_mut("/spec/resources").and_then(Value::as_object_mut) else { return };
    let limits = resources.get("limits").and_then(Value::as_object).cloned().unwrap_or_default();
    set(resources, "requests", json!({}));
    let Some(requests) = object(resources.get_mut("requests")) else { return };
    for (name, amount) in of_containers {
        if matches!(name.as_str(), "cpu" | "memory") {
            requests.entry(name).or_insert_with(|| json!(amount.to_string()));
        }
    }
    for (name, limit) in limits {
        if is_pod_level_resource(&name) {
            requests.entry(name).or_insert(limit);
        }
    }
}

fn object(value: Option<&mut Value>) -> Option<&mut Object> {
    value.and_then(Value::as_object_mut)
}

fn objects(value: Option<&mut Value>) -> impl Iterator<Item = &mut Object> {
    value.and_then(Value::as_array_mut).into_iter().flatten().filter_map(Value::as_object_mut)
}

fn set_unless(object: &mut Object, key: &str, is_set: impl Fn(&Value) -> bool, default: Value) {
    if !object.get(key).is_some_and(is_set) {
        object.insert(key.to_owned(), default);
    }
}

/// Sets a field that is absent or `null`.
fn set(object: &mut Object, key: &str, default: Value) {
    set_unless(object, key, |value| !value.is_null(), default);
}

/// Sets a text field that is absent, `null` or empty.
fn set_text(object: &mut Object, key: &str, default: &str) {
    set_unless(object, key, |value| !value.is_null() && value.as_str() != Some(""), json!(default));
}

/// Sets a number field that is absent, `null` or zero.
fn set_number(object: &mut Object, key: &str, default: Value) {
    set_unless(object, key, |value| !value.is_null() && value.as_i64() != Some(0), default);
}
