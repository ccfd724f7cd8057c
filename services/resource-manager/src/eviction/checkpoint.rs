//! The checkpoint of the eviction task: the orders in effect, and since when thresholds are met.

use keelson_config::{Config, ServiceName};
use keelson_resource_manager_core::desire::PodRef;
use keelson_resource_manager_core::drain::Drain;
use keelson_resource_manager_core::eviction::monitor::Monitor;
use keelson_resource_manager_core::eviction::order::{Order, OrderKind};
use keelson_resource_manager_core::eviction::signal::{Condition, Signal};
use keelson_service_kit::{StateFile, StoredState};
use serde::{Deserialize, Serialize};

/// The checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub(crate) struct Checkpoint {
    pub(crate) orders: Vec<Order>,
    pub(crate) monitor: Monitor,
    /// The boot in which it was written.
    pub(crate) boot_id: String,
}

impl Checkpoint {
    /// Without the orders of a shutdown that a reboot has ended: pods that no controller has replaced start again. When the boot
    /// is not known they are dropped too; a shutdown that is still under way orders the same again.
    pub(crate) fn in_boot(mut self, boot_id: &str) -> Self {
        if boot_id.is_empty() || self.boot_id != boot_id {
            self.orders.retain(|order| order.kind() != OrderKind::NodeShutdown);
        }
        self
    }

