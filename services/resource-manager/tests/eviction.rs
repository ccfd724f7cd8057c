//! Evictions and preemptions over the socket: which pods get an order, its content, and how long it is in effect.

#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

#[allow(dead_code, unused_imports, reason = "shared with tests that use more of it")]
mod support;
#[path = "support/volumes.rs"]
mod volumes;

use std::time::Duration;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_proto::keelson::events::v1::{Event, ListEventsRequest};
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::resource_manager::v1::admit_pod_response::Verdict;
use keelson_proto::keelson::resource_manager::v1::watch_evictions_response::Item;
use support::{Service, Sync, World, admit, desire, hierarchies, within};
use tonic::Streaming;
use volumes::FakeVolumes;

/// Signals are evaluated every 10 s.
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(2);

async fn synced(service: &Service) -> Sync {
    let mut sync = Sync::open(&mut service.client()).await;
    sync.complete(1, true).await;
    sync
}

struct Orders(Streaming<pb::WatchEvictionsResponse>);

impl Orders {
    async fn of(service: &Service) -> Self {
        Self(service.client().watch_evictions(pb::WatchEvictionsRequest {}).await.unwrap().into_inner())
    }

    async fn next(&mut self) -> Item {
        let message = tokio::time::timeout(LONG, self.0.message()).await.expect("no order in time");
        message.unwrap().unwrap().item.unwrap()
    }

    /// The orders up to `synced`.
    async fn replay(&mut self) -> Vec<pb::Eviction> {
        let mut orders = Vec::new();
        loop {
            match self.next().await {
                Item::Eviction(order) => orders.push(order),
                Item::Synced(_) => return orders,
                Item::GoneUid(uid) => panic!("{uid} is gone in the replay"),
            }
        }
    }

    async fn order(&mut self) -> pb::Eviction {
        match self.next().await {
            Item::Eviction(order) => order,
            other => panic!("{other:?}"),
        }
    }
}

/// The event of the eviction of a pod.
async fn evicted(service: &Service, uid: &str) -> Event {
    let request = tonic::Request::new(ListEventsRequest::default());
    let events = service.ctx.events.list_events(request).await.unwrap().into_inner().events;
    events.into_iter().find(|event| event.reason == "Evicted" && event.uid == uid).unwrap()
}

async fn machine(service: &Service, wanted: impl Fn(&pb::Machine) -> bool) -> pb::Machine {
    let mut stream = service.client().watch_machine(pb::WatchMachineRequest {}).await.unwrap().into_inner();
    let expected = async {
        loop {
            let machine = stream.message().await.unwrap().unwrap();
            if wanted(&machine) {
                return machine;
            }
        }
    };
    tokio::time::timeout(LONG, expected).await.expect("the machine has not reached the expected state")
}

fn requesting(uid: &str, milli: i64) -> pb::PodDesire {
    let mut wanted = desire(uid, 1, Want::Run, "Burstable");
    wanted.requests.insert("cpu".into(), milli);
    wanted
}

