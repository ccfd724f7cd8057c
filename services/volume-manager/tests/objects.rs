//! Volumes whose files come from objects: they are mounted when the objects exist, and updated with them.

#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_service_kit::status::reason;
use support::api::{FakeApi, config_map, downward, files, object, secret};
use support::{Client, Sync, World, desire, mount, mounts_below, unmount, until_some, within};
use tonic::Code;

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

async fn until_text(path: PathBuf, text: &str) {
    until_some(&format!("{text:?} in {}", path.display()), || {
        std::future::ready((read(&path).as_deref() == Some(text)).then_some(()))
    })
    .await;
}

/// The first progress of `MountPod` whose message contains `text`.
async fn until_progress(client: &mut Client, uid: &str, text: &str) -> pb::MountProgress {
    let request = pb::MountPodRequest { uid: uid.into(), revision: 1 };
    let mut stream = client.mount_pod(within(request, Duration::from_secs(20))).await.unwrap().into_inner();
    loop {
        let Some(pb::mount_pod_response::Item::Progress(progress)) =
            stream.message().await.unwrap().unwrap().item
        else {
            panic!("the volumes are ready")
        };
        if progress.waiting_for.contains(text) {
            return progress;
        }
    }
}

#[tokio::test]
async fn object_volumes_have_the_kubelets_paths_modes_and_contents() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    api.config_map("conf", r#"{"a": "1", "b": "2"}"#);
    api.secret("key", r#"{"token": "aHVudGVyMg=="}"#);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let both = files(
        "both",
        pb::file_volume::Kind::Projected,
        vec![object("Secret", "key", false), object("ConfigMap", "conf", false)],
    );
    let mut desired = desire(
        "u1",
        1,
        Want::Run,
        vec![config_map("conf"), secret("key"), downward("pod", "labels", "a=\"b\""), both],
    );
    desired.memory_limit_bytes = 8 << 20;
    sync.pod(desired).await;
    let ready = mount(&mut client, "u1", 1).await.1.unwrap();
    assert!(ready.volumes.len() == 4 && ready.volumes.iter().all(|v| v.read_only), "{ready:?}");
    let conf = world.volume("u1", "configmap", "conf");
    let key = world.volume("u1", "secret", "key");
    let pod = world.volume("u1", "downward-api", "pod");
    let both = world.volume("u1", "projected", "both");
    assert_eq!(Path::new(&ready.volumes.iter().find(|v| v.name == "conf").unwrap().host_path), conf);
    for (path, text) in [
        (conf.join("a"), "1"),
        (conf.join("b"), "2"),
        (key.join("token"), "hunter2"),
        (pod.join("labels"), "a=\"b\""),
        (both.join("token"), "hunter2"),
        (both.join("a"), "1"),
    ] {
        assert_eq!(read(&path).as_deref(), Some(text), "{}", path.display());
    }
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode(&conf), mode(&conf.join("a")), mode(&key)), (0o777, 0o644, 0o1777));
    let mounts = mounts_below(&world.pod("u1"));
    for (path, memory) in [(&conf, false), (&key, true), (&pod, true), (&both, true)] {
        assert_eq!(mounts.contains(path), memory, "{}", path.display());
    }
    let stat = rustix::fs::statvfs(&key).unwrap();
    assert_eq!(stat.f_blocks * stat.f_frsize, 8 << 20);
    assert!(world.pod("u1").join("plugins/kubernetes.io~empty-dir/wrapped_key/ready").exists());
}

