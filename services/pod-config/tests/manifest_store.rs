//! `ApplyManifest`, `DeleteManifest`, the Node, and shutdown.

#![allow(clippy::unwrap_used)] // A failed unwrap fails the test.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use common::{Node, Service, pod};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_service_kit::status::reason;
use tonic::Code;

#[tokio::test]
async fn an_applied_manifest_is_created_unchanged_configured_restored_and_deleted() {
    let node = Node::new();
    let service = node.start();
    let mut watch = service.watch().await;
    watch.replay().await;
    let created = service.apply(&pod("web", "one")).await.unwrap();
    assert_eq!((created[0].result.as_str(), created[0].name.as_str()), ("created", "web-n1"));
    let added = watch.pod().await;
    assert_eq!((added.uid.as_str(), added.source.as_str()), (created[0].uid.as_str(), "manifest"));
    assert!(added.origin.ends_with("/manifests/default_web.json"), "{}", added.origin);

    let reapplied = service.apply(&pod("web", "one")).await.unwrap();
    assert_eq!((reapplied[0].result.as_str(), &reapplied[0].uid), ("unchanged", &created[0].uid));
    let changed = service.apply(&pod("web", "two")).await.unwrap();
    assert_eq!(changed[0].result, "configured");
    assert_eq!(watch.removed_uid().await, created[0].uid);
    assert_eq!(watch.pod().await.uid, changed[0].uid);
    service.kill();

    let service = node.start();
    let mut watch = service.watch().await;
    assert_eq!(watch.replay().await.0[0].uid, changed[0].uid);
    assert_eq!(service.delete("web").await.unwrap(), changed[0].uid);
    assert_eq!(watch.removed_uid().await, changed[0].uid);
    assert_eq!(service.delete("web").await.unwrap_err().code(), Code::NotFound);
    let reapplied = service.apply(&pod("web", "two")).await.unwrap();
    assert_eq!(service.delete("web-n1").await.unwrap(), reapplied[0].uid);
    assert_eq!(fs::read_dir(node.path("state/pod-config/manifests")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_manifest_is_validated_completely_before_any_object_is_stored() {
    let node = Node::new();
    let service = node.start();
    service.watch().await.replay().await;
    let text = format!("{}---\n{}---\n{}", pod("good", "i"), pod("BAD", "i"), pod("worse", "' '"));
    let refused = service.apply(&text).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(
        refused.message().contains("given.yaml:13:3: document 2: metadata.name"),
        "{}",
        refused.message()
    );
    assert!(refused.message().contains("document 3: spec.containers[0].image"), "{}", refused.message());
    let twice = service.apply(&format!("{}---\n{}", pod("same", "a"), pod("same", "b"))).await.unwrap_err();
    assert!(
        twice.code() == Code::InvalidArgument && twice.message().contains("default/same-n1"),
        "{twice:?}"
    );
    assert_eq!(fs::read_dir(node.path("state/pod-config/manifests")).unwrap().count(), 0);
    let huge = service.apply(&"#".repeat(10 << 20)).await.unwrap_err();
    assert!(huge.message().contains("10 MiB"), "{huge:?}");
}

#[tokio::test]
async fn a_pod_of_the_file_source_can_neither_be_applied_nor_deleted() {
    let node = Node::new();
    node.write_backdated("web.yaml", &pod("web", "one"));
    let service = node.start();
    service.watch().await.replay().await;
    for refused in [
        service.apply(&pod("web", "two")).await.unwrap_err(),
        service.delete("web").await.unwrap_err(),
        service.delete("web-n1").await.unwrap_err(),
    ] {
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.message().contains("/manifests/web.yaml"), "{refused:?}");
    }
}

#[tokio::test]
async fn secrets_and_config_maps_can_be_applied_and_deleted() {
    let node = Node::new();
    let service = node.start();
    service.watch().await.replay().await;
    let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings}\ndata: {k: v}\n";
    assert!(service.apply(map).await.unwrap().is_empty());
    let ask = pb::GetObjectRequest {
        kind: "ConfigMap".into(),
        namespace: "default".into(),
        name: "settings".into(),
    };
    service.client().get_object(ask.clone()).await.unwrap();
    assert_eq!(service.delete("settings").await.unwrap(), "");
    assert_eq!(service.client().get_object(ask).await.unwrap_err().code(), Code::NotFound);
}

fn config_map(name: &str) -> String {
    format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\ndata: {{k: v}}\n")
}

fn volume(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}}}\nspec:\n  capacity: {{storage: 1Gi}}\n  \
         accessModes: [ReadWriteOnce]\n  hostPath: {{path: /srv}}\n"
    )
}

fn claim(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec:\n  accessModes: [ReadWriteOnce]\n  \
         resources: {{requests: {{storage: 1Gi}}}}\n"
    )
}

