//! The loop that builds the Node.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use keelson_config::Paths;
use keelson_kube_model::{Node, NodeAddress, NodeCondition, annotations};
use keelson_node_status_core::health::SILENCE_MS;
use keelson_node_status_core::{
    AddressInputs, NodeEvent, NodeInputs, RuntimeState, Watchdog, build_node, condition_events,
    rebooted_event, report_after_ms, starting_event, worth_reporting,
};
use keelson_service_kit::{
    Context, LoopHandle, NewEvent, ObjectRef, is_local_address, now_unix_nanos, preferred_route_address,
};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::inputs::World;
use crate::neighbours::Clock;
use crate::saved::Saved;
use crate::writer::ControlPlaneWriter;

/// The most by which the time between two looks is longer (node-and-api.md §9.8), as a part of it.
const JITTER: f64 = 0.04;

/// How long a new node-status waits for the first word of everybody before it judges.
const SETTLE: Duration = Duration::from_secs(3);

/// Certificates that are longer are none that a Node could carry.
const LONGEST_CERTIFICATES: usize = 64 << 10;

pub(crate) struct NodeLoop {
    ctx: Context,
    clock: Clock,
    writer: Arc<dyn ControlPlaneWriter>,
    saved: Arc<watch::Sender<Saved>>,
    handle: LoopHandle,
    conditions: Vec<NodeCondition>,
    /// When the Node of this name was built first, unix seconds.
    created: i64,
    /// What was written last, and when it is written again without news.
    written: Option<(Arc<Node>, Instant)>,
}

