use k8s_cri::v1 as cri;
use k8s_cri::v1::ContainerState::ContainerExited;
use keelson_proto::keelson::common::v1::{PodRef, Want};
use keelson_proto::keelson::events::v1 as events;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_proto::keelson::runtime::v1 as pb;
use pb::sync_request::Item;
use tokio::sync::mpsc;
use tonic::Code;

use super::*;
use crate::tests::fake_runtime::{FakeRuntime, refusal, until};
use crate::tests::sync_messages::{complete, pod_with_images};

const FULL: DiskSpace = DiskSpace { capacity: 1_000, available: 50 };

fn image(id: &str, tag: &str, size: u64) -> cri::Image {
    cri::Image { id: id.into(), repo_tags: vec![tag.into()], size, ..Default::default() }
}

fn wants(uid: &str, image: &str) -> Item {
    pod_with_images(uid, Want::Run, &[image])
}

/// A collector with a complete and empty set of desired pods, which has known the images for an hour.
async fn collector(fake: &FakeRuntime, space: DiskSpace) -> ImageCollector {
    let (cri, observer, desired) = (fake.cri.clone(), fake.observer.clone(), DesiredPods::default());
    let images = Images::new(cri.clone(), EventRing::default(), 1);
    let mut collector = ImageCollector::new(cri, observer, images, desired, EventRing::default());
    collector.clock = Clock::stopped();
    collector.disk = Disk::Set(space);
    collector.node = ObjectRef::node("edge");
    let stream = collector.desired.begin();
    collector.desired.apply_message(stream, complete(true)).unwrap();
    let now = collector.clock.read().boot_nanos;
    let images = collector.list().await.unwrap();
    collector.usage().record_list(images, now);
    collector.clock.advance(3_600, 0);
    collector
}

