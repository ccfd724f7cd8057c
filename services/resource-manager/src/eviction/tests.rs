//! The eviction task on a cgroup tree in memory.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use keelson_config::{ServiceName, SystemCgroups};
use keelson_proto::keelson::events::v1::ListEventsRequest;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_resource_manager_core::desire::DesireHeader;
use keelson_resource_manager_core::layout::{Driver, Layout};
use keelson_resource_manager_core::values::NodeLimits;
use keelson_testkit::service::until_some;
use rustix::event::{EventfdFlags, eventfd};
use tokio::task::JoinHandle;

use super::*;
use crate::cgroup::fake::FakeCgroups;
use crate::cgroup::{DriverConfig, MemoryNotifier, Tree};
use crate::statistics::Statistics;
use crate::storage::Storage;
use crate::view::TreeState;

const LONG: Duration = Duration::from_secs(20);
/// So long that no pass starts by itself.
const NEVER: Duration = Duration::from_secs(100_000);
const V1: &str = "\
32 31 0:29 / /cg/cpu rw - cgroup cgroup rw,cpu\n\
33 31 0:30 / /cg/cpuacct rw - cgroup cgroup rw,cpuacct\n\
34 31 0:31 / /cg/memory rw - cgroup cgroup rw,memory\n";
const V2: &str = "31 23 0:28 / /cg rw - cgroup2 cgroup2 rw\n";
const PODS: &str = "/cg/memory/kubepods";

/// Notifications that the test triggers; registrations fail while `broken`.
#[derive(Debug, Default)]
struct FakeNotifier {
    registered: Mutex<Vec<(PathBuf, u64, OwnedFd)>>,
    broken: Mutex<bool>,
}

impl MemoryNotifier for FakeNotifier {
    fn register(&self, dir: &Path, bytes: u64) -> std::io::Result<OwnedFd> {
        if *self.broken.lock().unwrap() {
            return Err(std::io::ErrorKind::PermissionDenied.into());
        }
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let other_end = event.as_fd().try_clone_to_owned()?;
        self.registered.lock().unwrap().push((dir.to_owned(), bytes, other_end));
        Ok(event)
    }
}

impl FakeNotifier {
    /// Triggers the last notification that was registered for a cgroup.
    fn trigger(&self, dir: &str) {
        let registered = self.registered.lock().unwrap();
        let (_, _, fd) = registered.iter().rfind(|(of, ..)| of == Path::new(dir)).unwrap();
        rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
    }

    /// The usages for which notifications of a cgroup were registered.
    fn usages(&self, dir: &str) -> Vec<u64> {
        let registered = self.registered.lock().unwrap();
        registered.iter().filter(|(of, ..)| of == Path::new(dir)).map(|(_, bytes, _)| *bytes).collect()
    }
}

/// A tree of cgroups below `/cg`.
fn open_tree(fake: &FakeCgroups, mountinfo: &str) -> Tree {
    let driver_config = DriverConfig {
        layout: Layout::new(Driver::Cgroupfs, "/").unwrap(),
        slices: None,
        owner: "/var/lib/kubelet".into(),
    };
    let mounts = keelson_mountinfo::parse(mountinfo.as_bytes());
    Tree::open(Arc::new(fake.clone()), &mounts, Path::new("/cg"), driver_config, NodeLimits::default())
        .unwrap()
}

/// A running eviction task and its environment.
struct World {
    _dir: tempfile::TempDir,
    ctx: Context,
    notifier: Arc<FakeNotifier>,
    conditions: watch::Receiver<BTreeSet<Condition>>,
    _ends: (mpsc::Sender<Vec<Order>>, watch::Sender<u64>, watch::Sender<TreeState>),
    running: JoinHandle<()>,
}

