//! The kubelet's metrics of what is told to an API server (node-and-api.md §15.1): mirrors, the time of a status, the start of the
//! node.

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

/// What is measured. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Measured {
    metrics: Metrics,
    /// When this start of the agent has begun, nanoseconds since 1970.
    agent_start: i64,
    startup: Arc<Mutex<StartupClock>>,
    mirrors: Gauge,
    statuses: Histogram,
}

impl Measured {
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

    /// The server has so many mirrors.
    pub(super) fn mirrors(&self, count: usize) {
        self.mirrors.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// The server has a status that had changed so long ago.
    pub(super) fn status_told(&self, after: Duration) {
        self.statuses.observe(after.as_secs_f64());
    }

    /// The server is asked for the Node.
    pub(super) fn registers(&self) {
        self.startup(|clock| clock.registers(now_unix_nanos()));
    }

    /// The server has this Node, which was `made` or found.
    pub(super) fn registered(&self, made: bool, node: &Value) {
        let now = now_unix_nanos();
        self.startup(|clock| clock.registered(made, now));
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

    fn startup<T>(&self, look: impl FnOnce(&mut StartupClock) -> T) -> T {
        look(&mut self.startup.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn is_ready(node: &Value) -> bool {
    let mut conditions = node["status"]["conditions"].as_array().into_iter().flatten();
    conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

/// When the machine was booted; `None` where it does not tell.
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
    fn the_start_of_a_node_is_told_when_it_is_ready_and_not_of_one_that_was_there() {
        let node = |status: &str| json!({"status": {"conditions": [{"type": "Ready", "status": status}]}});
        for (made, lines) in [(true, 5), (false, 0)] {
            let config =
                Config { resolved_unix_nanos: now_unix_nanos() - 3_000_000_000, ..Config::default() };
            let ctx = Context::detached(ServiceName::NodeStatus, config);
            let measured = Measured::register(&ctx);
            let told = |name: &str| -> Vec<String> {
                let text = ctx.metrics.text();
                text.lines().filter(|line| line.starts_with(name)).map(str::to_owned).collect()
            };
            measured.registers();
            measured.registered(made, &node("False"));
            assert!(told("kubelet_node_startup").is_empty());
            measured.registered(false, &node("True"));
            measured.registered(false, &node("True"));
            let found = told("kubelet_node_startup");
            assert_eq!(found.len(), lines, "{found:?}");
            if made {
                let line = told("kubelet_node_startup_pre_registration_duration_seconds ").remove(0);
                let seconds: f64 = line.split(' ').nth(1).unwrap().parse().unwrap();
                assert!((3.0..60.0).contains(&seconds), "{line}");
            }
        }
    }
}
