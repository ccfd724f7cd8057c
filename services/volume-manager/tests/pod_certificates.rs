//! Certificates of pods in volumes: waited for, written with their key, refused, and requested anew.

#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::PathBuf;
use std::time::Duration;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::volume_manager::v1 as pb;
use support::api::{FakeApi, config_map, files, now};
use support::{Client, Sync, World, desire, mount, mounts_below, until_some, within};

const SIGNER: &str = "example.com/ca";

/// A volume with a certificate of the pod in three files.
fn certificate() -> pb::Volume {
    let source = pb::PodCertificate {
        signer_name: SIGNER.into(),
        key_type: "ECDSAP256".into(),
        credential_bundle_path: "tls.pem".into(),
        key_path: "key.pem".into(),
        certificate_chain_path: "chain.pem".into(),
        mode: Some(0o600),
        owner_uid: Some(7),
        ..Default::default()
    };
    let source = pb::file_source::Source::PodCertificate(source);
    files("tls", pb::file_volume::Kind::Projected, vec![source])
}

fn chain(text: &str) -> String {
    format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
}

/// Issues the request with this number, to be refreshed in so many seconds.
fn issue(api: &FakeApi, number: usize, text: &str, begin_refresh: i64) {
    let time = |seconds| keelson_kube_model::time::format_seconds(now() + seconds).unwrap();
    let name = format!("req-{number}");
    let status = format!(
        r#"{{"conditions": [{{"type": "Issued", "status": "True"}}], "certificateChain": {:?},
        "beginRefreshAt": "{}", "notAfter": "{}"}}"#,
        chain(text),
        time(begin_refresh),
        time(86_400),
    );
    let json = format!(r#"{{"metadata": {{"name": "{name}"}}, "status": {status}}}"#);
    api.object("PodCertificateRequest", &name, json);
}

fn file(world: &World, name: &str) -> PathBuf {
    world.volume("u1", "projected", "tls").join(name)
}

fn read(world: &World, name: &str) -> Option<String> {
    fs::read_to_string(file(world, name)).ok()
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    until_some(what, || std::future::ready(is_so().then_some(()))).await;
}

/// The first progress of `MountPod` whose message contains `text`.
async fn until_progress(client: &mut Client, text: &str) -> pb::MountProgress {
    let request = pb::MountPodRequest { uid: "u1".into(), revision: 1 };
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

#[tokio::test]
async fn a_pod_waits_for_its_signer_while_others_start_and_gets_key_and_chain() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    api.config_map("conf", r#"{"a": "1"}"#);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![certificate()])).await;
    api.object("PodCertificateRequest", "req-1", r#"{"metadata": {"name": "req-1"}}"#.into());
    let text = format!("the signer {SIGNER} to issue the PodCertificateRequest default/req-1");
    let progress = until_progress(&mut client, &text).await;
    assert_eq!(progress.owner, format!("signer {SIGNER}"));
    sync.pod(desire("u2", 1, Want::Run, vec![config_map("conf")])).await;
    mount(&mut client, "u2", 1).await.1.unwrap();
    issue(&api, 1, "YQ==", 3600);
    mount(&mut client, "u1", 1).await.1.unwrap();
    let (key, written) = (read(&world, "key.pem").unwrap(), read(&world, "chain.pem").unwrap());
    assert!(key.starts_with("-----BEGIN PRIVATE KEY-----\n"));
    assert_eq!((written, read(&world, "tls.pem").unwrap()), (chain("YQ=="), key + &chain("YQ==")));
    let status = fs::metadata(file(&world, "key.pem")).unwrap();
    assert_eq!((status.permissions().mode() & 0o7777, status.uid()), (0o600, 7));
    assert!(mounts_below(&world.pod("u1")).contains(&world.volume("u1", "projected", "tls")), "on tmpfs");
    let requests = api.certificate_requests();
    assert_eq!((requests.len(), requests[0].pod_uid.as_str()), (1, "u1"));
    until("nothing is followed any more", || !api.watched().iter().any(|name| name.contains("req-1"))).await;
}

#[tokio::test]
async fn a_refreshed_certificate_replaces_the_files_and_a_deleted_request_is_created_anew() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![certificate()])).await;
    api.object("PodCertificateRequest", "req-1", r#"{"metadata": {"name": "req-1"}}"#.into());
    until_progress(&mut client, "to issue the PodCertificateRequest default/req-1").await;
    api.delete("PodCertificateRequest", "req-1");
    until("the request is created anew", || api.certificate_requests().len() == 2).await;
    // The refresh is due, also with the longest jitter.
    issue(&api, 2, "YQ==", -400);
    mount(&mut client, "u1", 1).await.1.unwrap();
    let first = read(&world, "tls.pem").unwrap();
    assert!(first.ends_with(&chain("YQ==")));
    until("the refresh is requested", || api.certificate_requests().len() == 3).await;
    assert_eq!(read(&world, "tls.pem").unwrap(), first);
    issue(&api, 3, "Yg==", 3600);
    until("the new certificate", || read(&world, "chain.pem").unwrap() == chain("Yg==")).await;
    let key = read(&world, "key.pem").unwrap();
    assert_eq!(read(&world, "tls.pem").unwrap(), format!("{key}{}", chain("Yg==")));
    assert!(!first.starts_with(&key), "a new certificate has a new key");
}

#[tokio::test]
async fn a_denied_certificate_fails_the_mount_with_the_signers_reason() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![certificate()])).await;
    let condition = r#"{"type": "Denied", "status": "True", "reason": "NotOurs", "message": "ask another"}"#;
    let json = format!(r#"{{"metadata": {{"name": "req-1"}}, "status": {{"conditions": [{condition}]}}}}"#);
    api.object("PodCertificateRequest", "req-1", json);
    let kubelets = "PodCertificateRequest was permanently denied: reason=\"NotOurs\" message=\"ask another\"";
    let progress = until_progress(&mut client, kubelets).await;
    assert!(progress.waiting_for.contains(SIGNER), "{progress:?}");
}

#[tokio::test]
async fn a_restarted_service_requests_anew_and_leaves_the_files_until_then() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    issue(&api, 1, "YQ==", 3600);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![certificate()])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let first = read(&world, "tls.pem").unwrap();
    service.stop().await;
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![certificate()])).await;
    api.object("PodCertificateRequest", "req-2", r#"{"metadata": {"name": "req-2"}}"#.into());
    until_progress(&mut client, "default/req-2").await;
    assert_eq!(read(&world, "tls.pem").unwrap(), first);
    issue(&api, 2, "Yg==", 3600);
    mount(&mut client, "u1", 1).await.1.unwrap();
    assert_eq!(read(&world, "chain.pem").unwrap(), chain("Yg=="));
}
