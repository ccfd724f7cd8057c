mod credentials;
mod progress;

use std::time::Duration;

use keelson_proto::keelson::events::v1 as events;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_runtime_shim_core::image::BACKOFF_INITIAL_S;
use keelson_service_kit::{Fairness, Turns};
use keelson_testkit::fakes::cut_off;
use tokio::sync::mpsc;
use tonic::Code;

use super::*;
use crate::clock::Clock;
use crate::tests::fake_runtime::{FakeRuntime, refusal};

fn images(fake: &FakeRuntime) -> Images {
    let mut images = Images::new(fake.cri.clone(), EventRing::default(), 1);
    let clock = Clock::stopped();
    images.puller.present.clock = clock.clone();
    images.puller.clock = clock;
    images
}

/// The status with which a request ends that fails without `done` or `failed`.
async fn unavailable_status(images: &Images, request: pb::EnsureImageRequest) -> Status {
    let (progress, mut messages) = mpsc::channel(8);
    images.ensure(request, progress).await;
    let mut last = None;
    while let Some(message) = messages.recv().await {
        last = Some(message);
    }
    last.unwrap().unwrap_err()
}

fn request(policy: &str) -> pb::EnsureImageRequest {
    pb::EnsureImageRequest {
        pod: Some(PodRef { uid: "u".into(), namespace: "default".into(), name: "web".into() }),
        container: "c".into(),
        image: "busybox:1".into(),
        pull_policy: policy.into(),
        spec_list: "initContainers".into(),
        pull_secrets: Vec::new(),
    }
}

async fn events_of(images: &Images) -> Vec<events::Event> {
    let request = tonic::Request::new(events::ListEventsRequest::default());
    images.events.list_events(request).await.unwrap().into_inner().events
}

/// The last message of a request.
async fn end(images: &Images, request: pb::EnsureImageRequest) -> Item {
    let (progress, mut messages) = mpsc::channel(8);
    images.ensure(request, progress).await;
    let mut last = None;
    while let Some(message) = messages.recv().await {
        last = message.unwrap().item;
    }
    last.unwrap()
}

