//! `PodVolumeStats` over the socket: the usage of volumes, measured in the background.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::time::Duration;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::volume_manager::v1 as pb;
use support::api::{FakeApi, config_map};
use support::{Client, Service, Sync, World, desire, empty_dir, mount, unmount, until_some, volume};

const LONG: Duration = Duration::from_secs(20);

async fn stats(client: &mut Client, uid: &str) -> Vec<pb::PodVolumeStatsResponse> {
    let request = pb::PodVolumeStatsRequest { uid: uid.into() };
    let mut stream = client.pod_volume_stats(request).await.unwrap().into_inner();
    let mut pods = Vec::new();
    while let Some(pod) = stream.message().await.unwrap() {
        pods.push(pod);
    }
    pods
}

/// The number of measurements with this `source`; `None` if it is 0.
fn sample(service: &Service, name: &str, source: &str) -> Option<u64> {
    let begin = format!("{name}_count{{metric_source=\"{source}\"}} ");
    let text = service.ctx.metrics.text();
    let count = text.lines().find_map(|line| line.strip_prefix(&begin))?;
    count.parse().ok().filter(|count| *count > 0)
}

/// Waits until the only pod has stats of exactly these volumes.
async fn until_volumes(client: &Client, names: &[&str]) -> Vec<pb::VolumeStats> {
    until_some(&format!("stats of {names:?}"), || {
        let mut client = client.clone();
        async move {
            let pod = stats(&mut client, "").await.pop()?;
            let found: Vec<&str> = pod.volumes.iter().map(|volume| volume.name.as_str()).collect();
            (found == names).then_some(pod.volumes)
        }
    })
    .await
}

#[tokio::test]
async fn every_volume_kind_has_stats_except_host_path() {
    let (mut world, api) = (World::new(), FakeApi::default());
    world.config.volumes.stats_period_ms = 20;
    let _runtime = world.start_runtime().await;
    let _server = api.serve(&world).await;
    api.config_map("conf", r#"{"a": "1"}"#);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let host_path = pb::HostPath { path: "/".into(), r#type: String::new() };
    let volumes = vec![
        empty_dir("disk", "", 7 << 20),
        empty_dir("shm", "Memory", 4 << 20),
        config_map("conf"),
        volume("host", pb::volume::Source::HostPath(host_path)),
    ];
    let desired = desire("u1", 1, Want::Run, volumes);
    sync.pod(desired.clone()).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let first = until_volumes(&client, &["conf", "disk", "shm"]).await;
    let flags: Vec<_> = first.iter().map(|v| (v.local_ephemeral, v.size_limit_bytes)).collect();
    assert_eq!(flags, [(true, 0), (true, 7 << 20), (false, 4 << 20)]);
    assert!(first.iter().all(|v| v.measured_unix_nanos > 0 && v.message.is_empty()), "{first:?}");
    assert_eq!((first[1].inodes_used, first[2].capacity_bytes), (1, 4 << 20));

    fs::write(world.empty_dir("u1", "disk").join("x"), vec![b'x'; 1 << 20]).unwrap();
    fs::write(world.empty_dir("u1", "shm").join("x"), vec![b'x'; 1 << 20]).unwrap();
    let filled = until_some("the next round", || {
        let mut client = client.clone();
        async move {
            let volumes = stats(&mut client, "u1").await.pop()?.volumes;
            let at_least = |v: &pb::VolumeStats| v.used_bytes >= 1 << 20;
            (at_least(&volumes[1]) && at_least(&volumes[2])).then_some(volumes)
        }
    })
    .await;
    assert_eq!((filled[1].inodes_used, filled[2].available_bytes), (2, 3 << 20));
    // The stats of a measurement are visible a moment before the metric counts it.
    for source in ["du", "statfs"] {
        let name = "kubelet_volume_metric_collection_duration_seconds";
        until_some(source, || std::future::ready(sample(&service, name, source))).await;
    }
    let pod = stats(&mut client, "u1").await.pop().unwrap().pod.unwrap();
    assert_eq!((pod.uid.as_str(), pod.namespace.as_str(), pod.name.as_str()), ("u1", "default", "pod-u1"));
    assert!(stats(&mut client, "u2").await.is_empty());

    sync.pod(pb::PodDesire { want: Want::Unmount.into(), revision: 2, ..desired }).await;
    unmount(&mut client, "u1", LONG).await.unwrap();
    until_some("the removal of its stats", || {
        let mut client = client.clone();
        async move { stats(&mut client, "").await.is_empty().then_some(()) }
    })
    .await;
}

#[tokio::test]
async fn a_restarted_service_measures_found_volumes_once_the_pod_is_named() {
    let world = World::new();
    let first = world.start().await;
    let mut client = first.client();
    let sync = Sync::open(&mut client).await;
    let desired = desire("u1", 1, Want::Run, vec![empty_dir("disk", "", 0)]);
    sync.pod(desired.clone()).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    fs::write(world.empty_dir("u1", "disk").join("x"), vec![b'x'; 1 << 20]).unwrap();
    drop(sync);
    first.stop().await;
    let second = world.start().await;
    let mut client = second.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desired).await;
    // At once, not after the period of one minute.
    let volumes = until_volumes(&client, &["disk"]).await;
    assert!(volumes[0].used_bytes >= 1 << 20 && volumes[0].inodes_used == 2, "{volumes:?}");
}

#[tokio::test]
async fn volume_stats_are_disabled_by_a_zero_period() {
    let mut world = World::new();
    world.config.volumes.stats_period_ms = 0;
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![empty_dir("disk", "", 0)])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    assert!(service.ctx.progress.report("").loops.iter().all(|l| l.name != "volume statistics"));
    assert!(stats(&mut client, "").await.is_empty());
}

#[tokio::test]
async fn a_volume_with_a_limit_is_measured_more_often() {
    let mut world = World::new();
    world.config.volumes.stats_period_ms = 3_600_000;
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let own = desire("u1", 1, Want::Run, vec![empty_dir("disk", "", 1 << 20)]);
    let of_pod = desire("u2", 1, Want::Run, vec![empty_dir("disk", "", 0)]);
    for desired in [own, pb::PodDesire { storage_limited: true, ..of_pod }] {
        let uid = desired.pod.as_ref().unwrap().uid.clone();
        sync.pod(desired).await;
        mount(&mut client, &uid, 1).await.1.unwrap();
        let stats_of_at_least = |least: u64| {
            let (mut client, uid) = (client.clone(), uid.clone());
            async move {
                let volumes = stats(&mut client, &uid).await.pop()?.volumes;
                (volumes[0].used_bytes >= least).then_some(())
            }
        };
        until_some("the stats of the empty volume", || stats_of_at_least(0)).await;
        fs::write(world.empty_dir(&uid, "disk").join("x"), vec![b'x'; 2 << 20]).unwrap();
        // The normal period is an hour.
        let full = async {
            while stats_of_at_least(2 << 20).await.is_none() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(300), full)
            .await
            .expect("the full volume is measured in time");
    }
}
