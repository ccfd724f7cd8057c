//! What nobody names goes only when every source has reported.

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

/// Waits until every stream has been read beyond what was told before.
async fn has_heard_everything(world: &World, service: &PodSync, uid: &str) {
    world.name(uid, "Always", 1);
    service.phase(uid, "Running").await;
    let starts = world.shim.calls("StartContainer");
    world.shim.exit(uid, 1);
    eventually("the restart", async || (world.shim.calls("StartContainer") > starts).then_some(())).await;
    eventually("its desire", async || (world.shim.want(uid) == Some(Want::Run)).then_some(())).await;
}

#[tokio::test]
async fn what_no_source_names_stays_until_all_of_them_have_reported_and_then_goes() {
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
        has_heard_everything(&world, &service, "one").await;
        // News of it while the sources are still awaited.
        stray();
        has_heard_everything(&world, &service, "two").await;
        assert!(runs(&world, "stray"), "{:?}", world.shim.order());
        assert_eq!(world.shim.calls("StopPodSandbox"), 0);
        assert!(!world.shim.may_sweep(), "nor may runtime-shim end it");

        world.reported(&SOURCES);
        eventually("its end", async || (world.shim.calls("StopPodSandbox") == 2).then_some(())).await;
        assert!(!runs(&world, "stray") && runs(&world, "one") && runs(&world, "two"));
        eventually("the word to runtime-shim", async || world.shim.may_sweep().then_some(())).await;
        service.kill();
    }
}

#[tokio::test]
async fn a_pod_whose_source_has_not_reported_since_a_restart_stays_and_goes_when_it_is_not_named() {
    let world = World::start();
    let first = world.pod_sync().await;
    world.name("web", "Always", 1);
    first.phase("web", "Running").await;
    first.kill();
    world.pods.remove(&"web".to_owned());

    world.reported(&["manifest"]);
    let second = world.pod_sync().await;
    has_heard_everything(&world, &second, "other").await;
    assert!(runs(&world, "web"), "{:?}", world.shim.order());
    assert!(!world.shim.may_sweep());

    world.reported(&SOURCES);
    eventually("its end", async || (!runs(&world, "web")).then_some(())).await;
    assert!(runs(&world, "other"));
    second.kill();
}

#[tokio::test]
async fn a_pod_that_has_left_its_source_and_come_back_is_started_anew_though_only_the_second_was_told() {
    let world = World::start();
    let service = world.pod_sync().await;
    let spec = || {
        let container = json!({"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent"});
        json!({"restartPolicy": "Always", "containers": [container]})
    };
    let sandboxes = || world.shim.calls("RunPodSandbox");
    world.name_added("web", spec(), 1, 0);
    service.phase("web", "Running").await;
    let begins_anew = async |revision, added, expected: usize| {
        world.name_added("web", spec(), revision, added);
        // runtime-shim removes what is left of what has ended.
        let has_ended = async || world.shim.pod("web")?.sandboxes.iter().all(|s| !s.ready).then_some(());
        eventually("the end", has_ended).await;
        eventually("nobody wants it", async || world.shim.want("web").is_none().then_some(())).await;
        world.shim.collect("web");
        eventually("the new sandbox", async || (sandboxes() == expected).then_some(())).await;
        service.phase("web", "Running").await;
    };
    begins_anew(2, 7, 2).await;
    // What was told already, and what a new run of pod-config does not know, is no news.
    for (revision, added) in [(3, 7), (4, 0)] {
        world.name_added("web", spec(), revision, added);
        eventually("the revision", async || {
            let desire = world.machine.desire("web")?;
            (desire.revision == revision).then_some(())
        })
        .await;
    }
    begins_anew(5, 9, 3).await;
    assert_eq!(world.shim.calls("StopPodSandbox"), 2);
    service.kill();

    // Nor has a new run of pod-sync anything to compare with.
    let second = world.pod_sync().await;
    second.phase("web", "Running").await;
    has_heard_everything(&world, &second, "other").await;
    assert_eq!(world.shim.calls("StopPodSandbox"), 2);
    second.kill();
}
