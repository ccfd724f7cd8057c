//! The folder of manifests, through the API of the real binary.

mod common;

use std::fs;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::time::{Duration, SystemTime};

use common::{Node, backdate, image, pod, replace};
use keelson_kube_model::with_source_annotations;
use keelson_proto::keelson::pod_config::v1::DesiredPod;
use keelson_proto::keelson::pod_config::v1::watch_pods_response::Item;

#[tokio::test]
async fn only_a_request_for_unannotated_pods_gets_them_without_annotations() {
    let node = Node::new();
    node.write_backdated("web.yaml", &pod("web", "one"));
    let service = node.start();
    let (plain, _) = service.watch_unannotated().await.replay().await;
    let (annotated, _) = service.watch().await.replay().await;
    let text = std::str::from_utf8(&plain[0].pod_json).unwrap();
    assert!(!text.contains("config.source") && !text.contains("config.seen"), "{text}");
    let DesiredPod { source, seen_unix_nanos, .. } = &plain[0];
    let pod_json = with_source_annotations(&plain[0].pod_json, source, *seen_unix_nanos).into();
    assert_ne!(plain, annotated);
    assert_eq!([DesiredPod { pod_json, ..plain[0].clone() }], *annotated);
}

#[tokio::test]
async fn a_manifest_is_added_edited_broken_repaired_and_removed() {
    let node = Node::new();
    let mut service = node.start();
    let mut watch = service.watch().await;
    let (pods, mut sources) = watch.replay().await;
    sources.sort();
    assert!(pods.is_empty());
    assert_eq!(sources, ["file", "manifest"]);

    node.write("web.yaml", &pod("web", "one"));
    let first = watch.pod().await;
    assert_eq!(
        (first.namespace.as_str(), first.name.as_str(), first.source.as_str()),
        ("default", "web-n1", "file")
    );
    assert_eq!(first.origin, node.manifest("web.yaml").to_str().unwrap());
    assert!(first.revision > 0 && first.seen_unix_nanos > 0);
    let json = String::from_utf8(first.pod_json.to_vec()).unwrap();
    assert!(json.contains("\"kubernetes.io/config.source\":\"file\""), "{json}");

    node.write("web.yaml", &pod("web", "two"));
    assert_eq!(watch.removed_uid().await, first.uid);
    let second = watch.pod().await;
    assert_ne!(second.uid, first.uid);

    node.write("web.yaml", &pod("web", "three").replace("  containers:", "  containers: ["));
    let line = service.wait_for_event("manifest_error");
    assert!(line.contains("its last good version stays in effect"), "{line}");
    let problems = service.problems().await;
    assert_eq!(problems.len(), 1);
    assert!(problems[0].line >= 6, "{problems:?}");
    assert_eq!(problems[0].kept_pods, ["default/web-n1"]);
    let events = service.events().await;
    let place = format!("web.yaml:{}:", problems[0].line);
    for kind in ["Node", "Pod"] {
        assert!(
            events
                .iter()
                .any(|e| e.kind == kind && e.reason == "InvalidManifest" && e.message.contains(&place)),
            "{kind}: {events:?}"
        );
    }
    assert!(service.metrics().await.contains("keelson_pod_config_manifest_problems 1"));

    node.write("web.yaml", &pod("web", "two"));
    service.wait_for_event("manifest_fixed");
    assert!(service.problems().await.is_empty());
    assert!(service.metrics().await.contains("keelson_pod_config_pods{source=\"file\"} 1"));

    fs::remove_file(node.manifest("web.yaml")).unwrap();
    assert_eq!(watch.removed_uid().await, second.uid, "the breaking and the repair changed nothing");
    assert!(service.metrics().await.contains("keelson_pod_config_pods{source=\"file\"} 0"));
}