#[tokio::test]
async fn a_pod_above_its_emptydir_limit_is_evicted_across_restarts_until_finished() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let volumes = FakeVolumes::start(&world.config).await;
    let service = world.start().await;
    let sync = synced(&service).await;
    let limited = |uid: &str| {
        let volume =
            pb::EmptyDirShare { name: "scratch".into(), size_limit: "1Mi".into(), ..Default::default() };
        // System priority: no limits. Limits of other critical pods, such as static ones, are enforced.
        let priority = if uid == "critical" { 2_000_000_000 } else { 0 };
        pb::PodDesire {
            empty_dirs: vec![volume],
            critical: true,
            priority,
            ..desire(uid, 1, Want::Run, "BestEffort")
        }
    };
    for uid in ["modest", "greedy", "critical"] {
        sync.pod(limited(uid)).await;
    }
    for uid in ["modest", "greedy", "critical"] {
        admit(&mut service.client(), uid, LONG).await;
    }
    // The watch is open before a limit is exceeded: a pass in between would put the order into the replay.
    let mut orders = Orders::of(&service).await;
    assert_eq!(orders.replay().await, Vec::new());
    volumes.holds("modest", "scratch", 1 << 20);
    volumes.holds("greedy", "scratch", (1 << 20) + 1);
    volumes.holds("critical", "scratch", 9 << 20);
    let order = orders.order().await;
    assert_eq!(order.pod.as_ref().unwrap().uid, "greedy");
    assert_eq!(order.message, "Usage of EmptyDir volume \"scratch\" exceeds the limit \"1Mi\". ");
    assert_eq!((order.reason.as_str(), order.grace_period_seconds), ("Evicted", Some(1)));
    assert_eq!(evicted(&service, "greedy").await.annotations, Default::default());
    assert_eq!(
        (order.condition_type.as_str(), order.condition_reason.as_str()),
        ("DisruptionTarget", "TerminationByKubelet")
    );

    // The pod is not finished: after a kill the same order is in effect.
    volumes.holds("greedy", "scratch", 0);
    service.stop().await;
    let service = world.start().await;
    let mut orders = Orders::of(&service).await;
    assert_eq!(orders.replay().await, [order]);
    let sync = synced_with(&service, [limited("modest"), limited("greedy"), limited("critical")]).await;
    let mut forgotten = limited("greedy");
    (forgotten.want, forgotten.revision) = (Want::Forget.into(), 2);
    sync.pod(forgotten).await;
    assert_eq!(orders.next().await, Item::GoneUid("greedy".into()));
    service.stop().await;
    let service = world.start().await;
    assert_eq!(Orders::of(&service).await.replay().await, Vec::new());
}

/// A stream that sends these pods before its set is complete.
async fn synced_with<const N: usize>(service: &Service, pods: [pb::PodDesire; N]) -> Sync {
    let mut sync = Sync::open(&mut service.client()).await;
    for pod in pods {
        sync.pod(pod).await;
    }
    sync.complete(1, true).await;
    sync
}

#[tokio::test]
async fn an_eviction_of_a_pod_missing_from_the_first_complete_set_is_fulfilled() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let volumes = FakeVolumes::start(&world.config).await;
    let service = world.start().await;
    let sync = synced(&service).await;
    let volume = pb::EmptyDirShare { name: "v".into(), size_limit: "1".into(), ..Default::default() };
    sync.pod(pb::PodDesire { empty_dirs: vec![volume], ..desire("u", 1, Want::Run, "BestEffort") }).await;
    admit(&mut service.client(), "u", LONG).await;
    let mut orders = Orders::of(&service).await;
    orders.replay().await;
    volumes.holds("u", "v", 2);
    orders.order().await;
    service.stop().await;
    let service = world.start().await;
    let mut orders = Orders::of(&service).await;
    assert_eq!(orders.replay().await.len(), 1);
    synced(&service).await;
    assert_eq!(orders.next().await, Item::GoneUid("u".into()));
}