impl World {
    /// `interval` is the time between two passes; `known` are the pods of the manager.
    fn start(
        fake: &FakeCgroups,
        mountinfo: &str,
        interval: Duration,
        orders: Orders,
        known: &[KnownPod],
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config { node_name: "node".into(), ..Config::default() };
        config.paths.run_dir = dir.path().to_owned();
        config.paths.state_dir = dir.path().join("state");
        // A single byte is enough: no machine is short of that, but all pods together may be.
        config.resources.eviction.hard = [("memory.available".to_owned(), "1".to_owned())].into();
        config.resources.eviction.local_storage_limits = false;
        let ctx = Context::detached(ServiceName::ResourceManager, config);
        let opened = open_tree(fake, mountinfo);
        let (tree_end, tree) = watch::channel(TreeState::Ready(Arc::new(opened)));
        let runtime = || ctx.peer(ServiceName::RuntimeShim);
        let storage = Storage::new(runtime(), ctx.peer(ServiceName::VolumeManager));
        let root = dir.path().to_owned();
        let statistics = Arc::new(Statistics::new(
            tree.clone(),
            runtime(),
            storage,
            root.clone(),
            SystemCgroups::default(),
        ));
        let (commands, mut requests) = mpsc::channel(1);
        let known: BTreeMap<String, KnownPod> = known
            .iter()
            .map(|pod| (pod.desire.as_ref().unwrap().header.pod.uid.clone(), pod.clone()))
            .collect();
        tokio::spawn(async move {
            while let Some(Command::Request(ManagerRequest::ListPods { reply })) = requests.recv().await {
                let _ = reply.send(known.clone());
            }
        });
        let (preemptions_end, preemptions) = mpsc::channel(1);
        let (finished_end, finished) = watch::channel(0);
        let (conditions_end, conditions) = watch::channel(BTreeSet::new());
        let notifier = Arc::<FakeNotifier>::default();
        let eviction = EvictionLoop {
            settings: Settings::new(&ctx.config).unwrap(),
            observer: Observer { root, statistics, tree },
            file: state_file(&ctx.config),
            monitor: Monitor::default(),
            orders,
            conditions: conditions_end,
            commands,
            ordered: preemptions,
            drain: watch::channel(None).1,
            boot_id: String::new(),
            finished,
            metrics: EvictionMetrics::new(&ctx.metrics),
            notifications: Some(MemoryNotifications::new(Arc::clone(&notifier) as Arc<dyn MemoryNotifier>)),
            overdue: BTreeSet::new(),
            interval,
            ctx: ctx.clone(),
        };
        let handle = ctx.progress.register("eviction");
        let running = tokio::spawn(eviction.run(ctx.shutdown.clone(), handle));
        let ends = (preemptions_end, finished_end, tree_end);
        Self { _dir: dir, ctx, notifier, conditions, _ends: ends, running }
    }

    async fn first_pass(&self) {
        until_some("the first pass", || {
            let report = self.ctx.progress.report("");
            std::future::ready(report.conditions.into_iter().find(|c| c.name == CONDITION))
        })
        .await;
    }

    async fn events(&self, reason: &str) -> Vec<(String, String, u32)> {
        let request = tonic::Request::new(ListEventsRequest::default());
        let events = self.ctx.events.list_events(request).await.unwrap().into_inner().events;
        let with_reason = events.into_iter().filter(|event| event.reason == reason);
        with_reason.map(|event| (event.uid, event.message, event.count)).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.ctx.shutdown.cancel();
        self.running.abort();
    }
}

/// A machine with cgroup v1 on which all pods together use `used` of their 1000 bytes.
fn v1(used: u64) -> FakeCgroups {
    let fake = FakeCgroups::v1();
    fake.add_file("/cg/memory", "memory.usage_in_bytes", "5000\n");
    fake.add_file(PODS, "memory.limit_in_bytes", "1000\n");
    fake.add_file(PODS, "memory.stat", "total_inactive_file 100\n");
    fake.add_file(PODS, "memory.usage_in_bytes", &format!("{used}\n"));
    fake
}

#[tokio::test]
async fn a_kernel_memory_notification_triggers_an_eviction_pass() {
    let fake = v1(600);
    let mut world = World::start(&fake, V1, NEVER, Orders::new(), &[]);
    world.first_pass().await;
    // 500 of 1000 are available, and the threshold is 1.
    assert_eq!(world.notifier.usages(PODS), [600 + 499]);
    let of_machine = world.notifier.usages("/cg/memory");
    assert!(of_machine.len() == 1 && of_machine[0] > 5000, "{of_machine:?}");
    assert!(world.conditions.borrow().is_empty());
    fake.add_file(PODS, "memory.usage_in_bytes", "1100\n");
    world.notifier.trigger(PODS);
    let short = world.conditions.wait_for(|conditions| conditions.contains(&Condition::Memory));
    tokio::time::timeout(LONG, short).await.expect("no pass in time").unwrap();
    // Nothing is available: the kernel notifies when usage falls again.
    assert_eq!(world.notifier.usages(PODS), [1099, 1099]);
    world.notifier.trigger(PODS);
    until_some("another pass", || std::future::ready((world.notifier.usages(PODS).len() == 3).then_some(())))
        .await;
}

