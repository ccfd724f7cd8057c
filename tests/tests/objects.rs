//! ConfigMaps and Secrets as files of a running container, on a real containerd. The container's view is read
//! through /proc, never from the agent.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, Scratch, eventually};
use keelson_tests::waits::{pod_with, until_one_ready, until_retried};
use keelson_tests::{LIMIT, running, until_event, until_no_cause, until_ready};

fn config_map(name: &str, data: &str) -> String {
    format!("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\ndata:\n{data}")
}

fn secret(name: &str, data: &str) -> String {
    format!("apiVersion: v1\nkind: Secret\nmetadata:\n  name: {name}\nstringData:\n{data}")
}

/// A pod with a ConfigMap at /conf, a Secret at /key, and both and its own labels at /all.
fn pod(name: &str) -> String {
    let mounts = "    volumeMounts:\n    - {name: conf, mountPath: /conf}\n    - {name: key, mountPath: /key}\n    \
                  - {name: all, mountPath: /all}\n";
    let volumes = "  volumes:\n  - name: conf\n    configMap: {name: conf}\n  - name: key\n    \
                   secret: {secretName: key, defaultMode: 256}\n  - name: all\n    projected:\n      sources:\n      \
                   - configMap: {name: conf}\n      - secret: {name: key}\n      - downwardAPI:\n          items:\n          \
                   - {path: labels, fieldRef: {fieldPath: metadata.labels}}\n          \
                   - {path: cpu, resourceFieldRef: {containerName: main, resource: limits.cpu}}\n";
    pod_with(name, mounts, volumes)
        .replace(&format!("  name: {name}\n"), &format!("  name: {name}\n  labels: {{tier: front}}\n"))
}

/// The root of the container's filesystem, as its process sees it.
async fn container_root(agent: &Agent, name: &str) -> PathBuf {
    let full = format!("{name}-{}/main", agent.spec().node_name);
    let process = running(agent).await.unwrap().remove(&full).expect("the container runs");
    Path::new("/proc").join(process.pid.to_string()).join("root")
}

fn text(path: PathBuf) -> String {
    std::fs::read_to_string(&path).unwrap_or_else(|e| format!("{}: {e}", path.display()))
}

#[tokio::test]
async fn config_map_and_secret_edits_reach_the_mounted_file_within_a_second() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("conf.yaml", &config_map("conf", "  colour: red\n  old: x\n")).unwrap();
    agent.write_manifest("key.yaml", &secret("key", "  token: hunter2\n")).unwrap();
    agent.write_manifest("web.yaml", &pod("web")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    let root = container_root(&agent, "web").await;
    for (path, wanted) in [
        ("conf/colour", "red"),
        ("key/token", "hunter2"),
        ("all/colour", "red"),
        ("all/token", "hunter2"),
        ("all/labels", "tier=\"front\""),
    ] {
        assert_eq!(text(root.join(path)), wanted, "{path}");
    }
    assert!(text(root.join("all/cpu")).parse::<u32>().unwrap() > 0);
    // The Secret is in no file on disk: its volume is a tmpfs, mounted read-only.
    let mounts = std::fs::read_to_string(root.parent().unwrap().join("mounts")).unwrap();
    let line = mounts.lines().find(|l| l.split(' ').nth(1) == Some("/key")).expect("it is mounted");
    assert!(line.split(' ').nth(2) == Some("tmpfs") && line.contains(" ro"), "{line}");

    let before = running(&agent).await.unwrap();
    assert_edits_arrive_within_a_second(&agent, &root).await;
    assert!(!root.join("conf/old").exists(), "the file of a removed key is deleted");
    agent.write_manifest("key.yaml", &secret("key", "  token: hunter3\n")).unwrap();
    eventually(LIMIT, "the Secret's edit is in the container", async || {
        text(root.join("key/token")) == "hunter3" && text(root.join("all/token")) == "hunter3"
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    // After kills, both services that deliver the files rewrite nothing, and the next edit is delivered.
    let folder = |volume: &str| std::fs::metadata(root.join(volume).join("..data/")).unwrap().ino();
    let folders = ["conf", "key", "all"].map(folder);
    for service in [ServiceName::VolumeManager, ServiceName::PodConfig] {
        let process = agent.service(service).unwrap();
        process.signal(Signal::KILL);
        eventually(LIMIT, format!("{service} is back"), async || {
            agent.service(service).is_some_and(|p| p != process)
        })
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    }
    until_ready(&agent, &["web"]).await.unwrap();
    agent.write_manifest("key.yaml", &secret("key", "  token: hunter4\n")).unwrap();
    eventually(LIMIT, "the edit is in the container", async || text(root.join("key/token")) == "hunter4")
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_eq!(folder("conf"), folders[0], "equal files are not written again");
    assert_ne!(folder("key"), folders[1]);
    assert_eq!(running(&agent).await.unwrap(), before, "nothing restarted");
    agent.end().unwrap();
}

/// Edits the ConfigMap 20 times, and waits for each edit in the container.
async fn assert_edits_arrive_within_a_second(agent: &Agent, root: &Path) {
    let mut took = Vec::new();
    for n in 0..20 {
        agent.write_manifest("conf.yaml", &config_map("conf", &format!("  colour: blue{n}\n"))).unwrap();
        let begun = Instant::now();
        eventually(LIMIT, format!("edit {n} is in the container"), async || {
            text(root.join("conf/colour")) == format!("blue{n}")
        })
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
        took.push(begun.elapsed());
    }
    took.sort_unstable();
    println!("edits took {took:?}");
    // A busy machine may delay some updates; polling instead of watching would delay all.
    assert!(took[took.len() / 2] < Duration::from_secs(1), "{took:?}");
}

#[tokio::test]
async fn a_missing_object_waits_for_you_until_it_is_created() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("key.yaml", &secret("key", "  token: x\n")).unwrap();
    agent.write_manifest("web.yaml", &pod("web")).unwrap();
    let step = until_retried(&agent, "web", "volumes", "you", "configmap \"conf\" not found").await;
    assert!(step["message"].as_str().unwrap().contains("volume \"conf\""), "{step}");
    let event = "MountVolume.SetUp failed for volume \"conf\" : configmap \"conf\" not found";
    until_event(&agent, "FailedMount", event).await.unwrap();
    assert!(running(&agent).await.unwrap().is_empty());

    agent.write_manifest("conf.yaml", &config_map("conf", "  colour: red\n")).unwrap();
    until_one_ready(&agent, "web").await;
    until_no_cause(&agent, "web").await.unwrap();
    assert_eq!(text(container_root(&agent, "web").await.join("conf/colour")), "red");
    agent.end().unwrap();
}
