//! `keelson apply` and `keelson delete`.

use std::io::Write as _;
use std::process::Stdio;

use crate::fake::{Fake, World};
use crate::{CommandResult, command, keelson, world};

#[test]
fn apply_reads_files_folders_and_standard_input() {
    let fake = Fake::start(world());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("web.yaml");
    std::fs::write(&file, "kind: Pod").unwrap();
    let path = file.to_str().unwrap();
    assert_eq!(keelson(&fake.run_dir, &["apply", "-f", path]).ok(), "pod/web-edge created\n");
    assert_eq!(
        keelson(&fake.run_dir, &["apply", "-f", folder.path().to_str().unwrap()]).ok(),
        "pod/web-edge created\n"
    );
    let mut child = command(&fake.run_dir, &["apply", "-f", "-", "-o", "json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"piped").unwrap();
    let json = CommandResult::of(child.wait_with_output().unwrap()).json();
    assert_eq!(json["items"][0]["result"], "created");
    let calls = fake.world.calls.all();
    assert_eq!(calls[0], format!("apply {path}: kind: Pod"));
    assert_eq!(calls[2], "apply standard input: piped");
}

#[test]
fn apply_continues_after_a_refused_manifest() {
    let fake = Fake::start(world());
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.yaml"), "broken").unwrap();
    std::fs::write(folder.path().join("b.yaml"), "fine").unwrap();
    let result = keelson(&fake.run_dir, &["apply", "-f", folder.path().to_str().unwrap()]);
    assert!(result.failed(1).0.ends_with("a.yaml:4: spec.containers: Required value"), "{result:?}");
    assert!(
        result.err.starts_with("error: ") && result.err.contains("a.yaml:1: metadata.name"),
        "{}",
        result.err
    );
    assert_eq!(result.err.lines().count(), 2, "{}", result.err);
    assert_eq!(result.out, "pod/web-edge created\n");
}

#[test]
fn delete_waits_until_the_pod_is_gone() {
    let fake = Fake::start(world());
    assert_eq!(keelson(&fake.run_dir, &["delete", "pod", "web"]).ok(), "pod/web-edge deleted\n");
    assert_eq!(fake.world.calls.all(), ["delete Pod default/web-edge"]);
}

#[test]
fn delete_by_file_deletes_the_pods_of_the_manifest() {
    let fake = Fake::start(world());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.yaml");
    std::fs::write(
        &file,
        "kind: Pod\nmetadata: {name: web}\n---\nmetadata: {name: dns, namespace: system}\n",
    )
    .unwrap();
    let result = keelson(&fake.run_dir, &["delete", "-f", file.to_str().unwrap()]).ok();
    assert_eq!(result, "pod/web-edge deleted\npod/dns-edge deleted\n");
    assert_eq!(fake.world.calls.all(), ["delete Pod default/web-edge", "delete Pod system/dns-edge"]);
}

#[test]
fn apply_and_delete_handle_secrets_and_config_maps() {
    let fake = Fake::start(world());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.yaml");
    let path = file.to_str().unwrap();
    std::fs::write(&file, "kind: Secret\nmetadata: {name: key}\n---\nkind: Pod\nmetadata: {name: web}\n")
        .unwrap();
    assert_eq!(
        keelson(&fake.run_dir, &["apply", "-f", path]).ok(),
        "pod/web-edge created\nsecret/key stored\n"
    );
    assert_eq!(
        keelson(&fake.run_dir, &["delete", "-f", path]).ok(),
        "pod/web-edge deleted\nsecret/key deleted\n"
    );
    std::fs::write(&file, "kind: ConfigMap\nmetadata: {name: web}\n").unwrap();
    let result = keelson(&fake.run_dir, &["delete", "-f", path]);
    assert!(result.failed(1).0.contains("has the name of the pod web-edge"), "{result:?}");
    assert_eq!(fake.world.calls.all()[1..], ["delete Pod default/web-edge", "delete Secret default/key"]);
}

#[test]
fn delete_respects_wait_and_timeout() {
    let fake = Fake::start(World { keeps_deleted: true, ..world() });
    let result = keelson(&fake.run_dir, &["delete", "pod", "web", "--wait=false"]);
    assert_eq!(result.ok(), "pod/web-edge is being deleted\n");
    let result = keelson(&fake.run_dir, &["delete", "pod", "web", "--timeout", "50ms"]);
    assert!(result.failed(75).0.contains("not gone yet"), "{result:?}");
}

#[test]
fn delete_of_a_static_pod_names_its_file() {
    let fake = Fake::start(world());
    let result = keelson(&fake.run_dir, &["delete", "pod", "static"]);
    assert!(result.failed(1).0.contains("/m/static.yaml"), "{result:?}");
}
