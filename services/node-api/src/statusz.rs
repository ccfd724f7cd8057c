//! `/statusz`: start time and version of this process (node-and-api.md §8.11).

use std::borrow::Cow;
use std::path::Path;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use jiff::Timestamp;
use keelson_config::{FeatureGate, KUBELET_VERSION, feature_gates};
use keelson_service_kit::Metrics;
use keelson_service_kit::status::chain;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use serde_json::{Map, Value, json};

use crate::App;
use crate::api_error::ApiError;
use crate::zpages::{format, response};

const KIND: &str = "Statusz";
/// The Kubernetes release whose behaviour is emulated.
const EMULATION_VERSION: &str = "1.36";
/// The paths that the page lists: those of a kubelet that exist here.
const PATHS: [&str; 4] = ["/configz", "/flagz", "/healthz", "/metrics"];

/// The `kubeletVersion` of the Node, without the `v`.
fn binary_version() -> &'static str {
    KUBELET_VERSION.trim_start_matches('v')
}

/// `GET /statusz`; authorized as the subresource `statusz` (§7).
pub(crate) async fn get(State(app): State<App>, headers: HeaderMap) -> Result<Response, ApiError> {
    let format = format(&headers, KIND)?;
    let (started, now) = (app.started, Timestamp::now());
    Ok(response(format, KIND, |separator| text(started, now, separator), || fields(started, now)))
}

/// The uptime in whole seconds; 0 if the clock was set back.
fn up_seconds(started: Timestamp, now: Timestamp) -> i64 {
    now.as_second().saturating_sub(started.as_second()).max(0)
}

fn text(started: Timestamp, now: Timestamp, separator: &str) -> String {
    let up = up_seconds(started, now);
    let lines = [
        ("Started", started.strftime("%a %b %e %H:%M:%S UTC %Y").to_string()),
        ("Up", format!("{} hr {:02} min {:02} sec", up / 3600, up / 60 % 60, up % 60)),
        ("Go version", "none".to_owned()),
        ("Binary version", binary_version().to_owned()),
        ("Emulation version", EMULATION_VERSION.to_owned()),
        ("Paths", PATHS.join(" ")),
    ];
    lines.iter().fold("\n".to_owned(), |text, (name, value)| format!("{text}{name}{separator} {value}\n"))
}

/// Registers `kubelet_metrics_provider`, and `kubernetes_build_info`, with which alerts compare the versions in a cluster
/// (§15.2). The labels about Go are empty.
pub(crate) fn register_build(metrics: &Metrics, kubelet_version: &str) {
    let (major, minor) = EMULATION_VERSION.split_once('.').unwrap_or_default();
    let platform = format!("{}/{}", std::env::consts::OS, go_architecture(std::env::consts::ARCH));
    let labels = [
        ("major", major.to_owned()),
        ("minor", minor.to_owned()),
        ("git_version", kubelet_version.to_owned()),
        ("git_commit", String::new()),
        ("git_tree_state", String::new()),
        ("build_date", String::new()),
        ("go_version", String::new()),
        ("compiler", "rustc".to_owned()),
        ("platform", platform),
    ];
    metrics.register("kubernetes_build", "The version of the agent", Info::new(labels.to_vec()));
    // Container statistics come from cgroups, as with cAdvisor, and not from the runtime (§15.1).
    let provider = Family::<[(&str, &str); 1], Gauge>::default();
    provider.get_or_create(&[("provider", "cadvisor")]).set(1);
    metrics.register("kubelet_metrics_provider", "The source of container statistics", provider);
}

