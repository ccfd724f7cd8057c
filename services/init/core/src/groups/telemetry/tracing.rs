//! Traces, from both files (node-and-api.md §14).

use keelson_config::Tracing as ResolvedTracing;

use crate::document::Sourced;
use crate::outcome::{Level, Outcome};
use crate::reader::Reader;
use crate::settings::Files;

/// The default trace collector of a kubelet.
const COLLECTOR: &str = "localhost:4317";
/// gRPC's default port for a name without one.
const PORT: &str = "443";
const ALL: u32 = 1_000_000;

/// `tracing` of the KubeletConfiguration.
#[derive(Debug, Default)]
struct KubeletTracing {
    /// The origin of the field, if it is set.
    origin: Option<String>,
    endpoint: Option<Sourced<Collector>>,
    rate: Option<Sourced<u32>>,
}

/// The trace settings of both files; `None` where they do not set them.
#[derive(Debug)]
pub(super) struct Tracing {
    kubelet: KubeletTracing,
    endpoint: Option<Sourced<String>>,
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

impl KubeletTracing {
    fn read(reader: &mut Reader<'_>) -> Self {
        if !reader.object("tracing") {
            return Self::default();
        }
        Self {
            origin: Some(reader.origin("tracing")),
            endpoint: endpoint(reader),
            rate: reader.u32_field("tracing.samplingRatePerMillion"),
        }
    }
}

fn endpoint(reader: &mut Reader<'_>) -> Option<Sourced<Collector>> {
    let text = reader.text_field("tracing.endpoint")?;
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

impl Tracing {
    pub(super) fn read(files: &mut Files<'_>) -> Self {
        let kubelet = KubeletTracing::read(&mut files.kubelet);
        let reader = &mut files.keelson;
        if !reader.object("tracing") {
            return Self { kubelet, endpoint: None, rate: None };
        }
        Self {
            kubelet,
            endpoint: reader.string("tracing.endpoint"),
            rate: reader.u32("tracing.samplingRatePerMillion", 0..=ALL),
        }
    }

    /// Applies the settings, field by field; the KubeletConfiguration overrides the KeelsonConfiguration.
    pub(super) fn resolve(self, out: &mut Outcome<'_>) {
        let Self { kubelet, endpoint: own_endpoint, rate: own_rate } = self;
        let is_collector = |text: &str| text.starts_with("http://") || text.starts_with("unix:");
        if let Some(endpoint) = own_endpoint.as_ref().filter(|endpoint| !is_collector(&endpoint.value)) {
            out.refuse(endpoint, "this must be http://host:port or unix:///path of an OTLP/gRPC collector");
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
                out.note(Level::Warn, text);
                return;
            }
            (None, Some(own), _) => own,
            (None, None, Some(origin)) => {
                Sourced { value: format!("http://{COLLECTOR}"), origin, field: "tracing.endpoint".to_owned() }
            }
            (None, None, None) => {
                if let Some(rate) = rate {
                    out.refuse(&rate, "tracing.endpoint, the address of the collector, is missing");
                }
                return;
            }
        };
        out.set("tracing.endpoint", Some(endpoint), |c, endpoint| {
            c.tracing = Some(ResolvedTracing { endpoint, sampling_rate_per_million: ALL });
        });
        out.set("tracing.samplingRatePerMillion", rate, |c, v| {
            if let Some(tracing) = &mut c.tracing {
                tracing.sampling_rate_per_million = v;
            }
        });
    }
}
