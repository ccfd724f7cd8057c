//! Pulls from a real registry on loopback: tags and digests, pull policies, pull secrets, and registries that are slow, stall
//! or are unavailable.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Registry, Scratch, eventually};
use keelson_tests::link::{Flow, Link};
use keelson_tests::waits::{until_one_ready, until_retried, waiting_reason};
use keelson_tests::{LIMIT, events, running, until_cause, until_event, until_explained, until_no_cause};
use serde_json::json;

/// Size in bytes of a layer that only one image has.
const RANDOM: usize = 10 << 20;

/// A pod of an image, with these lines in its spec, already indented.
fn pod(name: &str, image: &str, policy: &str, spec: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  terminationGracePeriodSeconds: 0\n  \
         containers:\n  - name: main\n    image: {image}\n    imagePullPolicy: {policy}\n    \
         command: [\"/bin/sh\", \"-c\", \"exec sleep 1000000\"]\n{spec}"
    )
}

/// The digest for a reference by digest, after the name without tag.
fn by_digest(image: &str, digest: &str) -> String {
    format!("{}@{digest}", image.rsplit_once(':').unwrap().0)
}

/// Waits for an event with this reason and text about this pod.
async fn until_event_about(agent: &Agent, pod: &str, reason: &str, text: &str) {
    let name = format!("{pod}-{}", agent.spec().node_name);
    let mut last = Vec::new();
    eventually(LIMIT, format!("{pod} has an event {reason} with {text:?}"), async || {
        last = events(agent).await.unwrap_or_default();
        last.iter().any(|e| {
            e["reason"] == reason
                && e["involvedObject"]["name"] == name.as_str()
                && e["message"].as_str().is_some_and(|m| m.contains(text))
        })
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{last:#?}\n{}", agent.log_tail()));
}

async fn until_waiting_reason(agent: &Agent, pod: &str, reason: &str) {
    eventually(LIMIT, format!("{pod} waits because of {reason}"), async || {
        waiting_reason(agent, pod).await == reason
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
}

async fn kill_shim(agent: &Agent) {
    let process = agent.service(ServiceName::RuntimeShim).unwrap();
    process.signal(Signal::KILL);
    eventually(LIMIT, "runtime-shim is back", async || {
        agent.service(ServiceName::RuntimeShim).is_some_and(|p| p != process)
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
}

#[tokio::test]
async fn images_are_pulled_by_tag_and_digest_according_to_the_pull_policy() {
    let scratch = Scratch::new().unwrap();
    let registry = Registry::start(&scratch.path().join("registry")).unwrap();
    let (first, second) =
        (registry.put("team/a", "1", 100).unwrap(), registry.put("team/b", "1", 100).unwrap());
    let link = Link::to(registry.address()).await.unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let (a, b) = (link.image("team/a:1"), link.image("team/b:1"));

    agent.write_manifest("never.yaml", &pod("never", &a, "Never", "")).unwrap();
    until_waiting_reason(&agent, "never", "ErrImageNeverPull").await;
    let text = format!("Container image \"{a}\" is not present with pull policy of Never");
    until_event_about(&agent, "never", "ErrImageNeverPull", &text).await;

    agent.write_manifest("tag.yaml", &pod("tag", &a, "IfNotPresent", "")).unwrap();
    until_one_ready(&agent, "tag").await;
    until_event_about(&agent, "tag", "Pulled", &format!("Successfully pulled image \"{a}\" in ")).await;
    let digest = by_digest(&b, &second);
    agent.write_manifest("digest.yaml", &pod("digest", &digest, "IfNotPresent", "")).unwrap();
    until_one_ready(&agent, "digest").await;
    until_event_about(&agent, "digest", "Pulled", &format!("Successfully pulled image \"{digest}\" in "))
        .await;
    // The image is on the node now, and the pod with policy Never starts.
    until_one_ready(&agent, "never").await;

    // Without its registry a present image is used, unless its policy is Always.
    link.set(Flow::Cut);
    agent
        .write_manifest("present.yaml", &pod("present", &by_digest(&a, &first), "IfNotPresent", ""))
        .unwrap();
    until_one_ready(&agent, "present").await;
    until_event_about(&agent, "present", "Pulled", "already present on machine").await;
    agent.write_manifest("always.yaml", &pod("always", &a, "Always", "")).unwrap();
    until_event_about(&agent, "always", "Failed", &format!("Failed to pull image \"{a}\": ")).await;
    link.set(Flow::Free);
    until_one_ready(&agent, "always").await;
    until_event_about(&agent, "always", "Pulled", &format!("Successfully pulled image \"{a}\" in ")).await;
    agent.end().unwrap();
}

/// A pull secret for this registry.
fn secret(name: &str, registry: &str, password: &str) -> String {
    let login = Registry::LOGIN.0;
    let config = json!({"auths": {registry: {"auth": STANDARD.encode(format!("{login}:{password}"))}}});
    let data = STANDARD.encode(config.to_string());
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata:\n  name: {name}\ntype: kubernetes.io/dockerconfigjson\n\
         data:\n  .dockerconfigjson: {data}\n"
    )
}

fn with_secret(name: &str, image: &str, secret: &str) -> String {
    pod(name, image, "IfNotPresent", &format!("  imagePullSecrets:\n  - name: {secret}\n"))
}

/// The files below a folder whose content has `text`.
fn files_with(folder: &Path, text: &str, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            files_with(&path, text, found);
        } else if kind.is_file() {
            let content = std::fs::read(&path).unwrap_or_default();
            if content.windows(text.len()).any(|part| part == text.as_bytes()) {
                found.push(path.display().to_string());
            }
        }
    }
}

#[tokio::test]
async fn only_pods_with_the_right_pull_secret_may_use_a_private_image() {
    let (_, password) = Registry::LOGIN;
    let scratch = Scratch::new().unwrap();
    let registry = Registry::start_private(&scratch.path().join("registry")).unwrap();
    registry.put("team/a", "1", 100).unwrap();
    let link = Link::to(registry.address()).await.unwrap();
    let (host, image) = (link.image("").trim_end_matches('/').to_owned(), link.image("team/a:1"));
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("wrong-key.yaml", &secret("wrong", &host, "password123")).unwrap();
    agent.write_manifest("right-key.yaml", &secret("right", &host, password)).unwrap();

    for (name, secret) in [("wrong", "wrong"), ("lost", "nowhere")] {
        agent.write_manifest(&format!("{name}.yaml"), &with_secret(name, &image, secret)).unwrap();
        until_event_about(&agent, name, "Failed", "Failed to pull image").await;
    }
    let text =
        "Unable to retrieve some image pull secrets (nowhere); attempting to pull the image may not succeed.";
    until_event_about(&agent, "lost", "FailedToRetrieveImagePullSecret", text).await;
    until_waiting_reason(&agent, "wrong", "ImagePullBackOff").await;
    assert!(running(&agent).await.unwrap().is_empty());

    agent.write_manifest("right.yaml", &with_secret("right", &image, "right")).unwrap();
    until_one_ready(&agent, "right").await;
    // The image is present now and still denied to the others, also after runtime-shim was killed.
    kill_shim(&agent).await;
    agent.write_manifest("none.yaml", &pod("none", &image, "IfNotPresent", "")).unwrap();
    until_event_about(&agent, "none", "Failed", "Failed to pull image").await;
    agent.write_manifest("never.yaml", &pod("never", &image, "Never", "")).unwrap();
    until_waiting_reason(&agent, "never", "ErrImageNeverPull").await;
    let spec = "  imagePullSecrets:\n  - name: right\n";
    agent.write_manifest("shown.yaml", &pod("shown", &image, "Never", spec)).unwrap();
    until_one_ready(&agent, "shown").await;
    until_event_about(&agent, "shown", "Pulled", "already present on machine and can be accessed by the pod")
        .await;
    assert_eq!(running(&agent).await.unwrap().len(), 2);

    // The password, plain or encoded, is in no log, no event and no file of runtime-shim.
    let encoded = STANDARD.encode(format!("{}:{password}", Registry::LOGIN.0));
    let published = format!("{:?}{}", events(&agent).await.unwrap(), agent.log());
    for text in [password, encoded.as_str(), "password123"] {
        assert!(!published.contains(text), "{text} is in an event or the log");
        let mut found = Vec::new();
        let state = agent.spec().state_dir.join("runtime-shim");
        for folder in [&agent.spec().root_dir, &agent.spec().pod_logs_dir, &state] {
            files_with(folder, text, &mut found);
        }
        assert!(found.is_empty(), "{text} is in {found:?}");
    }
    agent.end().unwrap();
}

fn impatient(spec: &mut keelson_testkit::AgentSpec) {
    spec.keelson.insert("imagePullProgressTimeout".into(), "5s".into());
}

#[tokio::test]
async fn a_stalled_pull_is_cancelled_and_a_slow_pull_continues() {
    let scratch = Scratch::new().unwrap();
    let registry = Registry::start(&scratch.path().join("registry")).unwrap();
    registry.put("team/still", "1", RANDOM).unwrap();
    registry.put("team/slow", "1", RANDOM).unwrap();
    let link = Link::to(registry.address()).await.unwrap();
    let agent = Agent::builder(scratch.path()).configure(impatient).start().await.unwrap();

    link.set(Flow::StopsAfter(6 << 20));
    agent
        .write_manifest("still.yaml", &pod("still", &link.image("team/still:1"), "IfNotPresent", ""))
        .unwrap();
    until_cause(&agent, "still", "image", "runtime-shim", " MiB of ").await.unwrap();
    let failed = until_retried(&agent, "still", "image", "you", "no progress within 5s: ").await;
    assert!(failed["message"].as_str().unwrap().contains(" way)"), "{failed}");
    until_waiting_reason(&agent, "still", "ImagePullBackOff").await;
    link.set(Flow::Free);
    until_one_ready(&agent, "still").await;
    until_no_cause(&agent, "still").await.unwrap();

    // Twice as long as the limit, and a kill in the middle.
    link.set(Flow::Slow(1 << 20));
    agent.write_manifest("slow.yaml", &pod("slow", &link.image("team/slow:1"), "IfNotPresent", "")).unwrap();
    until_cause(&agent, "slow", "image", "runtime-shim", " MiB of ").await.unwrap();
    kill_shim(&agent).await;
    until_one_ready(&agent, "slow").await;
    let failures = events(&agent).await.unwrap();
    let slow = format!("slow-{}", agent.spec().node_name);
    let of_slow = failures.iter().filter(|e| e["involvedObject"]["name"] == slow.as_str());
    assert_eq!(of_slow.filter(|e| e["reason"] == "Failed").count(), 0, "{failures:#?}");
    agent.end().unwrap();
}

#[tokio::test]
async fn an_unavailable_registry_is_retried_after_the_back_off() {
    let scratch = Scratch::new().unwrap();
    let folder = scratch.path().join("registry");
    let registry = Registry::start(&folder).unwrap();
    registry.put("team/a", "1", 100).unwrap();
    let link = Link::to(registry.address()).await.unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    registry.kill();
    agent.write_manifest("web.yaml", &pod("web", &link.image("team/a:1"), "IfNotPresent", "")).unwrap();
    until_waiting_reason(&agent, "web", "ImagePullBackOff").await;
    until_retried(&agent, "web", "image", "you", "Back-off pulling image").await;
    until_event(&agent, "BackOff", "Back-off pulling image").await.unwrap();

    let registry = Registry::start(&folder).unwrap();
    link.set_target(registry.address());
    until_one_ready(&agent, "web").await;
    until_no_cause(&agent, "web").await.unwrap();
    until_event_about(&agent, "web", "Pulled", "Successfully pulled image").await;
    agent.end().unwrap();
}

#[tokio::test]
async fn images_are_pulled_while_the_pod_waits_for_volumes() {
    let scratch = Scratch::new().unwrap();
    let registry = Registry::start(&scratch.path().join("registry")).unwrap();
    registry.put("team/a", "1", 100).unwrap();
    let link = Link::to(registry.address()).await.unwrap();
    let image = link.image("team/a:1");
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let spec = "    volumeMounts:\n    - {name: conf, mountPath: /conf}\n  volumes:\n  - name: conf\n    configMap: {name: conf}\n";
    agent.write_manifest("web.yaml", &pod("web", &image, "IfNotPresent", spec)).unwrap();
    until_event_about(&agent, "web", "Pulled", &format!("Successfully pulled image \"{image}\" in ")).await;
    let explained = until_explained(&agent, "web", "the volumes are waited for", |e| {
        let steps = e["steps"].as_array();
        steps.into_iter().flatten().any(|s| s["name"] == "volumes" && s["state"] != "done")
    });
    explained.await.unwrap();
    assert!(running(&agent).await.unwrap().is_empty());
    let conf = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: conf\ndata:\n  a: b\n";
    agent.write_manifest("conf.yaml", conf).unwrap();
    until_one_ready(&agent, "web").await;
    agent.end().unwrap();
}

#[tokio::test]
async fn an_image_volume_that_the_runtime_cannot_mount_is_refused_by_name() {
    let scratch = Scratch::new().unwrap();
    let registry = Registry::start(&scratch.path().join("registry")).unwrap();
    registry.put("team/data", "1", 100).unwrap();
    let link = Link::to(registry.address()).await.unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let image = link.image("team/data:1");
    let volume = format!("  volumes:\n  - name: data\n    image:\n      reference: {image}\n");
    let mount = |path: &str| format!("    volumeMounts:\n    - name: data\n      mountPath: {path}\n");
    // The second container does not mount the image.
    let second = format!(
        "  - name: other\n    image: {BUSYBOX_IMAGE}\n    imagePullPolicy: IfNotPresent\n    \
         command: [\"/bin/sh\", \"-c\", \"exec sleep 1000000\"]\n"
    );
    let with_volume = |spec: &str| pod("web", BUSYBOX_IMAGE, "IfNotPresent", spec);
    agent.write_manifest("web.yaml", &with_volume(&format!("{}{second}{volume}", mount("/data")))).unwrap();
    // Debian's containerd leaves out the image of a mount, so the container would start without its files.
    let step =
        until_cause(&agent, "web", "container", "you", "volume \"data\" is an image, which containerd 1.6.");
    let step = step.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    let message = step["message"].as_str().unwrap();
    assert!(message.contains("use containerd 2.1 or CRI-O 1.31, or newer"), "{message}");
    until_event_about(&agent, "web", "Failed", "cannot mount").await;
    until_waiting_reason(&agent, "web", "CreateContainerConfigError").await;
    let names = async || running(&agent).await.unwrap_or_default().into_keys().collect::<Vec<_>>();
    eventually(LIMIT, "the other container runs", async || {
        names().await.iter().any(|n| n.ends_with("/other"))
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert!(!names().await.iter().any(|name| name.ends_with("/main")));

    // Without the mount, the pod runs.
    agent.write_manifest("web.yaml", &with_volume(&volume)).unwrap();
    until_one_ready(&agent, "web").await;
    agent.end().unwrap();
}
