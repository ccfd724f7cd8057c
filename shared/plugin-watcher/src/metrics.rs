//! The numbers of plugins.

use std::path::Path;

use keelson_service_kit::Metrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    socket_path: String,
    state: &'static str,
}

/// The plugins that are found and registered. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct PluginMetrics(Family<Labels, Gauge>);

impl PluginMetrics {
    pub(crate) fn register(metrics: &Metrics) -> Self {
        let total = Family::default();
        let help = "Plugins by socket: found (desired_state_of_world) and registered (actual_state_of_world)";
        metrics.register("plugin_manager_total_plugins", help, total.clone());
        Self(total)
    }

    fn set(&self, socket: &Path, state: &'static str, is_in_it: bool) {
        let labels = Labels { socket_path: socket.display().to_string(), state };
        if is_in_it {
            self.0.get_or_create(&labels).set(1);
        } else {
            self.0.remove(&labels);
        }
    }

    pub(crate) fn found(&self, socket: &Path, is_found: bool) {
        self.set(socket, "desired_state_of_world", is_found);
    }

    pub(crate) fn registered(&self, socket: &Path, is_registered: bool) {
        self.set(socket, "actual_state_of_world", is_registered);
    }
}
