//! The loop on a cgroup tree in memory.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use keelson_config::{ServiceName, SystemCgroups};
use keelson_proto::keelson::events::v1::ListEventsRequest;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_resource_manager_core::desire::Desire as _;
use keelson_resource_manager_core::layout::{Driver, Layout};
use keelson_resource_manager_core::values::NodeBounds;
use keelson_sync_callee::testing::eventually;
use rustix::event::{EventfdFlags, eventfd};
use tokio::task::JoinHandle;

use super::*;
use crate::cgroup::fake::FakeCgroups;
use crate::cgroup::{Driving, Tree, UsageAlarm};
use crate::statistics::Statistics;
use crate::storage::Storage;
use crate::view::TreeState;

const LONG: Duration = Duration::from_secs(20);
/// So long that no look comes by itself.
const NEVER: Duration = Duration::from_secs(100_000);
const V1: &str = "\
32 31 0:29 / /cg/cpu rw - cgroup cgroup rw,cpu\n\
33 31 0:30 / /cg/cpuacct rw - cgroup cgroup rw,cpuacct\n\
34 31 0:31 / /cg/memory rw - cgroup cgroup rw,memory\n";
const V2: &str = "31 23 0:28 / /cg rw - cgroup2 cgroup2 rw\n";
const PODS: &str = "/cg/memory/kubepods";

/// Alarms that ring when the test says so; all fail while `broken`.
#[derive(Debug, Default)]
struct FakeAlarm {
    set: Mutex<Vec<(PathBuf, u64, OwnedFd)>>,
    broken: Mutex<bool>,
}

impl UsageAlarm for FakeAlarm {
    fn set(&self, dir: &Path, bytes: u64) -> std::io::Result<OwnedFd> {
        if *self.broken.lock().unwrap() {
            return Err(std::io::ErrorKind::PermissionDenied.into());
        }
        let alarm = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let other_end = alarm.as_fd().try_clone_to_owned()?;
        self.set.lock().unwrap().push((dir.to_owned(), bytes, other_end));
        Ok(alarm)
    }
}

impl FakeAlarm {
    /// The last one that was set for a cgroup rings.
    fn ring(&self, dir: &str) {
        let set = self.set.lock().unwrap();
        let (_, _, fd) = set.iter().rfind(|(of, ..)| of == Path::new(dir)).unwrap();
        rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
    }

    /// The lines that were set for a cgroup.
    fn lines(&self, dir: &str) -> Vec<u64> {
        let set = self.set.lock().unwrap();
        set.iter().filter(|(of, ..)| of == Path::new(dir)).map(|(_, bytes, _)| *bytes).collect()
    }
}

/// A loop that begins with a look, and what is around it.
struct World {
    _dir: tempfile::TempDir,
    ctx: Context,
    alarm: Arc<FakeAlarm>,
    conditions: watch::Receiver<BTreeSet<Condition>>,
    _ends: (mpsc::Sender<Vec<Order>>, watch::Sender<u64>, watch::Sender<TreeState>),
    running: JoinHandle<()>,
}