impl NodeLoop {
    pub(crate) fn new(
        ctx: &Context,
        clock: Clock,
        writer: Arc<dyn ControlPlaneWriter>,
        saved: Arc<watch::Sender<Saved>>,
    ) -> Self {
        let name = Family::<[(&'static str, String); 1], Gauge>::default();
        name.get_or_create(&[("node", ctx.config.node_name.clone())]).set(1);
        ctx.metrics.register("kubelet_node_name", "The node's name; the value is always 1", name);
        let conditions = saved.borrow().conditions.clone();
        let mut created = 0;
        saved.send_modify(|saved| {
            created = saved.created(&ctx.config.node_name, now_unix_nanos() / 1_000_000_000);
        });
        let own = Self {
            handle: ctx.progress.register("node"),
            ctx: ctx.clone(),
            clock,
            writer,
            saved,
            conditions,
            created,
            written: None,
        };
        own.tell_start();
        own
    }

    /// Tells that the agent has started, unless an earlier node-status of the same start has.
    fn tell_start(&self) {
        let now = self.ctx.config.resolved_unix_nanos;
        let before = self.saved.borrow().agent_start;
        if let Some(event) = starting_event(before, now) {
            self.tell(&self.ctx.config.node_name, event);
            self.saved.send_modify(|saved| saved.agent_start = now);
        }
    }

    /// Builds the Node on every news and at each heartbeat, until the shutdown.
    pub(crate) async fn run(
        mut self,
        mut world: watch::Receiver<World>,
        mut health: watch::Receiver<Watchdog>,
        published: watch::Sender<Option<Arc<Node>>>,
    ) {
        let shutdown = self.ctx.shutdown.clone();
        // Cancel-safe: waiting takes nothing from the channels.
        tokio::select! {
            () = shutdown.cancelled() => return,
            _ = timeout(SETTLE, settled(&mut world, &mut health)) => {}
        }
        loop {
            self.handle.tick();
            let seen = world.borrow_and_update().clone();
            let watchdog = health.borrow_and_update().clone();
            let node = Arc::new(self.build(&seen, &watchdog));
            published.send_replace(Some(Arc::clone(&node)));
            self.write(&node).await;
            let next = self.next_turn(&seen, &watchdog);
            // Cancel-safe: the channels keep their news until it is borrowed.
            let open = tokio::select! {
                () = shutdown.cancelled() => return,
                end = world.changed() => end.is_ok(),
                end = health.changed() => end.is_ok(),
                () = tokio::time::sleep_until(next) => true,
            };
            if !open {
                return;
            }
        }
    }

    /// The next heartbeat, or sooner when a silence becomes too long before it.
    fn next_turn(&self, world: &World, watchdog: &Watchdog) -> Instant {
        let update = Duration::from_millis(self.ctx.config.node_status.status_update_ms);
        let period = update.min(LoopHandle::HEARTBEAT).mul_f64(1.0 + JITTER * fastrand::f64());
        let heartbeat = Instant::now() + period;
        let now = self.clock.now_ms();
        let down = world.runtime_unknown_since_ms.map(|since| since + SILENCE_MS).filter(|at| *at > now);
        let soonest = watchdog.next_change_ms(now).into_iter().chain(down).min();
        soonest.map_or(heartbeat, |ms| heartbeat.min(self.clock.at(ms)))
    }

    fn build(&mut self, world: &World, watchdog: &Watchdog) -> Node {
        let now_ms = self.clock.now_ms();
        let config = Arc::clone(&self.ctx.config);
        let down = world.runtime_unknown_since_ms.filter(|since| now_ms.saturating_sub(*since) >= SILENCE_MS);
        let lost = RuntimeState { unreachable: true, ..world.runtime.clone().unwrap_or_default() };
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
                machine: world.machine.as_ref(),
                images: world.images.as_deref().unwrap_or_default(),
                runtime: if down.is_some() { Some(&lost) } else { world.runtime.as_ref() },
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
        self.tell_addresses(&node, unusable);
        self.remember(&node);
        node
    }

    /// Says what is wrong with the addresses.
    fn tell_addresses(&self, node: &Node, unusable: Option<String>) {
        let own = &self.ctx.config.node_status;
        let is_internal = |address: &NodeAddress| address.type_ == "InternalIP";
        let of_cloud = own.external_cloud && own.node_ips.is_empty();
        let told = match unusable {
            Some(why) => {
                Err(format!("failed to validate nodeIP: {why}; correct --node-ip, or wait until it is there"))
            }
            None if of_cloud || node.status.addresses.iter().any(is_internal) => Ok(()),
            None => Err(format!(
                "can't get ip address of node {}: there is no default route; looking again",
                node.metadata.name
            )),
        };
        self.ctx.progress.condition("node address", told);
    }

    /// Tells what has changed, and keeps it for the next turn and the next start.
    fn remember(&mut self, node: &Node) {
        let name = &node.metadata.name;
        let boot_id = &node.status.node_info.boot_id;
        let before = self.saved.borrow().boot_id.clone();
        let reboot = rebooted_event(name, &before, boot_id);
        for event in
            condition_events(name, &self.conditions, &node.status.conditions).into_iter().chain(reboot)
        {
            self.tell(name, event);
        }
        self.conditions.clone_from(&node.status.conditions);
        let mut lasting = self.conditions.clone();
        for condition in &mut lasting {
            condition.last_heartbeat_time = None;
        }
        self.saved.send_if_modified(|saved| {
            let changed = saved.conditions != lasting || (!boot_id.is_empty() && saved.boot_id != *boot_id);
            saved.conditions = lasting;
            if !boot_id.is_empty() {
                saved.boot_id.clone_from(boot_id);
            }
            changed
        });
    }

    fn tell(&self, node: &str, event: NodeEvent) {
        if event.reason == "NodeNotReady" {
            tracing::warn!(node, "{}", event.message);
        } else {
            tracing::info!(node, "{}", event.message);
        }
        self.ctx.events.record(NewEvent {
            warning: event.warning,
            reason: event.reason.to_owned(),
            message: event.message,
            object: ObjectRef::node(node),
        });
    }

    async fn write(&mut self, node: &Arc<Node>) {
        let last = self.written.as_ref();
        let changed = worth_reporting(last.map(|(node, _)| &**node), node);
        if !changed && last.is_some_and(|(_, again)| Instant::now() < *again) {
            return;
        }
        match self.writer.write_node(node).await {
            Ok(()) => {
                let every = self.ctx.config.node_status.status_report_ms;
                let after = report_after_ms(every, changed, fastrand::f64());
                self.written = Some((Arc::clone(node), Instant::now() + Duration::from_millis(after)));
                self.ctx.progress.condition("node report", Ok(()));
            }
            Err(error) => self.ctx.progress.condition("node report", Err(error.to_string())),
        }
    }
}

/// Waits until everybody whose word counts has spoken.
async fn settled(world: &mut watch::Receiver<World>, health: &mut watch::Receiver<Watchdog>) {
    let ready = |world: &World| world.runtime.as_ref().is_some_and(|r| r.ready);
    let spoken = |world: &World| world.machine.is_some() && ready(world) && world.images.is_some();
    let both = async {
        let _ = world.wait_for(spoken).await;
        let _ = health.wait_for(Watchdog::all_turning).await;
    };
    both.await;
}

/// Whether `--node-ip` is `::`: any address, of this family where there is one.
fn prefers_v6(node_ips: &[IpAddr]) -> bool {
    matches!(node_ips, [IpAddr::V6(ip)] if ip.is_unspecified())
}

/// What the kubelet API shows, for those who want to know it again; `None` before there is any.
fn serving_certificate(paths: &Paths) -> Option<String> {
    let text = std::fs::read_to_string(paths.serving_certificate()).ok()?;
    Some(text).filter(|text| text.len() <= LONGEST_CERTIFICATES)
}

#[cfg(test)]
mod tests {
    use keelson_config::{Config, ServiceName};
    use keelson_kube_model::ContainerImage;
    use keelson_node_status_core::{Answer, Machine};

    use super::*;
    use crate::images;
    use crate::neighbours::watchdog;
    use crate::writer::NoControlPlane;

    struct Bench {
        ctx: Context,
        clock: Clock,
        world: watch::Sender<World>,
        health: watch::Sender<Watchdog>,
        node: watch::Receiver<Option<Arc<Node>>>,
        writer: Arc<NoControlPlane>,
    }

    fn bench(saved: Saved) -> Bench {
        bench_with(saved, |_| ())
    }

    fn bench_with(saved: Saved, change: impl FnOnce(&mut Config)) -> Bench {
        let mut config = Config { node_name: "n1".into(), ..Config::default() };
        change(&mut config);
        let ctx = Context::detached(ServiceName::NodeStatus, config);
        let clock = Clock::start();
        let writer = Arc::new(NoControlPlane::new(&ctx.metrics));
        let (world, world_seen) = watch::channel(World::default());
        let (health, health_seen) = watch::channel(watchdog());
        let (published, node) = watch::channel(None);
        let saved = Arc::new(watch::Sender::new(saved));
        let turns = NodeLoop::new(&ctx, clock, writer.clone(), saved);
        tokio::spawn(turns.run(world_seen, health_seen, published));
        Bench { ctx, clock, world, health, node, writer }
    }

    impl Bench {
        fn all_well(&self) {
            let names = ["cpu", "memory", "pods", "ephemeral-storage"];
            let machine =
                Machine { capacity: names.map(|n| (n.to_owned(), 1 << 20)).into(), ..Machine::default() };
            self.world.send_modify(|world| {
                world.machine = Some(machine);
                world.take_runtime(runtime(true), 0);
            });
            images::take(&self.world, Vec::new());
            self.services(Answer::Turning);
        }

        fn services(&self, answer: Answer) {
            let now = self.clock.now_ms();
            self.health.send_modify(|w| {
                for name in ["pod-sync", "runtime-shim", "volume-manager", "resource-manager", "pod-config"] {
                    w.record(name, answer.clone(), now);
                }
            });
        }

        fn pod_config(&self, answer: Answer) {
            let now = self.clock.now_ms();
            self.health.send_modify(|w| w.record("pod-config", answer, now));
        }

        async fn ready(&mut self) -> NodeCondition {
            let node = self.node.wait_for(Option::is_some).await.unwrap().clone().unwrap();
            node.status.conditions[3].clone()
        }

        async fn ready_becomes(&mut self, status: &str) -> Duration {
            let begun = Instant::now();
            let is =
                |n: &Option<Arc<Node>>| n.as_ref().is_some_and(|n| n.status.conditions[3].status == status);
            // Far more than anything takes, of a clock that is not waited for.
            let turned = timeout(Duration::from_secs(3600), self.node.wait_for(is)).await;
            assert!(turned.is_ok(), "Ready does not become {status}");
            begun.elapsed()
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
    async fn the_first_node_waits_for_everybody_but_not_for_long() {
        let mut bench = bench(Saved::default());
        let begun = Instant::now();
        assert_eq!(bench.ready().await.status, "False");
        assert_eq!(begun.elapsed(), SETTLE);
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_is_not_there_yet_is_waited_for() {
        // Of a network for documents (RFC 5737).
        let mut bench = bench_with(Saved::default(), |config| {
            config.node_status.node_ips = vec!["198.51.100.7".parse().unwrap()];
        });
        bench.all_well();
        let node = bench.node.wait_for(Option::is_some).await.unwrap().clone().unwrap();
        assert!(node.status.addresses.is_empty(), "{:?}", node.status.addresses);
        let report = bench.ctx.progress.report("0");
        let told = report.conditions.iter().find(|condition| condition.name == "node address").unwrap();
        let words = "failed to validate nodeIP: node IP: \"198.51.100.7\" not found";
        assert!(!told.ok && told.message.starts_with(words), "{told:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_restarted_node_status_keeps_ready_and_its_transition_time() {
        let old = NodeCondition {
            type_: "Ready".into(),
            status: "True".into(),
            last_transition_time: Some("2026-01-01T00:00:00Z".into()),
            ..NodeCondition::default()
        };
        let mut bench = bench(Saved { conditions: vec![old], ..Saved::default() });
        tokio::time::sleep(Duration::from_secs(1)).await;
        bench.all_well();
        let ready = bench.ready().await;
        assert_eq!(ready.status, "True");
        assert_eq!(ready.last_transition_time.as_deref(), Some("2026-01-01T00:00:00Z"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_comes_back_makes_the_node_ready_at_once() {
        let mut bench = bench(Saved::default());
        bench.all_well();
        assert_eq!(bench.ready().await.status, "True");
        bench.world.send_modify(|w| w.take_runtime(runtime(false), 0));
        bench.ready_becomes("False").await;
        assert_eq!(bench.ready().await.message, "container runtime not ready: X");
        tokio::time::sleep(Duration::from_secs(3)).await;
        bench.world.send_modify(|w| w.take_runtime(runtime(true), 0));
        assert!(bench.ready_becomes("True").await < Duration::from_secs(1));
        assert_eq!(bench.writer.taken("node"), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn services_that_fall_silent_make_the_node_unready_after_exactly_thirty_seconds() {
        let mut bench = bench(Saved::default());
        bench.all_well();
        assert_eq!(bench.ready().await.status, "True");
        let answered = bench.clock.now_ms();
        bench.services(Answer::None { error: "stopped".into() });
        bench.ready_becomes("False").await;
        assert_eq!(bench.clock.now_ms() - answered, 30_000);
        assert!(bench.ready().await.message.contains("pod-sync makes no progress"));
    }

    #[tokio::test(start_paused = true)]
    async fn without_pod_config_the_node_is_unready_after_exactly_five_minutes_and_ready_at_once_with_it() {
        let gone = Answer::None { error: "no socket".into() };
        let stuck = Answer::Stuck { loop_name: "file-source".into() };
        let deaf = Answer::Unwatched { message: "pods is forbidden".into() };
        for (answer, start, text) in [
            (gone, "pod-config has read no source of pods", "does not answer (no socket)"),
            (stuck, "pod-config has read no source of pods", "loop \"file-source\""),
            (deaf, "pod-config has had no working watch of pods", "writes are taken: pods is forbidden"),
        ] {
            let mut bench = bench(Saved::default());
            bench.all_well();
            assert_eq!(bench.ready().await.status, "True");
            tokio::time::sleep(Duration::from_secs(10)).await;
            bench.pod_config(answer);
            assert_eq!(bench.ready_becomes("False").await, Duration::from_secs(290));
            let message = bench.ready().await.message;
            assert!(message.starts_with(start) && message.contains(text), "{message}");
            bench.pod_config(Answer::Turning);
            assert!(bench.ready_becomes("True").await < Duration::from_secs(1));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_does_not_answer_is_down_after_thirty_seconds_and_not_before() {
        let mut bench = bench(Saved::default());
        bench.all_well();
        assert_eq!(bench.ready().await.status, "True");
        let away = RuntimeState { unreachable: true, ..runtime(false) };
        let now = bench.clock.now_ms();
        bench.world.send_modify(|w| w.take_runtime(away.clone(), now));
        assert_eq!(bench.ready_becomes("False").await, Duration::from_secs(30));
        assert_eq!(bench.ready().await.message, "container runtime is down");
        bench.world.send_modify(|w| w.take_runtime(runtime(true), 0));
        assert!(bench.ready_becomes("True").await < Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_node_has_the_images_where_they_are_told_in_time() {
        let mut bench = bench(Saved::default());
        let image = ContainerImage { names: vec!["a:1".into()], size_bytes: Some(7) };
        bench.world.send_modify(|world| world.take_runtime(runtime(true), 0));
        let listed = vec![image.clone(), image];
        let world = bench.world.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            images::take(&world, listed);
        });
        bench.world.send_modify(|world| world.machine = Some(Machine::default()));
        bench.services(Answer::Turning);
        let begun = Instant::now();
        let node = bench.node.wait_for(Option::is_some).await.unwrap().clone().unwrap();
        assert_eq!((node.status.images.len(), begun.elapsed()), (2, Duration::from_secs(1)));
    }

    #[tokio::test(start_paused = true)]
    async fn new_images_are_written_with_the_next_heartbeat_and_only_once() {
        let mut bench = bench(Saved::default());
        bench.all_well();
        bench.ready().await;
        let begun = Instant::now();
        let image = ContainerImage { names: vec!["a:1".into()], size_bytes: Some(7) };
        tokio::time::sleep(Duration::from_secs(4)).await;
        images::take(&bench.world, vec![image.clone()]);
        let listed = |n: &Option<Arc<Node>>| n.as_ref().is_some_and(|n| !n.status.images.is_empty());
        let node = bench.node.wait_for(listed).await.unwrap().clone().unwrap();
        let late = begun.elapsed().saturating_sub(LoopHandle::HEARTBEAT);
        assert!(begun.elapsed() >= LoopHandle::HEARTBEAT && late <= Duration::from_millis(400), "{late:?}");
        assert_eq!(node.status.images, std::slice::from_ref(&image));
        images::take(&bench.world, vec![image]);
        tokio::time::sleep(Duration::from_secs(120)).await;
        assert_eq!(bench.writer.taken("node"), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_without_news_is_written_once_and_its_loop_turns() {
        let mut bench = bench(Saved::default());
        bench.all_well();
        bench.ready().await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(bench.writer.taken("node"), 1);
        assert!(bench.ctx.progress.report("").loops.iter().any(|l| l.name == "node"));
        assert!(bench.ctx.metrics.text().contains("kubelet_node_name{node=\"n1\"} 1"));
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_api_shows_is_told_once_it_is_there_and_when_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let mut bench = bench_with(Saved::default(), |config| {
            config.paths.run_dir = dir.path().to_owned();
            config.api.tls = Some(keelson_config::ApiTls::with_client_ca("/ca".into()));
        });
        bench.all_well();
        bench.ready().await;
        let file = Paths { run_dir: dir.path().to_owned(), ..Paths::default() }.serving_certificate();
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        for text in ["one", "two"] {
            std::fs::write(&file, text).unwrap();
            let told = |node: &Option<Arc<Node>>| {
                let node = node.as_ref()?;
                node.metadata.annotations.get(annotations::SERVING_CERTIFICATE).cloned()
            };
            bench.node.wait_for(|node| told(node).as_deref() == Some(text)).await.unwrap();
            let written = bench.writer.taken("node");
            tokio::time::sleep(Duration::from_secs(30)).await;
            assert_eq!(bench.writer.taken("node"), written, "no more than once");
        }
        assert_eq!(bench.writer.taken("node"), 3);
    }
}