#[tokio::test]
async fn memory_pressure_rejects_best_effort_pods_and_evicts_the_lowest_ranked_pod() {
    let mut world = World::new();
    let _runtime = world.start_runtime().await;
    // More than any machine has: available memory is always below it.
    world.config.resources.eviction.hard = [("memory.available".to_owned(), "1000Ti".to_owned())].into();
    let service = world.start().await;
    machine(&service, |machine| machine.memory_pressure).await;
    let sync = synced(&service).await;
    let best_effort = desire("best-effort", 1, Want::Run, "BestEffort");
    sync.pod(best_effort.clone()).await;
    let verdict = admit(&mut service.client(), "best-effort", LONG).await;
    let rejected = pb::Rejected {
        reason: "Evicted".into(),
        message: "The node had condition: [MemoryPressure]. ".into(),
        passing: true,
    };
    assert_eq!(verdict, Verdict::Rejected(rejected));
    let tolerant = pb::PodDesire { tolerates_memory_pressure: true, ..best_effort };
    let mut tolerant = pb::PodDesire { priority: 1, ..tolerant };
    tolerant.pod.as_mut().unwrap().uid = "tolerant".into();
    // The pod to be evicted starts first: a pass may happen before all of them have started.
    sync.pod(requesting("unimportant", 1)).await;
    sync.pod(pb::PodDesire { critical: true, priority: -9, ..requesting("critical", 1) }).await;
    sync.pod(tolerant).await;
    for uid in ["unimportant", "critical", "tolerant"] {
        let verdict = admit(&mut service.client(), uid, LONG).await;
        assert_eq!(verdict, Verdict::Admitted(pb::Admitted {}), "{uid}");
    }
    // A pass may have happened before the watch.
    let mut orders = Orders::of(&service).await;
    let order = match orders.replay().await.pop() {
        Some(order) => order,
        None => orders.order().await,
    };
    assert_eq!(order.pod.unwrap().uid, "unimportant");
    let low = "The node was low on resource: memory. Threshold quantity: 1000Ti, available: ";
    assert!(order.message.starts_with(low), "{}", order.message);
    assert_eq!((order.signal.as_str(), order.grace_period_seconds), ("memory.available", Some(1)));
    let event = evicted(&service, "unimportant").await;
    assert_eq!(event.message, order.message);
    let annotations =
        [("starved_resource", "memory"), ("offending_containers", ""), ("offending_containers_usage", "")];
    let annotations = annotations.map(|(key, value)| (key.to_owned(), value.to_owned()));
    assert_eq!(event.annotations, annotations.into());
    let metrics = service.ctx.metrics.text();
    assert!(metrics.contains("kubelet_evictions{eviction_signal=\"memory.available\"} 1\n"), "{metrics}");

    // After a kill the condition is restored for the rest of the transition period.
    service.stop().await;
    world.config.resources.eviction.hard.clear();
    let service = world.start().await;
    let first = service
        .client()
        .watch_machine(pb::WatchMachineRequest {})
        .await
        .unwrap()
        .into_inner()
        .message()
        .await;
    assert!(first.unwrap().unwrap().memory_pressure);
}

#[tokio::test]
async fn pressure_defers_a_resize_of_a_running_pod_that_grows_and_none_that_shrinks() {
    let mut world = World::new();
    let _runtime = world.start_runtime().await;
    world.config.resources.eviction.hard = [("memory.available".to_owned(), "1000Ti".to_owned())].into();
    let service = world.start().await;
    machine(&service, |machine| machine.memory_pressure).await;
    let sync = synced(&service).await;
    sync.pod(pb::PodDesire { adopted: true, qos_class: "BestEffort".into(), ..requesting("u1", 10) }).await;
    assert_eq!(admit(&mut service.client(), "u1", LONG).await, Verdict::Admitted(pb::Admitted {}));
    let resize = async |milli: i64| {
        let requests = [("cpu".to_owned(), milli)].into();
        let request = pb::ResizePodRequest { uid: "u1".into(), revision: 1, requests };
        service.client().resize_pod(within(request, LONG)).await.unwrap().into_inner().verdict.unwrap()
    };
    use pb::resize_pod_response::Verdict::{Accepted, Rejected};
    let Rejected(rejected) = resize(20).await else { panic!("it may grow") };
    assert_eq!((rejected.reason.as_str(), rejected.passing), ("Evicted", true));
    assert_eq!(rejected.message, "The node had condition: [MemoryPressure]. ");
    assert_eq!(resize(5).await, Accepted(pb::Admitted {}));
}

