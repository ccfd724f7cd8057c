//! What node-status writes to etcd, against a real member.

#![allow(clippy::unwrap_used)]

mod etcd_scene;
mod fake;

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use etcd_scene::{NODE, Scene};
use fake::{eventually, pod_document};
use keelson_config::ConfigurationStatus;
use keelson_etcd::{Etcd, Expect, Operation, Range, Written};
use keelson_proto::keelson::events::v1::ListEventsRequest;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_service_kit::{Context, ObjectRef};
use serde_json::{Value, json};

/// The error in the writer's condition.
fn writer_error(ctx: &Context) -> Option<String> {
    let conditions = ctx.progress.report("").conditions;
    conditions.into_iter().find(|c| c.name == "control-plane" && !c.ok).map(|c| c.message)
}

#[tokio::test]
async fn node_lease_pods_and_events_are_written_under_the_nodes_keys() {
    let scene = Scene::new().await;
    scene.peers.machine();
    scene.peers.runtime(true, "");
    scene.pod("u1", "web", "Pending", "2026-01-01T00:00:00Z");
    let ctx = scene.start("a", 40).await;
    ctx.events.warning(ObjectRef::pod("default", "web", "u1"), "BackOff", "it falls");

    let lease = eventually(async || scene.entry(&scene.keys.lease()).await).await;
    assert_ne!(lease.lease, 0, "the key expires with the node");
    let conditions = ctx.progress.report("").conditions;
    assert!(
        !conditions.iter().any(|c| c.name == "events" && !c.ok),
        "events wait for the lease: {conditions:?}"
    );
    let value: Value = serde_json::from_slice(&lease.value).unwrap();
    assert_eq!(value["spec"]["leaseDurationSeconds"], 40);
    assert!(value["spec"]["holderIdentity"].as_str().unwrap().starts_with("n1_"), "{value}");
    let node = eventually(async || scene.json(&scene.keys.node()).await).await;
    assert_eq!(node["metadata"]["name"], NODE);
    scene.until("web", "u1", "Pending").await;
    scene.pod("u1", "web", "Running", "2026-01-01T00:00:00Z");
    scene.until("web", "u1", "Running").await;
    let event = eventually(async || {
        let events = scene.etcd.list(&scene.keys.events()).await.unwrap().entries;
        events.into_iter().find_map(|entry| {
            let event: Value = serde_json::from_slice(&entry.value).unwrap();
            (event["reason"] == "BackOff").then_some((entry.lease, event))
        })
    })
    .await;
    assert_ne!(event.0, 0, "events expire by themselves");
    assert_eq!(event.1["involvedObject"]["uid"], "u1");
    assert_eq!(event.1["source"]["component"], "node-status");
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn a_separate_status_is_stored_with_the_pod_that_was_sent_before() {
    let scene = Scene::new().await;
    let mut document = pod_document("u1", "Unknown", false, 1);
    document.pod_revision = 1;
    document.status_json = br#"{"phase":"Pending"}"#.as_slice().into();
    scene.peers.pods.set("u1".into(), document.clone());
    let ctx = scene.start("a", 40).await;
    scene.until("web", "u1", "Pending").await;
    document.pod_json = Default::default();
    document.status_json = br#"{"phase":"Running"}"#.as_slice().into();
    (document.deletion_unix_seconds, document.deletion_grace_seconds) = (1_767_225_600, 30);
    scene.peers.pods.set("u1".into(), document);
    scene.until("web", "u1", "Running").await;
    let pod = scene.json(&scene.keys.pod_status("default", "web")).await.unwrap();
    let metadata =
        json!({"uid": "u1", "deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30});
    assert_eq!((&pod["metadata"], &pod["status"]), (&metadata, &json!({"phase": "Running"})));
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn a_restart_keeps_the_lease_and_removes_stale_pod_statuses() {
    let scene = Scene::new().await;
    scene.pod("u1", "web", "Running", "");
    scene.pod("u2", "db", "Running", "");
    let ctx = scene.start("a", 40).await;
    scene.until("web", "u1", "Running").await;
    scene.until("db", "u2", "Running").await;
    let (lease, web) =
        (scene.entry(&scene.keys.lease()).await, scene.entry(&scene.keys.pod_status("default", "web")).await);
    ctx.shutdown.cancel();

    scene.peers.pods.remove(&"u2".to_owned());
    let ctx = scene.start("a", 40).await;
    let gone = scene.keys.pod_status("default", "db");
    eventually(async || scene.entry(&gone).await.is_none().then_some(())).await;
    scene.pod("u3", "next", "Running", "");
    scene.until("next", "u3", "Running").await;
    assert_eq!(scene.entry(&scene.keys.lease()).await, lease, "the lease is the same");
    assert_eq!(
        scene.entry(&scene.keys.pod_status("default", "web")).await,
        web,
        "what has not changed is not written"
    );
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn a_later_pod_of_the_same_name_owns_the_status_key() {
    let scene = Scene::new().await;
    scene.pod("u1", "web", "Running", "2026-01-01T00:00:00Z");
    let ctx = scene.start("a", 40).await;
    scene.until("web", "u1", "Running").await;
    scene.pod("u2", "web", "Pending", "2026-01-01T00:00:09Z");
    scene.until("web", "u2", "Pending").await;
    scene.pod("u1", "web", "Failed", "2026-01-01T00:00:00Z");
    scene.until_earlier_reports_are_written("m1").await;
    scene.until("web", "u2", "Pending").await;
    scene.peers.pods.remove(&"u1".to_owned());
    scene.until_earlier_reports_are_written("m2").await;
    scene.until("web", "u2", "Pending").await;
    scene.peers.pods.remove(&"u2".to_owned());
    let key = scene.keys.pod_status("default", "web");
    eventually(async || scene.entry(&key).await.is_none().then_some(())).await;
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn a_second_agent_of_the_same_name_is_refused_and_writes_nothing() {
    let scene = Scene::new().await;
    scene.pod("u1", "web", "Running", "");
    let first = scene.start("a", 40).await;
    scene.until("web", "u1", "Running").await;
    first.shutdown.cancel();
    let second = scene.start("b", 40).await;
    let reported = eventually(async || {
        second.progress.report("").conditions.into_iter().find(|c| c.name == "node lease" && !c.ok)
    })
    .await;
    assert!(
        reported.message.contains("refuses this agent the node n1: another agent has it (n1_"),
        "{}",
        reported.message
    );
    scene.pod("u1", "web", "Failed", "");
    // There is no signal that a writer without the lease keeps waiting, so a few turns of its loops have to do.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    scene.until("web", "u1", "Running").await;
    second.shutdown.cancel();
}

#[tokio::test]
async fn a_key_changed_by_another_writer_is_overwritten() {
    let scene = Scene::new().await;
    scene.pod("u1", "web", "Pending", "");
    let ctx = scene.start("a", 40).await;
    scene.until("web", "u1", "Pending").await;
    let key = scene.keys.pod_status("default", "web");
    let before = scene.entry(&key).await.unwrap();
    let put = Operation::Put { key: key.clone(), value: b"no pod".to_vec(), lease: 0 };
    let expected = [(key.clone(), Expect::Revision(before.mod_revision))];
    assert!(matches!(scene.etcd.write(&expected, &[put]).await.unwrap(), Written::Done(_)));
    scene.pod("u1", "web", "Running", "");
    scene.until("web", "u1", "Running").await;
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn the_lease_expires_with_the_node_and_queued_reports_are_written_after_an_outage() {
    let mut scene = Scene::new().await;
    scene.pod("u1", "web", "Pending", "");
    let ctx = scene.start("a", 3).await;
    scene.until("web", "u1", "Pending").await;
    scene.cluster.kill(0);
    scene.pod("u1", "web", "Running", "");
    eventually(async || {
        ctx.progress.report("").conditions.into_iter().find(|c| c.name == "control-plane" && !c.ok)
    })
    .await;
    scene.cluster.restart(0).unwrap();
    scene.until("web", "u1", "Running").await;
    ctx.shutdown.cancel();
    let key = scene.keys.lease();
    eventually(async || scene.entry(&key).await.is_none().then_some(())).await;
}

#[tokio::test]
async fn the_configuration_status_of_init_has_a_key_and_each_change_one_event() {
    let scene = Scene::new().await;
    let ctx = scene.start("a", 40).await;
    let file = ctx.config.paths.configuration_status();
    let reasons = async |ctx: &Context| {
        let request = ListEventsRequest::default();
        let list = ctx.events.list_events(tonic::Request::new(request)).await.unwrap().into_inner();
        let of_it = list.events.into_iter().filter(|event| event.reason.starts_with("NodeConfig"));
        of_it.map(|event| (event.reason, event.message)).collect::<Vec<_>>()
    };
    let key = scene.keys.config_status();
    let refused = r#"{"assigned": {"revision": 7}, "state": "refused", "error": "line 3"}"#;
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(&file, refused).unwrap();
    eventually(async || (scene.json(&key).await?["state"] == "refused").then_some(())).await;
    let message =
        "Node n1 refuses the configuration of revision 7, the files of the node are in force alone: line 3";
    let reported =
        eventually(async || Some(reasons(&ctx).await).filter(|reported| !reported.is_empty())).await;
    assert_eq!(reported, [("NodeConfigRefused".to_owned(), message.to_owned())]);
    ctx.shutdown.cancel();

    // A later start records only new changes.
    let before = scene.entry(&key).await;
    let ctx = scene.start("a", 40).await;
    scene.until_earlier_reports_are_written("m1").await;
    assert_eq!(scene.entry(&key).await, before);
    assert_eq!(reasons(&ctx).await, []);
    std::fs::remove_file(&file).unwrap();
    eventually(async || scene.entry(&key).await.is_none().then_some(())).await;
    let reported =
        eventually(async || Some(reasons(&ctx).await).filter(|reported| !reported.is_empty())).await;
    assert_eq!(reported[0].0, "NodeConfigRemoved");
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn without_init_every_configuration_is_refused_without_an_event() {
    let scene = Scene::new().await;
    let key = scene.keys.config_status();
    // A status that an earlier init has left is ignored on a node without init.
    let file = scene.context("a", 40).config.paths.configuration_status();
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(&file, r#"{"assigned": {"revision": 7}, "state": "active"}"#).unwrap();
    for mark in ["m1", "m2"] {
        let ctx = scene.context("a", 40);
        keelson_node_status::build_with_init(ctx.clone(), false).await.unwrap();
        let reported = eventually(async || scene.json(&key).await).await;
        let status: ConfigurationStatus = serde_json::from_value(reported).unwrap();
        assert!(status.refuses_all(), "{status}");
        let why = status.error.unwrap();
        assert!(why.lines().next().unwrap().starts_with("no init runs on this node"), "{why}");
        assert!(why.contains("/etc/keelson/kubelet.yaml") && why.contains("kubelet.service"), "{why}");
        scene.until_earlier_reports_are_written(mark).await;
        let request = tonic::Request::new(ListEventsRequest::default());
        let list = ctx.events.list_events(request).await.unwrap().into_inner();
        let reported: Vec<String> = list.events.into_iter().map(|event| event.reason).collect();
        assert!(!reported.iter().any(|reason| reason.starts_with("NodeConfig")), "{reported:?}");
        ctx.shutdown.cancel();
    }

    // Under init nothing is refused that was not checked.
    std::fs::remove_file(&file).unwrap();
    let ctx = scene.start("a", 40).await;
    eventually(async || scene.entry(&key).await.is_none().then_some(())).await;
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn a_short_lease_has_its_duration_and_is_kept_alive() {
    let scene = Scene::new().await;
    let ctx = scene.start("a", 4).await;
    let first = eventually(async || scene.entry(&scene.keys.lease()).await).await;
    let value: Value = serde_json::from_slice(&first.value).unwrap();
    assert_eq!(value["spec"]["leaseDurationSeconds"], 4);
    // Twice its duration, in which it is renewed eight times.
    let end = tokio::time::Instant::now() + Duration::from_secs(8);
    while tokio::time::Instant::now() < end {
        assert_eq!(scene.entry(&scene.keys.lease()).await.as_ref(), Some(&first), "the lease is the same");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    ctx.shutdown.cancel();
    let ended = tokio::time::Instant::now();
    let key = scene.keys.lease();
    eventually(async || scene.entry(&key).await.is_none().then_some(())).await;
    assert!(ended.elapsed() < Duration::from_secs(20), "the lease is shorter than forty seconds");
}

#[tokio::test]
async fn a_write_refused_by_etcd_delays_no_other_and_is_retried_until_permitted() {
    let mut scene = Scene::new().await;
    let key = scene.keys.pod_status("default", "web");
    let permission = |what: &str, start: &str, end: &str| {
        let (start, end) = (STANDARD.encode(start), STANDARD.encode(end));
        json!({"name": NODE, "perm": {"permType": what, "key": start, "range_end": end}})
    };
    let own = Range::prefix(scene.keys.prefix());
    for (path, body) in [
        ("auth/role/add", json!({"name": NODE})),
        ("auth/role/grant", permission("READ", &own.start, &own.end)),
        ("auth/role/grant", permission("WRITE", &own.start, &key)),
        ("auth/role/grant", permission("WRITE", &key, "")),
        ("auth/role/grant", permission("WRITE", &format!("{key}\0"), &own.end)),
        ("auth/user/add", json!({"name": "root", "password": "r"})),
        ("auth/user/grant", json!({"user": "root", "role": "root"})),
        ("auth/user/add", json!({"name": NODE, "password": "p"})),
        ("auth/user/grant", json!({"user": NODE, "role": NODE})),
        ("auth/enable", json!({})),
    ] {
        scene.admin("", path, body).await;
    }
    scene.etcd = Etcd::new(scene.settings_of("root", "r"));
    let root = scene.admin("", "auth/authenticate", json!({"name": "root", "password": "r"})).await;
    let root = root["token"].as_str().unwrap().to_owned();
    let settings = scene.settings_of(NODE, "p");
    let password = settings.password_file.clone().unwrap();
    scene.pod("u1", "web", "Pending", "");
    let ctx = scene.context_with("a", settings);
    keelson_node_status::build_with_init(ctx.clone(), true).await.unwrap();
    scene.until("web", "u1", "Pending").await;

    // A single key is refused.
    let revoked = json!({"role": NODE, "key": STANDARD.encode(&key)});
    scene.admin(&root, "auth/role/revoke", revoked).await;
    scene.pod("u1", "web", "Running", "");
    let reported = eventually(async || writer_error(&ctx)).await;
    assert!(reported.contains(&key) && reported.contains("permission denied"), "{reported}");
    scene.pod("u2", "db", "Running", "");
    scene.until("db", "u2", "Running").await;
    scene.until_earlier_reports_are_written("m1").await;
    assert_eq!(writer_error(&ctx), Some(reported), "the error remains while others are written");
    scene.admin(&root, "auth/role/grant", permission("WRITE", &key, "")).await;
    scene.until("web", "u1", "Running").await;
    eventually(async || writer_error(&ctx).is_none().then_some(())).await;

    // Everything is refused: the password changes in etcd first, and a pod goes meanwhile.
    scene.admin(&root, "auth/user/changepw", json!({"name": NODE, "password": "q"})).await;
    scene.pod("u1", "web", "Failed", "");
    scene.peers.pods.remove(&"u2".to_owned());
    let reported = eventually(async || writer_error(&ctx)).await;
    assert!(reported.contains("etcd refuses"), "{reported}");
    std::fs::write(&password, "q").unwrap();
    scene.until("web", "u1", "Failed").await;
    let gone = scene.keys.pod_status("default", "db");
    eventually(async || scene.entry(&gone).await.is_none().then_some(())).await;
    eventually(async || writer_error(&ctx).is_none().then_some(())).await;
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn a_report_too_large_for_etcd_is_an_event_and_skipped_until_it_changes() {
    let scene = Scene::new().await;
    let ctx = scene.start("a", 40).await;
    scene.pod("u1", "web", "Pending", &"x".repeat(1_700_000));
    let reported = eventually(async || writer_error(&ctx)).await;
    assert!(
        reported.contains("/status/pods/default/web") && reported.contains("request is too large"),
        "{reported}"
    );
    scene.pod("u2", "db", "Running", "");
    scene.until("db", "u2", "Running").await;
    assert_eq!(writer_error(&ctx), Some(reported), "the error remains while others are written");
    let request = tonic::Request::new(ListEventsRequest::default());
    let list = ctx.events.list_events(request).await.unwrap().into_inner();
    let of_it: Vec<_> = list.events.into_iter().filter(|event| event.reason == "ReportTooLarge").collect();
    assert_eq!(of_it.len(), 1, "{of_it:?}");
    assert_eq!((of_it[0].uid.as_str(), of_it[0].count), ("u1", 1));
    scene.pod("u1", "web", "Running", "");
    scene.until("web", "u1", "Running").await;
    eventually(async || writer_error(&ctx).is_none().then_some(())).await;
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn wiped_or_restored_keys_are_repaired_with_the_next_lease() {
    let scene = Scene::new().await;
    scene.pod("u1", "web", "Running", "");
    scene.pod("u2", "db", "Running", "");
    let ctx = scene.context("a", 3);
    let file = ctx.config.paths.configuration_status();
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(&file, r#"{"assigned": {"revision": 7}, "state": "refused", "error": "line 3"}"#).unwrap();
    keelson_node_status::build_with_init(ctx.clone(), true).await.unwrap();
    let [web, db, old] = ["web", "db", "old"].map(|name| scene.keys.pod_status("default", name));
    let written = [scene.keys.node(), scene.keys.config_status(), web.clone(), db.clone()];
    for key in &written {
        eventually(async || scene.entry(key).await).await;
    }
    let before = scene.entry(&db).await.unwrap();
    let lease = scene.entry(&scene.keys.lease()).await.unwrap();

    let delete = |key: &String| Operation::Delete { key: key.clone() };
    let mut wipe: Vec<_> = written[..3].iter().map(delete).collect();
    let stale = pod_document("u0", "Running", true, 1).pod_json.to_vec();
    wipe.push(Operation::Put { key: old.clone(), value: stale, lease: 0 });
    wipe.push(delete(&scene.keys.lease()));
    let expected = [(scene.keys.lease(), Expect::Lease(lease.lease))];
    assert!(matches!(scene.etcd.write(&expected, &wipe).await.unwrap(), Written::Done(_)));
    for key in &written {
        eventually(async || scene.entry(key).await).await;
    }
    eventually(async || scene.entry(&old).await.is_none().then_some(())).await;
    assert_ne!(scene.entry(&scene.keys.lease()).await.unwrap().lease, lease.lease);
    scene.until_earlier_reports_are_written("m1").await;
    assert_eq!(scene.entry(&db).await, Some(before), "an unchanged key is not written again");
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn a_changed_lease_duration_takes_a_new_lease_and_revokes_the_old_one() {
    let scene = Scene::new().await;
    let mut before = None;
    for (seconds, phase) in [(40, "Pending"), (10, "Running"), (40, "Failed")] {
        let ctx = scene.start("a", seconds).await;
        let lease = eventually(async || {
            let lease = scene.entry(&scene.keys.lease()).await?.lease;
            (Some(lease) != before).then_some(lease)
        })
        .await;
        assert_eq!(scene.granted_seconds(lease).await, seconds.to_string());
        let value = scene.json(&scene.keys.lease()).await.unwrap();
        assert_eq!(value["spec"]["leaseDurationSeconds"], seconds);
        if let Some(before) = before {
            eventually(async || (!scene.etcd.keep_alive(before).await.unwrap()).then_some(())).await;
        }
        scene.pod("u1", "web", phase, "");
        scene.until("web", "u1", phase).await;
        assert_eq!(scene.entry(&scene.keys.lease()).await.map(|entry| entry.lease), Some(lease));
        before = Some(lease);
        ctx.shutdown.cancel();
    }
}