#[tokio::test]
async fn eviction_passes_continue_without_kernel_notifications() {
    let fake = v1(600);
    let mut world = World::start(&fake, V1, Duration::from_millis(5), Orders::new(), &[]);
    *world.notifier.broken.lock().unwrap() = true;
    world.first_pass().await;
    fake.add_file(PODS, "memory.usage_in_bytes", "1100\n");
    let short = world.conditions.wait_for(|conditions| conditions.contains(&Condition::Memory));
    tokio::time::timeout(LONG, short).await.expect("no pass in time").unwrap();
    *world.notifier.broken.lock().unwrap() = false;
    let before = world.notifier.usages(PODS).len();
    until_some("notifications are registered again", || {
        std::future::ready((world.notifier.usages(PODS).len() > before).then_some(()))
    })
    .await;
}

#[tokio::test]
async fn a_notification_error_is_reported_once_until_it_recovers() {
    let config = Config::default();
    let tree = TreeState::Ready(Arc::new(open_tree(&v1(600), V1)));
    let mut texts = config.resources.eviction;
    texts.hard = [("memory.available".to_owned(), "1".to_owned())].into();
    let list = thresholds(&Texts { hard: texts.hard, ..Texts::default() }, true).unwrap();
    let seen = Observation { capacity: 1000, available: 500, taken: 1 };
    let seen = list.iter().map(|threshold| (threshold.signal, seen)).collect();
    let notifier = Arc::<FakeNotifier>::default();
    let mut notifications = MemoryNotifications::new(Arc::clone(&notifier) as Arc<dyn MemoryNotifier>);
    for (broken, reported) in [(true, true), (true, false), (false, false), (true, true)] {
        *notifier.broken.lock().unwrap() = broken;
        let result = notifications.renew(tree.clone(), &list, &seen).await;
        assert_eq!(result.is_err(), reported, "{broken}");
        if let Err(error) = result {
            assert!(error.to_string().contains("/cg/memory"), "{error}");
        }
    }
}

#[tokio::test]
async fn on_cgroup_v2_no_memory_notification_is_registered() {
    let fake = FakeCgroups::v2(&["cpu", "memory"]);
    let world = World::start(&fake, V2, NEVER, Orders::new(), &[]);
    world.first_pass().await;
    assert!(world.notifier.registered.lock().unwrap().is_empty());
}

#[tokio::test]
async fn an_overdue_eviction_is_reported_once_and_stays_in_effect() {
    let pod = |uid: &str, want| {
        let pod = PodRef { uid: uid.into(), namespace: "default".into(), name: format!("pod-{uid}") };
        PodDesire { grace_seconds: 600, ..DesireHeader { pod, revision: 0, want }.into() }
    };
    let orders = Orders::new();
    let now = now_unix_nanos();
    let order = |uid: &str, grace_seconds, ago_seconds: i64| {
        let since_unix_nanos = now - ago_seconds * 1_000_000_000;
        let pod = pod(uid, Want::Run).header.pod;
        orders.set(uid.into(), Arc::new(Order { pod, grace_seconds, since_unix_nanos, ..Order::default() }));
    };
    order("late", Some(1), 60);
    order("soon", Some(100), 60);
    order("own", None, 60);
    order("over", Some(1), 60);
    let known = [("late", Want::Stop), ("soon", Want::Stop), ("own", Want::Run), ("over", Want::Unmount)]
        .map(|(uid, want)| KnownPod { desire: Some(pod(uid, want)), admitted: true });
    let world = World::start(&v1(600), V1, Duration::from_millis(5), orders.clone(), &known);
    // Notifications are registered again at the start of each pass.
    until_some("a few passes", || std::future::ready((world.notifier.usages(PODS).len() > 5).then_some(())))
        .await;
    let text = "Container runtime did not kill the pod within specified grace period.";
    assert_eq!(world.events("ExceededGracePeriod").await, [("late".to_owned(), text.to_owned(), 1)]);
    assert_eq!(orders.keys(), ["late", "own", "soon"]);
}
