//! The task against a fake logind on a bus of the test's own, with pods and orders in memory.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Mutex};

use keelson_config::{Config, PriorityGracePeriod, ServiceName};
use keelson_proto::keelson::events::v1::ListEventsRequest;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_resource_manager_core::desire::{DesireHeader, PodDesire, PodRef, Want};
use keelson_resource_manager_core::eviction::order::{NODE_SHUTDOWN, Order};
use keelson_service_kit::now_unix_nanos;
use keelson_testkit::logind::{Behaviour, FakeLogind, LOGIND, PATIENT, soon};
use keelson_testkit::service::until_some;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::*;
use crate::commands::{Command, KnownPod, ManagerRequest};
use crate::logind::tests::TestMachine;
use crate::metrics::ShutdownMetrics;
use crate::view::Orders;

const LOW: i32 = 0;
const HIGH: i32 = 1000;
const BEGIN: &str = "Shutdown manager detected shutdown event";
const CANCELLATION: &str = "Shutdown manager detected shutdown cancellation";

/// A running task and its environment.
struct World {
    machine: TestMachine,
    ctx: Context,
    pods: Arc<Mutex<BTreeMap<String, KnownPod>>>,
    changes: watch::Sender<u64>,
    known: watch::Sender<bool>,
    /// The orders of the task, in the order in which they were issued.
    issued: mpsc::Receiver<Vec<Order>>,
    orders: Orders,
    shutting_down: watch::Receiver<bool>,
    running: JoinHandle<()>,
}

impl World {
    /// `seconds` are those of pods with a low priority; those with a high one have 20 s.
    async fn start(seconds: i64, prepare: impl FnOnce(&Config, &Orders)) -> Self {
        let machine = TestMachine::new();
        let mut config = Config { node_name: "node".into(), ..Config::default() };
        config.paths.root_dir = machine.dir().to_owned();
        let period = |priority, seconds| PriorityGracePeriod { priority, seconds };
        config.resources.node_shutdown.by_priority = vec![period(HIGH, 20), period(LOW, seconds)];
        let orders = Orders::new();
        prepare(&config, &orders);
        let ctx = Context::detached(ServiceName::ResourceManager, config);
        let pods = Arc::<Mutex<BTreeMap<String, KnownPod>>>::default();
        let (commands, mut requests) = mpsc::channel(1);
        let listed = Arc::clone(&pods);
        tokio::spawn(async move {
            while let Some(Command::Request(ManagerRequest::ListPods { reply })) = requests.recv().await {
                let _ = reply.send(listed.lock().unwrap().clone());
            }
        });
        let (changes, known) = (watch::Sender::new(0), watch::Sender::new(true));
        let (issue, issued) = mpsc::channel(16);
        let periods = grace_periods(&ctx.config.resources.node_shutdown).unwrap();
        let logind = Settings::for_test(&machine, Duration::from_secs(25));
        let ending = Ending {
            periods,
            commands,
            changes: changes.subscribe(),
            pods_known: known.subscribe(),
            issue,
            orders: orders.clone(),
        };
        let record = Record::load(&ctx, ShutdownMetrics::new(&ctx.metrics)).await;
        let (sender, shutting_down) = watch::channel(false);
        let task = ShutdownLoop::new(ctx.clone(), logind, ending, record, sender);
        let handle = ctx.progress.register("node-shutdown");
        let running = tokio::spawn(task.run(ctx.shutdown.clone(), handle));
        Self { machine, ctx, pods, changes, known, issued, orders, shutting_down, running }
    }

    fn set(&self, uid: &str, priority: i32, want: Want) {
        let pod = PodRef { uid: uid.into(), namespace: "default".into(), name: uid.into() };
        let header = DesireHeader { pod, revision: 0, want };
        let desire = PodDesire { priority, grace_seconds: 30, ..header.into() };
        self.pods.lock().unwrap().insert(uid.into(), KnownPod { desire: Some(desire), admitted: true });
        self.changes.send_modify(|count| *count += 1);
    }

    /// The UIDs and grace periods of the next group that the task orders to end.
    async fn next_group(&mut self) -> Vec<(String, i64)> {
        let orders = soon(self.issued.recv()).await.unwrap();
        let grace = |order: Order| (order.pod.uid.clone(), order.grace_seconds.unwrap());
        orders.into_iter().map(grace).collect()
    }

    async fn condition(&self, is_met: bool) -> String {
        until_some("the condition", || {
            let conditions = self.ctx.progress.report("").conditions;
            let found = conditions.into_iter().find(|found| found.name == CONDITION && found.ok == is_met);
            std::future::ready(found.map(|found| found.message))
        })
        .await
    }

