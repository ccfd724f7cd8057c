use super::*;
use crate::credentials::testing::secret;
use crate::fake::{Answer, FakeRuntime};
use keelson_proto::keelson::events::v1 as events;
use keelson_proto::keelson::events::v1::events_server::Events as _;

fn images(fake: &FakeRuntime) -> Images {
    let images = Images::new(fake.cri.clone(), EventRing::default(), 1);
    Images { clock: Clock::standing(), ..images }
}

/// How an answer that a broken call ends comes to its end.
async fn broken(images: &Images, request: pb::EnsureImageRequest) -> Status {
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

async fn told(images: &Images) -> Vec<events::Event> {
    let request = tonic::Request::new(events::ListEventsRequest::default());
    images.events.list_events(request).await.unwrap().into_inner().events
}

/// The last message of a request that is carried out to its end.
async fn end(images: &Images, request: pb::EnsureImageRequest) -> Item {
    let (progress, mut messages) = mpsc::channel(8);
    images.ensure(request, progress).await;
    let mut last = None;
    while let Some(message) = messages.recv().await {
        last = message.unwrap().item;
    }
    last.unwrap()
}

fn failure(item: Item) -> pb::ImageFailed {
    match item {
        Item::Failed(failed) => failed,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_pull_that_nobody_waits_for_any_more_is_no_failure() {
    let fake = FakeRuntime::start().await;
    let images = images(&fake);
    let _never = fake.hold("PullImage");
    let (progress, messages) = mpsc::channel(8);
    let pull = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    fake.called("PullImage", 1).await;
    // A second one waits for the only slot.
    let (progress, waits) = mpsc::channel(8);
    let waiting = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    fake.called("ImageStatus", 2).await;
    drop(waits);
    waiting.await.unwrap();
    drop(messages);
    pull.await.unwrap();
    assert_eq!(images.book().waits_until("u", "busybox:1", images.clock.read().boot_nanos), None);
    assert!(told(&images).await.iter().all(|e| e.reason == "Pulling"));
}

#[tokio::test]
async fn a_pull_that_comes_to_no_end_gives_its_turn_to_the_pull_of_another_pod_which_says_what_it_waits_for()
{
    let fake = FakeRuntime::start().await;
    let moment = Duration::from_millis(20);
    let images =
        Images { turns: Turns::new(1, Fairness { patience: moment, kept: moment }), ..images(&fake) };
    let held = fake.hold("PullImage");
    let mut messages = Vec::new();
    for (name, begun) in [("slow", 1), ("other", 2)] {
        let (progress, told) = mpsc::channel(8);
        let pod = PodRef { uid: name.into(), namespace: "default".into(), name: name.into() };
        let request = pb::EnsureImageRequest { pod: Some(pod), ..request("Always") };
        let images = images.clone();
        tokio::spawn(async move { images.ensure(request, progress).await });
        messages.push(told);
        // With one at a time the second begins although the first one does not end.
        fake.called("PullImage", begun).await;
    }
    held.add_permits(2);
    let mut told = Vec::new();
    for mut messages in messages {
        let mut all = Vec::new();
        while let Some(message) = messages.recv().await {
            all.push(message.unwrap().item.unwrap());
        }
        assert!(matches!(all.last(), Some(Item::Done(_))), "{all:?}");
        told = all;
    }
    let waits = "serializeImagePulls, maxParallelImagePulls): 1 of 1 run, 1 of them for default/slow";
    assert!(told.iter().any(|item| format!("{item:?}").contains(waits)), "{told:?}");
}

#[tokio::test]
async fn a_failed_pull_is_told_in_the_kubelets_words_and_repeated_while_it_backs_off() {
    let fake = FakeRuntime::start().await;
    let images = images(&fake);
    fake.answer("PullImage", Answer::Fail(1, Code::Unknown));
    let first = failure(end(&images, request("Always")).await);
    assert_eq!(first.reason, "ErrImagePull");
    assert_eq!(first.message, "Failed to pull image \"busybox:1\": as the test wants it");
    let second = failure(end(&images, request("Always")).await);
    assert_eq!(second.reason, "ImagePullBackOff");
    let expected = "Back-off pulling image \"busybox:1\": ErrImagePull: as the test wants it";
    assert_eq!(second.message, expected);
    assert_eq!(second.next_retry_unix_nanos, first.next_retry_unix_nanos);
    let told = told(&images).await;
    let texts: Vec<_> =
        told.iter().map(|e| (e.r#type.as_str(), e.reason.as_str(), e.message.as_str())).collect();
    let expected = [
        ("Normal", "Pulling", "Pulling image \"busybox:1\""),
        ("Warning", "Failed", first.message.as_str()),
        ("Normal", "BackOff", "Back-off pulling image \"busybox:1\""),
    ];
    assert_eq!(texts, expected);
    assert!(told.iter().all(|e| e.field_path == "spec.initContainers{c}"), "{told:?}");
}

#[tokio::test]
async fn a_runtime_that_is_away_is_no_fault_of_the_image() {
    let fake = FakeRuntime::start().await;
    let images = images(&fake);
    let dead = fake.dir.path().join("dead.sock");
    let timeout = std::time::Duration::from_secs(5);
    let cri = Cri::new(dead.to_str().unwrap(), timeout).unwrap();
    let unreached = Images { cri, ..images.clone() };
    let status = broken(&unreached, request("IfNotPresent")).await;
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("the container runtime is not reachable"), "{status:?}");
    assert!(told(&images).await.is_empty());

    fake.answer("PullImage", Answer::CutOff);
    let status = broken(&images, request("Always")).await;
    assert_eq!(status.code(), Code::Unavailable);
    fake.answer("PullImage", Answer::Fail(0, Code::Unknown));
    assert!(matches!(end(&images, request("Always")).await, Item::Done(_)));
    assert!(told(&images).await.iter().all(|e| e.r#type == "Normal" && e.reason != "BackOff"));
}

#[tokio::test]
async fn what_the_runtime_answers_about_a_pull_is_a_fault_of_the_image_whatever_the_code() {
    let fake = FakeRuntime::start().await;
    for code in [Code::Unavailable, Code::Cancelled, Code::DeadlineExceeded] {
        let images = images(&fake);
        fake.answer("PullImage", Answer::Fail(1, code));
        assert_eq!(failure(end(&images, request("Always")).await).reason, "ErrImagePull", "{code:?}");
    }
}

#[tokio::test]
async fn a_clock_that_is_set_back_does_not_lengthen_a_back_off() {
    let fake = FakeRuntime::start().await;
    let images = images(&fake);
    fake.answer("PullImage", Answer::Fail(1, Code::Unknown));
    failure(end(&images, request("Always")).await);
    images.clock.pass(9, -7_200);
    let waits = failure(end(&images, request("Always")).await);
    assert_eq!(waits.next_retry_unix_nanos, images.clock.read().unix_nanos + 1_000_000_000);
    images.clock.pass(1, 0);
    assert!(matches!(end(&images, request("Always")).await, Item::Done(_)));
}

#[tokio::test]
async fn an_image_that_is_there_and_one_that_was_pulled_are_told() {
    let fake = FakeRuntime::start().await;
    let images = images(&fake);
    assert!(matches!(end(&images, request("IfNotPresent")).await, Item::Done(done) if done.pulled));
    fake.image("busybox:1");
    // That is told by who starts the container: this is asked as often as a start is tried.
    let present = "Container image \"busybox:1\" already present on machine";
    let end = end(&images, request("IfNotPresent")).await;
    assert!(matches!(&end, Item::Done(done) if !done.pulled && done.message == present), "{end:?}");
    let told = told(&images).await;
    assert!(told[1].message.starts_with("Successfully pulled image \"busybox:1\" in "), "{told:?}");
    assert_eq!(told.len(), 2, "{told:?}");
}

/// As [`images`], with these Secrets and with records in the fake's folder.
fn recorded(fake: &FakeRuntime, secrets: &[(&str, Result<serde_json::Value, Status>)]) -> Images {
    counted(fake, secrets, &Metrics::new())
}

/// As [`recorded`], counted in these metrics.
fn counted(
    fake: &FakeRuntime,
    secrets: &[(&str, Result<serde_json::Value, Status>)],
    metrics: &Metrics,
) -> Images {
    let images = images(fake);
    let credentials = Credentials::of(secrets, &[], images.clock.clone());
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
async fn credentials_are_tried_one_after_the_other_until_one_is_good() {
    let fake = FakeRuntime::start().await;
    let secrets = [
        ("default/old", Ok(secret("r.example", "old", "hunter2"))),
        ("default/good", Ok(secret("r.example", "ann", "hunter3"))),
        ("default/spare", Ok(secret("r.example", "spare", "hunter4"))),
    ];
    let images = recorded(&fake, &secrets);
    fake.pullers(&["ann", "spare"]);
    let names = ["old", "gone", "good", "spare"];
    assert!(matches!(end(&images, with_secrets("Always", &names)).await, Item::Done(done) if done.pulled));
    assert_eq!(fake.pulled_as(), ["old", "ann"]);
    let told = told(&images).await;
    let missing = told.iter().find(|e| e.reason == "FailedToRetrieveImagePullSecret").unwrap();
    let text =
        "Unable to retrieve some image pull secrets (gone); attempting to pull the image may not succeed.";
    assert_eq!((missing.message.as_str(), missing.r#type.as_str()), (text, "Warning"));
    assert!(missing.field_path.is_empty(), "it is about the pod");
    assert!(!format!("{told:?}").contains("hunter"));
}

#[tokio::test]
async fn the_refusals_of_all_credentials_are_told_together_and_each_once() {
    let fake = FakeRuntime::start().await;
    let secrets = [
        ("default/a", Ok(secret("r.example", "a", "p"))),
        ("default/b", Ok(secret("r.example", "b", "p"))),
        ("default/c", Ok(secret("r.example", "a", "q"))),
    ];
    let images = recorded(&fake, &secrets);
    fake.pullers(&["nobody"]);
    let failed = failure(end(&images, with_secrets("Always", &["a", "b", "c"])).await);
    let expected = "Failed to pull image \"r.example/a:1\": [\"a\" may not pull, \"b\" may not pull]";
    assert_eq!((failed.reason.as_str(), failed.message.as_str()), ("ErrImagePull", expected));
    // Without any it is tried once with nothing.
    let other = pb::EnsureImageRequest { image: "s.example/a:1".into(), ..with_secrets("Always", &["a"]) };
    assert!(failure(end(&images, other).await).message.ends_with("\"\" may not pull"));
    assert_eq!(fake.pulled_as(), ["a", "b", "a", ""]);
}

#[tokio::test]
async fn what_the_registry_says_of_itself_and_of_signatures_is_a_reason_of_its_own() {
    for (text, reason) in [
        ("RegistryUnavailable: connection refused", "RegistryUnavailable"),
        ("[SignatureValidationFailed: no signature, x]", "SignatureValidationFailed"),
        ("not found", "ErrImagePull"),
    ] {
        assert_eq!(crate::pull::pull_reason(text), reason);
    }
}

#[tokio::test]
async fn while_a_secret_cannot_be_asked_for_nothing_is_pulled_and_nothing_is_the_images_fault() {
    let fake = FakeRuntime::start().await;
    let away = error(
        Code::Unavailable,
        keelson_service_kit::status::PEER_UNAVAILABLE,
        "pod-config is not reachable",
    );
    let images = recorded(&fake, &[("default/a", Err(away))]);
    let status = broken(&images, with_secrets("Always", &["a"])).await;
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("pod-config is not reachable"), "{status:?}");
    assert!(fake.pulled_as().is_empty() && told(&images).await.is_empty());
}

/// What a container gets of an image that is there; `None`: it has to be pulled, and nobody may.
async fn gets(images: &Images, policy: &str, names: &[&str]) -> Result<String, pb::ImageFailed> {
    match end(images, with_secrets(policy, names)).await {
        Item::Done(done) => {
            assert!(!done.pulled);
            Ok(done.message)
        }
        other => Err(failure(other)),
    }
}

#[tokio::test]
async fn an_image_that_was_pulled_with_a_secret_is_not_for_pods_without_it() {
    let fake = FakeRuntime::start().await;
    let ann = || Ok(secret("r.example", "ann", "p"));
    let secrets =
        [("default/a", ann()), ("default/copy", ann()), ("default/bob", Ok(secret("r.example", "bob", "p")))];
    let images = recorded(&fake, &secrets);
    fake.pullers(&["ann"]);
    assert!(
        matches!(end(&images, with_secrets("IfNotPresent", &["a"])).await, Item::Done(done) if done.pulled)
    );
    fake.image("r.example/a:1");
    let shown = "Container image \"r.example/a:1\" already present on machine and can be accessed by the pod";
    for names in [["a"], ["copy"]] {
        assert_eq!(gets(&images, "IfNotPresent", &names).await.unwrap(), shown);
        assert_eq!(gets(&images, "Never", &names).await.unwrap(), shown);
    }
    let pulls = fake.pulled_as().len();
    let never = gets(&images, "Never", &["bob"]).await.unwrap_err();
    assert_eq!(never.reason, "ErrImageNeverPull");
    assert!(never.message.contains("is present with pull policy of Never"), "{never:?}");
    assert_eq!(fake.pulled_as().len(), pulls);
    assert_eq!(gets(&images, "IfNotPresent", &["bob"]).await.unwrap_err().reason, "ErrImagePull");
    assert_eq!(fake.pulled_as()[pulls..], ["bob"]);
    // Killed and begun anew it still holds: it is on disk.
    let again = recorded(&fake, &secrets);
    assert_eq!(gets(&again, "Never", &["bob"]).await.unwrap_err().reason, "ErrImageNeverPull");
    assert_eq!(gets(&again, "Never", &["a"]).await.unwrap(), shown);
    let labels = |required: &str| AskedLabels {
        pull_policy: "never".into(),
        present_locally: "true".into(),
        pull_required: required.into(),
    };
    assert_eq!(again.asked.get_or_create(&labels("false")).get(), 2);
}

#[tokio::test]
async fn looks_whether_a_pod_may_use_an_image_that_is_there_are_counted_by_what_came_of_them() {
    let fake = FakeRuntime::start().await;
    let away = error(
        Code::Unavailable,
        keelson_service_kit::status::PEER_UNAVAILABLE,
        "pod-config is not reachable",
    );
    let metrics = Metrics::new();
    let ann = Ok(secret("r.example", "ann", "p"));
    let images = counted(&fake, &[("default/a", ann), ("default/lost", Err(away))], &metrics);
    fake.pullers(&["ann"]);
    // What is pulled whatever is there is not looked at, nor is an image that is not there.
    assert_eq!(gets(&images, "Never", &[]).await.unwrap_err().reason, "ErrImageNeverPull");
    fake.image("r.example/a:1");
    gets(&images, "IfNotPresent", &[]).await.unwrap();
    assert!(matches!(end(&images, with_secrets("Always", &["a"])).await, Item::Done(done) if done.pulled));
    gets(&images, "Never", &["a"]).await.unwrap();
    gets(&images, "IfNotPresent", &["a"]).await.unwrap();
    assert_eq!(gets(&images, "Never", &[]).await.unwrap_err().reason, "ErrImageNeverPull");
    assert_eq!(broken(&images, with_secrets("Never", &["lost"])).await.code(), Code::Unavailable);
    let text = metrics.text();
    let name = "kubelet_imagemanager_image_mustpull_checks_total{";
    let mut told: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(name)).collect();
    told.sort_unstable();
    let expected = [
        "result=\"credentialPolicyAllowed\"} 1",
        "result=\"credentialRecordFound\"} 2",
        "result=\"error\"} 1",
        "result=\"mustAuthenticate\"} 1",
    ];
    assert_eq!(told, expected, "{text}");
}

#[tokio::test]
async fn an_image_that_was_pulled_for_everybody_is_for_everybody() {
    let fake = FakeRuntime::start().await;
    let images = recorded(&fake, &[]);
    assert!(matches!(end(&images, with_secrets("IfNotPresent", &[])).await, Item::Done(done) if done.pulled));
    fake.image("r.example/a:1");
    let text = gets(&images, "Never", &[]).await.unwrap();
    assert!(text.ends_with("already present on machine and can be accessed by the pod"), "{text}");
    let dir = fake.dir.path().join("root/image_manager");
    assert_eq!(std::fs::read_dir(dir.join("pulled")).unwrap().count(), 1);
    assert_eq!(std::fs::read_dir(dir.join("pulling")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_pull_that_a_kill_cut_off_is_settled_at_the_next_start() {
    let fake = FakeRuntime::start().await;
    let secrets = [("default/a", Ok(secret("r.example", "ann", "p")))];
    let first = recorded(&fake, &secrets);
    let intended = first.in_records(|records| records.begin("r.example/a:1")).await.unwrap();
    std::mem::forget(intended);
    fake.image("r.example/a:1");
    let again = recorded(&fake, &secrets);
    fake.answer("ImageStatus", Answer::Fail(1, Code::Unavailable));
    assert!(again.settle_cut_off().await.is_err(), "nobody knows whether it is there");
    fake.answer("ImageStatus", Answer::Fail(0, Code::Unavailable));
    again.settle_cut_off().await.unwrap();
    assert_eq!(gets(&again, "Never", &[]).await.unwrap_err().reason, "ErrImageNeverPull");
    assert!(
        matches!(end(&again, with_secrets("IfNotPresent", &["a"])).await, Item::Done(done) if done.pulled)
    );
    assert!(gets(&again, "IfNotPresent", &["a"]).await.is_ok());
}

/// The progress of a pull that is held, until it has said `wanted`.
async fn says(
    messages: &mut mpsc::Receiver<Result<pb::EnsureImageResponse, Status>>,
    wanted: &str,
) -> pb::ImageProgress {
    let found = async {
        loop {
            if let Some(Item::Progress(progress)) = messages.recv().await.unwrap().unwrap().item
                && progress.detail == wanted
            {
                return progress;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), found)
        .await
        .unwrap_or_else(|_| panic!("{wanted} is not said"))
}

fn watched(fake: &FakeRuntime, limit: Duration) -> Images {
    let mut images = images(fake);
    images.watching = Watching::new(fake.cri.clone(), images.clock.clone(), limit);
    images.watching.period = Duration::from_millis(10);
    images
}

#[tokio::test]
async fn a_pull_tells_what_has_come_and_is_given_up_when_nothing_comes_any_more() {
    let fake = FakeRuntime::start().await;
    let images = watched(&fake, Duration::from_secs(60));
    let _held = fake.hold("PullImage");
    fake.fetching(&[]);
    let (progress, mut messages) = mpsc::channel(8);
    let pull = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    says(&mut messages, "pulling: the registry is asked").await;
    for bytes in [10, 20] {
        images.clock.pass(59, 0);
        fake.fetching(&[("layer-a", bytes), ("layer-b", 5)]);
        let far =
            says(&mut messages, &format!("pulling: {}.0 B of 200.0 B (2 layers on their way)", bytes + 5))
                .await;
        assert_eq!((far.step.as_str(), far.bytes, far.total_bytes), ("pulling", bytes as u64 + 5, 200));
    }
    images.clock.pass(60, 0);
    pull.await.unwrap();
    let mut last = None;
    while let Some(message) = messages.recv().await {
        last = message.unwrap().item;
    }
    let failed = failure(last.unwrap());
    assert_eq!(failed.reason, "ErrImagePull");
    let text = "Failed to pull image \"busybox:1\": no progress within 1m0s: 25.0 B of 200.0 B (2 layers on their way)";
    assert!(failed.message.starts_with(text), "{failed:?}");
    assert!(failed.next_retry_unix_nanos > 0, "it is tried again after the back-off");
    assert_eq!(failure(end(&images, request("Always")).await).reason, "ImagePullBackOff");
}

#[tokio::test]
async fn a_pull_of_a_runtime_that_tells_nothing_has_no_limit() {
    let fake = FakeRuntime::start().await;
    let images = watched(&fake, Duration::ZERO);
    let held = fake.hold("PullImage");
    let (progress, mut messages) = mpsc::channel(8);
    let pull = tokio::spawn(async move { images.ensure(request("Always"), progress).await });
    fake.called("PullImage", 1).await;
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
async fn a_runtime_that_hangs_during_a_pull_is_away_and_no_fault_of_the_image() {
    let fake = FakeRuntime::start().await;
    let images = watched(&fake, Duration::from_secs(60));
    let _held = fake.hold("PullImage");
    fake.fetching(&[]);
    let (progress, mut messages) = mpsc::channel(8);
    let pull = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    says(&mut messages, "pulling: the registry is asked").await;
    fake.answer("ListStatuses", Answer::CutOff);
    images.clock.pass(61, 0);
    pull.await.unwrap();
    let mut last = None;
    while let Some(message) = messages.recv().await {
        last = Some(message);
    }
    assert_eq!(last.unwrap().unwrap_err().code(), Code::Unavailable);
    assert!(told(&images).await.iter().all(|e| e.r#type == "Normal"));
}

#[tokio::test]
async fn a_pull_beyond_the_rate_waits_and_says_so() {
    let fake = FakeRuntime::start().await;
    let images = images(&fake);
    *images.rate.lock().unwrap() = PullRate::new(1, 1);
    assert!(matches!(end(&images, request("Always")).await, Item::Done(_)));
    let (progress, mut messages) = mpsc::channel(8);
    let begun = std::time::Instant::now();
    let pull = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    says(&mut messages, "waiting for its turn (registryPullQPS)").await;
    assert_eq!(fake.pulled_as().len(), 1);
    pull.await.unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(900) && fake.pulled_as().len() == 2);
    // One that is given up leaves its turn to the next.
    let (progress, mut messages) = mpsc::channel(8);
    let pull = tokio::spawn({
        let images = images.clone();
        async move { images.ensure(request("Always"), progress).await }
    });
    says(&mut messages, "waiting for its turn (registryPullQPS)").await;
    drop(messages);
    pull.await.unwrap();
    images.clock.pass(2, 0);
    assert!(matches!(end(&images, request("Always")).await, Item::Done(_)));
}
