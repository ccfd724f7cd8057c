//! Which cgroup driver is used, and what happens without one.

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::resource_manager::v1::admit_pod_response::Verdict;
use tonic::Code;

use crate::shared::{LONG, SHORT, admitted, machine, synced};
use crate::support::{World, admit, desire, prepare, release, until_some};

#[tokio::test]
async fn the_first_start_waits_for_the_runtimes_cgroup_driver_and_later_starts_restore_it() {
    let mut world = World::new();
    world.store_driver(None);
    // The configured driver is invalid: every cgroup is created with the runtime's driver.
    world.config.runtime.cgroup_driver = "slices".into();
    let service = world.start().await;
    let sync = synced(&service).await;
    sync.pod(desire("u1", 1, Want::Run, "Guaranteed")).await;
    let mut client = service.client();
    let Verdict::NotYet(not_yet) = admit(&mut client, "u1", SHORT).await else { panic!("it was decided on") };
    assert!(not_yet.message.contains("has not reported its cgroup driver yet"), "{not_yet:?}");
    assert_eq!(machine(&service).await.cgroup_driver, "");
    assert!(world.existing("").is_empty());
    let waiting = tokio::spawn(async move { admit(&mut client, "u1", LONG).await });
    let runtime = world.start_runtime().await;
    runtime.set_cgroup_driver(Some("cgroupfs"));
    waiting.await.unwrap();
    let mut client = service.client();
    assert_eq!(
        prepare(&mut client, "u1", 1, LONG).await.unwrap(),
        format!("{}/kubepods/podu1", world.config.runtime.cgroup_root)
    );
    assert_eq!(machine(&service).await.cgroup_driver, "cgroupfs");
    drop(sync);
    service.stop().await;

    // The next run finds its pod while the runtime is down.
    runtime.set_cgroup_driver(None);
    let service = world.start().await;
    assert_eq!(machine(&service).await.cgroup_driver, "cgroupfs");
    let sync = synced(&service).await;
    sync.pod(desire("u1", 1, Want::Run, "Guaranteed")).await;
    let mut client = service.client();
    assert_eq!(admit(&mut client, "u1", LONG).await, admitted());

    // The runtime comes back with another configuration: its driver is used, and existing cgroups stay.
    runtime.set_cgroup_driver(Some(""));
    service.condition("cgroups", false).await;
    let no_driver = async || (machine(&service).await.cgroup_driver == *"").then_some(());
    until_some("no driver is used", no_driver).await;
    assert!(!world.existing("kubepods/podu1").is_empty());
    runtime.set_cgroup_driver(Some("cgroupfs"));
    service.condition("cgroups", true).await;
    prepare(&mut client, "u1", 1, LONG).await.unwrap();
    sync.pod(desire("u1", 2, Want::Forget, "Guaranteed")).await;
    release(&mut client, "u1", LONG).await.unwrap();
    assert!(world.existing("kubepods/podu1").is_empty());
}

#[tokio::test]
async fn the_configured_cgroup_driver_is_used_when_the_runtime_does_not_answer() {
    let world = World::new();
    world.store_driver(None);
    let service = world.start().await;
    assert_eq!(machine(&service).await.cgroup_driver, "");
    let configured = async || (machine(&service).await.cgroup_driver == "cgroupfs").then_some(());
    until_some("the configured driver", configured).await;
    assert!(!world.existing("kubepods").is_empty());
}

#[tokio::test]
async fn an_unknown_cgroup_driver_is_refused_with_a_remedy() {
    let mut world = World::new();
    world.config.runtime.cgroup_driver = "slices".into();
    let service = world.start().await;
    let mut client = service.client();
    let text = service.condition("cgroups", false).await;
    assert!(text.contains("\"slices\"") && text.contains("cgroupfs or systemd"), "{text}");
    let sync = synced(&service).await;
    sync.pod(desire("u1", 1, Want::Run, "BestEffort")).await;
    let Verdict::NotYet(not_yet) = admit(&mut client, "u1", LONG).await else { panic!("it was decided on") };
    assert_eq!(not_yet.reason, "CgroupDriverNotSupported");
    let status = prepare(&mut client, "u1", 1, LONG).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    sync.pod(desire("u1", 2, Want::Forget, "BestEffort")).await;
    release(&mut client, "u1", LONG).await.unwrap();
    assert!(world.existing("").is_empty());
}

#[tokio::test]
async fn an_invalid_cgroup_root_is_a_condition_and_does_not_stop_the_service() {
    let mut world = World::new();
    world.config.runtime.cgroup_root = "/a/../b".into();
    let service = world.start().await;
    let text = service.condition("cgroups", false).await;
    assert!(text.contains("/a/../b"), "{text}");
    world.config.runtime.cgroup_root = "/keelson-rm-none".into();
}
