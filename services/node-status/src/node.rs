//! The loop that builds the Node.

mod record;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use keelson_config::Paths;
use keelson_kube_model::{Node, NodeAddress, NodeCondition, annotations};
use keelson_node_status_core::health::SILENCE_MS;
use keelson_node_status_core::{
    AddressInputs, NodeInputs, NodeReport, RuntimeState, Watchdog, build_node, report_after_ms,
    worth_reporting,
};
use keelson_service_kit::{Context, LoopHandle, is_local_address, now_unix_nanos, preferred_route_address};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::checkpoint::Checkpoint;
use crate::observed_state::ObservedState;
use crate::peer_health::Clock;
use crate::writer::ControlPlaneWriter;

/// The largest part by which the time between two turns is lengthened (node-and-api.md §9.8).
const JITTER: f64 = 0.04;

/// How long a new node-status waits for the first report of every service before it judges.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(3);

/// Longer certificates are not put into the Node, in bytes.
const MAX_CERTIFICATE_BYTES: usize = 64 << 10;

pub(crate) struct NodeLoop {
    ctx: Context,
    clock: Clock,
    writer: Arc<dyn ControlPlaneWriter>,
    checkpoint: Arc<watch::Sender<Checkpoint>>,
    handle: LoopHandle,
    conditions: Vec<NodeCondition>,
    /// When the Node of this name was first built, unix seconds.
    created: i64,
    /// The Node written last, and when it is written again without a change.
    written: Option<(NodeReport, Instant)>,
}

