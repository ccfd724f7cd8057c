//! Logs and traces, from the flags and both files (node-and-api.md §2.6, §14).

use keelson_config::Tracing;

use crate::document::{Reader, Sourced};
use crate::keelson_file::KeelsonFile;
use crate::kubelet_file::KubeletFile;
use crate::resolve::{Level, Resolver, flag};

const LEVELS: &[&str] = &["off", "error", "warn", "info", "debug", "trace"];
/// The default trace collector of a kubelet.
const COLLECTOR: &str = "localhost:4317";
/// gRPC's default port for a name without one.
const PORT: &str = "443";
const ALL: u32 = 1_000_000;

/// `tracing` of the KubeletConfiguration.
#[derive(Debug, Default)]
pub(crate) struct TracingFile {
    /// The origin of the field, if it is set.
    origin: Option<String>,
    endpoint: Option<Sourced<Collector>>,
    rate: Option<Sourced<u32>>,
}

/// The target of an endpoint in a KubeletConfiguration.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Collector {
    /// An address in the format of the KeelsonConfiguration.
    At(String),
    /// An abstract socket.
    Abstract,
}

impl TracingFile {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        if !reader.object("tracing") {
            return Self::default();
        }
        Self {
            origin: Some(reader.origin("tracing")),
            endpoint: endpoint(reader),
            rate: reader.u32("tracing.samplingRatePerMillion", 0..=ALL),
        }
    }
}

fn endpoint(reader: &mut Reader<'_>) -> Option<Sourced<Collector>> {
    let text = reader.string("tracing.endpoint").filter(|text| !text.value.is_empty())?;
    match collector(&text.value) {
        Ok(collector) => Some(text.map(|_| collector)),
        Err(remedy) => {
            reader.refuse(&text, remedy);
            None
        }
    }
}

/// Parses an endpoint as gRPC does: `host:port`, `dns:host:port`, `unix:/path` or `unix-abstract:name`.
fn collector(text: &str) -> Result<Collector, String> {
    let with_port = |name: &str| {
        let host = name.rsplit('/').next().unwrap_or_default();
        if host.is_empty() {
            return Err(format!("this must name a host, such as {COLLECTOR}"));
        }
        let has_port = host.rsplit_once(':').is_some_and(|(before, port)| {
            !port.is_empty()
                && port.bytes().all(|b| b.is_ascii_digit())
                && (!before.contains(':') || before.ends_with(']'))
        });
        let address = if has_port { host.to_owned() } else { format!("{host}:{PORT}") };
        Ok(Collector::At(format!("http://{address}")))
    };
    match text.split_once(':') {
        Some(("dns", name)) => with_port(name),
        Some(("unix", path)) => {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.starts_with('/') {
                Ok(Collector::At(format!("unix://{path}")))
            } else {
                Err("this must be unix: and an absolute path, such as unix:///run/otel.sock".to_owned())
            }
        }
        Some(("unix-abstract", _)) => Ok(Collector::Abstract),
        Some((scheme, rest)) if rest.starts_with("//") => Err(format!(
            "unsupported scheme: {scheme}.  Options are none, dns, unix, or unix-abstract; write host:port, such as {COLLECTOR}"
        )),
        _ => with_port(text),
    }
}

impl Resolver<'_> {
    pub(crate) fn telemetry(&mut self, kubelet: &mut KubeletFile, keelson: &mut KeelsonFile) {
        let format = flag("--log-format", self.flags.log_format.as_ref())
            .or(kubelet.log_format.take())
            .or(keelson.log_format.take());
        if let Some(format) = format.as_ref().filter(|f| !["text", "json"].contains(&f.value.as_str())) {
            self.refuse(format, "this must be one of: text, json");
        }
        self.set("logging.format", format, |c, v| c.logging.format = v);
        let verbosity = kubelet.verbosity.take().filter(|v| v.value > 0).map(|v| v.map(level_of));
        let level =
            flag("--log-level", self.flags.log_level.as_ref()).or(verbosity).or(keelson.log_level.take());
        if let Some(level) = level.as_ref().filter(|level| !is_filter(&level.value)) {
            self.refuse(
                level,
                format!(
                    "this must be one of {}, or a list such as info,keelson_pod_sync=debug",
                    LEVELS.join(", ")
                ),
            );
        }
        self.set("logging.level", level, |c, v| c.logging.level = v);
        self.traces(std::mem::take(&mut kubelet.tracing), keelson);
    }

    /// The trace settings, field by field; the KubeletConfiguration overrides the KeelsonConfiguration.
    fn traces(&mut self, kubelet: TracingFile, keelson: &mut KeelsonFile) {
        let (own_endpoint, own_rate) = (keelson.trace_endpoint.take(), keelson.trace_rate.take());
        let is_collector = |text: &str| text.starts_with("http://") || text.starts_with("unix:");
        if let Some(endpoint) = own_endpoint.as_ref().filter(|endpoint| !is_collector(&endpoint.value)) {
            self.refuse(endpoint, "this must be http://host:port or unix:///path of an OTLP/gRPC collector");
        }
        // Without a rate, a kubelet only samples traces of its callers; the KeelsonConfiguration samples all.
        let of_kubelet = kubelet.origin.clone().map(|origin| {
            let field = "tracing.samplingRatePerMillion".to_owned();
            Sourced { value: 0, origin, field }
        });
        let rate = kubelet.rate.or(own_rate).or(of_kubelet);
        let explicit = kubelet.endpoint.map(|endpoint| (endpoint.clone(), endpoint.value));
        let endpoint = match (explicit, own_endpoint, kubelet.origin) {
            (Some((endpoint, Collector::At(address))), ..) => endpoint.map(|_| address),
            (Some((endpoint, Collector::Abstract)), ..) => {
                let text = format!(
                    "tracing.endpoint ({}) is an abstract socket, which is not supported: no traces are sent",
                    endpoint.origin
                );
                self.note(Level::Warn, text);
                return;
            }
            (None, Some(own), _) => own,
            (None, None, Some(origin)) => {
                Sourced { value: format!("http://{COLLECTOR}"), origin, field: "tracing.endpoint".to_owned() }
            }
            (None, None, None) => {
                if let Some(rate) = rate {
                    self.refuse(&rate, "tracing.endpoint, the address of the collector, is missing");
                }
                return;
            }
        };
        self.set("tracing.endpoint", Some(endpoint), |c, endpoint| {
            c.tracing = Some(Tracing { endpoint, sampling_rate_per_million: ALL });
        });
        self.set("tracing.samplingRatePerMillion", rate, |c, v| {
            if let Some(tracing) = &mut c.tracing {
                tracing.sampling_rate_per_million = v;
            }
        });
    }
}