    async fn until_shutting_down(&mut self, expected: bool) {
        soon(self.shutting_down.wait_for(|now| *now == expected)).await.unwrap();
    }

    async fn events(&self) -> Vec<(String, u32)> {
        let request = tonic::Request::new(ListEventsRequest::default());
        let events = self.ctx.events.list_events(request).await.unwrap().into_inner().events;
        assert!(events.iter().all(|event| (event.reason.as_str(), event.kind.as_str()) == (REASON, "Node")));
        events.into_iter().map(|event| (event.message, event.count)).collect()
    }

    /// Whether the state file has a start and an end.
    fn stored(&self) -> (bool, bool) {
        let file = self.ctx.config.paths.root_dir.join("graceful_node_shutdown_state");
        let content = fs::read_to_string(file).unwrap();
        let is_set = |field: &str| !content.contains(&format!("\"{field}\":\"0001-01-01T00:00:00Z\""));
        (is_set("startTime"), is_set("endTime"))
    }

    fn gauge(&self, which: &str) -> i64 {
        let name = format!("kubelet_graceful_shutdown_{which}_time_seconds ");
        let text = self.ctx.metrics.text();
        let value = text.lines().find_map(|line| line.strip_prefix(&name)).expect("the gauge");
        value.parse().unwrap()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.running.abort();
    }
}

async fn released(held: &mut pipe::Receiver) {
    assert_eq!(soon(held.read(&mut [0])).await.unwrap(), 0);
}

fn is_held(held: &pipe::Receiver) -> bool {
    held.try_read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
}

#[tokio::test]
async fn groups_end_by_rising_priority_and_then_the_machine_may_stop() {
    let mut world = World::start(600, |_, _| {}).await;
    let _bus = world.machine.start_bus().await;
    let mut logind = FakeLogind::start(&world.machine, PATIENT).await;
    for (uid, priority, want) in [
        ("low-a", LOW, Want::Run),
        ("low-b", LOW, Want::Stop),
        ("high", HIGH, Want::Run),
        ("ended", LOW, Want::Unmount),
    ] {
        world.set(uid, priority, want);
    }
    let not_admitted = KnownPod { admitted: false, ..world.pods.lock().unwrap()["low-a"].clone() };
    world.pods.lock().unwrap().insert("not-admitted".into(), not_admitted);
    let mut held = soon(logind.inhibitors.recv()).await.unwrap();
    world.condition(true).await;
    assert_eq!((world.gauge("start"), world.gauge("end")), (0, 0));

    logind.signal(true).await;
    assert_eq!(world.next_group().await, [("low-a".to_owned(), 30), ("low-b".to_owned(), 30)]);
    world.until_shutting_down(true).await;
    assert_eq!(world.events().await, [(BEGIN.to_owned(), 1)]);
    assert_eq!(world.stored(), (true, false));
    let second = 1_000_000_000;
    let began = world.gauge("start");
    assert!((began - now_unix_nanos() / second).abs() < 60 && world.gauge("end") == 0);
    world.set("low-a", LOW, Want::Forget);
    assert!(world.issued.try_recv().is_err() && is_held(&held));
    world.pods.lock().unwrap().remove("low-b");
    world.changes.send_modify(|count| *count += 1);
    assert_eq!(world.next_group().await, [("high".to_owned(), 20)]);
    // Its volumes are mounted still.
    world.set("high", HIGH, Want::Unmount);
    assert!(is_held(&held));
    world.set("high", HIGH, Want::Forget);
    released(&mut held).await;
    assert_eq!(world.stored(), (true, true));
    assert!(world.gauge("end") >= began);
    assert!(*world.shutting_down.borrow(), "until the machine has stopped");
}

#[tokio::test]
async fn a_group_that_does_not_end_has_its_grace_period_and_no_more() {
    let mut world = World::start(1, |_, _| {}).await;
    let _bus = world.machine.start_bus().await;
    let mut logind = FakeLogind::start(&world.machine, PATIENT).await;
    world.set("low", LOW, Want::Run);
    world.set("high", HIGH, Want::Run);
    let held = soon(logind.inhibitors.recv()).await.unwrap();
    world.condition(true).await;
    logind.signal(true).await;
    assert_eq!(world.next_group().await, [("low".to_owned(), 1)]);
    assert_eq!(world.next_group().await, [("high".to_owned(), 20)]);
    assert!(is_held(&held));
}

