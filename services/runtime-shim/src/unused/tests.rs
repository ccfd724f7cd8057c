use k8s_cri::v1::ContainerState::ContainerExited;
use keelson_proto::keelson::common::v1::{PodRef, SetComplete, Want};
use keelson_proto::keelson::events::v1 as events;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_proto::keelson::runtime::v1 as pb;
use pb::sync_request::Item;
use tokio::sync::mpsc;
use tonic::Code;

use super::*;
use crate::fake::{Answer, FakeRuntime, until};

const FULL: Space = Space { capacity: 1_000, available: 50 };

fn image(id: &str, tag: &str, size: u64) -> cri::Image {
    cri::Image { id: id.into(), repo_tags: vec![tag.into()], size, ..Default::default() }
}

fn wants(uid: &str, image: &str) -> Item {
    Item::Pod(pb::PodDesire {
        pod: Some(PodRef { uid: uid.into(), ..Default::default() }),
        want: Want::Run as i32,
        images: vec![image.into()],
        ..Default::default()
    })
}

/// A collector that knows the whole set of wanted pods, which is empty, and has seen the images for an hour.
async fn unused(fake: &FakeRuntime, space: Space) -> UnusedImages {
    let (cri, observer, desires) = (fake.cri.clone(), fake.observer.clone(), Desires::default());
    let images = Images::new(cri.clone(), EventRing::default(), 1);
    let mut unused = UnusedImages::new(cri, observer, images, desires, EventRing::default());
    unused.clock = Clock::standing();
    unused.disk = Disk::Set(space);
    unused.node = ObjectRef::node("edge");
    let complete = SetComplete { epoch: 1, sources_ready: true };
    let stream = unused.desires.begin();
    unused.desires.take(stream, Item::Complete(complete)).unwrap();
    let now = unused.clock.read().boot_nanos;
    let images = unused.list().await.unwrap();
    unused.book().list(images, now);
    unused.clock.pass(3_600, 0);
    unused
}

