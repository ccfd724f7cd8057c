//! Garbage collection on a real containerd: unused images when their disk is short, and dead containers of a running
//! pod (runtime-and-resources.md §6.7 and §7.3, pod-lifecycle.md §9.12).

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeSet;

use k8s_cri::v1 as cri;
use keelson_testkit::{Agent, AgentSpec, BUSYBOX_IMAGE, PAUSE_IMAGE, Registry, Scratch, eventually};
use keelson_tests::bystander::BystanderPod;
use keelson_tests::disk::SmallDisk;
use keelson_tests::waits::until_one_ready;
use keelson_tests::{LIMIT, events, pods, running, until_event};
use serde_json::{Value, json};

/// The disk of the runtime, on which an image takes twice its size: packed and unpacked.
const DISK: u64 = 160 << 20;
/// Size in bytes of the layer that only the used image has.
const USED_BYTES: usize = 4 << 20;
/// Size in bytes of the layer that only the unused image has.
const UNUSED_BYTES: usize = 32 << 20;
/// Number of times that the container ends before it keeps running.
const CRASHES: u32 = 4;

fn short_of_images_only(spec: &mut AgentSpec) {
    spec.kubelet.insert("evictionHard".into(), json!({"imagefs.available": "92Mi"}));
    // Images may be removed as soon as they are seen, and containers restart after a second.
    spec.kubelet.insert("imageMinimumGCAge".into(), "1us".into());
    spec.kubelet.insert("crashLoopBackOff".into(), json!({"maxContainerRestartPeriod": "1s"}));
}

fn pod(name: &str, image: &str, script: &str) -> String {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main", "image": image, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sh", "-c", script],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }],
            "volumes": [{"name": "data", "emptyDir": {}}],
        },
    })
    .to_string()
}

/// The tags of all images of the runtime.
async fn images(agent: &Agent) -> BTreeSet<String> {
    let all = cri::ListImagesRequest { filter: None };
    let list = agent.containerd().images().list_images(all).await.unwrap().into_inner();
    list.images.into_iter().flat_map(|image| image.repo_tags).collect()
}

/// Pulls an image that no pod uses.
async fn pull(agent: &Agent, name: &str) {
    let image = cri::ImageSpec { image: name.to_owned(), ..Default::default() };
    let request = cri::PullImageRequest { image: Some(image), ..Default::default() };
    agent.containerd().images().pull_image(request).await.unwrap();
}

/// Every container of a pod in the runtime: attempt, and whether it runs.
async fn attempts(agent: &Agent, name: &str) -> Vec<(u32, bool)> {
    let full = format!("{name}-{}", agent.spec().node_name);
    let all = cri::ListContainersRequest { filter: None };
    let list = agent.containerd().runtime().list_containers(all).await.unwrap().into_inner();
    let of_pod = list
        .containers
        .into_iter()
        .filter(|container| container.labels.get("io.kubernetes.pod.name").is_some_and(|pod| *pod == full));
    let running = cri::ContainerState::ContainerRunning as i32;
    let mut found: Vec<(u32, bool)> =
        of_pod.map(|c| (c.metadata.unwrap_or_default().attempt, c.state == running)).collect();
    found.sort_unstable();
    found
}

#[tokio::test]
async fn unused_images_and_all_but_the_newest_dead_container_are_removed() {
    let scratch = Scratch::new().unwrap();
    let registry = Registry::start(&scratch.path().join("registry")).unwrap();
    registry.put("team/used", "1", USED_BYTES).unwrap();
    registry.put("team/unused", "1", UNUSED_BYTES).unwrap();
    let image = |name: &str| format!("{}/team/{name}:1", registry.address());
    let disk = SmallDisk::at(scratch.path().join("c/root"), DISK).unwrap();
    let agent = Agent::builder(scratch.path()).configure(short_of_images_only).start().await.unwrap();
    let calm = BystanderPod::start(&agent, "calm").await;
    agent.write_manifest("used.json", &pod("used", &image("used"), "exec sleep 1000000")).unwrap();
    until_one_ready(&agent, "used").await;
    let before = running(&agent).await.unwrap();
    let crashing = format!(
        "echo x >> /data/log; if [ $(wc -l < /data/log) -le {CRASHES} ]; then exit 1; fi; exec sleep 1000000"
    );
    agent.write_manifest("crashing.json", &pod("crashing", BUSYBOX_IMAGE, &crashing)).unwrap();
    let names = |unused: bool| {
        let mut names = BTreeSet::from([BUSYBOX_IMAGE.to_owned(), PAUSE_IMAGE.to_owned(), image("used")]);
        names.extend(unused.then(|| image("unused")));
        names
    };
    assert_eq!(images(&agent).await, names(false));
    // This image makes the disk short.
    pull(&agent, &image("unused")).await;
    dead_containers(&agent).await;

    let mut last = BTreeSet::new();
    let gone = eventually(LIMIT, "the unused image is gone", async || {
        last = images(&agent).await;
        last != names(true)
    });
    gone.await.unwrap_or_else(|e| panic!("{e:#}: {last:?}\n{}", agent.log_tail()));
    assert_eq!(last, names(false));
    until_event(&agent, "EvictionThresholdMet", "Attempting to reclaim ephemeral-storage").await.unwrap();
    // Nothing that runs is affected.
    let now = running(&agent).await.unwrap();
    assert!(before.iter().all(|(name, process)| now.get(name) == Some(process)), "{before:#?} {now:#?}");
    calm.assert_untouched(&agent).await;
    let all_events = events(&agent).await.unwrap();
    assert!(!all_events.iter().any(|event| event["reason"] == "Evicted"), "{all_events:#?}");
    agent.end().unwrap();
    drop(disk);
}

/// Only the newest dead container of a crash-looping one stays.
async fn dead_containers(agent: &Agent) {
    let full = format!("crashing-{}", agent.spec().node_name);
    let mut last = (Value::Null, Vec::new());
    let wanted = vec![(CRASHES - 1, false), (CRASHES, true)];
    let collected = eventually(LIMIT, "the newest dead container is left alone", async || {
        let status = pods(agent).await.ok().and_then(|mut all| all.remove(&full)).unwrap_or_default();
        last = (status["status"]["containerStatuses"][0].clone(), attempts(agent, "crashing").await);
        last.0["restartCount"] == CRASHES && last.1 == wanted
    });
    collected.await.unwrap_or_else(|e| panic!("{e:#}: {last:#?}\n{}", agent.log_tail()));
    assert_eq!(last.0["lastState"]["terminated"]["exitCode"], 1, "{last:#?}");
}