/// Registers `kubernetes_feature_enabled` (§15.2) with the feature gates that init has resolved. They change only with a restart;
/// a file without gates gives no samples.
pub(crate) fn register_gates(metrics: &Metrics, file: &Path) {
    let gates = feature_gates(file).unwrap_or_else(|error| {
        tracing::warn!(error = chain(&error), "cannot read the feature gates; their metrics are missing");
        Vec::new()
    });
    let family = Family::<[(&str, Cow<'static, str>); 2], Gauge>::default();
    for FeatureGate { name, stage, enabled } in gates {
        family.get_or_create(&[("name", name), ("stage", stage)]).set(enabled.into());
    }
    metrics.register(
        "kubernetes_feature_enabled",
        "Whether a feature gate is enabled, by name and stage",
        family,
    );
}

/// The Go name of a Rust architecture.
fn go_architecture(architecture: &str) -> &str {
    match architecture {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

fn fields(started: Timestamp, now: Timestamp) -> Map<String, Value> {
    let started_second = Timestamp::from_second(started.as_second()).unwrap_or(started);
    let fields = [
        ("startTime", started_second.to_string().into()),
        ("uptimeSeconds", up_seconds(started, now).into()),
        // There is no Go version; that of another compiler would be wrong.
        ("goVersion", "".into()),
        ("binaryVersion", binary_version().into()),
        ("emulationVersion", EMULATION_VERSION.into()),
        ("paths", json!(PATHS)),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_nanosecond(i128::from(second) * 1_000_000_000 + 123).unwrap()
    }

    #[test]
    fn build_info_has_the_kubelet_version_of_the_node() {
        let metrics = Metrics::new();
        register_build(&metrics, KUBELET_VERSION);
        let text = metrics.text();
        let line = text.lines().find(|line| line.starts_with("kubernetes_build_info{")).unwrap_or_default();
        for part in ["{major=\"1\",minor=\"36\",git_version=\"v1.36.", ",platform=\"linux/"] {
            assert!(line.contains(part) && line.ends_with("} 1"), "{part}: {line}");
        }
        assert!(text.contains("kubelet_metrics_provider{provider=\"cadvisor\"} 1\n"), "{text}");
        assert_eq!((go_architecture("x86_64"), go_architecture("riscv64")), ("amd64", "riscv64"));
    }

    #[test]
    fn feature_gates_are_metrics_with_stage_and_state() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.json");
        let gate = |name: &'static str, stage: &'static str, enabled| FeatureGate {
            name: name.into(),
            stage: stage.into(),
            enabled,
        };
        let gates = [gate("AllAlpha", "ALPHA", false), gate("ImageVolume", "", true)];
        let extras = keelson_config::ConfigExtras { feature_gates: &gates, ..Default::default() };
        keelson_service_kit::store_config(&file, &keelson_config::Config::default(), extras).unwrap();
        let metrics = Metrics::new();
        register_gates(&metrics, &file);
        let text = metrics.text();
        let mut lines: Vec<_> =
            text.lines().filter(|line| line.starts_with("kubernetes_feature_enabled{")).collect();
        lines.sort_unstable();
        let expected = [
            "kubernetes_feature_enabled{name=\"AllAlpha\",stage=\"ALPHA\"} 0",
            "kubernetes_feature_enabled{name=\"ImageVolume\",stage=\"\"} 1",
        ];
        assert_eq!(lines, expected);
        let without = Metrics::new();
        register_gates(&without, &dir.path().join("none.json"));
        assert!(!without.text().contains("kubernetes_feature_enabled{"));
    }

    #[test]
    fn statusz_text_has_a_line_for_each_field() {
        let expected = "\nStarted= Fri Jan  2 03:04:05 UTC 1970\nUp= 27 hr 46 min 39 sec\nGo version= none\n\
            Binary version= 1.36.2+keelson.0.1.0\nEmulation version= 1.36\nPaths= /configz /flagz /healthz /metrics\n";
        assert_eq!(text(at(97_445), at(97_445 + 99_999), "="), expected);
    }

    #[test]
    fn statusz_object_has_the_kubelets_fields() {
        let expected = json!({
            "startTime": "1970-01-02T03:04:05Z", "uptimeSeconds": 61, "goVersion": "",
            "binaryVersion": "1.36.2+keelson.0.1.0", "emulationVersion": "1.36",
            "paths": ["/configz", "/flagz", "/healthz", "/metrics"],
        });
        assert_eq!(Value::from(fields(at(97_445), at(97_506))), expected);
        assert_eq!(fields(at(97_445), at(97_000))["uptimeSeconds"], 0, "a clock that was set back");
    }
}
