use super::*;
use crate::fake::{Answer, FakeRuntime};
use keelson_proto::keelson::common::v1::{PodRef, SetComplete};
use keelson_service_kit::EventRing;
use pb::sync_request::Item;
use std::path::PathBuf;
use tonic::Code;

fn pod(uid: &str, want: Want) -> Item {
    Item::Pod(pb::PodDesire {
        pod: Some(PodRef { uid: uid.into(), ..Default::default() }),
        want: want as i32,
        ..Default::default()
    })
}

fn complete(sources_ready: bool) -> Item {
    Item::Complete(SetComplete { epoch: 7, sources_ready })
}

#[test]
fn a_new_set_replaces_the_old_one_only_when_it_is_complete_and_all_sources_are_ready() {
    let desires = Desires::default();
    let first = desires.begin();
    desires.take(first, pod("old", Want::Run)).unwrap();
    assert_eq!(desires.take(first, complete(true)).unwrap(), Some(7));
    let second = desires.begin();
    desires.take(second, pod("new", Want::Run)).unwrap();
    assert!(desires.wants("old"), "nothing is swept while a set is incomplete");
    desires.take(second, complete(true)).unwrap();
    assert!(!desires.wants("old"));
    assert!(desires.wants("new"));
}

#[test]
fn without_ready_sources_nothing_is_unwanted() {
    let desires = Desires::default();
    let stream = desires.begin();
    desires.take(stream, complete(false)).unwrap();
    assert!(desires.wants("anything"));
}

#[test]
fn an_older_stream_is_turned_away() {
    let desires = Desires::default();
    let first = desires.begin();
    desires.begin();
    assert!(desires.take(first, pod("u", Want::Run)).is_err());
}

#[test]
fn a_set_that_is_complete_before_all_sources_are_ready_is_taken_when_they_are() {
    let desires = Desires::default();
    let first = desires.begin();
    desires.take(first, pod("old", Want::Run)).unwrap();
    desires.take(first, complete(true)).unwrap();
    let second = desires.begin();
    desires.take(second, pod("new", Want::Run)).unwrap();
    desires.take(second, pod("dropped", Want::Run)).unwrap();
    desires.take(second, complete(false)).unwrap();
    desires.take(second, Item::DroppedUid("dropped".into())).unwrap();
    desires.take(second, complete(true)).unwrap();
    assert!(desires.wants("new"));
    assert!(!desires.wants("old"), "the set of the earlier stream is gone");
    assert!(!desires.wants("dropped"), "a pod that was dropped during the replay is gone");
}

const EXITED: cri::ContainerState = cri::ContainerState::ContainerExited;

async fn collector(fake: &FakeRuntime) -> Collector {
    fake.observer.relist().await.unwrap();
    let (cri, observer, desires) = (fake.cri.clone(), fake.observer.clone(), Desires::default());
    let images = Images::new(cri.clone(), EventRing::default(), 1);
    let ring = EventRing::default();
    Collector {
        unused: UnusedImages::new(cri.clone(), observer.clone(), images.clone(), desires.clone(), ring),
        cri,
        observer,
        files: fake.files.clone(),
        images,
        desires,
        failures: Failures::default(),
        limits: Limits::default(),
        events: EventRing::default(),
        node: ObjectRef::node("edge"),
        remove_within: REMOVE_WITHIN,
    }
}