#[tokio::test]
async fn a_critical_pod_waits_until_preempted_pods_are_gone() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let service = world.start().await;
    let all = machine(&service, |_| true).await.allocatable["cpu"];
    let sync = synced(&service).await;
    sync.pod(requesting("large", all)).await;
    assert_eq!(admit(&mut service.client(), "large", LONG).await, Verdict::Admitted(pb::Admitted {}));
    sync.pod(pb::PodDesire { critical: true, ..requesting("critical", all / 2) }).await;
    let verdict = admit(&mut service.client(), "critical", SHORT).await;
    let Verdict::NotYet(wait) = verdict else { panic!("{verdict:?}") };
    assert_eq!(wait.reason, "Preempting");
    let mut orders = Orders::of(&service).await;
    let order = orders.replay().await.pop();
    let order = match order {
        Some(order) => order,
        None => orders.order().await,
    };
    assert_eq!(order.pod.unwrap().uid, "large");
    assert_eq!((order.reason.as_str(), order.grace_period_seconds), ("Preempting", None));
    assert_eq!(order.message, "Preempted in order to admit critical pod");
    // Resources that preemption frees are reserved for the critical pod.
    sync.pod(requesting("other", all)).await;
    let mut gone = requesting("large", all);
    (gone.want, gone.revision) = (Want::Forget.into(), 2);
    sync.pod(gone).await;
    let verdict = admit(&mut service.client(), "other", LONG).await;
    assert!(matches!(&verdict, Verdict::Rejected(rejected) if rejected.reason == "OutOfcpu"), "{verdict:?}");
    assert_eq!(admit(&mut service.client(), "critical", LONG).await, Verdict::Admitted(pb::Admitted {}));
}

#[tokio::test]
async fn a_younger_pod_is_not_admitted_before_an_older_undecided_pod() {
    let world = World::new();
    let service = world.start().await;
    let all = machine(&service, |_| true).await.allocatable["cpu"];
    let most = all * 6 / 10;
    let sync = synced(&service).await;
    sync.pod(pb::PodDesire { created_unix_nanos: 1, ..requesting("older", most) }).await;
    sync.pod(pb::PodDesire { created_unix_nanos: 2, ..requesting("younger", most) }).await;
    let verdict = admit(&mut service.client(), "younger", SHORT).await;
    let Verdict::NotYet(wait) = verdict else { panic!("{verdict:?}") };
    assert_eq!(wait.reason, "OlderPodsFirst");
    let mut client = service.client();
    let younger = tokio::spawn(async move { admit(&mut client, "younger", LONG).await });
    assert_eq!(admit(&mut service.client(), "older", LONG).await, Verdict::Admitted(pb::Admitted {}));
    let verdict = younger.await.unwrap();
    assert!(matches!(&verdict, Verdict::Rejected(rejected) if rejected.reason == "OutOfcpu"), "{verdict:?}");
}

/// The number of eventfds of this process.
fn eventfds() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten().map(|fd| std::fs::read_link(fd.path()));
    links.filter(|link| link.as_ref().is_ok_and(|link| link.to_str() == Some("anon_inode:[eventfd]"))).count()
}

#[tokio::test]
async fn kernel_memcg_notification_registers_notifications_on_cgroup_v1() {
    let v1 = hierarchies().iter().any(|mount| mount.join("memory.usage_in_bytes").exists());
    for asked in [false, true] {
        let mut world = World::new();
        world.config.resources.eviction.hard = [("memory.available".to_owned(), "1".to_owned())].into();
        world.config.resources.eviction.kernel_memcg_notification = asked;
        let before = eventfds();
        let service = world.start().await;
        service.condition("eviction", true).await;
        // For the machine, and for all pods once they are limited.
        let most = if asked && v1 { 1..=2 } else { 0..=0 };
        let more = eventfds() - before;
        assert!(most.contains(&more), "{more} more, asked: {asked}");
        service.stop().await;
    }
}

#[tokio::test]
async fn excessive_reservations_and_unknown_eviction_signals_fail_the_start() {
    let mut world = World::new();
    world.config.resources.reserved = [("cpu".to_owned(), "100k".to_owned())].into();
    let text = world.start_error().await;
    assert!(text.contains("Resource \"cpu\" has a reservation of 100k but capacity of"), "{text}");
    world.config.resources.reserved.clear();
    world.config.resources.eviction.hard = [("memory.free".to_owned(), "1Gi".to_owned())].into();
    let text = world.start_error().await;
    assert!(text.contains("memory.free"), "{text}");
}