/// The reason and the message of a refused deletion.
async fn refusal(service: &Service, kind: &str, name: &str) -> (Code, String, String) {
    let status = service.delete_kind(kind, name).await.unwrap_err();
    (status.code(), reason(&status).unwrap(), status.message().to_owned())
}

#[tokio::test]
async fn an_object_of_another_kind_is_never_deleted() {
    let node = Node::new();
    let service = node.start();
    service.watch().await.replay().await;
    let all = [pod("web", "i"), config_map("web"), claim("web"), volume("web")].join("---\n");
    service.apply(&all).await.unwrap();
    let (code, why, message) = refusal(&service, "", "web").await;
    assert_eq!((code, why.as_str()), (Code::InvalidArgument, "KIND_AMBIGUOUS"));
    let objects = "the pod default/web-n1 and the ConfigMap default/web and the PersistentVolumeClaim default/web \
                   and the PersistentVolume web";
    assert!(message.contains(objects), "{message}");

    for kind in ["Secret", "secret", "Service", "Pods"] {
        let (code, why, message) = refusal(&service, kind, "web").await;
        if kind == "Secret" {
            assert_eq!((code, why.as_str()), (Code::NotFound, "OBJECT_UNKNOWN"));
            assert!(message.starts_with("no manifest of the Secret default/web is stored; "), "{message}");
        } else {
            assert_eq!((code, why.as_str()), (Code::InvalidArgument, "KIND_UNKNOWN"));
            assert!(message.contains(&format!("kind {kind:?} is none of Pod, Secret")), "{message}");
        }
    }
    let stored = || {
        let entries = fs::read_dir(node.path("state/pod-config/manifests")).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let (pod_file, map, claim_file, volume_file) = (
        "default_web.json",
        "default_web_configmap.json",
        "default_web_persistentvolumeclaim.json",
        "_web_persistentvolume.json",
    );
    assert_eq!(stored(), [volume_file, pod_file, map, claim_file]);
    for (kind, expected) in [
        ("PersistentVolumeClaim", &[volume_file, pod_file, map][..]),
        ("ConfigMap", &[volume_file, pod_file]),
        ("Pod", &[volume_file]),
    ] {
        service.delete_kind(kind, "web").await.unwrap();
        assert_eq!(stored(), expected, "{kind}");
        let (code, _, message) = refusal(&service, kind, "web").await;
        assert_eq!(code, Code::NotFound, "{kind}: {message}");
        assert_eq!(stored(), expected, "a repeated deletion of the {kind}");
    }
    // The only object with the name needs no kind.
    assert_eq!(service.delete("web").await.unwrap(), "");
    assert_eq!(stored(), [""; 0]);
    let (code, why, message) = refusal(&service, "", "web").await;
    assert_eq!((code, why.as_str()), (Code::NotFound, "POD_UNKNOWN"));
    assert!(message.contains("no manifest of default/web is stored"), "{message}");
    let missing = service.delete_kind("PersistentVolume", "").await.unwrap_err();
    assert_eq!(reason(&missing).as_deref(), Some("NAME_MISSING"));
}

#[tokio::test]
async fn objects_of_other_sources_are_not_deleted_and_make_a_name_ambiguous() {
    let node = Node::new();
    node.write_backdated("storage.yaml", &[claim("data"), volume("disk")].join("---\n"));
    let service = node.start();
    service.watch().await.replay().await;
    service.apply(&volume("data")).await.unwrap();
    for (kind, name) in [("PersistentVolumeClaim", "data"), ("PersistentVolume", "disk"), ("", "disk")] {
        let (code, why, message) = refusal(&service, kind, name).await;
        assert_eq!((code, why.as_str()), (Code::FailedPrecondition, "OTHER_SOURCE"), "{kind} {name}");
        assert!(message.contains("/manifests/storage.yaml; change it there"), "{message}");
    }
    let (_, why, _) = refusal(&service, "", "data").await;
    assert_eq!(why, "KIND_AMBIGUOUS");
    service.delete_kind("PersistentVolume", "data").await.unwrap();
}

#[tokio::test]
async fn a_file_with_several_objects_is_not_deleted_for_one_of_them() {
    let node = Node::new();
    let folder = node.path("state/pod-config/manifests");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("by-hand.yaml"), [claim("data"), volume("disk")].join("---\n")).unwrap();
    let service = node.start();
    service.watch().await.replay().await;
    let (code, why, message) = refusal(&service, "PersistentVolumeClaim", "data").await;
    assert_eq!((code, why.as_str()), (Code::FailedPrecondition, "FILE_SHARED"));
    let expected = "by-hand.yaml contains other objects besides the PersistentVolumeClaim default/data; delete the file by hand";
    assert!(message.ends_with(expected), "{message}");
    assert!(folder.join("by-hand.yaml").exists());
}