async fn told(unused: &UnusedImages) -> Vec<(String, String)> {
    let request = tonic::Request::new(events::ListEventsRequest::default());
    let list = unused.events.list_events(request).await.unwrap().into_inner().events;
    assert!(list.iter().all(|e| e.kind == "Node" && e.name == "edge" && e.r#type == "Warning"));
    list.into_iter().map(|e| (e.reason, e.message)).collect()
}

#[tokio::test]
async fn enough_is_removed_and_what_is_used_wanted_or_pinned_stays() {
    let fake = FakeRuntime::start().await;
    fake.image_of(image("sha256:used", "used:1", 500));
    fake.image_of(image("sha256:wanted", "wanted:latest", 500));
    fake.image_of(cri::Image { pinned: true, ..image("sha256:pinned", "pinned:1", 500) });
    fake.image_of(image("sha256:named", "pause:1", 500));
    fake.image_of(image("sha256:pause", "runtime-pause:1", 500));
    for id in ["sha256:a", "sha256:b", "sha256:c"] {
        fake.image_of(image(id, id, 80));
    }
    fake.sandbox_image("runtime-pause:1");
    // A dead container of somebody else's.
    fake.container("c", "u", ContainerExited);
    fake.made_from("c", "sha256:used");
    let mut unused = unused(&fake, FULL).await;
    unused.sandbox_image = Some("pause:1".into());
    unused.desires.take(1, wants("p", "wanted")).unwrap();
    // 200 are to be free and 50 are.
    let freed = unused.collect().await.unwrap();
    assert_eq!(freed, Freed { images: 2, bytes: 160 });
    let left = ["sha256:used", "sha256:wanted", "sha256:pinned", "sha256:named", "sha256:pause", "sha256:c"];
    assert_eq!(fake.image_ids(), left);
    assert!(told(&unused).await.is_empty());
    let spaced = ReasonLabel { reason: "space".into() };
    assert_eq!(unused.removed.get_or_create(&spaced).get(), 2);
}

#[tokio::test]
async fn below_the_threshold_nothing_is_asked_but_the_two_lists() {
    let fake = FakeRuntime::start().await;
    fake.image_of(image("sha256:a", "a:1", 80));
    let unused = unused(&fake, Space { capacity: 1_000, available: 160 }).await;
    assert_eq!(unused.collect().await.unwrap(), Freed::default());
    assert_eq!(fake.image_ids().len(), 1);
    assert!(fake.calls("ImageStatus").is_empty() && fake.calls("Status").is_empty());
}

#[tokio::test]
async fn too_little_is_told_at_once_and_from_the_second_time_on_as_a_failure_too() {
    let fake = FakeRuntime::start().await;
    fake.image_of(image("sha256:a", "a:1", 80));
    let unused = unused(&fake, FULL).await;
    unused.collect_and_tell().await;
    let first = told(&unused).await;
    assert_eq!(first.len(), 1);
    assert_eq!(first[0].0, "FreeDiskSpaceFailed");
    let begin = "Insufficient free disk space on the node's image filesystem (95% of 1000.0 B used). Failed to free \
                 sufficient space by deleting unused images (freed 80 bytes). ";
    assert!(first[0].1.starts_with(begin), "{first:?}");
    unused.collect_and_tell().await;
    let reasons: Vec<String> = told(&unused).await.into_iter().map(|(reason, _)| reason).collect();
    assert_eq!(reasons, ["FreeDiskSpaceFailed", "FreeDiskSpaceFailed", "ImageGCFailed"]);
}

#[tokio::test]
async fn a_good_collection_between_two_failures_is_forgiving() {
    let fake = FakeRuntime::start().await;
    let mut unused = unused(&fake, FULL).await;
    unused.collect_and_tell().await;
    unused.disk = Disk::Set(Space { capacity: 1_000, available: 900 });
    unused.collect_and_tell().await;
    unused.disk = Disk::Set(FULL);
    unused.collect_and_tell().await;
    assert!(told(&unused).await.iter().all(|(reason, _)| reason == "FreeDiskSpaceFailed"));
}

#[tokio::test]
async fn a_file_system_without_a_size_is_told() {
    let fake = FakeRuntime::start().await;
    let unused = unused(&fake, Space { capacity: 0, available: 0 }).await;
    assert!(unused.collect().await.is_err());
    let expected = ("InvalidDiskCapacity".to_owned(), "invalid capacity 0 on image filesystem".to_owned());
    assert_eq!(told(&unused).await, [expected]);
}

#[tokio::test]
async fn the_real_file_system_of_the_images_has_a_size() {
    let fake = FakeRuntime::start().await;
    let mut unused = unused(&fake, FULL).await;
    unused.disk = Disk::Statfs;
    let space = unused.space().await.unwrap();
    assert!(space.capacity >= space.available && space.capacity > 1 << 20, "{space:?}");
}

#[tokio::test]
async fn without_the_whole_set_or_without_the_containers_nothing_is_removed() {
    let fake = FakeRuntime::start().await;
    fake.image_of(image("sha256:a", "a:1", 80));
    let unused = unused(&fake, FULL).await;
    fake.answer("ListContainers", Answer::Fail(1, Code::Unavailable));
    assert!(unused.collect().await.is_err());
    assert_eq!(fake.image_ids().len(), 1);
    unused.desires.begin();
    assert_eq!(unused.collect_all().await.unwrap(), Freed::default());
    assert_eq!(fake.image_ids().len(), 1);
}

#[tokio::test]
async fn an_image_that_cannot_be_removed_makes_room_for_the_next() {
    let fake = FakeRuntime::start().await;
    for id in ["sha256:a", "sha256:b"] {
        fake.image_of(image(id, id, 200));
    }
    let unused = unused(&fake, FULL).await;
    fake.answer("RemoveImage", Answer::Fail(1, Code::Internal));
    assert_eq!(unused.collect().await.unwrap(), Freed { images: 1, bytes: 200 });
    assert_eq!(fake.image_ids(), ["sha256:a"]);
}

#[tokio::test]
async fn an_order_removes_all_that_is_old_enough_at_any_usage() {
    let fake = FakeRuntime::start().await;
    for id in ["sha256:a", "sha256:b"] {
        fake.image_of(image(id, id, 200));
    }
    let unused = unused(&fake, Space { capacity: 1_000, available: 1_000 }).await;
    fake.image_of(image("sha256:new", "new:1", 200));
    assert_eq!(unused.collect_all().await.unwrap(), Freed { images: 2, bytes: 400 });
    assert_eq!(fake.image_ids(), ["sha256:new"]);
}

#[tokio::test]
async fn a_pod_that_comes_during_a_collection_keeps_its_image() {
    let fake = FakeRuntime::start().await;
    for id in ["sha256:a", "sha256:b"] {
        fake.image_of(image(id, &format!("{}:1", &id[7..]), 200));
    }
    let unused = unused(&fake, FULL).await;
    let removal = fake.hold("RemoveImage");
    let collection = tokio::spawn({
        let unused = unused.clone();
        async move { unused.collect_all().await }
    });
    fake.called("RemoveImage", 1).await;
    unused.desires.take(1, wants("p", "b:1")).unwrap();
    removal.add_permits(2);
    assert_eq!(collection.await.unwrap().unwrap().images, 1);
    assert_eq!(fake.image_ids(), ["sha256:b"]);
}

fn ensure(image: &str) -> pb::EnsureImageRequest {
    pb::EnsureImageRequest {
        pod: Some(PodRef { uid: "p".into(), ..Default::default() }),
        image: image.into(),
        pull_policy: "IfNotPresent".into(),
        ..Default::default()
    }
}

#[tokio::test]
async fn an_image_that_somebody_was_just_told_is_there_stays() {
    let fake = FakeRuntime::start().await;
    fake.image_of(image("sha256:a", "a:1", 200));
    let unused = unused(&fake, FULL).await;
    let (progress, mut messages) = mpsc::channel(8);
    unused.images.ensure(ensure("a:1"), progress).await;
    while messages.recv().await.is_some() {}
    assert_eq!(unused.collect_all().await.unwrap(), Freed::default());
    assert_eq!(fake.image_ids(), ["sha256:a"]);
}

#[tokio::test]
async fn who_asks_for_an_image_while_it_is_removed_gets_it_pulled_and_not_a_promise() {
    let fake = FakeRuntime::start().await;
    fake.image_of(image("sha256:a", "a:1", 200));
    let unused = unused(&fake, FULL).await;
    let removal = fake.hold("RemoveImage");
    let collection = tokio::spawn({
        let unused = unused.clone();
        async move { unused.collect_all().await }
    });
    fake.called("RemoveImage", 1).await;
    let asked = fake.calls("ImageStatus").len();
    let (progress, mut messages) = mpsc::channel(8);
    let ensured = tokio::spawn({
        let images = unused.images.clone();
        async move { images.ensure(ensure("a:1"), progress).await }
    });
    fake.called("ImageStatus", asked + 1).await;
    removal.add_permits(1);
    collection.await.unwrap().unwrap();
    ensured.await.unwrap();
    let mut steps = Vec::new();
    while let Some(message) = messages.recv().await {
        steps.extend(message.unwrap().item);
    }
    let pulled = |item: &pb::ensure_image_response::Item| matches!(item, pb::ensure_image_response::Item::Done(done) if done.pulled);
    assert!(steps.last().is_some_and(pulled), "{steps:?}");
}

#[tokio::test]
async fn what_is_unused_for_longer_than_the_maximum_age_goes() {
    let fake = FakeRuntime::start().await;
    fake.image_of(image("sha256:a", "a:1", 200));
    let unused = unused(&fake, FULL).await;
    unused.set_policy(Policy {
        high_percent: 100,
        maximum_age: 3_599 * 1_000 * NANOS_PER_MS,
        ..unused.policy()
    });
    assert_eq!(unused.collect().await.unwrap(), Freed { images: 1, bytes: 200 });
    let aged = ReasonLabel { reason: "age".into() };
    assert_eq!(unused.removed.get_or_create(&aged).get(), 1);
}

#[tokio::test]
async fn an_order_for_some_bytes_ends_when_so_many_are_freed() {
    let fake = FakeRuntime::start().await;
    for id in ["sha256:a", "sha256:b", "sha256:c"] {
        fake.image_of(image(id, id, 200));
    }
    let unused = unused(&fake, Space { capacity: 1_000, available: 1_000 }).await;
    assert_eq!(unused.free(0).await.unwrap(), Freed::default());
    assert_eq!(unused.free(300).await.unwrap(), Freed { images: 2, bytes: 400 });
    assert_eq!(unused.free(300).await.unwrap(), Freed { images: 1, bytes: 200 });
    assert!(told(&unused).await.is_empty());
}

#[tokio::test]
async fn other_thresholds_count_as_soon_as_the_configuration_has_them() {
    let fake = FakeRuntime::start().await;
    fake.image_of(image("sha256:a", "a:1", 200));
    let image_collection = ImageCollection { high_threshold_percent: 100, ..ImageCollection::default() };
    let mut config = Config { image_collection, ..Config::default() };
    let unused = unused(&fake, FULL).await;
    unused.set_policy(policy_of(&config.image_collection));
    let context = Context::detached(keelson_config::ServiceName::RuntimeShim, config.clone());
    let running = tokio::spawn(unused.clone().run(context.clone()));
    config.image_collection.high_threshold_percent = 85;
    assert!(context.live.take(&config));
    until("the image is removed", || fake.image_ids().is_empty()).await;
    context.shutdown.cancel();
    running.await.unwrap();
}
