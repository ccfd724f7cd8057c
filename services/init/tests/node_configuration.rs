//! The configuration under the node's key, with init as a process and fake services. The test plays pod-config and writes its
//! file.
#![allow(clippy::unwrap_used, reason = "tests and their helpers")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use common::{Scene, eventually, find};
use keelson_config::{AssignedConfiguration, Config, ConfigurationStatus, ServiceName};
use keelson_init_core::ConfigurationCheckpoint;
use keelson_proto::keelson::supervisor::v1 as pb;
use rustix::process::Signal;

const ETCD: &str = "controlPlane: etcd\netcd:\n  endpoints: ['http://127.0.0.1:1']\n";

/// A node whose control plane is an etcd that never answers.
fn node(trial: &str) -> Scene {
    let scene = Scene::new();
    scene.write_config(&format!("{ETCD}nodeConfiguration:\n  trialPeriod: {trial}\n"));
    scene
}

fn content(fields: &str) -> String {
    format!("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{fields}\n")
}

fn assign(scene: &Scene, revision: i64, fields: &str) {
    let assigned = AssignedConfiguration::new(revision, content(fields).into_bytes());
    let path = scene.path("state/pod-config/node-configuration.json");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path.with_extension("new"), serde_json::to_vec(&assigned).unwrap()).unwrap();
    fs::rename(path.with_extension("new"), path).unwrap();
}

fn withdraw(scene: &Scene) {
    fs::remove_file(scene.path("state/pod-config/node-configuration.json")).unwrap();
}

fn status(scene: &Scene) -> Option<ConfigurationStatus> {
    let bytes = fs::read(scene.path("run/node-configuration.json")).ok()?;
    Some(serde_json::from_slice(&bytes).unwrap())
}

/// Waits until the status begins with `shown`.
async fn until(scene: &Scene, shown: &str) -> ConfigurationStatus {
    let is = || status(scene).is_some_and(|status| status.to_string().starts_with(shown));
    eventually(&format!("{shown}, it is {:?}", status(scene)), is).await;
    status(scene).unwrap()
}

fn config(scene: &Scene) -> Config {
    Config::load(&scene.path("run/config.json")).unwrap()
}

fn max_pods(scene: &Scene) -> u32 {
    config(scene).resources.max_pods
}

fn pids(services: &[pb::Service]) -> BTreeMap<String, u32> {
    services.iter().filter(|s| s.name != "init").map(|s| (s.name.clone(), s.pid)).collect()
}

/// Waits until every service runs in a new process.
async fn all_new(scene: &Scene, before: &BTreeMap<String, u32>) -> Vec<pb::Service> {
    scene
        .wait("all services run in new processes", |services| {
            services.len() == ServiceName::ALL.len()
                && services.iter().all(|s| s.state == "running" && before.get(&s.name) != Some(&s.pid))
        })
        .await
}

#[tokio::test]
async fn an_assigned_configuration_is_tried_and_becomes_last_known_good() {
    let scene = node("1s");
    let _init = scene.start();
    let before = pids(&scene.all_running().await);
    assert_eq!((max_pods(&scene), status(&scene)), (110, None));

    assign(&scene, 5, "maxPods: 7");
    let tried = until(&scene, "trial@5").await;
    assert_eq!((tried.active.unwrap().revision, tried.last_known_good), (5, None));
    let after = all_new(&scene, &before).await;
    let why = &find(&after, ServiceName::PodSync).message;
    assert!(why.starts_with("restarted for another configuration"), "{why}");
    let good = until(&scene, "active@5").await;
    assert_eq!(good.last_known_good.unwrap().revision, 5);
    let resolved = config(&scene);
    assert_eq!(resolved.resources.max_pods, 7);
    assert_eq!(resolved.provenance["resources.maxPods"], "etcd config@5:3");
    let mode = |path: &str| fs::metadata(scene.path(path)).unwrap().mode() & 0o777;
    assert_eq!(mode("run/node-configuration.json"), 0o640);
    assert_eq!(mode("state/init/node-configuration.json"), 0o600);
    assert_eq!(mode("state/init"), 0o700);

    // An unchanged configuration restarts nothing.
    assign(&scene, 6, "maxPods: 7 # as before");
    until(&scene, "active@6").await;
    assert_eq!(pids(&scene.all_running().await), pids(&after));
    assert_eq!(config(&scene).provenance["resources.maxPods"], "etcd config@6:3");

    withdraw(&scene);
    all_new(&scene, &pids(&after)).await;
    assert_eq!((max_pods(&scene), status(&scene)), (110, None));
}