impl World {
    /// `interval` lies between two looks; `active` is what the manager says of its pods.
    fn start(
        fake: &FakeCgroups,
        mountinfo: &str,
        interval: Duration,
        orders: Orders,
        active: &[Active],
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config { node_name: "node".into(), ..Config::default() };
        config.paths.run_dir = dir.path().to_owned();
        config.paths.state_dir = dir.path().join("state");
        // A single byte is enough: no machine is short of that, but all pods together may be.
        config.resources.eviction.hard = [("memory.available".to_owned(), "1".to_owned())].into();
        config.resources.eviction.local_storage_limits = false;
        let ctx = Context::detached(ServiceName::ResourceManager, config);
        let driving = Driving {
            layout: Layout::new(Driver::Cgroupfs, "/").unwrap(),
            slices: None,
            owner: "/var/lib/kubelet".into(),
        };
        let opened =
            Tree::open(Arc::new(fake.clone()), mountinfo, Path::new("/cg"), driving, NodeBounds::default());
        let (tree_end, tree) = watch::channel(TreeState::Ready(Arc::new(opened.unwrap())));
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
        let (commands, mut asked) = mpsc::channel(1);
        let active: BTreeMap<String, Active> =
            active.iter().map(|pod| (pod.desire.as_ref().unwrap().pod.uid.clone(), pod.clone())).collect();
        tokio::spawn(async move {
            while let Some(Command::Ask(Ask::Active { reply })) = asked.recv().await {
                let _ = reply.send(active.clone());
            }
        });
        let (wanted_end, wanted) = mpsc::channel(1);
        let (finished_end, finished) = watch::channel(0);
        let (short, conditions) = watch::channel(BTreeSet::new());
        let alarm = Arc::<FakeAlarm>::default();
        let eviction = EvictionLoop {
            settings: Settings::new(&ctx.config).unwrap(),
            look: Look { root, statistics, tree },
            file: state_file(&ctx.config),
            monitor: Monitor::default(),
            orders,
            conditions: short,
            commands,
            wanted,
            finished,
            metrics: EvictionMetrics::new(&ctx.metrics),
            notices: Some(Notices::new(Arc::clone(&alarm) as Arc<dyn UsageAlarm>)),
            overdue: BTreeSet::new(),
            interval,
            ctx: ctx.clone(),
        };
        let handle = ctx.progress.register("eviction");
        let running = tokio::spawn(eviction.run(ctx.shutdown.clone(), handle));
        Self { _dir: dir, ctx, alarm, conditions, _ends: (wanted_end, finished_end, tree_end), running }
    }

