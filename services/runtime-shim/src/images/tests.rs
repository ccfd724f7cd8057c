use std::time::Duration;

use keelson_runtime_shim_core::pull_rate::PullRate;
use keelson_service_kit::status::error;
use keelson_service_kit::{Fairness, Turns};
use tokio::sync::mpsc;
use tonic::Code;

use super::*;
use crate::clock::Clock;
use crate::credentials::testing::secret;
use crate::fake::{Answer, FakeRuntime};
use crate::pull_watch::PullWatcher;
use keelson_proto::keelson::events::v1 as events;
use keelson_proto::keelson::events::v1::events_server::Events as _;

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
    let _never = fake.hold("PullImage");
    let (progress, messages) = mpsc::channel(8);
    let pull = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    fake.wait_for_calls("PullImage", 1).await;
    // A second pull waits for the only turn.
    let (progress, waits) = mpsc::channel(8);
    let waiting = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    fake.wait_for_calls("ImageStatus", 2).await;
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
    let held = fake.hold("PullImage");
    let mut messages = Vec::new();
    for (name, begun) in [("slow", 1), ("other", 2)] {
        let (progress, receiver) = mpsc::channel(8);
        let pod = PodRef { uid: name.into(), namespace: "default".into(), name: name.into() };
        let request = pb::EnsureImageRequest { pod: Some(pod), ..request("Always") };
        let images = images.clone();
        tokio::spawn(async move { images.ensure(request, progress).await });
        messages.push(receiver);
        // With one pull at a time, the second begins although the first does not end.
        fake.wait_for_calls("PullImage", begun).await;
    }
    held.add_permits(2);
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
    fake.answer("PullImage", Answer::Fail(1, Code::Unknown));
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

    fake.answer("PullImage", Answer::CutOff);
    let status = unavailable_status(&images, request("Always")).await;
    assert_eq!(status.code(), Code::Unavailable);
    fake.answer("PullImage", Answer::Fail(0, Code::Unknown));
    assert!(matches!(end(&images, request("Always")).await, Item::Done(_)));
    assert!(events_of(&images).await.iter().all(|e| e.r#type == "Normal" && e.reason != "BackOff"));
}

#[tokio::test]
async fn pull_error_from_the_runtime_is_a_pull_failure_with_any_code() {
    let fake = FakeRuntime::start().await;
    for code in [Code::Unavailable, Code::Cancelled, Code::DeadlineExceeded] {
        let images = images(&fake);
        fake.answer("PullImage", Answer::Fail(1, code));
        assert_eq!(failed(end(&images, request("Always")).await).reason, "ErrImagePull", "{code:?}");
    }
}

#[tokio::test]
async fn clock_set_back_does_not_lengthen_pull_back_off() {
    let fake = FakeRuntime::start().await;
    let images = images(&fake);
    fake.answer("PullImage", Answer::Fail(1, Code::Unknown));
    failed(end(&images, request("Always")).await);
    images.puller.clock.advance(9, -7_200);
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

/// As [`images`], with these Secrets and with records in the fake runtime's folder.
fn recorded(fake: &FakeRuntime, secrets: &[(&str, Result<serde_json::Value, Status>)]) -> Images {
    counted(fake, secrets, &Metrics::new())
}

/// As [`recorded`], with these metrics.
fn counted(
    fake: &FakeRuntime,
    secrets: &[(&str, Result<serde_json::Value, Status>)],
    metrics: &Metrics,
) -> Images {
    let images = images(fake);
    let credentials = Credentials::of(secrets, &[], images.puller.clock.clone());
    let config = Config { paths: paths(fake), ..Config::default() };
    images.configured(&config, credentials, metrics)
}

fn paths(fake: &FakeRuntime) -> keelson_config::Paths {
    keelson_config::Paths { root_dir: fake.dir.path().join("root"), ..Default::default() }
}

fn with_secrets(policy: &str, names: &[&str]) -> pb::EnsureImageRequest {
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    pb::EnsureImageRequest { image: "r.example/a:1".into(), pull_secrets: names, ..request(policy) }
}

#[tokio::test]
async fn pull_credentials_are_tried_until_one_succeeds() {
    let fake = FakeRuntime::start().await;
    let secrets = [
        ("default/old", Ok(secret("r.example", "old", "hunter2"))),
        ("default/good", Ok(secret("r.example", "ann", "hunter3"))),
        ("default/spare", Ok(secret("r.example", "spare", "hunter4"))),
    ];
    let images = recorded(&fake, &secrets);
    fake.allow_pulls_by(&["ann", "spare"]);
    let names = ["old", "gone", "good", "spare"];
    assert!(matches!(end(&images, with_secrets("Always", &names)).await, Item::Done(done) if done.pulled));
    assert_eq!(fake.pulled_as(), ["old", "ann"]);
    let events = events_of(&images).await;
    let missing = events.iter().find(|e| e.reason == "FailedToRetrieveImagePullSecret").unwrap();
    let text =
        "Unable to retrieve some image pull secrets (gone); attempting to pull the image may not succeed.";
    assert_eq!((missing.message.as_str(), missing.r#type.as_str()), (text, "Warning"));
    assert!(missing.field_path.is_empty(), "the event is about the pod");
    assert!(!format!("{events:?}").contains("hunter"));
}

#[tokio::test]
async fn pull_errors_of_all_credentials_are_reported_together() {
    let fake = FakeRuntime::start().await;
    let secrets = [
        ("default/a", Ok(secret("r.example", "a", "p"))),
        ("default/b", Ok(secret("r.example", "b", "p"))),
        ("default/c", Ok(secret("r.example", "a", "q"))),
    ];
    let images = recorded(&fake, &secrets);
    fake.allow_pulls_by(&["nobody"]);
    let failure = failed(end(&images, with_secrets("Always", &["a", "b", "c"])).await);
    let expected = "Failed to pull image \"r.example/a:1\": [\"a\" may not pull, \"b\" may not pull]";
    assert_eq!((failure.reason.as_str(), failure.message.as_str()), ("ErrImagePull", expected));
    // Without credentials, one pull without a credential is tried.
    let other = pb::EnsureImageRequest { image: "s.example/a:1".into(), ..with_secrets("Always", &["a"]) };
    assert!(failed(end(&images, other).await).message.ends_with("\"\" may not pull"));
    assert_eq!(fake.pulled_as(), ["a", "b", "a", ""]);
}

#[tokio::test]
async fn pull_reason_is_registry_unavailable_or_signature_validation_failed() {
    for (text, reason) in [
        ("RegistryUnavailable: connection refused", "RegistryUnavailable"),
        ("[SignatureValidationFailed: no signature, x]", "SignatureValidationFailed"),
        ("not found", "ErrImagePull"),
    ] {
        assert_eq!(crate::pull::pull_reason(text), reason);
    }
}

#[tokio::test]
async fn pull_fails_as_unavailable_while_a_pull_secret_cannot_be_read() {
    let fake = FakeRuntime::start().await;
    let away = error(
        Code::Unavailable,
        keelson_service_kit::status::PEER_UNAVAILABLE,
        "pod-config is not reachable",
    );
    let images = recorded(&fake, &[("default/a", Err(away))]);
    let status = unavailable_status(&images, with_secrets("Always", &["a"])).await;
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("pod-config is not reachable"), "{status:?}");
    assert!(fake.pulled_as().is_empty() && events_of(&images).await.is_empty());
}

/// The message for a present image, or the failure.
async fn ensure_present(images: &Images, policy: &str, names: &[&str]) -> Result<String, pb::ImageFailed> {
    match end(images, with_secrets(policy, names)).await {
        Item::Done(done) => {
            assert!(!done.pulled);
            Ok(done.message)
        }
        other => Err(failed(other)),
    }
}

#[tokio::test]
async fn image_pulled_with_a_secret_is_refused_to_pods_without_it() {
    let fake = FakeRuntime::start().await;
    let ann = || Ok(secret("r.example", "ann", "p"));
    let secrets =
        [("default/a", ann()), ("default/copy", ann()), ("default/bob", Ok(secret("r.example", "bob", "p")))];
    let images = recorded(&fake, &secrets);
    fake.allow_pulls_by(&["ann"]);
    assert!(
        matches!(end(&images, with_secrets("IfNotPresent", &["a"])).await, Item::Done(done) if done.pulled)
    );
    fake.image("r.example/a:1");
    let shown = "Container image \"r.example/a:1\" already present on machine and can be accessed by the pod";
    for names in [["a"], ["copy"]] {
        assert_eq!(ensure_present(&images, "IfNotPresent", &names).await.unwrap(), shown);
        assert_eq!(ensure_present(&images, "Never", &names).await.unwrap(), shown);
    }
    let pulls = fake.pulled_as().len();
    let never = ensure_present(&images, "Never", &["bob"]).await.unwrap_err();
    assert_eq!(never.reason, "ErrImageNeverPull");
    assert!(never.message.contains("is present with pull policy of Never"), "{never:?}");
    assert_eq!(fake.pulled_as().len(), pulls);
    assert_eq!(ensure_present(&images, "IfNotPresent", &["bob"]).await.unwrap_err().reason, "ErrImagePull");
    assert_eq!(fake.pulled_as()[pulls..], ["bob"]);
    // The records are on disk, so they apply after a kill and a restart as well.
    let restarted = recorded(&fake, &secrets);
    assert_eq!(ensure_present(&restarted, "Never", &["bob"]).await.unwrap_err().reason, "ErrImageNeverPull");
    assert_eq!(ensure_present(&restarted, "Never", &["a"]).await.unwrap(), shown);
    let labels = |required: &str| RequestLabels {
        pull_policy: "never".into(),
        present_locally: "true".into(),
        pull_required: required.into(),
    };
    assert_eq!(restarted.requests.get_or_create(&labels("false")).get(), 2);
}

#[tokio::test]
async fn image_access_checks_are_counted_by_result() {
    let fake = FakeRuntime::start().await;
    let away = error(
        Code::Unavailable,
        keelson_service_kit::status::PEER_UNAVAILABLE,
        "pod-config is not reachable",
    );
    let metrics = Metrics::new();
    let ann = Ok(secret("r.example", "ann", "p"));
    let images = counted(&fake, &[("default/a", ann), ("default/lost", Err(away))], &metrics);
    fake.allow_pulls_by(&["ann"]);
    // Access is not checked for policy Always, nor for an image that is not present.
    assert_eq!(ensure_present(&images, "Never", &[]).await.unwrap_err().reason, "ErrImageNeverPull");
    fake.image("r.example/a:1");
    ensure_present(&images, "IfNotPresent", &[]).await.unwrap();
    assert!(matches!(end(&images, with_secrets("Always", &["a"])).await, Item::Done(done) if done.pulled));
    ensure_present(&images, "Never", &["a"]).await.unwrap();
    ensure_present(&images, "IfNotPresent", &["a"]).await.unwrap();
    assert_eq!(ensure_present(&images, "Never", &[]).await.unwrap_err().reason, "ErrImageNeverPull");
    assert_eq!(unavailable_status(&images, with_secrets("Never", &["lost"])).await.code(), Code::Unavailable);
    let text = metrics.text();
    let name = "kubelet_imagemanager_image_mustpull_checks_total{";
    let mut series: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(name)).collect();
    series.sort_unstable();
    let expected = [
        "result=\"credentialPolicyAllowed\"} 1",
        "result=\"credentialRecordFound\"} 2",
        "result=\"error\"} 1",
        "result=\"mustAuthenticate\"} 1",
    ];
    assert_eq!(series, expected, "{text}");
}

#[tokio::test]
async fn image_pulled_without_credentials_is_usable_by_all_pods() {
    let fake = FakeRuntime::start().await;
    let images = recorded(&fake, &[]);
    assert!(matches!(end(&images, with_secrets("IfNotPresent", &[])).await, Item::Done(done) if done.pulled));
    fake.image("r.example/a:1");
    let text = ensure_present(&images, "Never", &[]).await.unwrap();
    assert!(text.ends_with("already present on machine and can be accessed by the pod"), "{text}");
    let dir = fake.dir.path().join("root/image_manager");
    assert_eq!(std::fs::read_dir(dir.join("pulled")).unwrap().count(), 1);
    assert_eq!(std::fs::read_dir(dir.join("pulling")).unwrap().count(), 0);
}

#[tokio::test]
async fn pull_interrupted_by_a_kill_is_resolved_at_the_next_start() {
    let fake = FakeRuntime::start().await;
    let secrets = [("default/a", Ok(secret("r.example", "ann", "p")))];
    let first = recorded(&fake, &secrets);
    let intended = first.puller.with_records(|records| records.begin("r.example/a:1")).await.unwrap();
    std::mem::forget(intended);
    fake.image("r.example/a:1");
    let restarted = recorded(&fake, &secrets);
    fake.answer("ImageStatus", Answer::Fail(1, Code::Unavailable));
    assert!(restarted.resolve_interrupted_pulls().await.is_err(), "whether the image is present is unknown");
    fake.answer("ImageStatus", Answer::Fail(0, Code::Unavailable));
    restarted.resolve_interrupted_pulls().await.unwrap();
    assert_eq!(ensure_present(&restarted, "Never", &[]).await.unwrap_err().reason, "ErrImageNeverPull");
    assert!(
        matches!(end(&restarted, with_secrets("IfNotPresent", &["a"])).await, Item::Done(done) if done.pulled)
    );
    assert!(ensure_present(&restarted, "IfNotPresent", &["a"]).await.is_ok());
}

/// Receives progress of a held pull until its detail is `expected`.
async fn progress_detail(
    messages: &mut mpsc::Receiver<Result<pb::EnsureImageResponse, Status>>,
    expected: &str,
) -> pb::ImageProgress {
    let found = async {
        loop {
            if let Some(Item::Progress(progress)) = messages.recv().await.unwrap().unwrap().item
                && progress.detail == expected
            {
                return progress;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), found)
        .await
        .unwrap_or_else(|_| panic!("{expected} was not reported"))
}

fn watched(fake: &FakeRuntime, limit: Duration) -> Images {
    let mut images = images(fake);
    images.puller.watcher = PullWatcher::new(fake.cri.clone(), images.puller.clock.clone(), limit);
    images.puller.watcher.period = Duration::from_millis(10);
    images
}

#[tokio::test]
async fn pull_reports_progress_and_is_cancelled_when_stalled() {
    let fake = FakeRuntime::start().await;
    let images = watched(&fake, Duration::from_secs(60));
    let _held = fake.hold("PullImage");
    fake.set_blobs(&[]);
    let (progress, mut messages) = mpsc::channel(8);
    let pull = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    progress_detail(&mut messages, "pulling: waiting for the registry").await;
    for bytes in [10, 20] {
        images.puller.clock.advance(59, 0);
        fake.set_blobs(&[("layer-a", bytes), ("layer-b", 5)]);
        let far = progress_detail(
            &mut messages,
            &format!("pulling: {}.0 B of 200.0 B (2 layers on their way)", bytes + 5),
        )
        .await;
        assert_eq!((far.step.as_str(), far.bytes, far.total_bytes), ("pulling", bytes as u64 + 5, 200));
    }
    images.puller.clock.advance(60, 0);
    pull.await.unwrap();
    let mut last = None;
    while let Some(message) = messages.recv().await {
        last = message.unwrap().item;
    }
    let failure = failed(last.unwrap());
    assert_eq!(failure.reason, "ErrImagePull");
    let text = "Failed to pull image \"busybox:1\": no progress within 1m0s: 25.0 B of 200.0 B (2 layers on their way)";
    assert!(failure.message.starts_with(text), "{failure:?}");
    assert!(failure.next_retry_unix_nanos > 0, "it is retried after the back-off");
    assert_eq!(failed(end(&images, request("Always")).await).reason, "ImagePullBackOff");
}

#[tokio::test]
async fn pull_has_no_limit_when_the_runtime_reports_no_progress() {
    let fake = FakeRuntime::start().await;
    let images = watched(&fake, Duration::ZERO);
    let held = fake.hold("PullImage");
    let (progress, mut messages) = mpsc::channel(8);
    let pull = tokio::spawn(async move { images.ensure(request("Always"), progress).await });
    fake.wait_for_calls("PullImage", 1).await;
    assert_eq!(fake.calls("ListStatuses").len(), 1);
    held.add_permits(1);
    pull.await.unwrap();
    let mut last = None;
    while let Some(message) = messages.recv().await {
        last = message.unwrap().item;
    }
    assert!(matches!(last, Some(Item::Done(_))));
}

#[tokio::test]
async fn runtime_that_hangs_during_a_pull_is_unavailable() {
    let fake = FakeRuntime::start().await;
    let images = watched(&fake, Duration::from_secs(60));
    let _held = fake.hold("PullImage");
    fake.set_blobs(&[]);
    let (progress, mut messages) = mpsc::channel(8);
    let pull = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    progress_detail(&mut messages, "pulling: waiting for the registry").await;
    fake.answer("ListStatuses", Answer::CutOff);
    images.puller.clock.advance(61, 0);
    pull.await.unwrap();
    let mut last = None;
    while let Some(message) = messages.recv().await {
        last = Some(message);
    }
    assert_eq!(last.unwrap().unwrap_err().code(), Code::Unavailable);
    assert!(events_of(&images).await.iter().all(|e| e.r#type == "Normal"));
}

#[tokio::test]
async fn pull_beyond_the_rate_waits_and_reports_it() {
    let fake = FakeRuntime::start().await;
    let images = images(&fake);
    *images.puller.rate.lock().unwrap() = PullRate::new(1, 1);
    assert!(matches!(end(&images, request("Always")).await, Item::Done(_)));
    let (progress, mut messages) = mpsc::channel(8);
    let begun = std::time::Instant::now();
    let pull = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    progress_detail(&mut messages, "waiting for its turn (registryPullQPS)").await;
    assert_eq!(fake.pulled_as().len(), 1);
    pull.await.unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(900) && fake.pulled_as().len() == 2);
    // A cancelled pull returns its token.
    let (progress, mut messages) = mpsc::channel(8);
    let pull = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    progress_detail(&mut messages, "waiting for its turn (registryPullQPS)").await;
    drop(messages);
    pull.await.unwrap();
    images.puller.clock.advance(2, 0);
    assert!(matches!(end(&images, request("Always")).await, Item::Done(_)));
}
