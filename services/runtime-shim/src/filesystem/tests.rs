use k8s_cri::v1 as cri;
use k8s_cri::v1::ContainerState::{ContainerExited, ContainerRunning};
use keelson_config::ServiceName;
use tonic::Code;

use super::*;
use crate::tests::fake_runtime::{FakeRuntime, refusal, until};

fn filesystems(fake: &FakeRuntime) -> Filesystems {
    Filesystems::new(fake.cri.clone(), fake.observer.clone(), fake.files.clone())
}

fn usage(mountpoint: &str, bytes: u64) -> cri::FilesystemUsage {
    cri::FilesystemUsage {
        timestamp: 7,
        fs_id: Some(cri::FilesystemIdentifier { mountpoint: mountpoint.into() }),
        used_bytes: Some(cri::UInt64Value { value: bytes }),
        inodes_used: Some(cri::UInt64Value { value: 3 }),
    }
}

/// A pod `u` with a container `c` that has two log files, and an older dead container of the same name.
async fn pod(fake: &FakeRuntime) {
    fake.sandbox("s-u", "u", true);
    fake.container("c", "u", ContainerRunning);
    fake.container("old", "u", ContainerExited);
    fake.set_container_name("old", "c");
    let folder = fake.dir.path().join("logs/default_u_u/c");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("0.log"), vec![b'x'; 8_192]).unwrap();
    std::fs::write(folder.join("0.log.1"), b"y").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", folder.join("link")).unwrap();
    let own = fake.dir.path().join("root/pods/u");
    std::fs::create_dir_all(own.join("containers/c")).unwrap();
    std::fs::write(own.join("etc-hosts"), vec![b'h'; 20_000]).unwrap();
    for attempt in ["11111111", "22222222"] {
        std::fs::write(own.join("containers/c").join(attempt), vec![b'm'; 40_000]).unwrap();
    }
    std::os::unix::fs::symlink("/etc/passwd", own.join("containers/c/link")).unwrap();
    for container in ["c", "old"] {
        fake.set_log_path(container, &folder.join("0.log"));
        fake.set_layer(container, usage("/", 100));
    }
    fake.observer.read("u").await.unwrap();
}

#[tokio::test]
async fn filesystem_stats_are_unknown_before_the_first_response_and_then_cached() {
    let fake = FakeRuntime::start().await;
    let figures = filesystems(&fake);
    assert_eq!(figures.stats(true), None);
    fake.images.image_fs_info.answer_once(Err(refusal(Code::Unavailable)));
    figures.collect().await;
    assert_eq!(figures.stats(true), None);
    figures.collect().await;
    let first = figures.stats(true).unwrap();
    let image = &first.images[0];
    assert!(image.capacity_bytes > 1 << 20 && image.capacity_bytes >= image.available_bytes, "{image:?}");
    assert!(image.taken_unix_nanos > 0 && image.mountpoint == fake.dir.path().to_str().unwrap());
    fake.images.image_fs_info.fail(refusal(Code::Unavailable));
    figures.collect().await;
    assert_eq!(figures.stats(true), Some(first));
}

#[tokio::test]
async fn container_usage_has_its_layer_and_logs_count_for_the_newest_container() {
    let fake = FakeRuntime::start().await;
    pod(&fake).await;
    let figures = filesystems(&fake);
    figures.collect().await;
    let before = figures.stats(false).unwrap();
    assert!(before.pods.is_empty() && before.pods_taken_unix_nanos == 0, "nothing was requested before");
    figures.collect().await;
    let stats = figures.stats(false).unwrap();
    assert!(stats.pods_taken_unix_nanos > 0);
    let [pod] = stats.pods.as_slice() else { panic!("{stats:?}") };
    assert_eq!(pod.pod.as_ref().unwrap().name, "u");
    let of = |id: &str| pod.containers.iter().find(|c| c.id == id).unwrap();
    let (new, old) = (of("c"), of("old"));
    assert!(new.running && !old.running && old.name == "c");
    assert_eq!((new.layer_bytes, new.layer_inodes, new.layer_taken_unix_nanos), (Some(100), Some(3), 7));
    assert_eq!(old.layer_bytes, Some(100));
    let (with, without) = if new.log_inodes > 0 { (new, old) } else { (old, new) };
    // The size on disk depends on the file system; a link and its target do not count.
    assert!(with.log_bytes >= 8_192 && with.log_bytes < 1 << 20 && with.log_inodes == 2, "{with:?}");
    assert_eq!((without.log_bytes, without.log_inodes), (0, 0));
    assert!((80_000..1 << 20).contains(&with.termination_log_bytes), "{with:?}");
    assert_eq!((with.termination_log_inodes, without.termination_log_bytes), (2, 0));
    assert!((20_000..1 << 20).contains(&pod.hosts_file_bytes), "{pod:?}");
    assert_eq!(pod.hosts_file_inodes, 1);
    assert!(figures.stats(true).unwrap().pods.is_empty());
}

#[tokio::test]
async fn file_system_of_images_and_layers_is_reported_once() {
    let fake = FakeRuntime::start().await;
    let figures = filesystems(&fake);
    let here = fake.dir.path().to_str().unwrap().to_owned();
    fake.set_container_filesystem(usage(&here, 1));
    figures.collect().await;
    assert!(figures.stats(true).unwrap().containers.is_empty());
    fake.set_container_filesystem(usage("/proc", 1));
    figures.collect().await;
    let stats = figures.stats(true).unwrap();
    assert_eq!((stats.containers.len(), stats.containers[0].used_bytes), (1, Some(1)));
    fake.set_container_filesystem(usage("/nowhere/at/all", 1));
    figures.collect().await;
    assert!(
        figures.stats(true).unwrap().containers.is_empty(),
        "a file system that cannot be read is left out"
    );
}

#[tokio::test]
async fn container_usage_is_collected_only_while_requested() {
    let fake = FakeRuntime::start().await;
    pod(&fake).await;
    let figures = filesystems(&fake);
    let context = Context::detached(ServiceName::RuntimeShim, keelson_config::Config::default());
    let run = tokio::spawn(figures.clone().run(context.clone()));
    until("the file systems are known", || figures.stats(true).is_some()).await;
    assert!(fake.runtime.list_container_stats.requests().is_empty());
    // The first request does not wait, and wakes the collection.
    figures.stats(false).unwrap();
    until("the pods are known", || {
        figures.stats(true).is_some() && figures.state().stats.as_ref().unwrap().pods.len() == 1
    })
    .await;
    context.shutdown.cancel();
    run.await.unwrap();
    figures.state().pods_requested = Instant::now().checked_sub(REQUEST_RETENTION * 2);
    let measured = fake.runtime.list_container_stats.requests().len();
    figures.collect().await;
    assert_eq!(fake.runtime.list_container_stats.requests().len(), measured);
}
