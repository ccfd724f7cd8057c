//! Service account tokens in volumes: created, renewed, and kept while they cannot be renewed.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::Duration;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_service_kit::status::error;
use support::api::{FakeApi, token};
use support::{Client, Sync, World, desire, mount, mounts_below, unmount, until_some, within};
use tonic::{Code, Status};

fn file(world: &World, uid: &str) -> PathBuf {
    world.volume(uid, "projected", "access").join("token")
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    until_some(what, || std::future::ready(is_so().then_some(()))).await;
}

/// The first progress of `MountPod` whose message contains `text`.
async fn until_progress(client: &mut Client, uid: &str, text: &str) -> pb::MountProgress {
    let request = pb::MountPodRequest { uid: uid.into(), revision: 1 };
    let mut stream = client.mount_pod(within(request, Duration::from_secs(20))).await.unwrap().into_inner();
    loop {
        let item = stream.message().await.unwrap().unwrap().item;
        let Some(pb::mount_pod_response::Item::Progress(progress)) = item else {
            panic!("the volumes are ready")
        };
        if progress.waiting_for.contains(text) {
            return progress;
        }
    }
}

fn unavailable() -> Status {
    error(Code::Unavailable, "CONTROL_PLANE_AWAY", "the API server does not answer")
}

#[tokio::test]
async fn a_token_is_bound_to_the_pod_and_stored_on_tmpfs_with_its_mode_and_owner() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    api.issue_tokens(0);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    for (uid, mode, owner, group, expected) in [
        ("u1", None, None, None, (0, 0, 0o644)),
        ("u2", Some(0o600), Some(4711), None, (4711, 0, 0o600)),
        ("u3", Some(0o600), None, Some(4712), (0, 4712, 0o640)),
        ("u4", Some(0o600), Some(4711), Some(4712), (4711, 4712, 0o640)),
    ] {
        let mut desired = desire(uid, 1, Want::Run, vec![token("access", mode, owner)]);
        desired.fs_group = group;
        sync.pod(desired).await;
        mount(&mut client, uid, 1).await.1.unwrap();
        let meta = fs::metadata(file(&world, uid)).unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), expected, "{uid}");
        assert!(mounts_below(&world.pod(uid)).contains(&world.volume(uid, "projected", "access")));
    }
    let requests = api.token_requests();
    assert_eq!(requests.len(), 4);
    let first = &requests[0];
    assert_eq!((first.namespace.as_str(), first.service_account.as_str()), ("default", "default"));
    assert_eq!((first.pod_name.as_str(), first.pod_uid.as_str()), ("pod-u1", "u1"));
    assert_eq!((first.expiration_seconds, first.audiences.len()), (3600, 0));
    assert_eq!(fs::read_to_string(file(&world, "u1")).unwrap(), api.token(1));
}

#[tokio::test]
async fn a_pod_waits_for_its_token_and_reports_why() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    api.refuse_tokens(unavailable());
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![token("access", None, None)])).await;
    let progress = until_progress(&mut client, "u1", "the API server does not answer").await;
    assert!(progress.waiting_for.contains("token of the service account \"default\""), "{progress:?}");
    assert_eq!(progress.owner, "");
    api.refuse_tokens(error(
        Code::NotFound,
        "SERVICE_ACCOUNT_UNKNOWN",
        "serviceaccounts \"default\" not found",
    ));
    let progress = until_progress(&mut client, "u1", "serviceaccounts \"default\" not found").await;
    assert!(progress.waiting_for.contains("access") && progress.owner == "you", "{progress:?}");
    api.issue_tokens(0);
    mount(&mut client, "u1", 1).await.1.unwrap();
    assert_eq!(fs::read_to_string(file(&world, "u1")).unwrap(), api.token(api.token_requests().len()));
}

#[tokio::test]
async fn a_token_survives_a_restart_without_pod_config_and_is_renewed_when_due() {
    let (world, api) = (World::new(), FakeApi::default());
    let server = api.serve(&world).await;
    api.issue_tokens(0);
    let desired = || desire("u1", 1, Want::Run, vec![token("access", None, None)]);
    let service = world.start().await;
    {
        let mut client = service.client();
        let sync = Sync::open(&mut client).await;
        sync.pod(desired()).await;
        mount(&mut client, "u1", 1).await.1.unwrap();
    }
    let first = api.token(1);
    service.stop().await;
    server.kill();

    let service = world.start().await;
    {
        let mut client = service.client();
        let sync = Sync::open(&mut client).await;
        sync.pod(desired()).await;
        mount(&mut client, "u1", 1).await.1.unwrap();
        assert_eq!(fs::read_to_string(file(&world, "u1")).unwrap(), first);
    }
    assert_eq!(api.token_requests().len(), 1, "the token was not renewed");
    service.stop().await;

    // A token that is due for renewal when the service starts is used until there is a new one.
    let _server = api.serve(&world).await;
    let old = api.write_expiring_token(&file(&world, "u1"));
    api.refuse_tokens(unavailable());
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desired()).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    until("a new token is requested", || api.token_requests().len() > 1).await;
    assert_eq!(fs::read_to_string(file(&world, "u1")).unwrap(), old);
    api.issue_tokens(0);
    until("the new one is in the volume", || {
        fs::read_to_string(file(&world, "u1")).is_ok_and(|text| text != old)
    })
    .await;
    assert_eq!(fs::read_to_string(file(&world, "u1")).unwrap(), api.token(api.token_requests().len()));
}

/// Advances the time of the whole process.
async fn advance(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

#[tokio::test]
async fn a_due_token_is_renewed_and_the_old_one_stays_until_then() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    // The token expires in a minute, so it is due for renewal as soon as another request is allowed.
    api.issue_tokens(3540);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![token("access", None, None)])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let text = || fs::read_to_string(file(&world, "u1")).unwrap();
    let first = api.token(1);
    assert_eq!((text(), api.token_requests().len()), (first.clone(), 1));

    api.refuse_tokens(unavailable());
    advance(Duration::from_secs(61)).await;
    until("a new token is requested", || api.token_requests().len() > 1).await;
    assert_eq!(text(), first);
    api.issue_tokens(0);
    until("the new one is in the volume", || text() != first).await;
    let requests = api.token_requests();
    assert_eq!(text(), api.token(requests.len()));
    assert!(requests.iter().all(|one| *one == requests[0]), "all requests are equal: {requests:?}");

    // The new token is valid for an hour, so it is not renewed now.
    advance(Duration::from_secs(61)).await;
    sync.pod(desire("u2", 1, Want::Run, vec![token("access", None, None)])).await;
    mount(&mut client, "u2", 1).await.1.unwrap();
    let requests_of_first = api.token_requests().iter().filter(|one| one.pod_uid == "u1").count();
    assert_eq!(requests_of_first, requests.len());
}

#[tokio::test]
async fn the_token_is_removed_with_the_pod() {
    let (world, api) = (World::new(), FakeApi::default());
    let _runtime = world.start_runtime().await;
    let _server = api.serve(&world).await;
    api.issue_tokens(0);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![token("access", None, None)])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    sync.pod(desire("u1", 2, Want::Unmount, vec![token("access", None, None)])).await;
    unmount(&mut client, "u1", Duration::from_secs(20)).await.unwrap();
    assert!(!file(&world, "u1").exists() && mounts_below(&world.pod("u1")).is_empty());
}
