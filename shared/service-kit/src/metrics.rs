use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Metric, Registry};

use crate::process_metrics::ProcessMetrics;

/// The metrics of this service, in one registry.
#[derive(Debug, Clone)]
pub struct Metrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    registry: Mutex<Registry>,
    handled: Family<RpcLabels, Counter>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RpcLabels {
    service: String,
    method: String,
    code: String,
}

impl Metrics {
    /// A registry with the counters of the server stack and the usage of this process.
    pub fn new() -> Self {
        let handled = Family::default();
        let mut registry = Registry::default();
        registry.register(
            "keelson_grpc_server_handled",
            "RPCs that this service has answered, by method and gRPC code",
            handled.clone(),
        );
        registry.register_collector(Box::new(ProcessMetrics));
        Self(Arc::new(Inner { registry: Mutex::new(registry), handled }))
    }

    /// Registers a metric under its full name, for example `kubelet_running_pods`. Counters get the suffix `_total`.
    pub fn register(&self, name: &str, help: &str, metric: impl Metric) {
        self.0.registry.lock().unwrap_or_else(PoisonError::into_inner).register(name, help, metric);
    }

    /// Counts an answered RPC; `path` is `/package.Service/Method`.
    pub(crate) fn handled(&self, path: &str, code: i32) {
        let (service, method) = path.trim_start_matches('/').split_once('/').unwrap_or(("", path));
        let labels = RpcLabels {
            service: service.to_owned(),
            method: method.to_owned(),
            code: format!("{:?}", tonic::Code::from(code)),
        };
        self.0.handled.get_or_create(&labels).inc();
    }

    /// All metrics in the OpenMetrics text format.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let registry = self.0.registry.lock().unwrap_or_else(PoisonError::into_inner);
        if encode(&mut text, &registry).is_err() {
            text.clear();
        }
        text
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}
