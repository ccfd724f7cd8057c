//! Tokens of service accounts in volumes: made, kept fresh, and going on when nobody can make another.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::Duration;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_service_kit::status::error;
use support::objects::{Told, token};
use support::{Client, Sync, World, desire, eventually, mount, mounts_below, unmount, within};
use tonic::{Code, Status};

fn file(world: &World, uid: &str) -> PathBuf {
    world.volume(uid, "projected", "access").join("token")
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    eventually(what, || std::future::ready(is_so().then_some(()))).await;
}

/// What `MountPod` says of a wait with this text.
async fn until_progress(client: &mut Client, uid: &str, text: &str) -> pb::MountProgress {
    let request = pb::MountPodRequest { uid: uid.into(), revision: 1 };
    let mut stream = client.mount_pod(within(request, Duration::from_secs(20))).await.unwrap().into_inner();
    loop {
        let item = stream.message().await.unwrap().unwrap().item;
        let Some(pb::mount_pod_response::Item::Progress(progress)) = item else { panic!("it is ready") };
        if progress.waiting_for.contains(text) {
            return progress;
        }
    }
}

fn away() -> Status {
    error(Code::Unavailable, "CONTROL_PLANE_AWAY", "the API server does not answer")
}

#[tokio::test]
async fn a_token_is_bound_to_the_pod_and_lies_in_memory_with_its_mode_and_owner() {
    let (world, told) = (World::new(), Told::default());
    let _config = told.serve(&world).await;
    told.make_tokens(0);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    for (uid, mode, owner, group, expected) in [
        ("u1", None, None, None, (0, 0, 0o644)),
        ("u2", Some(0o600), Some(4711), None, (4711, 0, 0o600)),
        ("u3", Some(0o600), None, Some(4712), (0, 4712, 0o640)),
        ("u4", Some(0o600), Some(4711), Some(4712), (4711, 4712, 0o640)),
    ] {
        let mut wanted = desire(uid, 1, Want::Run, vec![token("access", mode, owner)]);
        wanted.fs_group = group;
        sync.pod(wanted).await;
        mount(&mut client, uid, 1).await.1.unwrap();
        let meta = fs::metadata(file(&world, uid)).unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), expected, "{uid}");
        assert!(mounts_below(&world.pod(uid)).contains(&world.volume(uid, "projected", "access")));
    }
    let asked = told.tokens_asked();
    assert_eq!(asked.len(), 4);
    let first = &asked[0];
    assert_eq!((first.namespace.as_str(), first.service_account.as_str()), ("default", "default"));
    assert_eq!((first.pod_name.as_str(), first.pod_uid.as_str()), ("pod-u1", "u1"));
    assert_eq!((first.expiration_seconds, first.audiences.len()), (3600, 0));
    assert_eq!(fs::read_to_string(file(&world, "u1")).unwrap(), told.token(1));
}

#[tokio::test]
async fn a_pod_waits_for_its_token_with_a_reason_and_no_longer_than_that() {
    let (world, told) = (World::new(), Told::default());
    let _config = told.serve(&world).await;
    told.refuse_tokens(away());
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![token("access", None, None)])).await;
    let progress = until_progress(&mut client, "u1", "the API server does not answer").await;
    assert!(progress.waiting_for.contains("token of the service account \"default\""), "{progress:?}");
    assert_eq!(progress.owner, "");
    told.refuse_tokens(error(
        Code::NotFound,
        "SERVICE_ACCOUNT_UNKNOWN",
        "serviceaccounts \"default\" not found",
    ));
    let progress = until_progress(&mut client, "u1", "serviceaccounts \"default\" not found").await;
    assert!(progress.waiting_for.contains("access") && progress.owner == "you", "{progress:?}");
    told.make_tokens(0);
    mount(&mut client, "u1", 1).await.1.unwrap();
    assert_eq!(fs::read_to_string(file(&world, "u1")).unwrap(), told.token(told.tokens_asked().len()));
}

