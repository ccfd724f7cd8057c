//! `/metrics` and `/metrics/probes`: the metrics of all services in one text.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::future::{join, join_all};
use keelson_config::ServiceName;
use keelson_proto::keelson::admin::v1::GetMetricsRequest;
use keelson_proto::keelson::admin::v1::admin_client::AdminClient;
use keelson_service_kit::Peer;
use tonic::Request;

use crate::{App, volume_statistics};

/// How long each service may take to answer.
const DEADLINE: Duration = Duration::from_secs(1);

/// Text format 0.0.4, which every version of Prometheus reads.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The label with the name of the service.
const LABEL: &str = "keelson_service";

/// The prefix of the families of `/metrics/probes`; a kubelet's `/metrics` has none of them (node-and-api.md §15.5).
const PROBES: &str = "prober_";

/// Prefixes of families whose labels dashboards and alerts match on.
const FROZEN: [&str; 11] = [
    "apiserver_delegated_",
    "authentication_token_cache_",
    "force_cleaned_failed_volume_",
    "kubelet_",
    PROBES,
    "kubernetes_build_info",
    "kubernetes_feature_enabled",
    "reconstruct_volume_",
    "storage_operation_",
    "volume_manager_",
    "volume_operation_",
];

/// `GET /metrics`. A service that does not answer within a second is missing from the text and has `keelson_service_up` 0.
pub(crate) async fn all(State(app): State<App>) -> Response {
    let (fetched, volumes) =
        join(join_all(app.peers.iter().map(fetch)), volume_statistics::metrics(&app)).await;
    let own = (ServiceName::NodeApi.as_str(), Some(app.ctx.metrics.text() + &volumes));
    let texts: Vec<(&str, Option<String>)> = fetched.into_iter().chain([own]).collect();
    response(&texts, |family| !family.starts_with(PROBES))
}

/// `GET /metrics/probes`: the probe metrics of pod-sync.
pub(crate) async fn probes(State(app): State<App>) -> Response {
    let peers = app.peers.iter().filter(|(name, _)| *name == ServiceName::PodSync);
    let is_included = |family: &str| family.starts_with(PROBES) || family == "process_start_time_seconds";
    response(&join_all(peers.map(fetch)).await, is_included)
}

async fn fetch((name, peer): &(ServiceName, Peer)) -> (&'static str, Option<String>) {
    let mut request = Request::new(GetMetricsRequest {});
    request.set_timeout(DEADLINE);
    let text = AdminClient::new(peer.channel()).get_metrics(request).await;
    (name.as_str(), text.ok().map(|response| response.into_inner().text))
}

fn response(texts: &[(&str, Option<String>)], is_included: impl Fn(&str) -> bool) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], merge(texts, is_included)).into_response()
}

#[derive(Default)]
struct Family<'a> {
    help: Option<&'a str>,
    kind: &'static str,
    /// The name of the service and the line of the sample.
    samples: Vec<(&'a str, &'a str)>,
}

/// Merges the included families of all services' OpenMetrics texts into one text in format 0.0.4; the text of a service that did
/// not answer is `None`.
///
/// HELP and TYPE of a family appear once. Each sample gets the label `keelson_service`, except those of a family of the
/// kubelet (`kubelet_…`, `storage_operation_…`) that only one service has: their labels are frozen.
pub fn merge(texts: &[(&str, Option<String>)], is_included: impl Fn(&str) -> bool) -> String {
    let mut families: BTreeMap<String, Family<'_>> = BTreeMap::new();
    for (service, text) in texts {
        parse(service, text.as_deref().unwrap_or_default(), &mut families);
    }
    let mut merged = String::new();
    for (name, family) in families.iter().filter(|(name, _)| is_included(name)) {
        write_family(&mut merged, name, family);
    }
    let _ = writeln!(merged, "# HELP keelson_service_up Whether the service has answered for its metrics");
    let _ = writeln!(merged, "# TYPE keelson_service_up gauge");
    for (service, text) in texts {
        let up = u8::from(text.is_some());
        let _ = writeln!(merged, "keelson_service_up{{{LABEL}=\"{service}\"}} {up}");
    }
    merged
}

