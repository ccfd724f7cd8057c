//! The KubeletConfiguration in force, as `/configz` shows it (node-and-api.md §2.5, §8.11).

use keelson_config::{Config, KUBELET_FIELDS};
use keelson_kube_model::{format_go_duration, parse_go_duration};
use serde_json::{Map, Value, json};

use crate::document::Document;
use crate::kubelet_file::absolute;
use crate::reserved::DEFAULT_THRESHOLDS;

/// The replacement of secret values.
const MASKED: &str = "<masked>";
/// Fields that are nested objects: fields that the file does not set keep their defaults.
const OBJECTS: &[&str] = &[
    "authentication",
    "authentication.anonymous",
    "authentication.webhook",
    "authentication.x509",
    "authorization",
    "authorization.webhook",
    "crashLoopBackOff",
    "logging",
    "memorySwap",
    "userNamespaces",
];
/// Fields whose values are durations.
const DURATIONS: &[&str] = &[
    "authentication.webhook.cacheTTL",
    "authorization.webhook.cacheAuthorizedTTL",
    "authorization.webhook.cacheUnauthorizedTTL",
    "containerLogMonitorInterval",
    "cpuCFSQuotaPeriod",
    "cpuManagerReconcilePeriod",
    "crashLoopBackOff.maxContainerRestartPeriod",
    "evictionPressureTransitionPeriod",
    "fileCheckFrequency",
    "httpCheckFrequency",
    "imageMaximumGCAge",
    "imageMinimumGCAge",
    "nodeStatusReportFrequency",
    "nodeStatusUpdateFrequency",
    "runtimeRequestTimeout",
    "shutdownGracePeriod",
    "shutdownGracePeriodCriticalPods",
    "streamingConnectionIdleTimeout",
    "syncFrequency",
    "volumeStatsAggPeriod",
];
/// Durations and numbers whose zero means the default, as in files written by programs.
pub(crate) const ZERO_IS_DEFAULT: &[&str] = &[
    "authentication.webhook.cacheTTL",
    "authorization.webhook.cacheAuthorizedTTL",
    "authorization.webhook.cacheUnauthorizedTTL",
    "cpuManagerReconcilePeriod",
    "eventBurst",
    "evictionPressureTransitionPeriod",
    "fileCheckFrequency",
    "httpCheckFrequency",
    "imageMinimumGCAge",
    "kubeAPIBurst",
    "logging.flushFrequency",
    "maxOpenFiles",
    "nodeStatusReportFrequency",
    "nodeStatusUpdateFrequency",
    "port",
    "runtimeRequestTimeout",
    "streamingConnectionIdleTimeout",
    "syncFrequency",
    "volumeStatsAggPeriod",
];
/// Fields whose empty string means the default.
const EMPTY_IS_DEFAULT: &[&str] = &[
    "cgroupDriver",
    "configMapAndSecretChangeDetectionStrategy",
    "containerLogMaxSize",
    "contentType",
    "cpuManagerPolicy",
    "hairpinMode",
    "imagePullCredentialsVerificationPolicy",
    "memoryManagerPolicy",
    "memoryReservationPolicy",
    "podLogsDir",
    "topologyManagerPolicy",
    "topologyManagerScope",
    "volumePluginDir",
];
/// Fields with paths that may be relative to the folder of the file.
const PATHS: &[&str] = &[
    "authentication.x509.clientCAFile",
    "podLogsDir",
    "resolvConf",
    "staticPodPath",
    "tlsCertFile",
    "tlsPrivateKeyFile",
    "volumePluginDir",
];

/// The defaults of a KubeletConfiguration.
const DEFAULTS: &str = include_str!("kubelet_defaults.json");

fn defaults() -> Map<String, Value> {
    serde_json::from_str(DEFAULTS).expect("kubelet_defaults.json is a JSON object")
}

/// The thresholds that apply unless a file sets some (§2.2, §2.5).
fn default_thresholds() -> Map<String, Value> {
    DEFAULT_THRESHOLDS.iter().map(|(signal, amount)| ((*signal).to_owned(), (*amount).into())).collect()
}

/// The default of the field at a dotted path, if it has one.
pub(crate) fn default_at(path: &str) -> Option<Value> {
    let mut whole = defaults();
    whole.insert("evictionHard".to_owned(), default_thresholds().into());
    path.split('.').try_fold(Value::Object(whole), |value, name| value.get(name).cloned())
}

/// The document with relative paths made absolute, starting from `folder`.
pub(crate) fn with_paths_from(folder: &str, document: &Document) -> Document {
    let mut document = document.clone();
    for path in PATHS {
        change_at(&mut document.root, path, |value| value.as_str().map(|path| absolute(folder, path).into()));
    }
    document
}