impl NodeLoop {
    pub(crate) fn new(
        ctx: &Context,
        clock: Clock,
        writer: Arc<dyn ControlPlaneWriter>,
        checkpoint: Arc<watch::Sender<Checkpoint>>,
    ) -> Self {
        let name = Family::<[(&'static str, String); 1], Gauge>::default();
        name.get_or_create(&[("node", ctx.config.node_name.clone())]).set(1);
        ctx.metrics.register("kubelet_node_name", "The node's name; the value is always 1", name);
        let conditions = checkpoint.borrow().conditions.clone();
        let mut created = 0;
        checkpoint.send_modify(|checkpoint| {
            created = checkpoint.created(&ctx.config.node_name, now_unix_nanos() / 1_000_000_000);
        });
        let own = Self {
            handle: ctx.progress.register("node"),
            ctx: ctx.clone(),
            clock,
            writer,
            checkpoint,
            conditions,
            created,
            written: None,
        };
        own.record_start();
        own
    }

    /// Builds the Node on every change and at each heartbeat, until the shutdown.
    pub(crate) async fn run(
        mut self,
        mut observed: watch::Receiver<ObservedState>,
        mut health: watch::Receiver<Watchdog>,
        published: watch::Sender<Option<Arc<Node>>>,
    ) {
        let shutdown = self.ctx.shutdown.clone();
        // Cancel-safe: waiting takes nothing from the channels.
        tokio::select! {
            () = shutdown.cancelled() => return,
            _ = timeout(SETTLE_TIMEOUT, wait_for_reports(&mut observed, &mut health)) => {}
        }
        loop {
            self.handle.tick();
            let seen = observed.borrow_and_update().clone();
            let watchdog = health.borrow_and_update().clone();
            let node = Arc::new(self.build(&seen, &watchdog));
            published.send_replace(Some(Arc::clone(&node)));
            let csi_drivers = Arc::clone(&seen.csi_drivers);
            let has_volumes_in_use = seen.volumes_in_use.is_some();
            self.write(NodeReport { node, has_volumes_in_use, csi_drivers }).await;
            let next = self.next_turn(&seen, &watchdog);
            // Cancel-safe: the channels keep a change until it is borrowed.
            let open = tokio::select! {
                () = shutdown.cancelled() => return,
                end = observed.changed() => end.is_ok(),
                end = health.changed() => end.is_ok(),
                () = tokio::time::sleep_until(next) => true,
            };
            if !open {
                return;
            }
        }
    }

    /// The next heartbeat, or sooner when an allowed silence ends before it.
    fn next_turn(&self, observed: &ObservedState, watchdog: &Watchdog) -> Instant {
        let update = Duration::from_millis(self.ctx.config.node_status.status_update_ms);
        let period = update.min(LoopHandle::HEARTBEAT).mul_f64(1.0 + JITTER * fastrand::f64());
        let heartbeat = Instant::now() + period;
        let now = self.clock.now_ms();
        let down = observed.runtime_unknown_since_ms.map(|since| since + SILENCE_MS).filter(|at| *at > now);
        let soonest = watchdog.next_change_ms(now).into_iter().chain(down).min();
        soonest.map_or(heartbeat, |ms| heartbeat.min(self.clock.at(ms)))
    }

    fn build(&mut self, observed: &ObservedState, watchdog: &Watchdog) -> Node {
        let now_ms = self.clock.now_ms();
        let config = Arc::clone(&self.ctx.config);
        let down =
            observed.runtime_unknown_since_ms.filter(|since| now_ms.saturating_sub(*since) >= SILENCE_MS);
        let down_runtime = RuntimeState { unreachable: true, ..observed.runtime.clone().unwrap_or_default() };
        let own = &config.node_status;
        let addresses = AddressInputs {
            node_ips: &own.node_ips,
            external_cloud: own.external_cloud,
            default_address: preferred_route_address(prefers_v6(&own.node_ips)),
        };
        let unusable = addresses.unusable(is_local_address);
        let service_errors = watchdog.errors(now_ms);
        let mut node = build_node(
            &NodeInputs {
                node_name: &config.node_name,
                labels: &config.resources.node_labels,
                max_pods: config.resources.max_pods,
                api_port: config.api.port,
                kubelet_version: &config.own_processes.kubelet_version,
                controller_attach_detach: own.controller_attach_detach,
                addresses: unusable.is_none().then_some(addresses),
                machine: observed.machine.as_ref(),
                images: observed.images.as_deref().unwrap_or_default(),
                volumes_in_use: observed.volumes_in_use.as_deref(),
                runtime: if down.is_some() { Some(&down_runtime) } else { observed.runtime.as_ref() },
                declared_features: &own.declared_features,
                service_errors: &service_errors,
                created_unix_seconds: self.created,
                now_unix_seconds: now_unix_nanos() / 1_000_000_000,
            },
            &self.conditions,
        );
        if config.api.tls.is_some() {
            let shown = serving_certificate(&config.paths);
            node.metadata
                .annotations
                .extend(shown.map(|pem| (annotations::SERVING_CERTIFICATE.to_owned(), pem)));
        }
        self.update_address_condition(&node, unusable);
        self.record_changes(&node);
        node
    }

    /// Updates the condition about the addresses.
    fn update_address_condition(&self, node: &Node, unusable: Option<String>) {
        let own = &self.ctx.config.node_status;
        let is_internal = |address: &NodeAddress| address.type_ == "InternalIP";
        let external_cloud = own.external_cloud && own.node_ips.is_empty();
        let result = match unusable {
            Some(why) => {
                Err(format!("failed to validate nodeIP: {why}; correct --node-ip, or wait until it is there"))
            }
            None if external_cloud || node.status.addresses.iter().any(is_internal) => Ok(()),
            None => Err(format!(
                "can't get ip address of node {}: there is no default route; it is checked again",
                node.metadata.name
            )),
        };
        self.ctx.progress.condition("node address", result);
    }

    async fn write(&mut self, report: NodeReport) {
        let last = self.written.as_ref();
        let changed = worth_reporting(last.map(|(report, _)| report), &report);
        if !changed && last.is_some_and(|(_, due)| Instant::now() < *due) {
            return;
        }
        match self.writer.write_node(&report).await {
            Ok(()) => {
                let every = self.ctx.config.node_status.status_report_ms;
                let after = report_after_ms(every, changed, fastrand::f64());
                self.written = Some((report, Instant::now() + Duration::from_millis(after)));
                self.ctx.progress.condition("node report", Ok(()));
            }
            Err(error) => self.ctx.progress.condition("node report", Err(error.to_string())),
        }
    }
}

/// Waits until every service that counts has reported.
async fn wait_for_reports(
    observed: &mut watch::Receiver<ObservedState>,
    health: &mut watch::Receiver<Watchdog>,
) {
    let ready = |observed: &ObservedState| observed.runtime.as_ref().is_some_and(|r| r.ready);
    let have_reported =
        |observed: &ObservedState| observed.machine.is_some() && ready(observed) && observed.images.is_some();
    let both = async {
        let _ = observed.wait_for(have_reported).await;
        let _ = health.wait_for(Watchdog::all_healthy).await;
    };
    both.await;
}

/// Whether `--node-ip` is `::`: any address, of this family where there is one.
fn prefers_v6(node_ips: &[IpAddr]) -> bool {
    matches!(node_ips, [IpAddr::V6(ip)] if ip.is_unspecified())
}

/// The serving certificate of the kubelet API, for clients that pin it; `None` before there is one.
fn serving_certificate(paths: &Paths) -> Option<String> {
    let text = std::fs::read_to_string(paths.serving_certificate()).ok()?;
    Some(text).filter(|text| text.len() <= MAX_CERTIFICATE_BYTES)
}

#[cfg(test)]
mod tests {
    use keelson_config::{Config, ServiceName};
    use keelson_kube_model::ContainerImage;
    use keelson_node_status_core::{Machine, Progress};

    use super::*;
    use crate::images;
    use crate::peer_health::watchdog;
    use crate::writer::NoControlPlane;

    struct Bench {
        ctx: Context,
        clock: Clock,
        observed: watch::Sender<ObservedState>,
        health: watch::Sender<Watchdog>,
        node: watch::Receiver<Option<Arc<Node>>>,
        writer: Arc<NoControlPlane>,
    }

    fn bench(checkpoint: Checkpoint) -> Bench {
        bench_with(checkpoint, |_| ())
    }

    fn bench_with(checkpoint: Checkpoint, change: impl FnOnce(&mut Config)) -> Bench {
        let mut config = Config { node_name: "n1".into(), ..Config::default() };
        change(&mut config);
        let ctx = Context::detached(ServiceName::NodeStatus, config);
        let clock = Clock::start();
        let writer = Arc::new(NoControlPlane::new(&ctx.metrics));
        let (observed, observed_rx) = watch::channel(ObservedState::default());
        let (health, health_rx) = watch::channel(watchdog());
        let (published, node) = watch::channel(None);
        let checkpoint = Arc::new(watch::Sender::new(checkpoint));
        let turns = NodeLoop::new(&ctx, clock, writer.clone(), checkpoint);
        tokio::spawn(turns.run(observed_rx, health_rx, published));
        Bench { ctx, clock, observed, health, node, writer }
    }

    impl Bench {
        fn all_well(&self) {
            let names = ["cpu", "memory", "pods", "ephemeral-storage"];
            let machine =
                Machine { capacity: names.map(|n| (n.to_owned(), 1 << 20)).into(), ..Machine::default() };
            self.observed.send_modify(|observed| {
                observed.machine = Some(machine);
                observed.store_runtime(runtime(true), 0);
            });
            images::store(&self.observed, Vec::new());
            self.services(Progress::Healthy);
        }

        fn services(&self, answer: Progress) {
            let now = self.clock.now_ms();
            self.health.send_modify(|w| {
                for name in ["pod-sync", "runtime-shim", "volume-manager", "resource-manager", "pod-config"] {
                    w.record(name, answer.clone(), now);
                }
            });
        }

        fn pod_config(&self, answer: Progress) {
            let now = self.clock.now_ms();
            self.health.send_modify(|w| w.record("pod-config", answer, now));
        }

        async fn ready(&mut self) -> NodeCondition {
            let node = self.node.wait_for(Option::is_some).await.unwrap().clone().unwrap();
            node.status.conditions[3].clone()
        }

        async fn ready_becomes(&mut self, status: &str) -> Duration {
            let started = Instant::now();
            let is =
                |n: &Option<Arc<Node>>| n.as_ref().is_some_and(|n| n.status.conditions[3].status == status);
            // Far longer than needed; the clock is paused.
            let changed = timeout(Duration::from_secs(3600), self.node.wait_for(is)).await;
            assert!(changed.is_ok(), "Ready does not become {status}");
            started.elapsed()
        }
    }

    fn runtime(ready: bool) -> RuntimeState {
        RuntimeState {
            name: "containerd".into(),
            version: "1".into(),
            ready,
            network_ready: ready,
            message: if ready { String::new() } else { "container runtime not ready: X".into() },
            ..RuntimeState::default()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_node_waits_for_all_services_but_not_for_long() {
        let mut bench = bench(Checkpoint::default());
        let started = Instant::now();
        assert_eq!(bench.ready().await.status, "False");
        assert_eq!(started.elapsed(), SETTLE_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_ip_without_an_interface_is_a_condition_and_leaves_no_address() {
        // From a network reserved for documentation (RFC 5737).
        let mut bench = bench_with(Checkpoint::default(), |config| {
            config.node_status.node_ips = vec!["198.51.100.7".parse().unwrap()];
        });
        bench.all_well();
        let node = bench.node.wait_for(Option::is_some).await.unwrap().clone().unwrap();
        assert!(node.status.addresses.is_empty(), "{:?}", node.status.addresses);
        let report = bench.ctx.progress.report("0");
        let result = report.conditions.iter().find(|condition| condition.name == "node address").unwrap();
        let words = "failed to validate nodeIP: node IP: \"198.51.100.7\" not found";
        assert!(!result.ok && result.message.starts_with(words), "{result:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_restarted_node_status_keeps_ready_and_its_transition_time() {
        let old = NodeCondition {
            type_: "Ready".into(),
            status: "True".into(),
            last_transition_time: Some("2026-01-01T00:00:00Z".into()),
            ..NodeCondition::default()
        };
        let mut bench = bench(Checkpoint { conditions: vec![old], ..Checkpoint::default() });
        tokio::time::sleep(Duration::from_secs(1)).await;
        bench.all_well();
        let ready = bench.ready().await;
        assert_eq!(ready.status, "True");
        assert_eq!(ready.last_transition_time.as_deref(), Some("2026-01-01T00:00:00Z"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_recovered_runtime_makes_the_node_ready_at_once() {
        let mut bench = bench(Checkpoint::default());
        bench.all_well();
        assert_eq!(bench.ready().await.status, "True");
        bench.observed.send_modify(|w| w.store_runtime(runtime(false), 0));
        bench.ready_becomes("False").await;
        assert_eq!(bench.ready().await.message, "container runtime not ready: X");
        tokio::time::sleep(Duration::from_secs(3)).await;
        bench.observed.send_modify(|w| w.store_runtime(runtime(true), 0));
        assert!(bench.ready_becomes("True").await < Duration::from_secs(1));
        assert_eq!(bench.writer.taken("node"), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn silent_services_make_the_node_unready_after_thirty_seconds() {
        let mut bench = bench(Checkpoint::default());
        bench.all_well();
        assert_eq!(bench.ready().await.status, "True");
        let answered = bench.clock.now_ms();
        bench.services(Progress::NoAnswer { error: "stopped".into() });
        bench.ready_becomes("False").await;
        assert_eq!(bench.clock.now_ms() - answered, 30_000);
        assert!(bench.ready().await.message.contains("pod-sync makes no progress"));
    }

    #[tokio::test(start_paused = true)]
    async fn without_pod_config_the_node_is_unready_after_five_minutes() {
        let gone = Progress::NoAnswer { error: "no socket".into() };
        let stuck = Progress::Stuck { loop_name: "file-source".into() };
        let watch_failing = Progress::WatchFailing { message: "pods is forbidden".into() };
        for (answer, start, text) in [
            (gone, "pod-config has read no pod source", "does not answer (no socket)"),
            (stuck, "pod-config has read no pod source", "loop \"file-source\""),
            (
                watch_failing,
                "pod-config has had no working watch of pods",
                "writes succeed: pods is forbidden",
            ),
        ] {
            let mut bench = bench(Checkpoint::default());
            bench.all_well();
            assert_eq!(bench.ready().await.status, "True");
            tokio::time::sleep(Duration::from_secs(10)).await;
            bench.pod_config(answer);
            assert_eq!(bench.ready_becomes("False").await, Duration::from_secs(290));
            let message = bench.ready().await.message;
            assert!(message.starts_with(start) && message.contains(text), "{message}");
            bench.pod_config(Progress::Healthy);
            assert!(bench.ready_becomes("True").await < Duration::from_secs(1));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_unreachable_runtime_is_down_after_thirty_seconds() {
        let mut bench = bench(Checkpoint::default());
        bench.all_well();
        assert_eq!(bench.ready().await.status, "True");
        let unreachable = RuntimeState { unreachable: true, ..runtime(false) };
        let now = bench.clock.now_ms();
        bench.observed.send_modify(|w| w.store_runtime(unreachable.clone(), now));
        assert_eq!(bench.ready_becomes("False").await, Duration::from_secs(30));
        assert_eq!(bench.ready().await.message, "container runtime is down");
        bench.observed.send_modify(|w| w.store_runtime(runtime(true), 0));
        assert!(bench.ready_becomes("True").await < Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_node_has_the_images_if_they_are_listed_in_time() {
        let mut bench = bench(Checkpoint::default());
        let image = ContainerImage { names: vec!["a:1".into()], size_bytes: Some(7) };
        bench.observed.send_modify(|observed| observed.store_runtime(runtime(true), 0));
        let listed = vec![image.clone(), image];
        let observed = bench.observed.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            images::store(&observed, listed);
        });
        bench.observed.send_modify(|observed| observed.machine = Some(Machine::default()));
        bench.services(Progress::Healthy);
        let started = Instant::now();
        let node = bench.node.wait_for(Option::is_some).await.unwrap().clone().unwrap();
        assert_eq!((node.status.images.len(), started.elapsed()), (2, Duration::from_secs(1)));
    }

    #[tokio::test(start_paused = true)]
    async fn new_images_are_written_with_the_next_heartbeat_and_only_once() {
        let mut bench = bench(Checkpoint::default());
        bench.all_well();
        bench.ready().await;
        let started = Instant::now();
        let image = ContainerImage { names: vec!["a:1".into()], size_bytes: Some(7) };
        tokio::time::sleep(Duration::from_secs(4)).await;
        images::store(&bench.observed, vec![image.clone()]);
        let listed = |n: &Option<Arc<Node>>| n.as_ref().is_some_and(|n| !n.status.images.is_empty());
        let node = bench.node.wait_for(listed).await.unwrap().clone().unwrap();
        let late = started.elapsed().saturating_sub(LoopHandle::HEARTBEAT);
        assert!(started.elapsed() >= LoopHandle::HEARTBEAT && late <= Duration::from_millis(400), "{late:?}");
        assert_eq!(node.status.images, std::slice::from_ref(&image));
        images::store(&bench.observed, vec![image]);
        tokio::time::sleep(Duration::from_secs(120)).await;
        assert_eq!(bench.writer.taken("node"), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_changed_list_of_volumes_in_use_is_written_at_once() {
        let mut bench = bench(Checkpoint::default());
        bench.all_well();
        let node = bench.node.wait_for(Option::is_some).await.unwrap().clone().unwrap();
        assert!(node.status.volumes_in_use.is_empty());
        // The first list is empty, but the control plane may have another one.
        for (written, list) in [(2, vec![]), (3, vec!["a".to_owned(), "b".to_owned()]), (4, vec![])] {
            let started = Instant::now();
            let volumes: Arc<[String]> = list.clone().into();
            bench.observed.send_modify(|observed| observed.volumes_in_use = Some(volumes));
            bench.node.changed().await.unwrap();
            let node = bench.node.borrow_and_update().clone().unwrap();
            assert_eq!(node.status.volumes_in_use, list);
            tokio::task::yield_now().await;
            assert_eq!((bench.writer.taken("node"), started.elapsed()), (written, Duration::ZERO));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_unchanged_node_is_written_once_and_its_loop_has_heartbeats() {
        let mut bench = bench(Checkpoint::default());
        bench.all_well();
        bench.ready().await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(bench.writer.taken("node"), 1);
        assert!(bench.ctx.progress.report("").loops.iter().any(|l| l.name == "node"));
        assert!(bench.ctx.metrics.text().contains("kubelet_node_name{node=\"n1\"} 1"));
    }

    #[tokio::test(start_paused = true)]
    async fn the_serving_certificate_annotation_follows_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut bench = bench_with(Checkpoint::default(), |config| {
            config.paths.run_dir = dir.path().to_owned();
            config.api.tls = Some(keelson_config::ApiTls::with_client_ca("/ca".into()));
        });
        bench.all_well();
        bench.ready().await;
        let file = Paths { run_dir: dir.path().to_owned(), ..Paths::default() }.serving_certificate();
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        for text in ["one", "two"] {
            std::fs::write(&file, text).unwrap();
            let result = |node: &Option<Arc<Node>>| {
                let node = node.as_ref()?;
                node.metadata.annotations.get(annotations::SERVING_CERTIFICATE).cloned()
            };
            bench.node.wait_for(|node| result(node).as_deref() == Some(text)).await.unwrap();
            let written = bench.writer.taken("node");
            tokio::time::sleep(Duration::from_secs(30)).await;
            assert_eq!(bench.writer.taken("node"), written, "no more than once");
        }
        assert_eq!(bench.writer.taken("node"), 3);
    }
}