fn write_family(merged: &mut String, name: &str, family: &Family<'_>) {
    if family.samples.is_empty() {
        return;
    }
    if let Some(help) = family.help {
        let _ = writeln!(merged, "# HELP {name} {}", help.replace("\\\"", "\""));
    }
    let _ = writeln!(merged, "# TYPE {name} {}", family.kind);
    let shared = family.samples.iter().any(|(service, _)| *service != family.samples[0].0);
    for (service, line) in &family.samples {
        if FROZEN.iter().any(|own| name.starts_with(own)) && !shared {
            let _ = writeln!(merged, "{line}");
        } else {
            write_labelled(merged, line, service);
        }
    }
}

fn write_labelled(merged: &mut String, line: &str, service: &str) {
    let (name, rest) = line.split_at(line.find(['{', ' ']).unwrap_or(line.len()));
    let _ = match rest.strip_prefix('{') {
        Some(rest) if rest.starts_with('}') => {
            writeln!(merged, "{name}{{{LABEL}=\"{service}\"{rest}")
        }
        Some(rest) => writeln!(merged, "{name}{{{LABEL}=\"{service}\",{rest}"),
        None => writeln!(merged, "{name}{{{LABEL}=\"{service}\"}}{rest}"),
    };
}

/// Counters of a kubelet whose names do not end in `_total` (node-and-api.md §15.1). OpenMetrics has no such counters, so
/// services export them as gauges.
const PLAIN_COUNTERS: [&str; 7] = [
    "kubelet_certificate_manager_client_expiration_renew_errors",
    "kubelet_evented_pleg_connection_error_count",
    "kubelet_evented_pleg_connection_success_count",
    "kubelet_evictions",
    "kubelet_pleg_discard_events",
    "kubelet_preemptions",
    "kubelet_server_expiration_renew_errors",
];

/// Parses an OpenMetrics text into families of format 0.0.4, in which the name of a counter family ends in `_total` and there are
/// no units, end marks and exemplars.
fn parse<'a>(service: &'a str, text: &'a str, families: &mut BTreeMap<String, Family<'a>>) {
    let mut help: Option<(&str, &str)> = None;
    let mut current = ("", String::new());
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let Some((name, kind)) = rest.split_once(' ') else { continue };
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                "gauge" if PLAIN_COUNTERS.contains(&name) => ("", "counter"),
                "gauge" | "stateset" => ("", "gauge"),
                "histogram" => ("", "histogram"),
                "summary" => ("", "summary"),
                _ => ("", "untyped"),
            };
            let full_name = if name.ends_with(suffix) { name.to_owned() } else { format!("{name}{suffix}") };
            let family = families.entry(full_name.clone()).or_default();
            family.kind = kind;
            if let Some((_, text)) = help.filter(|(named, _)| *named == name) {
                family.help.get_or_insert(text);
            }
            current = (name, full_name);
        } else if !line.starts_with('#') && !line.is_empty() {
            let sample = &line[..line.find(['{', ' ']).unwrap_or(line.len())];
            let is_of_current = !current.0.is_empty() && sample.starts_with(current.0);
            let name = if is_of_current { &current.1 } else { sample };
            let family = families
                .entry(name.to_owned())
                .or_insert_with(|| Family { kind: "untyped", ..Family::default() });
            family.samples.push((service, without_exemplar(line)));
        }
    }
}

/// A sample line without its exemplar, which begins with ` # ` after labels and value.
fn without_exemplar(line: &str) -> &str {
    let value = if line.contains('{') { labels_end(line) } else { 0 };
    match line[value..].find(" # ") {
        Some(at) => &line[..value + at],
        None => line,
    }
}