#[tokio::test]
async fn a_cancelled_shutdown_ends_no_further_group_and_is_delayed_again() {
    let mut world = World::start(600, |_, _| {}).await;
    let _bus = world.machine.start_bus().await;
    let mut logind = FakeLogind::start(&world.machine, PATIENT).await;
    world.set("low", LOW, Want::Run);
    world.set("high", HIGH, Want::Run);
    let mut first = soon(logind.inhibitors.recv()).await.unwrap();
    world.condition(true).await;
    logind.signal(true).await;
    assert_eq!(world.next_group().await.len(), 1);
    logind.signal(false).await;
    world.until_shutting_down(false).await;
    let second = soon(logind.inhibitors.recv()).await.unwrap();
    released(&mut first).await;
    assert!(is_held(&second));
    assert_eq!(world.events().await, [(BEGIN.to_owned(), 1), (CANCELLATION.to_owned(), 1)]);
    assert_eq!(world.stored(), (true, true));
    world.set("low", LOW, Want::Forget);
    // The next shutdown begins anew: the pod of the first has ended.
    logind.signal(true).await;
    assert_eq!(world.next_group().await, [("high".to_owned(), 20)]);
    assert_eq!(world.events().await.last().unwrap(), &(BEGIN.to_owned(), 2));
}

#[tokio::test]
async fn an_interrupted_shutdown_continues_with_the_rest_of_its_time() {
    let now = now_unix_nanos();
    let mut world = World::start(600, |config, orders| {
        let start = keelson_kube_model::time::format_nanos(now.into()).unwrap();
        let content = format!(r#"{{"startTime":"{start}","endTime":"0001-01-01T00:00:00Z"}}"#);
        fs::write(config.paths.root_dir.join("graceful_node_shutdown_state"), content).unwrap();
        let pod = PodRef { uid: "low".into(), ..PodRef::default() };
        // Its 600 seconds are over.
        let since_unix_nanos = now - 601 * 1_000_000_000;
        let order = Order { pod, signal: NODE_SHUTDOWN.into(), since_unix_nanos, ..Order::default() };
        orders.set("low".into(), Arc::new(order));
    })
    .await;
    assert!(*world.shutting_down.borrow(), "also before logind has answered");
    world.known.send_replace(false);
    let _bus = world.machine.start_bus().await;
    let behaviour = Behaviour { preparing: true, ..PATIENT };
    let _logind = FakeLogind::start(&world.machine, behaviour).await;
    world.set("low", LOW, Want::Stop);
    world.set("high", HIGH, Want::Run);
    world.until_shutting_down(true).await;
    assert!(world.issued.try_recv().is_err(), "not before all pods are known");
    world.known.send_replace(true);
    assert_eq!(world.next_group().await, [("low".to_owned(), 30)]);
    assert_eq!(world.next_group().await, [("high".to_owned(), 20)]);
    assert_eq!(world.events().await, []);
    assert_eq!(world.gauge("start"), now / 1_000_000_000, "as restored");
    assert!(world.orders.get(&"low".to_owned()).is_some());
}

#[tokio::test]
async fn a_missing_logind_is_a_condition_until_it_is_there() {
    let world = World::start(600, |_, _| {}).await;
    let text = world.condition(false).await;
    assert!(text.starts_with("cannot connect to the system's message bus at "), "{text}");
    assert!(text.contains("install and start dbus and systemd-logind"), "{text}");
    assert!(text.ends_with("until then pods end with the machine, and shutdownGracePeriod has no effect"));
    let _bus = world.machine.start_bus().await;
    let mut logind = FakeLogind::start(&world.machine, PATIENT).await;
    world.condition(true).await;
    let mut first = soon(logind.inhibitors.recv()).await.unwrap();

    logind.connection.release_name(LOGIND).await.unwrap();
    let text = world.condition(false).await;
    assert!(text.starts_with("systemd-logind has left the message bus"), "{text}");
    logind.connection.request_name(LOGIND).await.unwrap();
    world.condition(true).await;
    let second = soon(logind.inhibitors.recv()).await.unwrap();
    released(&mut first).await;
    assert!(is_held(&second));
    world.ctx.shutdown.cancel();
}

#[test]
fn a_configuration_without_grace_periods_delays_nothing() {
    let mut config = NodeShutdown::default();
    assert_eq!(grace_periods(&config), None);
    config.total_nanos = 30_000_000_000;
    let periods = grace_periods(&config).unwrap();
    assert_eq!(periods.total_seconds(), 30);
}