#[tokio::test]
async fn a_token_goes_on_over_a_restart_without_pod_config_and_is_made_anew_when_it_is_due() {
    let (world, told) = (World::new(), Told::default());
    let config = told.serve(&world).await;
    told.make_tokens(0);
    let wanted = || desire("u1", 1, Want::Run, vec![token("access", None, None)]);
    let service = world.start().await;
    {
        let mut client = service.client();
        let sync = Sync::open(&mut client).await;
        sync.pod(wanted()).await;
        mount(&mut client, "u1", 1).await.1.unwrap();
    }
    let first = told.token(1);
    service.stop().await;
    config.stop().await;

    let service = world.start().await;
    {
        let mut client = service.client();
        let sync = Sync::open(&mut client).await;
        sync.pod(wanted()).await;
        mount(&mut client, "u1", 1).await.1.unwrap();
        assert_eq!(fs::read_to_string(file(&world, "u1")).unwrap(), first);
    }
    assert_eq!(told.tokens_asked().len(), 1, "it was not made anew");
    service.stop().await;

    // One that is due when the service comes back is used until there is another.
    let _config = told.serve(&world).await;
    let old = told.put_old_token(&file(&world, "u1"));
    told.refuse_tokens(away());
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(wanted()).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    until("it is asked for", || told.tokens_asked().len() > 1).await;
    assert_eq!(fs::read_to_string(file(&world, "u1")).unwrap(), old);
    told.make_tokens(0);
    until("the new one is in the volume", || {
        fs::read_to_string(file(&world, "u1")).is_ok_and(|text| text != old)
    })
    .await;
    assert_eq!(fs::read_to_string(file(&world, "u1")).unwrap(), told.token(told.tokens_asked().len()));
}

/// Lets so much time pass for everything in this process at once.
async fn pass(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

#[tokio::test]
async fn a_token_is_made_anew_while_the_service_runs_and_the_one_before_goes_on_until_then() {
    let (world, told) = (World::new(), Told::default());
    let _config = told.serve(&world).await;
    // All but a minute of its time is used up: it is due again as soon as a server may be asked again.
    told.make_tokens(3540);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![token("access", None, None)])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let text = || fs::read_to_string(file(&world, "u1")).unwrap();
    let first = told.token(1);
    assert_eq!((text(), told.tokens_asked().len()), (first.clone(), 1));

    told.refuse_tokens(away());
    pass(Duration::from_secs(61)).await;
    until("another one is asked for", || told.tokens_asked().len() > 1).await;
    assert_eq!(text(), first);
    told.make_tokens(0);
    until("the new one is in the volume", || text() != first).await;
    let asked = told.tokens_asked();
    assert_eq!(text(), told.token(asked.len()));
    assert!(asked.iter().all(|one| *one == asked[0]), "for the same pod and as long: {asked:?}");

    // It is good for an hour, so nobody asks for another one now.
    pass(Duration::from_secs(61)).await;
    sync.pod(desire("u2", 1, Want::Run, vec![token("access", None, None)])).await;
    mount(&mut client, "u2", 1).await.1.unwrap();
    let of_first = told.tokens_asked().iter().filter(|one| one.pod_uid == "u1").count();
    assert_eq!(of_first, asked.len());
}

#[tokio::test]
async fn the_token_goes_with_the_pod() {
    let (world, told) = (World::new(), Told::default());
    let _runtime = world.start_runtime().await;
    let _config = told.serve(&world).await;
    told.make_tokens(0);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![token("access", None, None)])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    sync.pod(desire("u1", 2, Want::Unmount, vec![token("access", None, None)])).await;
    unmount(&mut client, "u1", Duration::from_secs(20)).await.unwrap();
    assert!(!file(&world, "u1").exists() && mounts_below(&world.pod("u1")).is_empty());
}