/// The end of the labels of a sample line; quoted label values may contain any character.
fn labels_end(line: &str) -> usize {
    let (mut quoted, mut escaped) = (false, false);
    for (at, byte) in line.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return at + 1,
            _ => {}
        }
    }
    line.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "# HELP keelson_grpc_server_handled RPCs, by \\\"method\\\".\n\
        # TYPE keelson_grpc_server_handled counter\n\
        keelson_grpc_server_handled_total{method=\"a } b\",code=\"Ok\"} 3 # {trace_id=\"x\"} 1\n\
        # HELP kubelet_running_pods Pods.\n# TYPE kubelet_running_pods gauge\nkubelet_running_pods 5\n\
        # HELP kubelet_x X.\n# TYPE kubelet_x gauge\nkubelet_x{} 1\n# EOF\n";
    const TWO: &str = "# HELP keelson_grpc_server_handled RPCs, by \\\"method\\\".\n\
        # TYPE keelson_grpc_server_handled counter\n\
        keelson_grpc_server_handled_total{method=\"c\"} 4\n\
        # HELP kubelet_x X.\n# TYPE kubelet_x gauge\nkubelet_x{} 2\n\
        # HELP wait Waits.\n# TYPE wait histogram\n# UNIT wait seconds\n\
        wait_sum 1.5\nwait_count 2\nwait_bucket{le=\"1\"} 1\nwait_bucket{le=\"+Inf\"} 2\n# EOF\n";

    #[test]
    fn counters_without_total_suffix_stay_counters() {
        for name in PLAIN_COUNTERS {
            let text = format!("# HELP {name} Some.\n# TYPE {name} gauge\n{name}{{x=\"y\"}} 3\n# EOF\n");
            let merged = merge(&[("a", Some(text))], |_| true);
            let expected = format!("# TYPE {name} counter\n{name}{{x=\"y\"}} 3\n");
            assert!(merged.contains(&expected), "{merged}");
        }
    }

    #[test]
    fn metric_families_are_merged_with_a_service_label() {
        let merged =
            merge(&[("a", Some(ONE.to_owned())), ("b", Some(TWO.to_owned())), ("c", None)], |_| true);
        let expected = "# HELP keelson_grpc_server_handled_total RPCs, by \"method\".\n\
            # TYPE keelson_grpc_server_handled_total counter\n\
            keelson_grpc_server_handled_total{keelson_service=\"a\",method=\"a } b\",code=\"Ok\"} 3\n\
            keelson_grpc_server_handled_total{keelson_service=\"b\",method=\"c\"} 4\n\
            # HELP kubelet_running_pods Pods.\n# TYPE kubelet_running_pods gauge\nkubelet_running_pods 5\n\
            # HELP kubelet_x X.\n# TYPE kubelet_x gauge\n\
            kubelet_x{keelson_service=\"a\"} 1\nkubelet_x{keelson_service=\"b\"} 2\n\
            # HELP wait Waits.\n# TYPE wait histogram\n\
            wait_sum{keelson_service=\"b\"} 1.5\nwait_count{keelson_service=\"b\"} 2\n\
            wait_bucket{keelson_service=\"b\",le=\"1\"} 1\nwait_bucket{keelson_service=\"b\",le=\"+Inf\"} 2\n\
            # HELP keelson_service_up Whether the service has answered for its metrics\n\
            # TYPE keelson_service_up gauge\n\
            keelson_service_up{keelson_service=\"a\"} 1\n\
            keelson_service_up{keelson_service=\"b\"} 1\n\
            keelson_service_up{keelson_service=\"c\"} 0\n";
        assert_eq!(merged, expected);
    }

    #[test]
    fn sample_without_a_family_is_untyped() {
        let merged = merge(&[("a", Some("stray 1\n".to_owned()))], |_| true);
        assert!(merged.starts_with("# TYPE stray untyped\nstray{keelson_service=\"a\"} 1\n"), "{merged}");
    }
}
