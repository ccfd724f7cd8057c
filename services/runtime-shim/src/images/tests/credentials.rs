//! Which credentials a pull uses, and which pods may use a present image.

use keelson_service_kit::status::error;
use tonic::Code;

use super::*;
use crate::credentials::testing::secret;

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
    fake.images.image_status.answer_once(Err(refusal(Code::Unavailable)));
    assert!(restarted.resolve_interrupted_pulls().await.is_err(), "whether the image is present is unknown");
    restarted.resolve_interrupted_pulls().await.unwrap();
    assert_eq!(ensure_present(&restarted, "Never", &[]).await.unwrap_err().reason, "ErrImageNeverPull");
    assert!(
        matches!(end(&restarted, with_secrets("IfNotPresent", &["a"])).await, Item::Done(done) if done.pulled)
    );
    assert!(ensure_present(&restarted, "IfNotPresent", &["a"]).await.is_ok());
}
