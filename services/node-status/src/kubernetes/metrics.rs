//! The kubelet's metrics of what is written to an API server (node-and-api.md §15.1): mirror pods, the delay of a status, the
//! start of the node.

use std::fs;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use keelson_node_status_core::startup::StartupClock;
use keelson_service_kit::{Context, Metrics, now_unix_nanos};
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use serde_json::Value;

/// Seconds from the change of a status until the server has it.
const SYNC_SECONDS: [f64; 11] = [0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0];

/// The metrics. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct WriterMetrics {
    metrics: Metrics,
    /// When this start of the agent began, nanoseconds since 1970.
    agent_start: i64,
    startup: Arc<Mutex<StartupClock>>,
    mirrors: Gauge,
    statuses: Histogram,
}

impl WriterMetrics {
    pub(super) fn register(ctx: &Context) -> Self {
        let own = Self {
            metrics: ctx.metrics.clone(),
            agent_start: ctx.config.resolved_unix_nanos,
            startup: Arc::default(),
            mirrors: Gauge::default(),
            statuses: Histogram::new(SYNC_SECONDS),
        };
        let help = "Mirrors of static pods that the API server has";
        ctx.metrics.register("kubelet_mirror_pods", help, own.mirrors.clone());
        let help = "Seconds from the change of a pod's status until the API server has it";
        ctx.metrics.register("kubelet_pod_status_sync_duration_seconds", help, own.statuses.clone());
        own
    }

    /// Sets how many mirror pods the server has.
    pub(super) fn set_mirrors(&self, count: usize) {
        self.mirrors.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Observes that the server has a status that changed this long ago.
    pub(super) fn observe_status(&self, after: Duration) {
        self.statuses.observe(after.as_secs_f64());
    }

    /// The registration of the Node begins.
    pub(super) fn start_registration(&self) {
        self.startup(|clock| clock.start_registration(now_unix_nanos()));
    }

    /// The server has this Node, which this process has `created` or found.
    pub(super) fn finish_registration(&self, created: bool, node: &Value) {
        let now = now_unix_nanos();
        self.startup(|clock| clock.finish_registration(created, now));
        if !is_ready(node) {
            return;
        }
        let parts = self.startup(|clock| clock.ready(boot_unix_nanos(now)?, self.agent_start, now));
        let Some(parts) = parts else { return };
        for (part, help, nanos) in [
            ("pre_kubelet_", "from the boot of the machine to the start of the agent", parts.pre_kubelet),
            (
                "pre_registration_",
                "from the start of the agent to the first try to register the Node",
                parts.pre_registration,
            ),
            ("registration_", "that the registration of the Node took", parts.registration),
            (
                "post_registration_",
                "from the registration of the Node until it was ready",
                parts.post_registration,
            ),
            ("", "from the boot of the machine until the Node was ready", parts.total()),
        ] {
            let name = format!("kubelet_node_startup_{part}duration_seconds");
            self.metrics.register(&name, &format!("Seconds {help}"), ConstGauge::new(nanos as f64 / 1e9));
        }
    }

    fn startup<T>(&self, update: impl FnOnce(&mut StartupClock) -> T) -> T {
        update(&mut self.startup.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn is_ready(node: &Value) -> bool {
    let mut conditions = node["status"]["conditions"].as_array().into_iter().flatten();
    conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

/// When the machine was booted; `None` if that is unknown.
fn boot_unix_nanos(now: i64) -> Option<i64> {
    let text = fs::read_to_string("/proc/uptime").ok()?;
    let seconds: f64 = text.split_whitespace().next()?.parse().ok()?;
    Some(now - (seconds * 1e9) as i64)
}

#[cfg(test)]
mod tests {
    use keelson_config::{Config, ServiceName};
    use serde_json::json;

    use super::*;

    #[test]
    fn startup_metrics_appear_when_a_newly_created_node_is_ready() {
        let node = |status: &str| json!({"status": {"conditions": [{"type": "Ready", "status": status}]}});
        for (created, lines) in [(true, 5), (false, 0)] {
            let config =
                Config { resolved_unix_nanos: now_unix_nanos() - 3_000_000_000, ..Config::default() };
            let ctx = Context::detached(ServiceName::NodeStatus, config);
            let metrics = WriterMetrics::register(&ctx);
            let lines_of = |name: &str| -> Vec<String> {
                let text = ctx.metrics.text();
                text.lines().filter(|line| line.starts_with(name)).map(str::to_owned).collect()
            };
            metrics.start_registration();
            metrics.finish_registration(created, &node("False"));
            assert!(lines_of("kubelet_node_startup").is_empty());
            metrics.finish_registration(false, &node("True"));
            metrics.finish_registration(false, &node("True"));
            let found = lines_of("kubelet_node_startup");
            assert_eq!(found.len(), lines, "{found:?}");
            if created {
                let line = lines_of("kubelet_node_startup_pre_registration_duration_seconds ").remove(0);
                let seconds: f64 = line.split(' ').nth(1).unwrap().parse().unwrap();
                assert!((3.0..60.0).contains(&seconds), "{line}");
            }
        }
    }
}