fn log_folder(fake: &FakeRuntime, uid: &str) -> PathBuf {
    let folder = fake.dir.path().join(format!("logs/default_{uid}_{uid}"));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn removed(fake: &FakeRuntime) -> Vec<String> {
    fake.calls("RemoveContainer").into_iter().map(|c| c.id).collect()
}

#[tokio::test]
async fn a_pod_that_is_wanted_again_during_a_collection_keeps_its_records_and_logs() {
    let fake = FakeRuntime::start().await;
    for uid in ["a", "b"] {
        fake.container(&format!("c-{uid}"), uid, EXITED);
    }
    let (gone, kept) = (log_folder(&fake, "a"), log_folder(&fake, "b"));
    let collector = collector(&fake).await;
    let stream = collector.desires.begin();
    collector.desires.take(stream, complete(true)).unwrap();
    let first = fake.hold("RemoveContainer c-a");
    let collection = tokio::spawn({
        let collector = collector.clone();
        async move { collector.collect().await }
    });
    fake.called("RemoveContainer", 1).await;
    collector.desires.take(stream, pod("b", Want::Run)).unwrap();
    first.add_permits(1);
    assert_eq!(collection.await.unwrap().unwrap(), (1, 0));
    assert_eq!(removed(&fake), ["c-a"]);
    assert!(!gone.exists());
    assert!(kept.exists());
}

#[tokio::test]
async fn the_logs_of_a_pod_that_is_wanted_again_stay_though_its_records_are_gone() {
    let fake = FakeRuntime::start().await;
    fake.container("c", "a", EXITED);
    let kept = log_folder(&fake, "a");
    let collector = collector(&fake).await;
    let stream = collector.desires.begin();
    collector.desires.take(stream, complete(true)).unwrap();
    let removal = fake.hold("RemoveContainer");
    let collection = tokio::spawn({
        let collector = collector.clone();
        async move { collector.collect().await }
    });
    fake.called("RemoveContainer", 1).await;
    collector.desires.take(stream, pod("a", Want::Run)).unwrap();
    removal.add_permits(1);
    collection.await.unwrap().unwrap();
    assert!(kept.exists());
}

#[tokio::test]
async fn a_container_that_was_started_since_it_was_seen_is_not_removed() {
    let fake = FakeRuntime::start().await;
    fake.container("c", "a", cri::ContainerState::ContainerCreated);
    let collector = collector(&fake).await;
    let stream = collector.desires.begin();
    collector.desires.take(stream, pod("a", Want::Forget)).unwrap();
    fake.container("c", "a", cri::ContainerState::ContainerRunning);
    assert_eq!(collector.collect().await.unwrap(), (0, 0));
    assert!(removed(&fake).is_empty());
}

#[tokio::test]
async fn a_removal_that_hangs_is_given_up_and_comes_after_the_others_next_time() {
    let fake = FakeRuntime::start().await;
    for uid in ["a", "b"] {
        fake.container(&format!("c-{uid}"), uid, EXITED);
    }
    let mut collector = collector(&fake).await;
    collector.remove_within = Duration::from_millis(200);
    let stream = collector.desires.begin();
    collector.desires.take(stream, complete(true)).unwrap();
    fake.answer("RemoveContainer c-b", Answer::Fail(1, Code::Internal));
    let _never = fake.hold("RemoveContainer c-a");
    assert!(collector.collect().await.is_err());
    assert_eq!(removed(&fake), ["c-a", "c-b"]);
    fake.container("c-c", "c", EXITED);
    fake.observer.relist().await.unwrap();
    let refused = collector.collect().await.unwrap_err();
    assert_eq!(refused.message(), "the runtime has not removed c-a in 200ms");
    assert_eq!(removed(&fake)[2..], ["c-c", "c-a", "c-b"]);
    assert!(fake.observer.cached("b").is_none() && fake.observer.cached("c").is_none());
}

#[test]
fn the_images_of_wanted_pods_are_known_until_the_pods_are_forgotten_or_dropped() {
    let pod = |uid: &str, want: Want| match pod(uid, want) {
        Item::Pod(desire) => Item::Pod(pb::PodDesire { images: vec![format!("{uid}:1")], ..desire }),
        other => other,
    };
    let images = |desires: &Desires| desires.wanted_images().into_iter().collect::<Vec<_>>();
    let desires = Desires::default();
    let first = desires.begin();
    for uid in ["a", "b", "c", "d"] {
        desires.take(first, pod(uid, Want::Run)).unwrap();
    }
    assert!(!desires.are_complete());
    desires.take(first, complete(true)).unwrap();
    assert!(desires.are_complete());
    desires.take(first, pod("b", Want::Stop)).unwrap();
    desires.take(first, pod("c", Want::Forget)).unwrap();
    desires.take(first, Item::DroppedUid("d".into())).unwrap();
    assert_eq!(images(&desires), ["a:1", "b:1"]);
    let second = desires.begin();
    desires.take(second, pod("e", Want::Run)).unwrap();
    assert_eq!(images(&desires), ["a:1", "b:1", "e:1"], "a set that is not complete takes nothing away");
    desires.take(second, complete(true)).unwrap();
    assert_eq!(images(&desires), ["e:1"]);
}

#[tokio::test]
async fn an_order_for_room_takes_the_dead_containers_of_pods_that_have_ended_for_good() {
    let fake = FakeRuntime::start().await;
    for uid in ["ended", "kept"] {
        fake.container(&format!("c-{uid}"), uid, EXITED);
    }
    let folder = log_folder(&fake, "ended");
    let collector = collector(&fake).await;
    let stream = collector.desires.begin();
    collector.desires.take(stream, pod("ended", Want::Unmount)).unwrap();
    collector.desires.take(stream, pod("kept", Want::Stop)).unwrap();
    collector.desires.take(stream, complete(true)).unwrap();
    assert_eq!(collector.collect().await.unwrap(), (0, 0));
    assert_eq!(collector.collect_for_room().await.unwrap(), (1, 0));
    assert_eq!(removed(&fake), ["c-ended"]);
    assert!(folder.exists(), "the pod is still there");
    assert!(collector.desires.wants("ended"));
}

#[test]
fn the_limits_of_the_configuration_are_the_kubelets() {
    let default = limits_of(&ContainerCollection::default());
    assert_eq!(default, Limits::default());
    let all = ContainerCollection { minimum_age_ms: 2, max_per_container: -1, max_total: 7 };
    let expected = Limits { minimum_age: 2_000_000, per_container: None, total: Some(7), order: false };
    assert_eq!(limits_of(&all), expected);
}

#[tokio::test]
async fn a_whole_collection_that_fails_is_told_of_the_node() {
    use keelson_proto::keelson::events::v1::events_server::Events as _;
    let fake = FakeRuntime::start().await;
    fake.container("c", "a", EXITED);
    let collector = collector(&fake).await;
    let stream = collector.desires.begin();
    collector.desires.take(stream, complete(true)).unwrap();
    fake.answer("RemoveContainer", Answer::Fail(1, Code::Internal));
    let context = Context::detached(keelson_config::ServiceName::RuntimeShim, Default::default());
    let run = tokio::spawn(collector.clone().run(context.clone()));
    let told = async || {
        let request = tonic::Request::new(Default::default());
        collector.events.list_events(request).await.unwrap().into_inner().events
    };
    keelson_testkit::eventually(Duration::from_secs(20), "it is told", async || !told().await.is_empty())
        .await
        .unwrap();
    let event = told().await.remove(0);
    let found = (event.reason.as_str(), event.kind.as_str(), event.name.as_str(), event.r#type.as_str());
    assert_eq!(found, ("ContainerGCFailed", "Node", "edge", "Warning"));
    assert_eq!(event.message, "as the test wants it");
    context.shutdown.cancel();
    run.await.unwrap();
}