/// The whole KubeletConfiguration: the defaults, overlaid by the file and flags, overlaid by the settings that this agent
/// derived from them. Resolving the result again gives the same, except for masked values. `with_file`: not made of flags
/// only.
pub(crate) fn effective(document: Option<&Document>, with_file: bool, config: &Config) -> Map<String, Value> {
    let mut whole = defaults();
    if !with_file {
        // The defaults of a kubelet without a file (§2.2), except the read-only port, which is not served here.
        let flags_only = json!({
            "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"},
        });
        if let Value::Object(flags_only) = flags_only {
            overlay(&mut whole, &flags_only, "");
        }
    }
    if let Some(document) = document {
        overlay(&mut whole, &with_paths_from(&document.folder, document).root, "");
        for path in ZERO_IS_DEFAULT {
            // For the bursts, zero in a flag means zero.
            let is_meant = path.ends_with("Burst") && document.origin(path).starts_with("--");
            change_at(
                &mut whole,
                path,
                |value| if is_zero(value) && !is_meant { default_at(path) } else { None },
            );
        }
        for path in EMPTY_IS_DEFAULT {
            change_at(&mut whole, path, |value| if value == "" { default_at(path) } else { None });
        }
        // Thresholds in the file already include the defaults that apply in addition.
        if !document.root.get("evictionHard").is_some_and(Value::is_object) {
            whole.insert("evictionHard".to_owned(), default_thresholds().into());
        }
        derived(&mut whole, &document.root);
        if !with_file && whole["evictionHard"] == json!({}) {
            whole.remove("evictionHard");
        }
    }
    for path in DURATIONS {
        change_at(&mut whole, path, |value| {
            Some(format_go_duration(parse_go_duration(value.as_str()?)?).into())
        });
    }
    insert_values_in_force(&mut whole, config);
    mask(&mut whole);
    whole
}

/// Overlays the fields of `over` on `whole`; ignores `null` and unknown fields.
fn overlay(whole: &mut Map<String, Value>, over: &Map<String, Value>, at: &str) {
    for (name, value) in over {
        let path = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
        let known = !at.is_empty() || KUBELET_FIELDS.contains(&name.as_str());
        match (whole.get_mut(name), value) {
            (_, Value::Null) => {}
            _ if !known => {}
            (Some(Value::Object(below)), Value::Object(over)) if OBJECTS.contains(&path.as_str()) => {
                overlay(below, over, &path);
            }
            _ => {
                whole.insert(name.clone(), value.clone());
            }
        }
    }
}

/// Replaces the value at a dotted path if it exists and `f` returns another.
fn change_at(whole: &mut Map<String, Value>, path: &str, f: impl FnOnce(&Value) -> Option<Value>) {
    let mut names = path.split('.');
    let mut value = names.next().and_then(|name| whole.get_mut(name));
    for name in names {
        value = value.and_then(|value| value.get_mut(name));
    }
    if let Some(value) = value
        && let Some(other) = f(value)
    {
        *value = other;
    }
}

/// Defaults that depend on other fields.
fn derived(whole: &mut Map<String, Value>, file: &Map<String, Value>) {
    let set = |name: &str| file.get(name).is_some_and(|value| !value.is_null() && !is_zero(value));
    let parallel = file.get("maxParallelImagePulls").and_then(Value::as_i64).unwrap_or(1);
    if parallel >= 2 && !set("serializeImagePulls") {
        whole.insert("serializeImagePulls".to_owned(), false.into());
    }
    if file.get("nodeLeaseDurationSeconds").and_then(Value::as_i64) == Some(0) {
        whole.insert("nodeLeaseDurationSeconds".to_owned(), defaults()["nodeLeaseDurationSeconds"].clone());
    }
}

/// Whether the value is a zero duration or the number zero.
pub(crate) fn is_zero(value: &Value) -> bool {
    value.as_i64() == Some(0)
        || value.as_str().and_then(parse_go_duration).is_some_and(|duration| duration.is_zero())
}

/// Inserts the values that the agent has in force from flags or its own defaults.
fn insert_values_in_force(whole: &mut Map<String, Value>, config: &Config) {
    let mut set = |name: &str, value: Value| {
        whole.insert(name.to_owned(), value);
    };
    set("address", config.api.address.clone().into());
    set("healthzBindAddress", config.api.healthz_address.clone().into());
    set("cgroupRoot", config.runtime.cgroup_root.clone().into());
    set("cgroupDriver", config.runtime.cgroup_driver.clone().into());
    set("containerRuntimeEndpoint", config.runtime.endpoint.clone().into());
    set("podPidsLimit", config.resources.pod_pids_limit.into());
    if let Some(path) = &config.sources.static_pod_path {
        set("staticPodPath", path.to_string_lossy().into());
    }
    if let Some(url) = &config.sources.static_pod_url {
        set("staticPodURL", url.clone().into());
    }
    if let Some(Value::Object(logging)) = whole.get_mut("logging") {
        logging.insert("format".to_owned(), config.logging.format.clone().into());
    }
    if let Some(tls) = &config.api.tls {
        let mode = if tls.reviews { "Webhook" } else { "AlwaysAllow" };
        change_at(whole, "authentication.anonymous.enabled", |_| Some(tls.anonymous.into()));
        change_at(whole, "authentication.webhook.enabled", |_| Some(tls.tokens.into()));
        change_at(whole, "authorization.mode", |_| Some(mode.into()));
    }
}

/// Header values are sent with each request for manifests and are often credentials (§16).
fn mask(whole: &mut Map<String, Value>) {
    let Some(headers) = whole.get_mut("staticPodURLHeader") else { return };
    match headers {
        Value::Object(headers) => headers.values_mut().for_each(|values| *values = json!([MASKED])),
        other => *other = MASKED.into(),
    }
}

#[cfg(test)]
#[path = "effective_tests.rs"]
mod tests;