#[tokio::test]
async fn an_invalid_assigned_configuration_is_refused_with_field_and_line() {
    let scene = node("1s");
    let _init = scene.start();
    let before = pids(&scene.all_running().await);
    for (revision, fields, expected) in [
        (5, "maxPods: many", "maxPods = \"many\" (etcd config@5:3; --max-pods): this must be a whole number"),
        (
            6,
            "podPidsLimit: 9\nmaxPod: 7",
            "maxPod = 7 (etcd config@6:4): a KubeletConfiguration has no such field",
        ),
        (7, "maxPods: [", "etcd config@7 is not usable: "),
        (
            8,
            "cgroupRoot: /other",
            "cgroupRoot = \"/other\" (etcd config@8:3): this field cannot change while the agent runs",
        ),
        (9, "kind: Pod", "kind = \"Pod\" (etcd config@9:"),
    ] {
        assign(&scene, revision, fields);
        let status = until(&scene, &format!("refused@{revision}")).await;
        let error = status.error.unwrap();
        assert!(error.contains(expected), "{error}");
        assert_eq!((status.active, status.last_known_good), (None, None));
    }
    let path = scene.path("state/pod-config/node-configuration.json");
    fs::write(&path, r#"{"revision": 10, "text": "", "problem": "it has 9 bytes too many"}"#).unwrap();
    let status = until(&scene, "refused@10").await;
    assert_eq!(status.error.unwrap(), "etcd config@10 is not accepted: it has 9 bytes too many");
    assert_eq!(pids(&scene.all_running().await), before);
    assert_eq!(max_pods(&scene), 110);
}

#[tokio::test]
async fn a_failed_trial_restores_the_last_known_good_and_is_not_repeated() {
    let scene = node("3s");
    scene.behave(ServiceName::NodeApi, "at 13 exit 78");
    scene.behave(ServiceName::VolumeManager, "at 14 exit 1");
    scene.behave(ServiceName::PodSync, "at 15 degraded it is ill");
    scene.behave(ServiceName::RuntimeShim, "degraded as it always was");
    let mut init = scene.start();
    let as_well_as_ever = |services: &[pb::Service]| {
        services.len() == ServiceName::ALL.len()
            && services
                .iter()
                .all(|s| s.state == if s.name == "runtime-shim" { "degraded" } else { "running" })
    };
    scene.wait("all services are as healthy as before", as_well_as_ever).await;
    assign(&scene, 5, "maxPods: 7");
    until(&scene, "active@5").await;
    for (revision, pods, expected) in [
        (6, 13, "node-api failed with this configuration: exit code 78"),
        (7, 14, "volume-manager ended 4 times with this configuration: "),
        (
            8,
            15,
            "the services are less healthy with this configuration than before: pod-sync is degraded: it is ill",
        ),
    ] {
        assign(&scene, revision, &format!("maxPods: {pods}"));
        let status = until(&scene, &format!("refused@{revision}")).await;
        let error = status.error.unwrap();
        assert!(error.starts_with(expected), "{error}");
        let revisions = (status.active.unwrap().revision, status.last_known_good.unwrap().revision);
        assert_eq!((revisions, max_pods(&scene)), ((5, 5), 7));
        scene.wait("all services are as healthy as before", as_well_as_ever).await;
    }

    // The next start has it in force before any service runs, and tries nothing again.
    init.signal(Signal::TERM);
    init.ended().await;
    drop(init);
    let _init = scene.start();
    let services = scene.wait("all services are as healthy as before", as_well_as_ever).await;
    assert!(services.iter().all(|service| service.restarts == 0), "{services:#?}");
    assert!(status(&scene).unwrap().to_string().starts_with("refused@8"));
    assert_eq!(max_pods(&scene), 7);
    assign(&scene, 9, "maxPods: 16");
    until(&scene, "active@9").await;
}

#[tokio::test]
async fn a_trial_continues_after_a_kill_of_init_until_the_third_start() {
    let scene = node("1h");
    let mut init = scene.start();
    scene.all_running().await;
    assign(&scene, 5, "maxPods: 7");
    until(&scene, "trial@5").await;
    for _ in 0..2 {
        init.signal(Signal::KILL);
        init.ended().await;
        drop(init);
        fs::remove_file(scene.path("run/config.json")).unwrap();
        init = scene.start();
        scene.all_running().await;
        assert_eq!((status(&scene).unwrap().to_string().as_str(), max_pods(&scene)), ("trial@5", 7));
    }
    init.signal(Signal::KILL);
    init.ended().await;
    drop(init);
    let _init = scene.start();
    scene.all_running().await;
    let status = status(&scene).unwrap();
    assert_eq!(status.to_string(), "refused@5: init was started 3 times during the trial");
    assert_eq!((max_pods(&scene), status.active), (110, None));
}

#[tokio::test]
async fn a_kill_of_init_at_any_time_keeps_the_last_known_good() {
    let scene = node("1s");
    scene.behave(ServiceName::NodeApi, "at 13 exit 78");
    let mut init = scene.start();
    scene.all_running().await;
    assign(&scene, 1, "maxPods: 7");
    until(&scene, "active@1").await;
    let mut random = fastrand::Rng::with_seed(7);
    for revision in 2..14 {
        let pods = if revision % 3 == 0 { 13 } else { 20 + revision };
        assign(&scene, revision, &format!("maxPods: {pods}"));
        // This sleep waits for nothing: init is killed at a random time, between the assignment and the end of the trial.
        tokio::time::sleep(Duration::from_millis(random.u64(0..1800))).await;
        init.signal(Signal::KILL);
        init.ended().await;
        drop(init);
        let bytes = fs::read(scene.path("state/init/node-configuration.json")).unwrap();
        let checkpoint: ConfigurationCheckpoint = serde_json::from_slice(&bytes).unwrap();
        assert!(
            checkpoint.status().unwrap().last_known_good.is_some(),
            "after revision {revision}: {checkpoint:#?}"
        );
        config(&scene);
        init = scene.start();
        scene.wait("init lists its services", |services| services.len() == ServiceName::ALL.len()).await;
        let status = status(&scene).unwrap();
        assert!(
            status.last_known_good.is_some() && status.active.is_some(),
            "after revision {revision}: {status:?}"
        );
    }
    until(&scene, "active@13").await;
    assert_eq!(max_pods(&scene), 33);
    scene.all_running().await;
}

#[tokio::test]
async fn an_active_configuration_that_no_longer_resolves_is_suspended() {
    let scene = node("1s");
    let write = |more: &str| {
        scene.write_config(&format!("{ETCD}nodeConfiguration:\n  trialPeriod: 1s\n"));
        let path = scene.path("kubelet.yaml");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(path, format!("{text}{more}")).unwrap();
    };
    write("imageGCLowThresholdPercent: 40\n");
    let mut init = scene.start();
    scene.all_running().await;
    assign(&scene, 5, "imageGCHighThresholdPercent: 50");
    until(&scene, "active@5").await;
    for (more, shown, high) in [("", "refused@5: ", 85), ("imageGCLowThresholdPercent: 30\n", "active@5", 50)]
    {
        init.signal(Signal::TERM);
        init.ended().await;
        drop(init);
        write(more);
        init = scene.start();
        scene.all_running().await;
        until(&scene, shown).await;
        assert_eq!(config(&scene).image_collection.high_threshold_percent, high);
    }
}

#[tokio::test]
async fn without_etcd_an_assigned_configuration_is_ignored() {
    let scene = node("1s");
    let mut init = scene.start();
    scene.all_running().await;
    assign(&scene, 5, "maxPods: 7");
    until(&scene, "active@5").await;
    init.signal(Signal::TERM);
    init.ended().await;
    drop(init);
    scene.write_config("");
    let _init = scene.start();
    scene.all_running().await;
    assert_eq!((max_pods(&scene), status(&scene)), (110, None));
}