async fn node_events(collector: &ImageCollector) -> Vec<(String, String)> {
    let request = tonic::Request::new(events::ListEventsRequest::default());
    let list = collector.events.list_events(request).await.unwrap().into_inner().events;
    assert!(list.iter().all(|e| e.kind == "Node" && e.name == "edge" && e.r#type == "Warning"));
    list.into_iter().map(|e| (e.reason, e.message)).collect()
}

#[tokio::test]
async fn image_gc_frees_enough_and_keeps_used_wanted_and_pinned_images() {
    let fake = FakeRuntime::start().await;
    fake.add_image(image("sha256:used", "used:1", 500));
    fake.add_image(image("sha256:wanted", "wanted:latest", 500));
    fake.add_image(cri::Image { pinned: true, ..image("sha256:pinned", "pinned:1", 500) });
    fake.add_image(image("sha256:named", "pause:1", 500));
    fake.add_image(image("sha256:pause", "runtime-pause:1", 500));
    for id in ["sha256:a", "sha256:b", "sha256:c"] {
        fake.add_image(image(id, id, 80));
    }
    fake.sandbox_image("runtime-pause:1");
    // A dead container that Keelson did not create.
    fake.container("c", "u", ContainerExited);
    fake.set_image_ref("c", "sha256:used");
    let mut collector = collector(&fake, FULL).await;
    collector.sandbox_image = Some("pause:1".into());
    collector.desired.apply_message(1, wants("p", "wanted")).unwrap();
    // 200 bytes must be free and 50 are.
    let freed = collector.collect().await.unwrap();
    assert_eq!(freed, Freed { images: 2, bytes: 160 });
    let left = ["sha256:used", "sha256:wanted", "sha256:pinned", "sha256:named", "sha256:pause", "sha256:c"];
    assert_eq!(fake.image_ids(), left);
    assert!(node_events(&collector).await.is_empty());
    let spaced = ReasonLabel { reason: "space".into() };
    assert_eq!(collector.removed.get_or_create(&spaced).get(), 2);
}

#[tokio::test]
async fn image_gc_below_the_threshold_only_lists_images_and_containers() {
    let fake = FakeRuntime::start().await;
    fake.add_image(image("sha256:a", "a:1", 80));
    let collector = collector(&fake, DiskSpace { capacity: 1_000, available: 160 }).await;
    assert_eq!(collector.collect().await.unwrap(), Freed::default());
    assert_eq!(fake.image_ids().len(), 1);
    assert!(fake.images.image_status.requests().is_empty() && fake.runtime.status.requests().is_empty());
}

#[tokio::test]
async fn image_gc_event_at_once_for_too_little_space_and_on_the_second_failure() {
    let fake = FakeRuntime::start().await;
    fake.add_image(image("sha256:a", "a:1", 80));
    let collector = collector(&fake, FULL).await;
    collector.collect_and_report().await;
    let first = node_events(&collector).await;
    assert_eq!(first.len(), 1);
    assert_eq!(first[0].0, "FreeDiskSpaceFailed");
    let begin = "Insufficient free disk space on the node's image filesystem (95% of 1000.0 B used). Failed to free \
                 sufficient space by deleting unused images (freed 80 bytes). ";
    assert!(first[0].1.starts_with(begin), "{first:?}");
    collector.collect_and_report().await;
    let reasons: Vec<String> = node_events(&collector).await.into_iter().map(|(reason, _)| reason).collect();
    assert_eq!(reasons, ["FreeDiskSpaceFailed", "FreeDiskSpaceFailed", "ImageGCFailed"]);
}

#[tokio::test]
async fn successful_image_gc_resets_the_failure_count() {
    let fake = FakeRuntime::start().await;
    let mut collector = collector(&fake, FULL).await;
    collector.collect_and_report().await;
    collector.disk = Disk::Set(DiskSpace { capacity: 1_000, available: 900 });
    collector.collect_and_report().await;
    collector.disk = Disk::Set(FULL);
    collector.collect_and_report().await;
    assert!(node_events(&collector).await.iter().all(|(reason, _)| reason == "FreeDiskSpaceFailed"));
}

#[tokio::test]
async fn image_file_system_of_size_zero_is_an_event() {
    let fake = FakeRuntime::start().await;
    let collector = collector(&fake, DiskSpace { capacity: 0, available: 0 }).await;
    assert!(collector.collect().await.is_err());
    let expected = ("InvalidDiskCapacity".to_owned(), "invalid capacity 0 on image filesystem".to_owned());
    assert_eq!(node_events(&collector).await, [expected]);
}

#[tokio::test]
async fn image_file_system_usage_is_read_by_statvfs() {
    let fake = FakeRuntime::start().await;
    let mut collector = collector(&fake, FULL).await;
    collector.disk = Disk::Statfs;
    let space = collector.disk_space().await.unwrap();
    assert!(space.capacity >= space.available && space.capacity > 1 << 20, "{space:?}");
}

#[tokio::test]
async fn image_gc_removes_nothing_without_complete_pods_or_containers() {
    let fake = FakeRuntime::start().await;
    fake.add_image(image("sha256:a", "a:1", 80));
    let collector = collector(&fake, FULL).await;
    fake.runtime.list_containers.answer_once(Err(refusal(Code::Unavailable)));
    assert!(collector.collect().await.is_err());
    assert_eq!(fake.image_ids().len(), 1);
    collector.desired.begin();
    assert_eq!(collector.collect_all().await.unwrap(), Freed::default());
    assert_eq!(fake.image_ids().len(), 1);
}

#[tokio::test]
async fn image_gc_continues_after_a_failed_removal() {
    let fake = FakeRuntime::start().await;
    for id in ["sha256:a", "sha256:b"] {
        fake.add_image(image(id, id, 200));
    }
    let collector = collector(&fake, FULL).await;
    fake.images.remove_image.answer_once(Err(refusal(Code::Internal)));
    assert_eq!(collector.collect().await.unwrap(), Freed { images: 1, bytes: 200 });
    assert_eq!(fake.image_ids(), ["sha256:a"]);
}

#[tokio::test]
async fn requested_image_gc_removes_all_old_enough_images_at_any_usage() {
    let fake = FakeRuntime::start().await;
    for id in ["sha256:a", "sha256:b"] {
        fake.add_image(image(id, id, 200));
    }
    let collector = collector(&fake, DiskSpace { capacity: 1_000, available: 1_000 }).await;
    fake.add_image(image("sha256:new", "new:1", 200));
    assert_eq!(collector.collect_all().await.unwrap(), Freed { images: 2, bytes: 400 });
    assert_eq!(fake.image_ids(), ["sha256:new"]);
}

#[tokio::test]
async fn pod_added_during_image_gc_keeps_its_image() {
    let fake = FakeRuntime::start().await;
    for id in ["sha256:a", "sha256:b"] {
        fake.add_image(image(id, &format!("{}:1", &id[7..]), 200));
    }
    let collector = collector(&fake, FULL).await;
    let removal = fake.images.remove_image.hold();
    let collection = tokio::spawn({
        let collector = collector.clone();
        async move { collector.collect_all().await }
    });
    fake.images.remove_image.requests().until_len(1).await;
    collector.desired.apply_message(1, wants("p", "b:1")).unwrap();
    removal.open();
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
async fn image_just_reported_as_present_is_not_removed() {
    let fake = FakeRuntime::start().await;
    fake.add_image(image("sha256:a", "a:1", 200));
    let collector = collector(&fake, FULL).await;
    let (progress, mut messages) = mpsc::channel(8);
    collector.images.ensure(ensure("a:1"), progress).await;
    while messages.recv().await.is_some() {}
    assert_eq!(collector.collect_all().await.unwrap(), Freed::default());
    assert_eq!(fake.image_ids(), ["sha256:a"]);
}

#[tokio::test]
async fn image_requested_during_its_removal_is_pulled_again() {
    let fake = FakeRuntime::start().await;
    fake.add_image(image("sha256:a", "a:1", 200));
    let collector = collector(&fake, FULL).await;
    let removal = fake.images.remove_image.hold();
    let collection = tokio::spawn({
        let collector = collector.clone();
        async move { collector.collect_all().await }
    });
    fake.images.remove_image.requests().until_len(1).await;
    let inspections = fake.images.image_status.requests().len();
    let (progress, mut messages) = mpsc::channel(8);
    let ensured = tokio::spawn({
        let images = collector.images.clone();
        async move { images.ensure(ensure("a:1"), progress).await }
    });
    fake.images.image_status.requests().until_len(inspections + 1).await;
    removal.open();
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
async fn image_unused_for_longer_than_the_maximum_age_is_removed() {
    let fake = FakeRuntime::start().await;
    fake.add_image(image("sha256:a", "a:1", 200));
    let collector = collector(&fake, FULL).await;
    collector.set_policy(ImageGcPolicy {
        high_percent: 100,
        maximum_age: 3_599 * 1_000 * NANOS_PER_MS,
        ..collector.policy()
    });
    assert_eq!(collector.collect().await.unwrap(), Freed { images: 1, bytes: 200 });
    let aged = ReasonLabel { reason: "age".into() };
    assert_eq!(collector.removed.get_or_create(&aged).get(), 1);
}

#[tokio::test]
async fn requested_image_gc_stops_after_the_requested_bytes() {
    let fake = FakeRuntime::start().await;
    for id in ["sha256:a", "sha256:b", "sha256:c"] {
        fake.add_image(image(id, id, 200));
    }
    let collector = collector(&fake, DiskSpace { capacity: 1_000, available: 1_000 }).await;
    assert_eq!(collector.free_bytes(0).await.unwrap(), Freed::default());
    assert_eq!(collector.free_bytes(300).await.unwrap(), Freed { images: 2, bytes: 400 });
    assert_eq!(collector.free_bytes(300).await.unwrap(), Freed { images: 1, bytes: 200 });
    assert!(node_events(&collector).await.is_empty());
}

#[tokio::test]
async fn changed_image_gc_thresholds_apply_at_once() {
    let fake = FakeRuntime::start().await;
    fake.add_image(image("sha256:a", "a:1", 200));
    let image_collection = ImageCollection { high_threshold_percent: 100, ..ImageCollection::default() };
    let mut config = Config { image_collection, ..Config::default() };
    let collector = collector(&fake, FULL).await;
    collector.set_policy(policy_of(&config.image_collection));
    let context = Context::detached(keelson_config::ServiceName::RuntimeShim, config.clone());
    let running = tokio::spawn(collector.clone().run(context.clone()));
    config.image_collection.high_threshold_percent = 85;
    assert!(context.live.take(&config));
    until("the image is removed", || fake.image_ids().is_empty()).await;
    context.shutdown.cancel();
    running.await.unwrap();
}