/// The log level for a kubelet's verbosity: details from 4 on, every step from 6 on.
fn level_of(verbosity: u32) -> String {
    match verbosity {
        0..=3 => "info",
        4..=5 => "debug",
        6.. => "trace",
    }
    .to_owned()
}

/// Whether this is a level, or a list of `level` and `target=level`.
fn is_filter(text: &str) -> bool {
    !text.is_empty()
        && text.split(',').all(|part| {
            let (target, level) = part.split_once('=').map_or((None, part), |(t, l)| (Some(t), l));
            target != Some("") && LEVELS.contains(&level.to_ascii_lowercase().as_str())
        })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::resolve::tests::{errors_of, host, keelson, kubelet, run};
    use crate::resolve::{Flags, Resolved};

    fn with(kubelet_tracing: Option<Value>, keelson_tracing: Option<Value>) -> Resolved {
        let kubelet_tracing = kubelet_tracing.map(|tracing| kubelet(json!({"tracing": tracing})));
        let keelson_tracing = keelson_tracing.map(|tracing| keelson(json!({"tracing": tracing})));
        run(&Flags::default(), kubelet_tracing.as_ref(), keelson_tracing.as_ref(), &host()).unwrap()
    }

    fn sent(resolved: &Resolved) -> Option<(&str, u32)> {
        let tracing = resolved.config.tracing.as_ref()?;
        Some((tracing.endpoint.as_str(), tracing.sampling_rate_per_million))
    }

    #[test]
    fn every_trace_endpoint_format_is_converted() {
        for (written, endpoint) in [
            (json!({}), "http://localhost:4317"),
            (json!({"endpoint": ""}), "http://localhost:4317"),
            (json!({"endpoint": "10.0.0.1:4317"}), "http://10.0.0.1:4317"),
            (json!({"endpoint": "[fd00::1]:4317"}), "http://[fd00::1]:4317"),
            (json!({"endpoint": "collector"}), "http://collector:443"),
            (json!({"endpoint": "dns:collector:4317"}), "http://collector:4317"),
            (json!({"endpoint": "dns:///collector:4317"}), "http://collector:4317"),
            (json!({"endpoint": "dns://10.0.0.53/collector:4317"}), "http://collector:4317"),
            (json!({"endpoint": "unix:///run/otel.sock"}), "unix:///run/otel.sock"),
            (json!({"endpoint": "unix:/run/otel.sock"}), "unix:///run/otel.sock"),
        ] {
            let resolved = with(Some(written.clone()), None);
            assert_eq!(sent(&resolved), Some((endpoint, 0)), "{written}");
            assert!(
                resolved.notes.iter().all(|note| !note.text.contains("no effect yet")),
                "{:?}",
                resolved.notes
            );
            assert!(resolved.config.provenance["tracing.endpoint"].starts_with("kubelet.yaml"), "{written}");
        }
        assert_eq!(sent(&with(None, None)), None);
        let abstract_socket = with(Some(json!({"endpoint": "unix-abstract:otel"})), None);
        assert_eq!(sent(&abstract_socket), None);
        assert!(
            abstract_socket.notes.iter().any(|note| note.text.contains("no traces are sent")),
            "{:?}",
            abstract_socket.notes
        );
    }

    #[test]
    fn kubelet_tracing_overrides_keelson_tracing_field_by_field() {
        let (kubelet_tracing, keelson_tracing) =
            (json!({"endpoint": "a:1", "samplingRatePerMillion": 7}), json!({"endpoint": "http://b:2"}));
        assert_eq!(
            sent(&with(Some(kubelet_tracing), Some(keelson_tracing.clone()))),
            Some(("http://a:1", 7))
        );
        assert_eq!(sent(&with(None, Some(keelson_tracing.clone()))), Some(("http://b:2", ALL)));
        assert_eq!(
            sent(&with(Some(json!({"samplingRatePerMillion": 7})), Some(keelson_tracing))),
            Some(("http://b:2", 7))
        );
        let rate_alone = with(Some(json!({"samplingRatePerMillion": 1_000_000})), None);
        assert_eq!(sent(&rate_alone), Some(("http://localhost:4317", ALL)));
    }

    #[test]
    fn invalid_trace_endpoints_are_refused() {
        for (endpoint, part) in [
            (
                "http://localhost:4317",
                "unsupported scheme: http.  Options are none, dns, unix, or unix-abstract",
            ),
            ("unix:otel.sock", "an absolute path"),
            ("dns:///", "must name a host"),
        ] {
            let errors = errors_of(json!({"tracing": {"endpoint": endpoint}}));
            assert!(errors.len() == 1 && errors[0].contains(part), "{endpoint}: {errors:?}");
        }
    }
}
