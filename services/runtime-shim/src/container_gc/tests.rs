use std::path::PathBuf;

use k8s_cri::v1 as cri;
use keelson_proto::keelson::common::v1::Want;
use keelson_service_kit::EventRing;
use tonic::Code;

use super::*;
use crate::tests::fake_runtime::{FakeRuntime, Fault, refusal};
use crate::tests::sync_messages::{complete, pod};

const EXITED: cri::ContainerState = cri::ContainerState::ContainerExited;

async fn collector(fake: &FakeRuntime) -> Collector {
    fake.observer.relist().await.unwrap();
    let (cri, observer, desired) = (fake.cri.clone(), fake.observer.clone(), DesiredPods::default());
    let images = Images::new(cri.clone(), EventRing::default(), 1);
    let ring = EventRing::default();
    Collector {
        image_collector: ImageCollector::new(
            cri.clone(),
            observer.clone(),
            images.clone(),
            desired.clone(),
            ring,
        ),
        cri,
        observer,
        files: fake.files.clone(),
        images,
        desired,
        failed_removals: FailedRemovals::default(),
        policy: GcPolicy::default(),
        events: EventRing::default(),
        node: ObjectRef::node("edge"),
        remove_timeout: REMOVE_TIMEOUT,
    }
}

fn log_folder(fake: &FakeRuntime, uid: &str) -> PathBuf {
    let folder = fake.dir.path().join(format!("logs/default_{uid}_{uid}"));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn removed(fake: &FakeRuntime) -> Vec<String> {
    fake.runtime.remove_container.requests().all().into_iter().map(|c| c.container_id).collect()
}

#[tokio::test]
async fn pod_desired_again_during_container_gc_keeps_its_containers_and_logs() {
    let fake = FakeRuntime::start().await;
    for uid in ["a", "b"] {
        fake.container(&format!("c-{uid}"), uid, EXITED);
    }
    let (gone, kept) = (log_folder(&fake, "a"), log_folder(&fake, "b"));
    let collector = collector(&fake).await;
    let stream = collector.desired.begin();
    collector.desired.apply_message(stream, complete(true)).unwrap();
    let first = fake.runtime.remove_container.hold();
    let collection = tokio::spawn({
        let collector = collector.clone();
        async move { collector.collect().await }
    });
    fake.runtime.remove_container.requests().until_len(1).await;
    collector.desired.apply_message(stream, pod("b", Want::Run)).unwrap();
    first.open();
    assert_eq!(collection.await.unwrap().unwrap(), (1, 0));
    assert_eq!(removed(&fake), ["c-a"]);
    assert!(!gone.exists());
    assert!(kept.exists());
}

#[tokio::test]
async fn pod_desired_again_keeps_its_logs_after_its_containers_were_removed() {
    let fake = FakeRuntime::start().await;
    fake.container("c", "a", EXITED);
    let kept = log_folder(&fake, "a");
    let collector = collector(&fake).await;
    let stream = collector.desired.begin();
    collector.desired.apply_message(stream, complete(true)).unwrap();
    let removal = fake.runtime.remove_container.hold();
    let collection = tokio::spawn({
        let collector = collector.clone();
        async move { collector.collect().await }
    });
    fake.runtime.remove_container.requests().until_len(1).await;
    collector.desired.apply_message(stream, pod("a", Want::Run)).unwrap();
    removal.open();
    collection.await.unwrap().unwrap();
    assert!(kept.exists());
}

#[tokio::test]
async fn container_started_since_the_last_read_is_not_removed() {
    let fake = FakeRuntime::start().await;
    fake.container("c", "a", cri::ContainerState::ContainerCreated);
    let collector = collector(&fake).await;
    let stream = collector.desired.begin();
    collector.desired.apply_message(stream, pod("a", Want::Forget)).unwrap();
    fake.container("c", "a", cri::ContainerState::ContainerRunning);
    assert_eq!(collector.collect().await.unwrap(), (0, 0));
    assert!(removed(&fake).is_empty());
}

#[tokio::test]
async fn hanging_container_removal_times_out_and_is_retried_last() {
    let fake = FakeRuntime::start().await;
    for uid in ["a", "b"] {
        fake.container(&format!("c-{uid}"), uid, EXITED);
    }
    let mut collector = collector(&fake).await;
    collector.remove_timeout = Duration::from_millis(200);
    let stream = collector.desired.begin();
    collector.desired.apply_message(stream, complete(true)).unwrap();
    fake.set_fault("c-b", Fault::RemovalFails);
    fake.set_fault("c-a", Fault::RemovalHangs);
    assert!(collector.collect().await.is_err());
    assert_eq!(removed(&fake), ["c-a", "c-b"]);
    fake.container("c-c", "c", EXITED);
    fake.observer.relist().await.unwrap();
    let refused = collector.collect().await.unwrap_err();
    assert_eq!(refused.message(), "the runtime has not removed c-a in 200ms");
    assert_eq!(removed(&fake)[2..], ["c-c", "c-a", "c-b"]);
    assert!(fake.observer.cached("b").is_none() && fake.observer.cached("c").is_none());
}

#[tokio::test]
async fn reclaiming_space_removes_dead_containers_of_ended_pods() {
    let fake = FakeRuntime::start().await;
    for uid in ["ended", "kept"] {
        fake.container(&format!("c-{uid}"), uid, EXITED);
    }
    let folder = log_folder(&fake, "ended");
    let collector = collector(&fake).await;
    let stream = collector.desired.begin();
    collector.desired.apply_message(stream, pod("ended", Want::Unmount)).unwrap();
    collector.desired.apply_message(stream, pod("kept", Want::Stop)).unwrap();
    collector.desired.apply_message(stream, complete(true)).unwrap();
    assert_eq!(collector.collect().await.unwrap(), (0, 0));
    assert_eq!(collector.reclaim_space().await.unwrap(), (1, 0));
    assert_eq!(removed(&fake), ["c-ended"]);
    assert!(folder.exists(), "the pod object still exists");
    assert!(collector.desired.is_desired("ended"));
}

#[test]
fn gc_policy_follows_the_kubelets_flags() {
    let default = gc_policy(&ContainerCollection::default());
    assert_eq!(default, GcPolicy::default());
    let all = ContainerCollection { minimum_age_ms: 2, max_per_container: -1, max_total: 7 };
    let expected = GcPolicy {
        minimum_age: 2_000_000,
        max_per_container: None,
        max_total: Some(7),
        reclaim_space: false,
    };
    assert_eq!(gc_policy(&all), expected);
}

#[tokio::test]
async fn failed_container_gc_is_a_node_event() {
    use keelson_proto::keelson::events::v1::events_server::Events as _;
    let fake = FakeRuntime::start().await;
    fake.container("c", "a", EXITED);
    let collector = collector(&fake).await;
    let stream = collector.desired.begin();
    collector.desired.apply_message(stream, complete(true)).unwrap();
    fake.runtime.remove_container.answer_once(Err(refusal(Code::Internal)));
    let context = Context::detached(keelson_config::ServiceName::RuntimeShim, Default::default());
    let run = tokio::spawn(collector.clone().run(context.clone()));
    let events = async || {
        let request = tonic::Request::new(Default::default());
        collector.events.list_events(request).await.unwrap().into_inner().events
    };
    keelson_testkit::eventually(Duration::from_secs(20), "an event is reported", async || {
        !events().await.is_empty()
    })
    .await
    .unwrap();
    let event = events().await.remove(0);
    let found = (event.reason.as_str(), event.kind.as_str(), event.name.as_str(), event.r#type.as_str());
    assert_eq!(found, ("ContainerGCFailed", "Node", "edge", "Warning"));
    assert_eq!(event.message, "as the test wants it");
    context.shutdown.cancel();
    run.await.unwrap();
}