fn failed(item: Item) -> pb::ImageFailed {
    match item {
        Item::Failed(failure) => failure,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn cancelled_pull_is_no_failure() {
    let fake = FakeRuntime::start().await;
    let images = images(&fake);
    let _never = fake.images.pull_image.hold();
    let (progress, messages) = mpsc::channel(8);
    let pull = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    fake.images.pull_image.requests().until_len(1).await;
    // A second pull waits for the only turn.
    let (progress, waits) = mpsc::channel(8);
    let waiting = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    fake.images.image_status.requests().until_len(2).await;
    drop(waits);
    waiting.await.unwrap();
    drop(messages);
    pull.await.unwrap();
    assert_eq!(
        images.puller.backoff().retry_at("u", "busybox:1", images.puller.clock.read().boot_nanos),
        None
    );
    assert!(events_of(&images).await.iter().all(|e| e.reason == "Pulling"));
}

#[tokio::test]
async fn endless_pull_gives_its_turn_to_another_pods_pull_which_reports_its_wait() {
    let fake = FakeRuntime::start().await;
    let moment = Duration::from_millis(20);
    let mut images = images(&fake);
    images.puller.turns = Turns::new(1, Fairness { patience: moment, kept: moment });
    let held = fake.images.pull_image.hold();
    let mut messages = Vec::new();
    for (name, begun) in [("slow", 1), ("other", 2)] {
        let (progress, receiver) = mpsc::channel(8);
        let pod = PodRef { uid: name.into(), namespace: "default".into(), name: name.into() };
        let request = pb::EnsureImageRequest { pod: Some(pod), ..request("Always") };
        let images = images.clone();
        tokio::spawn(async move { images.ensure(request, progress).await });
        messages.push(receiver);
        // With one pull at a time, the second begins although the first does not end.
        fake.images.pull_image.requests().until_len(begun).await;
    }
    held.open();
    let mut progress_of_last = Vec::new();
    for mut messages in messages {
        let mut all = Vec::new();
        while let Some(message) = messages.recv().await {
            all.push(message.unwrap().item.unwrap());
        }
        assert!(matches!(all.last(), Some(Item::Done(_))), "{all:?}");
        progress_of_last = all;
    }
    let waits = "serializeImagePulls, maxParallelImagePulls): 1 of 1 run, 1 of them for default/slow";
    assert!(progress_of_last.iter().any(|item| format!("{item:?}").contains(waits)), "{progress_of_last:?}");
}

#[tokio::test]
async fn failed_pull_has_the_kubelets_message_and_is_repeated_during_back_off() {
    let fake = FakeRuntime::start().await;
    let images = images(&fake);
    fake.images.pull_image.answer_once(Err(refusal(Code::Unknown)));
    let first = failed(end(&images, request("Always")).await);
    assert_eq!(first.reason, "ErrImagePull");
    assert_eq!(first.message, "Failed to pull image \"busybox:1\": as the test wants it");
    let second = failed(end(&images, request("Always")).await);
    assert_eq!(second.reason, "ImagePullBackOff");
    let expected = "Back-off pulling image \"busybox:1\": ErrImagePull: as the test wants it";
    assert_eq!(second.message, expected);
    assert_eq!(second.next_retry_unix_nanos, first.next_retry_unix_nanos);
    let events = events_of(&images).await;
    let texts: Vec<_> =
        events.iter().map(|e| (e.r#type.as_str(), e.reason.as_str(), e.message.as_str())).collect();
    let expected = [
        ("Normal", "Pulling", "Pulling image \"busybox:1\""),
        ("Warning", "Failed", first.message.as_str()),
        ("Normal", "BackOff", "Back-off pulling image \"busybox:1\""),
    ];
    assert_eq!(texts, expected);
    assert!(events.iter().all(|e| e.field_path == "spec.initContainers{c}"), "{events:?}");
}

#[tokio::test]
async fn events_of_the_image_of_a_volume_are_those_of_the_pod() {
    let fake = FakeRuntime::start().await;
    let images = images(&fake);
    fake.images.pull_image.answer_once(Err(refusal(Code::Unknown)));
    let of_volume =
        pb::EnsureImageRequest { container: String::new(), spec_list: String::new(), ..request("Always") };
    failed(end(&images, of_volume).await);
    let events = events_of(&images).await;
    let reasons: Vec<&str> = events.iter().map(|e| e.reason.as_str()).collect();
    assert_eq!(reasons, ["Pulling", "Failed"]);
    assert!(events.iter().all(|e| e.field_path.is_empty() && e.name == "web"), "{events:?}");
}

#[tokio::test]
async fn unavailable_runtime_is_no_pull_failure() {
    let fake = FakeRuntime::start().await;
    let images = images(&fake);
    let dead = fake.dir.path().join("dead.sock");
    let timeout = std::time::Duration::from_secs(5);
    let cri = Cri::new(dead.to_str().unwrap(), timeout).unwrap();
    let mut unreached = images.clone();
    unreached.puller.present.cri = cri.clone();
    unreached.puller.cri = cri;
    let status = unavailable_status(&unreached, request("IfNotPresent")).await;
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("the container runtime is not reachable"), "{status:?}");
    assert!(events_of(&images).await.is_empty());

    fake.images.pull_image.fail(cut_off());
    let status = unavailable_status(&images, request("Always")).await;
    assert_eq!(status.code(), Code::Unavailable);
    fake.answer_as_usual();
    assert!(matches!(end(&images, request("Always")).await, Item::Done(_)));
    assert!(events_of(&images).await.iter().all(|e| e.r#type == "Normal" && e.reason != "BackOff"));
}

#[tokio::test]
async fn pull_error_from_the_runtime_is_a_pull_failure_with_any_code() {
    let fake = FakeRuntime::start().await;
    for code in [Code::Unavailable, Code::Cancelled, Code::DeadlineExceeded] {
        let images = images(&fake);
        fake.images.pull_image.answer_once(Err(refusal(code)));
        assert_eq!(failed(end(&images, request("Always")).await).reason, "ErrImagePull", "{code:?}");
    }
}

#[tokio::test]
async fn clock_set_back_does_not_lengthen_pull_back_off() {
    let fake = FakeRuntime::start().await;
    let images = images(&fake);
    fake.images.pull_image.answer_once(Err(refusal(Code::Unknown)));
    failed(end(&images, request("Always")).await);
    images.puller.clock.advance(BACKOFF_INITIAL_S - 1, -7_200);
    let waits = failed(end(&images, request("Always")).await);
    assert_eq!(waits.next_retry_unix_nanos, images.puller.clock.read().unix_nanos + 1_000_000_000);
    images.puller.clock.advance(1, 0);
    assert!(matches!(end(&images, request("Always")).await, Item::Done(_)));
}

#[tokio::test]
async fn present_and_pulled_images_are_reported_with_the_kubelets_messages() {
    let fake = FakeRuntime::start().await;
    let images = images(&fake);
    assert!(matches!(end(&images, request("IfNotPresent")).await, Item::Done(done) if done.pulled));
    fake.image("busybox:1");
    // Present images are reported by pod-sync, because this is requested with every start attempt.
    let present = "Container image \"busybox:1\" already present on machine";
    let end = end(&images, request("IfNotPresent")).await;
    assert!(matches!(&end, Item::Done(done) if !done.pulled && done.message == present), "{end:?}");
    let events = events_of(&images).await;
    assert!(events[1].message.starts_with("Successfully pulled image \"busybox:1\" in "), "{events:?}");
    assert_eq!(events.len(), 2, "{events:?}");
}
