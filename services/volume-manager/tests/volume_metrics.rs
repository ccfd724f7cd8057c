//! The metrics of volume operations, over the socket.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::volume_manager::v1 as pb;
use support::api::{FakeApi, config_map};
use support::{Service, Sync, World, desire, empty_dir, mount, until_some, volume};

/// The value of a sample by its full name with labels; 0 if there is none.
fn sample(service: &Service, name: &str) -> u64 {
    let text = service.ctx.metrics.text();
    let found = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    found.unwrap_or(0)
}

/// The number of successful mounts of a plugin, and of those that took at most 100 ms.
fn mount_waits(service: &Service, plugin: &str) -> (u64, u64) {
    let labels = format!("plugin_name=\"kubernetes.io/{plugin}\",operation_name=\"overall_volume_mount\"");
    let name = "volume_operation_total_seconds";
    let quick = format!("{name}_bucket{{le=\"0.1\",{labels}}}");
    (sample(service, &format!("{name}_count{{{labels}}}")), sample(service, &quick))
}

fn operations(service: &Service, plugin: &str, operation: &str, status: &str) -> u64 {
    sample(
        service,
        &format!(
            "storage_operation_duration_seconds_count{{volume_plugin=\"kubernetes.io/{plugin}\",operation_name=\"{operation}\",status=\"{status}\",migrated=\"false\"}}"
        ),
    )
}

#[tokio::test]
async fn mount_duration_counts_from_the_first_request_including_failures() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let host_path = world.config.paths.run_dir.join("wanted");
    let path = host_path.to_string_lossy().into_owned();
    let host =
        volume("host", pb::volume::Source::HostPath(pb::HostPath { path, r#type: "Directory".into() }));
    sync.pod(desire("u1", 1, Want::Run, vec![host, empty_dir("data", "", 0)])).await;
    mount(&mut client, "u1", 1).await.1.unwrap_err();
    assert!(operations(&service, "host-path", "volume_mount", "fail-unknown") >= 1);
    assert_eq!((mount_waits(&service, "host-path").0, mount_waits(&service, "empty-dir").0), (0, 1));
    fs::create_dir(&host_path).unwrap();
    until_some("the volume", || {
        let mut client = service.client();
        async move { mount(&mut client, "u1", 1).await.1.ok() }
    })
    .await;
    // The retry comes after half a second or more.
    assert_eq!(mount_waits(&service, "host-path"), (1, 0));
    assert_eq!(operations(&service, "host-path", "volume_mount", "success"), 1);
    assert_eq!(mount_waits(&service, "empty-dir").0, 1);
}

#[tokio::test]
async fn each_fsgroup_walk_is_measured_as_its_own_operation() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    api.config_map("conf", r#"{"a": "1"}"#);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![empty_dir("data", "", 0)])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let walks = |plugin| operations(&service, plugin, "volume_apply_access_control", "success");
    assert_eq!(walks("empty-dir"), 0);
    let volumes = vec![empty_dir("data", "", 0), config_map("conf")];
    sync.pod(pb::PodDesire { fs_group: Some(4711), ..desire("u2", 1, Want::Run, volumes) }).await;
    mount(&mut client, "u2", 1).await.1.unwrap();
    // One walk for the folder of the files and one for the files.
    assert_eq!((walks("empty-dir"), walks("configmap")), (1, 2));
}

#[tokio::test]
async fn a_volume_that_its_plugin_does_not_understand_counts_as_error_and_one_cleanup() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    for (name, data) in [("torn", r#"{"driverNa"#), ("whole", r#"{"driverName": "d", "volumeHandle": "h"}"#)]
    {
        let folder = world.volume("gone", "csi", name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("vol_data.json"), data).unwrap();
    }
    let service = world.start().await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    let counted = || {
        [
            "reconstruct_volume_operations_total",
            "reconstruct_volume_operations_errors_total",
            "force_cleaned_failed_volume_operations_total",
            "force_cleaned_failed_volume_operation_errors_total",
        ]
        .map(|name| sample(&service, name))
    };
    assert_eq!(counted(), [2, 1, 0, 0]);
    sync.complete(1, true).await;
    until_some("the cleanup", || std::future::ready((counted() == [2, 1, 1, 0]).then_some(()))).await;
    assert!(!world.volume("gone", "csi", "torn").exists());
    assert!(world.volume("gone", "csi", "whole").exists(), "it waits for its driver");
}

#[tokio::test]
async fn a_volume_of_an_unknown_plugin_counts_as_reconstruction_error_and_one_cleanup() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let folder = |uid: &str, name: &str| world.volume(uid, "quobyte", name);
    fs::create_dir_all(folder("gone", "empty")).unwrap();
    fs::create_dir_all(folder("gone", "full")).unwrap();
    fs::write(folder("gone", "full").join("x"), "x").unwrap();
    fs::create_dir_all(world.empty_dir("gone", "data")).unwrap();
    let service = world.start().await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    let counted = || {
        [
            "reconstruct_volume_operations_total",
            "reconstruct_volume_operations_errors_total",
            "force_cleaned_failed_volume_operations_total",
            "force_cleaned_failed_volume_operation_errors_total",
        ]
        .map(|name| sample(&service, name))
    };
    assert_eq!(counted(), [3, 2, 0, 0]);
    assert!(service.ctx.metrics.text().contains("force_cleaned_failed_volume_operations_total 0\n"));
    sync.complete(1, true).await;
    until_some("the cleanup", || std::future::ready((counted() == [3, 2, 2, 1]).then_some(()))).await;
    assert!(!folder("gone", "empty").exists() && folder("gone", "full").join("x").exists());
    // Further attempts until it succeeds are not counted.
    fs::remove_file(folder("gone", "full").join("x")).unwrap();
    until_some("the removal", || std::future::ready((!world.pod("gone").exists()).then_some(()))).await;
    assert_eq!(counted(), [3, 2, 2, 1]);
}