#[tokio::test]
async fn a_changed_object_updates_only_its_own_files_within_a_second() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    api.config_map("conf", r#"{"a": "0", "b": "x"}"#);
    api.config_map("other", r#"{"o": "1"}"#);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![config_map("conf"), config_map("other")])).await;
    sync.pod(desire("u2", 1, Want::Run, vec![config_map("other")])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    mount(&mut client, "u2", 1).await.1.unwrap();
    let conf = world.volume("u1", "configmap", "conf");
    let data = |uid: &str| fs::read_link(world.volume(uid, "configmap", "other").join("..data")).unwrap();
    let before = (data("u1"), data("u2"));
    let mut took = Vec::new();
    for n in 1..=20 {
        let begun = Instant::now();
        api.config_map("conf", &format!(r#"{{"a": "{n}", "c": "{n}"}}"#));
        until_text(conf.join("a"), &n.to_string()).await;
        took.push(begun.elapsed());
        assert_eq!(read(&conf.join("c")).as_deref(), Some(n.to_string().as_str()));
    }
    took.sort_unstable();
    println!("changes took {took:?}");
    // A busy machine may delay some of them; polling instead of notifications would delay all.
    assert!(took[took.len() / 2] < Duration::from_secs(1), "{took:?}");
    assert!(fs::symlink_metadata(conf.join("b")).is_err(), "a removed key's file goes");
    assert_eq!((data("u1"), data("u2")), before);
    assert_eq!(fs::read_link(conf.join("a")).unwrap(), Path::new("..data/a"));
}

#[tokio::test]
async fn a_missing_object_blocks_the_mount_with_the_kubelets_message_until_it_exists() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    api.delete("ConfigMap", "conf");
    api.delete("Secret", "key");
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![config_map("conf"), secret("key")])).await;
    let text = "MountVolume.SetUp failed for volume \"conf\" : configmap \"conf\" not found";
    let progress = until_progress(&mut client, "u1", text).await;
    assert_eq!(progress.owner, "you");
    assert!(progress.next_try_unix_nanos > 0, "{progress:?}");
    assert!(progress.waiting_for.contains("secret \"key\" not found"), "{progress:?}");
    // No folder is created for a volume whose files are not known.
    assert!(!world.volume("u1", "secret", "key").exists());
    // At its deadline the caller gets FAILED_PRECONDITION, since the pod's objects cause the error and not the service.
    let request = pb::MountPodRequest { uid: "u1".into(), revision: 1 };
    let request = within(request, Duration::from_secs(2));
    let mut stream = client.mount_pod(request).await.unwrap().into_inner();
    let status = loop {
        if let Err(status) = stream.message().await {
            break status;
        }
    };
    assert_eq!(
        (status.code(), reason(&status).as_deref()),
        (Code::FailedPrecondition, Some("OBJECT_NOT_USABLE"))
    );
    assert!(status.message().contains(text), "{}", status.message());
    let waiting = tokio::spawn({
        let mut client = service.client();
        async move { mount(&mut client, "u1", 1).await.1 }
    });
    // The back-off grows: the objects are created during a long delay.
    let next_try = loop {
        let next = until_progress(&mut client, "u1", text).await.next_try_unix_nanos;
        if next > keelson_service_kit::now_unix_nanos() + 3_000_000_000 {
            break next;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    api.config_map("conf", r#"{"a": "1"}"#);
    api.secret("key", r#"{"k": "eA=="}"#);
    waiting.await.unwrap().unwrap();
    assert!(keelson_service_kit::now_unix_nanos() < next_try, "it waited for the next retry");
    assert_eq!(read(&world.volume("u1", "secret", "key").join("k")).as_deref(), Some("x"));
}

#[tokio::test]
async fn a_volume_waits_for_pod_config_while_other_volumes_are_mounted() {
    let (world, api) = (World::new(), FakeApi::default());
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let data = support::empty_dir("data", "", 0);
    sync.pod(desire("u1", 1, Want::Run, vec![config_map("conf"), data])).await;
    let progress = until_progress(&mut client, "u1", "pod-config to send the ConfigMap default/conf").await;
    assert_eq!((progress.owner.as_str(), progress.next_try_unix_nanos), ("", 0));
    assert!(world.empty_dir("u1", "data").exists());
    service.condition("pod-config", false).await;
    api.config_map("conf", r#"{"a": "1"}"#);
    let _server = api.serve(&world).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    service.condition("pod-config", true).await;
}

#[tokio::test]
async fn a_deleted_object_keeps_the_files_of_a_running_pod_unless_it_is_optional() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    api.config_map("conf", r#"{"a": "1"}"#);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let kind = pb::file_volume::Kind::ConfigMap;
    let optional = files("may", kind, vec![object("ConfigMap", "conf", true)]);
    sync.pod(desire("u1", 1, Want::Run, vec![config_map("conf"), optional])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    api.delete("ConfigMap", "conf");
    let may = world.volume("u1", "configmap", "may");
    until_some("the removal of the optional file", || {
        std::future::ready(fs::symlink_metadata(may.join("a")).is_err().then_some(()))
    })
    .await;
    let mut watch = client.watch_pod_volumes(pb::WatchPodVolumesRequest {}).await.unwrap().into_inner();
    let pod = loop {
        if let Some(pb::watch_pod_volumes_response::Item::Pod(pod)) =
            watch.message().await.unwrap().unwrap().item
            && pod.message.contains("configmap \"conf\" not found")
        {
            break pod;
        }
    };
    assert_eq!((pod.state.as_str(), pod.volumes.len()), ("mounted", 2), "the old volumes can be used");
    mount(&mut client, "u1", 1).await.1.unwrap();
    let conf = world.volume("u1", "configmap", "conf");
    assert_eq!(read(&conf.join("a")).as_deref(), Some("1"));
    api.config_map("conf", r#"{"a": "2"}"#);
    until_text(conf.join("a"), "2").await;
    until_text(may.join("a"), "2").await;
}

#[tokio::test]
async fn downward_api_files_follow_the_desire_and_an_equal_desire_writes_nothing() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let desired =
        |text: &str, revision| desire("u1", revision, Want::Run, vec![downward("pod", "labels", text)]);
    sync.pod(desired("a=\"1\"", 1)).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let path = world.volume("u1", "downward-api", "pod");
    let data = || fs::read_link(path.join("..data")).unwrap();
    let first = data();
    sync.pod(desired("a=\"1\"", 2)).await;
    mount(&mut client, "u1", 2).await.1.unwrap();
    assert_eq!(data(), first);
    sync.pod(desired("a=\"2\"", 3)).await;
    mount(&mut client, "u1", 3).await.1.unwrap();
    assert_eq!(read(&path.join("labels")).as_deref(), Some("a=\"2\""));
    assert_ne!(data(), first);
}

#[tokio::test]
async fn sources_that_need_an_api_server_are_refused_by_name() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    for field in ["serviceAccountToken", "clusterTrustBundle", "podCertificate"] {
        let source = pb::file_source::Source::Unsupported(field.into());
        let volume = files("kube-api-access", pb::file_volume::Kind::Projected, vec![source]);
        sync.pod(desire(field, 1, Want::Run, vec![volume])).await;
        let status = mount(&mut client, field, 1).await.1.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        let text = status.message();
        assert!(
            text.contains(field) && text.contains("API server") && text.contains("kube-api-access"),
            "{text}"
        );
    }
}

#[tokio::test]
async fn a_changed_trust_bundle_rewrites_the_files_that_it_is_part_of() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    let pem = |der: &str| format!("-----BEGIN CERTIFICATE-----\n{der}\n-----END CERTIFICATE-----\n");
    let json = |name: &str, anchor: &str| {
        let text = format!("# {name}\n{}", pem(anchor)).replace('\n', "\\n");
        format!(
            r#"{{"metadata": {{"name": "{name}", "labels": {{"k": "v"}}}},
            "spec": {{"signerName": "x/y", "trustBundle": "{text}"}}}}"#
        )
    };
    let list = |items: &[String]| format!(r#"{{"items": [{}]}}"#, items.join(","));
    api.delete("ClusterTrustBundle", "ca");
    api.object("ClusterTrustBundleList", "x/y", list(&[json("a", "YQ==")]));
    let source = |path: &str| pb::ClusterTrustBundle {
        path: path.to_owned(),
        mode: Some(0o600),
        owner_uid: Some(7),
        ..Default::default()
    };
    let by_name = pb::ClusterTrustBundle { name: "ca".into(), optional: true, ..source("named.pem") };
    let selector = br#"{"matchLabels": {"k": "v"}}"#.to_vec();
    let by_signer = pb::ClusterTrustBundle {
        signer_name: "x/y".into(),
        label_selector_json: Some(selector),
        ..source("signed.pem")
    };
    let sources = [by_name, by_signer].map(pb::file_source::Source::TrustBundle).to_vec();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let volume = files("trust", pb::file_volume::Kind::Projected, sources);
    sync.pod(desire("u1", 1, Want::Run, vec![volume])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let folder = world.volume("u1", "projected", "trust");
    let (named, signed) = (folder.join("named.pem"), folder.join("signed.pem"));
    assert_eq!((read(&named), read(&signed)), (Some(String::new()), Some(pem("YQ=="))));
    let status = fs::metadata(&signed).unwrap();
    assert_eq!((status.permissions().mode() & 0o7777, status.uid()), (0o600, 7));
    assert_eq!(api.watched(), ["ClusterTrustBundle/ca", "ClusterTrustBundleList/x/y"]);
    api.object("ClusterTrustBundle", "ca", json("ca", "Yw=="));
    until_text(named.clone(), &pem("Yw==")).await;
    api.object("ClusterTrustBundleList", "x/y", list(&[json("a", "Yg=="), json("b", "Yg==")]));
    until_text(signed, &pem("Yg==")).await;
    api.delete("ClusterTrustBundle", "ca");
    until_text(named, "").await;
}

#[tokio::test]
async fn a_pod_waits_for_its_trust_bundle_with_the_kubelets_message() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    api.delete("ClusterTrustBundle", "ca");
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let source = pb::ClusterTrustBundle { name: "ca".into(), path: "ca.pem".into(), ..Default::default() };
    let sources = vec![pb::file_source::Source::TrustBundle(source)];
    let volume = files("trust", pb::file_volume::Kind::Projected, sources);
    sync.pod(desire("u1", 1, Want::Run, vec![volume])).await;
    let text = "clustertrustbundle.certificates.k8s.io \"ca\" not found";
    let progress = until_progress(&mut client, "u1", text).await;
    assert!(progress.waiting_for.contains("while getting ClusterTrustBundle: "), "{progress:?}");
}

#[tokio::test]
async fn a_restarted_service_does_not_rewrite_unchanged_files() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    api.config_map("conf", r#"{"a": "1"}"#);
    api.secret("key", r#"{"k": "eA=="}"#);
    let desired = || desire("u1", 1, Want::Run, vec![config_map("conf"), secret("key")]);
    let paths = [world.volume("u1", "configmap", "conf"), world.volume("u1", "secret", "key")];
    let data = || paths.each_ref().map(|path| fs::metadata(path.join("..data/")).unwrap().ino());
    let service = world.start().await;
    {
        let mut client = service.client();
        let sync = Sync::open(&mut client).await;
        sync.pod(desired()).await;
        mount(&mut client, "u1", 1).await.1.unwrap();
    }
    let (before, mounts) = (data(), mounts_below(&world.pod("u1")).len());
    service.stop().await;

    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desired()).await;
    assert_eq!(mount(&mut client, "u1", 1).await.1.unwrap().volumes.len(), 2);
    assert_eq!(data(), before);
    assert_eq!(mounts_below(&world.pod("u1")).len(), mounts, "nothing is mounted twice");
    api.secret("key", r#"{"k": "eQ=="}"#);
    until_text(paths[1].join("k"), "y").await;
}

#[tokio::test]
async fn objects_are_watched_while_a_pod_refers_to_them() {
    let (world, api) = (World::new(), FakeApi::default());
    let _runtime = world.start_runtime().await;
    let server = api.serve(&world).await;
    api.config_map("conf", r#"{"a": "1"}"#);
    api.secret("key", r#"{"k": "eA=="}"#);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let volumes = || vec![config_map("conf"), secret("key")];
    sync.pod(desire("u1", 1, Want::Run, volumes())).await;
    sync.pod(desire("u2", 1, Want::Run, vec![config_map("conf")])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    mount(&mut client, "u2", 1).await.1.unwrap();
    assert_eq!(api.watched(), ["ConfigMap/conf", "Secret/key"]);
    sync.pod(desire("u1", 2, Want::Unmount, volumes())).await;
    unmount(&mut client, "u1", Duration::from_secs(20)).await.unwrap();
    for path in [world.volume("u1", "configmap", "conf"), world.volume("u1", "secret", "key")] {
        assert!(!path.exists(), "{}", path.display());
    }
    assert!(mounts_below(&world.pod("u1")).is_empty());
    until_some("the end of the watch", || {
        std::future::ready((api.watched() == ["ConfigMap/conf"]).then_some(()))
    })
    .await;

    // While pod-config is down the last data stays in effect; changes made meanwhile arrive when it is back.
    server.kill();
    service.condition("pod-config", false).await;
    api.config_map("conf", r#"{"a": "2"}"#);
    let file = world.volume("u2", "configmap", "conf").join("a");
    assert_eq!(read(&file).as_deref(), Some("1"));
    let _server = api.serve(&world).await;
    until_text(file, "2").await;
}

#[tokio::test]
async fn fsgroup_may_read_secret_files() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    api.secret("key", r#"{"k": "eA=="}"#);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let mut volume = secret("key");
    if let Some(pb::volume::Source::Files(files)) = &mut volume.source {
        files.default_mode = Some(0o400);
    }
    let mut desired = desire("u1", 1, Want::Run, vec![volume]);
    desired.fs_group = Some(4711);
    sync.pod(desired).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let path = world.volume("u1", "secret", "key");
    let shown = |path: &Path| {
        let meta = fs::metadata(path).unwrap();
        (meta.gid(), meta.mode() & 0o7777)
    };
    assert_eq!(shown(&path), (4711, 0o3777));
    assert_eq!(shown(&path.join("k")), (4711, 0o440));
}