#[tokio::test]
async fn a_manifest_that_others_may_write_is_reported_in_a_condition() {
    let node = Node::new();
    node.write("web.yaml", &pod("web", "one"));
    let file = node.manifest("web.yaml");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o646)).unwrap();
    let mut service = node.start();
    let text = format!("others than root may write {} (owner ", file.display());
    service.wait_for_log(&text);
    let condition = service.condition("writers-of-manifests").await.unwrap();
    assert!(!condition.ok && condition.message.contains("mode 0646"), "{condition:?}");
    // The pod runs nevertheless, as with a kubelet.
    let (pods, _) = service.watch().await.replay().await;
    assert_eq!(pods.len(), 1);
    drop(service);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let service = node.start();
    service.watch().await.replay().await;
    assert!(service.condition("writers-of-manifests").await.unwrap().ok);
}

#[tokio::test]
async fn an_invalid_pod_is_reported_in_an_event_with_file_and_line() {
    let node = Node::new();
    let mut service = node.start();
    node.write("web.yaml", &pod("web", "'bad image '"));
    service.wait_for_log("spec.containers[0].image");
    let events = service.events().await;
    let event = events.iter().find(|e| e.reason == "FailedValidation").unwrap();
    assert_eq!(
        (event.kind.as_str(), event.name.as_str(), event.r#type.as_str()),
        ("Pod", "web-n1", "Warning")
    );
    assert!(event.message.contains("/manifests/web.yaml:8:"), "{event:?}");
}

#[tokio::test]
async fn a_second_file_with_the_same_pod_is_rejected_until_the_first_is_removed() {
    let node = Node::new();
    node.write_backdated("b.yaml", &pod("web", "b"));
    node.write_backdated("a.yaml", &pod("web", "a"));
    let service = node.start();
    let mut watch = service.watch().await;
    let (pods, _) = watch.replay().await;
    assert_eq!(pods.len(), 1);
    assert!(pods[0].origin.ends_with("a.yaml"));
    let problems = service.problems().await;
    assert!(problems[0].origin.ends_with("b.yaml") && problems[0].message.contains("a.yaml"), "{problems:?}");
    fs::remove_file(node.manifest("a.yaml")).unwrap();
    assert_eq!(watch.removed_uid().await, pods[0].uid);
    assert!(watch.pod().await.origin.ends_with("b.yaml"));
}

#[tokio::test]
async fn documents_and_objects_in_one_file_are_read_and_objects_are_served() {
    use keelson_proto::keelson::pod_config::v1::GetObjectRequest;
    let node = Node::new();
    let secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\nstringData: {k: foobar}\n";
    node.write_backdated("all.yaml", &format!("{}---\n{}---\n{secret}", pod("a", "i"), pod("b", "i")));
    let service = node.start();
    let (pods, _) = service.watch().await.replay().await;
    assert_eq!(pods.len(), 2);
    let ask = |name: &str| GetObjectRequest {
        kind: "Secret".into(),
        namespace: "default".into(),
        name: name.into(),
    };
    let object = service.client().get_object(ask("s")).await.unwrap().into_inner().object_json;
    assert!(String::from_utf8(object).unwrap().contains("Zm9vYmFy"));
    let missing = service.client().get_object(ask("other")).await.unwrap_err();
    assert_eq!(missing.code(), tonic::Code::NotFound);
    assert!(missing.message().contains("Secret default/other"), "{missing:?}");
}

#[tokio::test]
async fn files_may_be_replaced_linked_and_saved_by_an_editor() {
    let node = Node::new();
    let mut service = node.start();
    let mut watch = service.watch().await;
    watch.replay().await;
    let path = node.manifest("web.yaml");
    replace(&path, &pod("web", "one"));
    let first = watch.pod().await;
    let uid = first.uid;

    // vim renames the old file to a backup, writes a new one, and deletes the backup. A kubelet takes that for a removal and an
    // addition.
    let backup = node.manifest("web.yaml~");
    fs::rename(&path, &backup).unwrap();
    fs::write(&path, pod("web", "one")).unwrap();
    fs::remove_file(&backup).unwrap();
    let readded = watch.next_version_of(&uid).await;
    assert_ne!(readded.added_unix_nanos, first.added_unix_nanos);
    // Replacing a file is neither.
    replace(&path, &pod("web", "one"));
    // Backup files are ignored.
    for name in ["x.bak", "x.tmp", ".x.swp", "x~"] {
        node.write(name, &pod("backup", "i"));
    }
    // Symbolic and hard links are read at once.
    fs::write(node.path("outside.yaml"), pod("soft", "i")).unwrap();
    symlink(node.path("outside.yaml"), node.manifest("soft.yaml")).unwrap();
    assert_eq!(watch.pod().await.name, "soft-n1", "nothing else was sent");
    fs::write(node.path("hard.yaml"), pod("hard", "i")).unwrap();
    fs::hard_link(node.path("hard.yaml"), node.manifest("hard.yaml")).unwrap();
    assert_eq!(watch.pod().await.name, "hard-n1");
    assert_eq!(service.count_log("backup"), 0);

    fs::rename(&path, node.path("moved.yaml")).unwrap();
    assert_eq!(watch.removed_uid().await, uid);
}

#[tokio::test]
async fn a_manifest_deleted_and_rewritten_at_once_is_removed_and_added_each_time() {
    let node = Node::new();
    node.write_backdated("web.yaml", &pod("web", "one"));
    let service = node.start();
    let mut watch = service.watch().await;
    let (pods, _) = watch.replay().await;
    assert_eq!(pods[0].added_unix_nanos, 0, "it was there before");
    let (path, uid, mut added) = (node.manifest("web.yaml"), pods[0].uid.clone(), 0);
    for _ in 0..20 {
        fs::remove_file(&path).unwrap();
        fs::write(&path, pod("web", "one")).unwrap();
        let readded = watch.next_version_of(&uid).await;
        assert!(readded.added_unix_nanos > added, "{readded:?}");
        added = readded.added_unix_nanos;
    }
    // Rewriting a file in place keeps the pod.
    fs::write(&path, pod("web", "one")).unwrap();
    node.write("mark.yaml", &pod("mark", "one"));
    assert_eq!(watch.pod().await.name, "mark-n1");

    // After a restart it is not known when the pods were added.
    service.kill();
    let service = node.start();
    let (pods, _) = service.watch().await.replay().await;
    assert!(pods.iter().all(|pod| pod.added_unix_nanos == 0), "{pods:?}");
}

#[tokio::test]
async fn manifest_warnings_are_reported_in_an_event_and_in_list_sources() {
    let node = Node::new();
    let exported = pod("web", "one").replace(
        "metadata:",
        "status: {phase: Running}\nmetadata:\n  deletionTimestamp: \"2026-01-01T00:00:00Z\"\n  labels: {1.10: x}",
    );
    node.write_backdated("web.yaml", &exported);
    let service = node.start();
    let (pods, _) = service.watch().await.replay().await;
    assert_eq!(pods.len(), 1, "{:?}", service.problems().await);
    let warnings: Vec<_> = service.sources().await.into_iter().flat_map(|source| source.warnings).collect();
    let [ignored, key] = &*warnings else { panic!("{warnings:?}") };
    assert!(ignored.message.ends_with(": metadata.deletionTimestamp, status"), "{warnings:?}");
    assert_eq!(key.message, r#"the key 1.10 is not text and is read as "1.1"; quote it"#);
    assert!(key.line > ignored.line && key.origin.ends_with("web.yaml"), "{warnings:?}");
    assert!(warnings.iter().all(|warning| warning.pod == "default/web-n1"), "{warnings:?}");
    let events = service.events().await;
    let has_warning_event = |text: &str| {
        events.iter().any(|e| e.reason == "ManifestWarning" && e.kind == "Pod" && e.message.contains(text))
    };
    assert!(
        has_warning_event("metadata.deletionTimestamp") && has_warning_event("the key 1.10"),
        "{events:?}"
    );
    let mut watch = service.watch().await;
    watch.replay().await;
    node.write("web.yaml", &pod("web", "one"));
    assert_eq!(watch.removed_uid().await, pods[0].uid);
    let sources = service.sources().await;
    assert!(sources.iter().all(|source| source.warnings.is_empty()), "{sources:?}");
}

#[tokio::test]
async fn a_single_file_may_be_the_source() {
    let mut node = Node::new();
    node.config.sources.static_pod_path = Some(node.manifest("only.yaml"));
    node.write_backdated("only.yaml", &pod("only", "one"));
    node.write_backdated("other.yaml", &pod("other", "one"));
    let service = node.start();
    let mut watch = service.watch().await;
    let (pods, _) = watch.replay().await;
    assert_eq!(pods.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["only-n1"]);
    node.write("other.yaml", &pod("other", "two"));
    replace(&node.manifest("only.yaml"), &pod("only", "two"));
    assert_eq!(watch.removed_uid().await, pods[0].uid);
    let second = watch.pod().await;
    assert_eq!(second.name, "only-n1");
    fs::remove_file(node.manifest("only.yaml")).unwrap();
    assert_eq!(watch.removed_uid().await, second.uid);
}

#[tokio::test]
async fn a_missing_folder_is_reported_and_followed_once_it_exists() {
    let node = Node::new();
    fs::remove_dir(node.path("manifests")).unwrap();
    let service = node.start();
    let mut watch = service.watch().await;
    assert_eq!(watch.replay().await.1.len(), 2, "an empty source is a read source");
    let condition = service.condition("static-pod-path").await.unwrap();
    assert!(!condition.ok && condition.message.contains("manifests does not exist"), "{condition:?}");
    fs::create_dir(node.path("manifests")).unwrap();
    node.write_backdated("web.yaml", &pod("web", "i"));
    watch.pod().await;
    assert!(service.condition("static-pod-path").await.unwrap().ok);
}

#[tokio::test]
async fn a_removed_folder_removes_its_pods_but_an_unreadable_one_does_not() {
    let mut node = Node::new();
    fs::create_dir_all(node.path("outer/inner")).unwrap();
    node.config.sources.static_pod_path = Some(node.path("outer/inner"));
    fs::write(node.path("outer/inner/web.yaml"), pod("web", "i")).unwrap();
    backdate(&node.path("outer/inner/web.yaml"));
    let mut service = node.start();
    let mut watch = service.watch().await;
    let (pods, _) = watch.replay().await;

    // With a file in place of the folder, the path cannot be read.
    fs::rename(node.path("outer"), node.path("away")).unwrap();
    fs::write(node.path("outer"), "").unwrap();
    // The service watches the inode of the inner folder, so that one has to change.
    fs::rename(node.path("away/inner"), node.path("away/inner2")).unwrap();
    service.wait_for_log("its pods keep running");
    let condition = service.condition("static-pod-path").await.unwrap();
    assert!(!condition.ok && condition.message.contains("outer/inner"), "{condition:?}");
    assert_eq!(service.sources().await[0].pods, 1);

    fs::remove_file(node.path("outer")).unwrap();
    fs::create_dir(node.path("outer")).unwrap();
    assert_eq!(
        watch.removed_uid().await,
        pods[0].uid,
        "the folder is missing in two scans, so the pods are removed"
    );
    fs::rename(node.path("away/inner2"), node.path("outer/inner")).unwrap();
    assert_eq!(watch.pod().await.uid, pods[0].uid);
}

#[tokio::test]
async fn a_partially_rewritten_file_is_not_read() {
    let mut node = Node::new();
    node.config.sources.file_check_ms = 100;
    node.write_backdated("web.yaml", &pod("web", "one"));
    let mut service = node.start();
    let mut watch = service.watch().await;
    let (pods, _) = watch.replay().await;
    // Each later scan logs that it skips this folder.
    fs::create_dir(node.manifest("folder")).unwrap();

    let path = node.manifest("web.yaml");
    let mut writer = fs::File::create(&path).unwrap();
    let text = pod("web", "two");
    let (half, other_half) = text.split_at(text.find("    image:").unwrap());
    writer.write_all(format!("{half}    image: three\n").as_bytes()).unwrap();
    // 2 s of scans, and an attribute change.
    for look in 0..20 {
        if look == 10 {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        }
        let line = service.wait_for_event("file_skipped");
        assert!(line.contains("not a regular file"), "{line}");
    }
    assert!(service.problems().await.is_empty());
    writer.set_len(half.len() as u64).unwrap();
    writer.seek(SeekFrom::End(0)).unwrap();
    writer.write_all(other_half.as_bytes()).unwrap();
    drop(writer);
    assert_eq!(watch.removed_uid().await, pods[0].uid);
    assert!(image(&watch.pod().await).contains("two"));
}

#[tokio::test]
async fn a_file_that_stays_open_is_read_once_it_is_quiet() {
    let node = Node::new();
    let service = node.start();
    let mut watch = service.watch().await;
    watch.replay().await;
    let mut writer = fs::File::create(node.manifest("web.yaml")).unwrap();
    writer.write_all(pod("web", "one").as_bytes()).unwrap();
    // Nine of the ten seconds have passed; only setting both times is reported as an attribute change.
    let then = SystemTime::now() - Duration::from_secs(9);
    writer.set_times(fs::FileTimes::new().set_accessed(then).set_modified(then)).unwrap();
    assert_eq!(watch.pod().await.name, "web-n1");
    drop(writer);
}

#[tokio::test]
async fn a_file_being_written_at_the_start_holds_back_its_source_but_no_other_pod() {
    let node = Node::new();
    node.write_backdated("one.yaml", &pod("one", "i"));
    let mut writer = fs::File::create(node.manifest("two.yaml")).unwrap();
    writer.write_all(pod("two", "half").as_bytes()).unwrap();
    let service = node.start();
    let mut watch = service.watch().await;
    // One pod, and the source that is not held back; nothing more while the file is being written.
    for _ in 0..2 {
        match watch.next().await {
            Item::Pod(pod) => assert_eq!(pod.name, "one-n1"),
            Item::SourceReady(ready) => assert_eq!(ready.source, "manifest"),
            other => panic!("{other:?}"),
        }
    }
    assert!(!service.sources().await[0].ready);
    writer.rewind().unwrap();
    writer.set_len(0).unwrap();
    writer.write_all(pod("two", "whole").as_bytes()).unwrap();
    drop(writer);
    assert!(image(&watch.pod().await).contains("whole"));
    assert!(matches!(watch.next().await, Item::SourceReady(ready) if ready.source == "file"));
}

#[tokio::test]
async fn a_file_of_10_mib_is_rejected_by_name() {
    let node = Node::new();
    let mut service = node.start();
    node.write("huge.yaml", &"#\n".repeat(5 << 20));
    let line = service.wait_for_log("10 MiB");
    assert!(line.contains("huge.yaml"), "{line}");
}

#[tokio::test]
async fn an_error_is_reported_once_although_the_folder_is_rescanned() {
    let mut node = Node::new();
    node.config.sources.file_check_ms = 100;
    node.write_backdated("bad.yaml", "kind: Nothing\n");
    let mut service = node.start();
    service.wait_for_log("bad.yaml");
    // Each later scan logs that it skips this folder.
    fs::create_dir(node.manifest("folder")).unwrap();
    for _ in 0..5 {
        let line = service.wait_for_event("file_skipped");
        assert!(line.contains("not a regular file"), "{line}");
    }
    assert_eq!(service.count_log("apiVersion: Required value"), 1);
    assert_eq!(service.events().await.iter().map(|event| event.count).collect::<Vec<_>>(), [1]);
}
