//! Orphans are terminated only when every source has reported.

#![allow(clippy::unwrap_used)]

mod fake;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::runtime::v1::Sandbox;

use serde_json::json;

use fake::{PodSync, SOURCES, World, eventually};

/// Whether the sandbox of a pod runs.
fn runs(world: &World, uid: &str) -> bool {
    world.shim.pod(uid).is_some_and(|pod| pod.sandboxes.iter().all(|s| s.ready))
}

/// Waits until every stream has been read beyond the messages so far.
async fn wait_for_all_streams(world: &World, service: &PodSync, uid: &str) {
    world.add_pod(uid, "Always", 1);
    service.phase(uid, "Running").await;
    let starts = world.shim.calls("StartContainer");
    world.shim.exit(uid, 1);
    eventually("the restart", async || (world.shim.calls("StartContainer") > starts).then_some(())).await;
    eventually("its desire", async || (world.shim.want(uid) == Some(Want::Run)).then_some(())).await;
}

#[tokio::test]
async fn orphans_are_kept_until_every_source_has_reported() {
    for reported in [&[][..], &["manifest"][..]] {
        let world = World::start();
        let stray = || {
            world.shim.change("stray", |pod| {
                let id = format!("s-stray-{}", pod.sandboxes.len());
                pod.sandboxes.push(Sandbox { id, ready: true, ..Sandbox::default() });
            });
        };
        stray();
        world.reported(reported);
        let service = world.pod_sync().await;
        wait_for_all_streams(&world, &service, "one").await;
        // It changes while sources have not reported yet.
        stray();
        wait_for_all_streams(&world, &service, "two").await;
        assert!(runs(&world, "stray"), "{:?}", world.shim.order());
        assert_eq!(world.shim.calls("StopPodSandbox"), 0);
        assert!(!world.shim.sources_ready(), "nor may runtime-shim end it");

        world.reported(&SOURCES);
        eventually("its end", async || (world.shim.calls("StopPodSandbox") == 2).then_some(())).await;
        assert!(!runs(&world, "stray") && runs(&world, "one") && runs(&world, "two"));
        eventually("the word to runtime-shim", async || world.shim.sources_ready().then_some(())).await;
        service.kill();
    }
}

#[tokio::test]
async fn a_pod_is_kept_after_a_restart_until_its_source_has_reported() {
    let world = World::start();
    let first = world.pod_sync().await;
    world.add_pod("web", "Always", 1);
    first.phase("web", "Running").await;
    first.kill();
    world.pods.remove(&"web".to_owned());

    world.reported(&["manifest"]);
    let second = world.pod_sync().await;
    wait_for_all_streams(&world, &second, "other").await;
    assert!(runs(&world, "web"), "{:?}", world.shim.order());
    assert!(!world.shim.sources_ready());

    world.reported(&SOURCES);
    eventually("its end", async || (!runs(&world, "web")).then_some(())).await;
    assert!(runs(&world, "other"));
    second.kill();
}

#[tokio::test]
async fn a_pod_removed_and_added_again_restarts_even_if_only_the_add_was_seen() {
    let world = World::start();
    let service = world.pod_sync().await;
    let spec = || {
        let container = json!({"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent"});
        json!({"restartPolicy": "Always", "containers": [container]})
    };
    let sandboxes = || world.shim.calls("RunPodSandbox");
    world.add_pod_at("web", spec(), 1, 0);
    service.phase("web", "Running").await;
    let starts_again = async |revision, added, expected: usize| {
        world.add_pod_at("web", spec(), revision, added);
        // runtime-shim removes the records of a terminated pod.
        let has_ended = async || world.shim.pod("web")?.sandboxes.iter().all(|s| !s.ready).then_some(());
        eventually("the end", has_ended).await;
        eventually("no desired state", async || world.shim.want("web").is_none().then_some(())).await;
        world.shim.remove("web");
        eventually("the new sandbox", async || (sandboxes() == expected).then_some(())).await;
        service.phase("web", "Running").await;
    };
    starts_again(2, 7, 2).await;
    // The same time of addition, and an unknown one after a restart of pod-config, do not restart the pod.
    for (revision, added) in [(3, 7), (4, 0)] {
        world.add_pod_at("web", spec(), revision, added);
        eventually("the revision", async || {
            let desire = world.machine.desire("web")?;
            (desire.revision == revision).then_some(())
        })
        .await;
    }
    starts_again(5, 9, 3).await;
    assert_eq!(world.shim.calls("StopPodSandbox"), 2);
    service.kill();

    // After a restart of pod-sync there is no earlier time to compare with.
    let second = world.pod_sync().await;
    second.phase("web", "Running").await;
    wait_for_all_streams(&world, &second, "other").await;
    assert_eq!(world.shim.calls("StopPodSandbox"), 2);
    second.kill();
}