    async fn looked(&self) {
        eventually("a look", || {
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

/// A machine with v1 on which all pods together use so many of their 1000 bytes.
fn v1(used: u64) -> FakeCgroups {
    let fake = FakeCgroups::v1();
    fake.show("/cg/memory", "memory.usage_in_bytes", "5000\n");
    fake.show(PODS, "memory.limit_in_bytes", "1000\n");
    fake.show(PODS, "memory.stat", "total_inactive_file 100\n");
    fake.show(PODS, "memory.usage_in_bytes", &format!("{used}\n"));
    fake
}

#[tokio::test]
async fn a_notice_of_the_kernel_brings_a_look_that_asks_it_anew() {
    let fake = v1(600);
    let mut world = World::start(&fake, V1, NEVER, Orders::new(), &[]);
    world.looked().await;
    // 500 of 1000 are left, and one must be.
    assert_eq!(world.alarm.lines(PODS), [600 + 499]);
    let of_machine = world.alarm.lines("/cg/memory");
    assert!(of_machine.len() == 1 && of_machine[0] > 5000, "{of_machine:?}");
    assert!(world.conditions.borrow().is_empty());
    fake.show(PODS, "memory.usage_in_bytes", "1100\n");
    world.alarm.ring(PODS);
    let short = world.conditions.wait_for(|conditions| conditions.contains(&Condition::Memory));
    tokio::time::timeout(LONG, short).await.expect("nobody has looked").unwrap();
    // Nothing is left: the kernel tells when it becomes better.
    assert_eq!(world.alarm.lines(PODS), [1099, 1099]);
    world.alarm.ring(PODS);
    eventually("another look", || std::future::ready((world.alarm.lines(PODS).len() == 3).then_some(())))
        .await;
}

#[tokio::test]
async fn where_the_kernel_cannot_be_asked_looks_go_on() {
    let fake = v1(600);
    let mut world = World::start(&fake, V1, Duration::from_millis(5), Orders::new(), &[]);
    *world.alarm.broken.lock().unwrap() = true;
    world.looked().await;
    fake.show(PODS, "memory.usage_in_bytes", "1100\n");
    let short = world.conditions.wait_for(|conditions| conditions.contains(&Condition::Memory));
    tokio::time::timeout(LONG, short).await.expect("nobody has looked").unwrap();
    *world.alarm.broken.lock().unwrap() = false;
    let before = world.alarm.lines(PODS).len();
    eventually("the kernel is asked again", || {
        std::future::ready((world.alarm.lines(PODS).len() > before).then_some(()))
    })
    .await;
}

#[tokio::test]
async fn a_failure_is_told_once_until_it_goes_well_again() {
    let config = Config::default();
    let fake = v1(600);
    let driving = Driving {
        layout: Layout::new(Driver::Cgroupfs, "/").unwrap(),
        slices: None,
        owner: "/var/lib/kubelet".into(),
    };
    let tree = Tree::open(Arc::new(fake), V1, Path::new("/cg"), driving, NodeBounds::default()).unwrap();
    let tree = TreeState::Ready(Arc::new(tree));
    let mut texts = config.resources.eviction;
    texts.hard = [("memory.available".to_owned(), "1".to_owned())].into();
    let list = thresholds(&Texts { hard: texts.hard, ..Texts::default() }, true).unwrap();
    let seen = Observation { capacity: 1000, available: 500, taken: 1 };
    let seen = list.iter().map(|threshold| (threshold.signal, seen)).collect();
    let alarm = Arc::<FakeAlarm>::default();
    let mut notices = Notices::new(Arc::clone(&alarm) as Arc<dyn UsageAlarm>);
    for (broken, told) in [(true, true), (true, false), (false, false), (true, true)] {
        *alarm.broken.lock().unwrap() = broken;
        let result = notices.renew(tree.clone(), &list, &seen).await;
        assert_eq!(result.is_err(), told, "{broken}");
        if let Err(error) = result {
            assert!(error.to_string().contains("/cg/memory"), "{error}");
        }
    }
}

#[tokio::test]
async fn on_cgroup_v2_there_is_nobody_to_ask() {
    let fake = FakeCgroups::v2(&["cpu", "memory"]);
    let world = World::start(&fake, V2, NEVER, Orders::new(), &[]);
    world.looked().await;
    assert!(world.alarm.set.lock().unwrap().is_empty());
}

#[tokio::test]
async fn an_order_whose_pod_does_not_end_in_time_is_told_of_once_and_stands() {
    let pod = |uid: &str, want| {
        let pod = PodRef { uid: uid.into(), namespace: "default".into(), name: format!("pod-{uid}") };
        PodDesire { want, grace_seconds: 600, ..PodDesire::forget(pod) }
    };
    let orders = Orders::new();
    let now = now_unix_nanos();
    let order = |uid: &str, grace_seconds, ago_seconds: i64| {
        let since_unix_nanos = now - ago_seconds * 1_000_000_000;
        let pod = pod(uid, Want::Run).pod;
        orders.set(uid.into(), Arc::new(Order { pod, grace_seconds, since_unix_nanos, ..Order::default() }));
    };
    order("late", Some(1), 60);
    order("soon", Some(100), 60);
    order("own", None, 60);
    order("over", Some(1), 60);
    let active = [("late", Want::Stop), ("soon", Want::Stop), ("own", Want::Run), ("over", Want::Unmount)]
        .map(|(uid, want)| Active { desire: Some(pod(uid, want)), admitted: true });
    let world = World::start(&v1(600), V1, Duration::from_millis(5), orders.clone(), &active);
    // The kernel is asked anew at the beginning of each look.
    eventually("a few looks", || std::future::ready((world.alarm.lines(PODS).len() > 5).then_some(()))).await;
    let text = "Container runtime did not kill the pod within specified grace period.";
    assert_eq!(world.events("ExceededGracePeriod").await, [("late".to_owned(), text.to_owned(), 1)]);
    assert_eq!(orders.keys(), ["late", "own", "soon"]);
}