#[tokio::test]
async fn volumes_and_claims_are_listed_with_their_status_and_no_other_kind() {
    let node = Node::new();
    let mut service = node.start();
    service.watch().await.replay().await;
    assert_eq!(service.volume_objects("PersistentVolume").await.unwrap(), [""; 0]);
    service
        .apply(&[volume("b"), volume("a"), claim("one"), claim("three"), claim("two")].join("---\n"))
        .await
        .unwrap();
    // Bindings are shown once they are stored.
    let claims = loop {
        let claims = service.volume_objects("PersistentVolumeClaim").await.unwrap();
        if claims[0]["status"]["phase"] == "Bound" {
            break claims;
        }
        service.wait_for_event("volume_objects_updated");
    };
    let names: Vec<&str> = claims.iter().filter_map(|claim| claim["metadata"]["name"].as_str()).collect();
    assert_eq!(names, ["one", "three", "two"]);
    assert_eq!(
        (&claims[0]["spec"]["volumeName"], &claims[1]["spec"]["volumeName"]),
        (&"a".into(), &"b".into())
    );
    let waiting = &claims[2]["status"];
    assert_eq!(
        (&waiting["phase"], &waiting["conditions"][0]["status"]),
        (&"Pending".into(), &"False".into())
    );
    let volumes = service.volume_objects("PersistentVolume").await.unwrap();
    let names: Vec<&str> = volumes.iter().filter_map(|volume| volume["metadata"]["name"].as_str()).collect();
    assert_eq!((names, &volumes[0]["spec"]["claimRef"]["name"]), (vec!["a", "b"], &"one".into()));
    for kind in ["", "Secret", "Pod", "persistentvolume"] {
        let refused = service.volume_objects(kind).await.unwrap_err();
        let found = (refused.code(), reason(&refused));
        assert_eq!(found, (Code::InvalidArgument, Some("KIND_NOT_LISTED".to_owned())), "{kind}");
    }
}

#[tokio::test]
async fn without_a_static_pod_path_only_the_manifest_source_exists() {
    let mut node = Node::new();
    node.config.sources.static_pod_path = None;
    let service = node.start();
    assert_eq!(service.watch().await.replay().await.1, ["manifest"]);
    assert_eq!(service.sources().await.len(), 1);
}

#[tokio::test]
async fn without_a_state_folder_file_pods_run_and_conditions_name_the_error() {
    let mut node = Node::new();
    fs::write(node.path("no-folder"), "").unwrap();
    node.config.paths.state_dir = node.path("no-folder");
    node.write_backdated("web.yaml", &pod("web", "one"));
    let service = node.start();
    assert_eq!(service.watch().await.replay().await.0.len(), 1);
    for name in ["checkpoint", "manifest-folder"] {
        let condition = service.condition(name).await.unwrap();
        assert!(!condition.ok && condition.message.contains("no-folder"), "{condition:?}");
    }
    let refused = service.apply(&pod("other", "i")).await.unwrap_err();
    assert!(refused.message().contains("no-folder"), "{refused:?}");
}

#[tokio::test]
async fn a_broken_checkpoint_is_moved_away_and_replaced() {
    let node = Node::new();
    fs::create_dir_all(node.path("state/pod-config")).unwrap();
    fs::write(node.path("state/pod-config/checkpoint.redb"), "garbage that is no database at all").unwrap();
    node.write_backdated("web.yaml", &pod("web", "one"));
    let mut service = node.start();
    assert_eq!(service.watch().await.replay().await.0.len(), 1);
    service.wait_for_event("checkpoint_written");
    let mode = fs::metadata(node.path("state/pod-config/checkpoint.redb")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

// The client must keep running while the test waits for the service to end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standalone_node_is_served_and_streams_end_with_the_service() {
    let mut node = Node::new();
    node.config.resources.node_labels.insert("disk".into(), "ssd".into());
    let service = node.start();
    let mut nodes = service.client().watch_node(pb::WatchNodeRequest {}).await.unwrap().into_inner();
    let first = nodes.message().await.unwrap().unwrap();
    assert!(!first.registered);
    let json = String::from_utf8(first.node_json).unwrap();
    assert!(
        json.contains("\"kubernetes.io/hostname\":\"n1\"") && json.contains("\"disk\":\"ssd\""),
        "{json}"
    );
    let mut watch = service.watch().await;
    watch.replay().await;
    let begun = std::time::Instant::now();
    assert_eq!(service.end(), Some(0));
    assert!(begun.elapsed() < std::time::Duration::from_secs(2), "no drain time-out: {:?}", begun.elapsed());
    watch.end().await;
}