    /// Without the orders of a drain that was undone, or that has not ended pods.
    pub(crate) fn under_drain(mut self, drain: Option<&Drain>) -> Self {
        if !drain.is_some_and(|drain| drain.stop_pods) {
            self.orders.retain(|order| order.kind() != OrderKind::NodeDrain);
        }
        self
    }
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Stored {
    orders: Vec<StoredOrder>,
    /// Signal, whether the threshold is hard, since when in milliseconds since 1970, and whether it is acted on.
    met: Vec<(String, bool, u64, bool)>,
    /// Condition and when it was last observed, in milliseconds since 1970.
    conditions: Vec<(String, u64)>,
    boot_id: String,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct StoredOrder {
    uid: String,
    namespace: String,
    name: String,
    reason: String,
    message: String,
    grace_seconds: Option<i64>,
    condition_message: String,
    signal: String,
    since_unix_nanos: i64,
}

impl StoredState for Checkpoint {
    const VERSION: u64 = 1;
    const CONSEQUENCE_OF_LOSS: &'static str = "pods that are being evicted then keep running";
    const CONSEQUENCE_OF_WRITE_ERROR: &'static str =
        "a restart would forget evictions in progress: free disk space and make the directory writable";
}

/// `<state-dir>/resource-manager/evictions.json`.
pub(crate) fn state_file(config: &Config) -> StateFile<Checkpoint> {
    StateFile::at(config.paths.state(ServiceName::ResourceManager).join("evictions.json"))
}

impl From<Checkpoint> for Stored {
    fn from(checkpoint: Checkpoint) -> Self {
        let Monitor { met_since, acted_on, last_observed, .. } = checkpoint.monitor;
        let met = met_since
            .into_iter()
            .map(|(key, since)| (key.0.name().to_owned(), key.1, since, acted_on.contains(&key)));
        Self {
            orders: checkpoint.orders.into_iter().map(StoredOrder::from).collect(),
            met: met.collect(),
            conditions: last_observed.into_iter().map(|(c, last)| (c.name().to_owned(), last)).collect(),
            boot_id: checkpoint.boot_id,
        }
    }
}

impl From<Stored> for Checkpoint {
    fn from(stored: Stored) -> Self {
        let mut monitor = Monitor::default();
        for (signal, hard, since, acted_on) in stored.met {
            let Some(signal) = Signal::parse(&signal) else { continue };
            monitor.met_since.insert((signal, hard), since);
            if acted_on {
                monitor.acted_on.insert((signal, hard));
            }
        }
        let conditions = stored.conditions.into_iter();
        monitor.last_observed =
            conditions.filter_map(|(name, last)| Some((Condition::parse(&name)?, last))).collect();
        let orders = stored.orders.into_iter().filter(|order| !order.uid.is_empty());
        Self { orders: orders.map(Order::from).collect(), monitor, boot_id: stored.boot_id }
    }
}

impl From<Order> for StoredOrder {
    fn from(order: Order) -> Self {
        Self {
            uid: order.pod.uid,
            namespace: order.pod.namespace,
            name: order.pod.name,
            reason: order.reason,
            message: order.message,
            grace_seconds: order.grace_seconds,
            condition_message: order.condition_message,
            signal: order.signal,
            since_unix_nanos: order.since_unix_nanos,
        }
    }
}

impl From<StoredOrder> for Order {
    fn from(stored: StoredOrder) -> Self {
        Self {
            pod: PodRef { uid: stored.uid, namespace: stored.namespace, name: stored.name },
            reason: stored.reason,
            message: stored.message,
            grace_seconds: stored.grace_seconds,
            condition_message: stored.condition_message,
            signal: stored.signal,
            since_unix_nanos: stored.since_unix_nanos,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_eviction_checkpoint_round_trips() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.state_dir = dir.path().to_owned();
        let file = state_file(&config);
        assert_eq!(file.load().await.unwrap(), Checkpoint::default());
        let mut monitor = Monitor::default();
        monitor.met_since.insert((Signal::MemoryAvailable, true), 5);
        monitor.met_since.insert((Signal::PidAvailable, false), 6);
        monitor.acted_on.insert((Signal::MemoryAvailable, true));
        monitor.last_observed.insert(Condition::Memory, 7);
        let order = Order {
            pod: PodRef { uid: "u".into(), namespace: "ns".into(), name: "web".into() },
            reason: "Evicted".into(),
            message: "m".into(),
            grace_seconds: Some(1),
            condition_message: "c".into(),
            signal: "memory.available".into(),
            since_unix_nanos: 9,
            ..Order::default()
        };
        let checkpoint = Checkpoint { orders: vec![order], monitor, boot_id: "b".into() };
        file.store(checkpoint.clone()).await.unwrap();
        assert_eq!(file.load().await.unwrap(), checkpoint);
    }

    #[test]
    fn orders_of_a_shutdown_are_dropped_after_a_reboot_and_others_are_kept() {
        let order = |signal: &str| Order { signal: signal.into(), ..Order::default() };
        let all = ["memory.available", "node-shutdown", "preemption"];
        for (written, now, kept) in [
            ("b1", "b1", &all[..]),
            ("b1", "b2", &["memory.available", "preemption"][..]),
            ("", "b2", &["memory.available", "preemption"][..]),
            ("", "", &["memory.available", "preemption"][..]),
        ] {
            let orders = all.map(order).into();
            let checkpoint = Checkpoint { orders, boot_id: written.into(), ..Checkpoint::default() };
            let orders = checkpoint.in_boot(now).orders;
            let signals: Vec<&str> = orders.iter().map(|order| order.signal.as_str()).collect();
            assert_eq!(signals, kept, "{written} {now}");
        }
    }

    #[test]
    fn orders_of_a_drain_are_kept_over_a_reboot_until_it_is_undone() {
        let order = |signal: &str| Order { signal: signal.into(), ..Order::default() };
        let all = ["memory.available", "node-drain"];
        for (drain, kept) in [
            (Some(true), &all[..]),
            (Some(false), &["memory.available"][..]),
            (None, &["memory.available"][..]),
        ] {
            let drain = drain.map(|stop_pods| Drain { stop_pods, ..Drain::default() });
            let checkpoint = Checkpoint { orders: all.map(order).into(), ..Checkpoint::default() };
            let orders = checkpoint.in_boot("another").under_drain(drain.as_ref()).orders;
            let signals: Vec<&str> = orders.iter().map(|order| order.signal.as_str()).collect();
            assert_eq!(signals, kept, "{drain:?}");
        }
    }
}
