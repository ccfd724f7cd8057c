//! Volumes in a running container: every type of a hostPath, emptyDirs in memory and their size, downward API fields
//! that change (volumes.md §9.5, §10.1, §10.2). The container's view is read through /proc, never from the agent.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::{LIMIT, is_ready, pods, running, until_ready};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat, statvfs};
use serde_json::{Value, json};

/// The memory limit of the pod.
const MEMORY: u64 = 64 << 20;
/// The size limit of one of its volumes.
const SIZE: u64 = 16 << 20;

/// The types of a hostPath, each with a path below the same folder.
const TYPES: [&str; 7] =
    ["DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket", "CharDevice", "BlockDevice"];

/// Creates what the types need to exist.
fn create_host_paths(folder: &Path) -> UnixListener {
    fs::create_dir(folder).unwrap();
    fs::create_dir(folder.join("Directory")).unwrap();
    fs::write(folder.join("File"), "of the host").unwrap();
    // Device nodes are only checked and mounted, never opened (null and loop0).
    for (name, kind, device) in [
        ("CharDevice", FileType::CharacterDevice, makedev(1, 3)),
        ("BlockDevice", FileType::BlockDevice, makedev(7, 0)),
    ] {
        mknodat(CWD, folder.join(name), kind, Mode::from_raw_mode(0o600), device).unwrap();
    }
    UnixListener::bind(folder.join("Socket")).unwrap()
}

/// A pod with a fixed UID, so that a change of its manifest does not replace it.
fn pod(folder: &Path, tier: &str) -> String {
    let of_host = |kind: &&str| json!({"name": kind.to_lowercase(), "hostPath": {"path": folder.join(kind), "type": kind}});
    let mut volumes: Vec<Value> = TYPES.iter().map(of_host).collect();
    volumes.push(json!({"name": "sized", "emptyDir": {"medium": "Memory", "sizeLimit": SIZE.to_string()}}));
    volumes.push(json!({"name": "whole", "emptyDir": {"medium": "Memory"}}));
    let labels = json!({"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}});
    volumes.push(json!({"name": "fields", "downwardAPI": {"items": [labels]}}));
    let mount = |volume: &Value| {
        let name = volume["name"].as_str().unwrap();
        json!({"name": name, "mountPath": format!("/v/{name}")})
    };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "web", "uid": "11111111-2222-3333-4444-555555555555", "labels": {"app": "web", "tier": tier},
        },
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sh", "-c", "exec sleep 1000000"],
                "resources": {"limits": {"memory": MEMORY.to_string()}},
                "volumeMounts": volumes.iter().map(mount).collect::<Vec<Value>>(),
            }],
            "volumes": volumes,
        },
    })
    .to_string()
}

#[tokio::test]
async fn host_path_types_memory_volumes_and_downward_api_updates_reach_the_container() {
    let scratch = Scratch::new().unwrap();
    let folder = scratch.path().join("host");
    let _socket = create_host_paths(&folder);
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("web.json", &pod(&folder, "front")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    let before = running(&agent).await.unwrap();
    let process = before.values().next().unwrap();
    let inside = PathBuf::from(format!("/proc/{}/root/v", process.pid));
    check_host_paths(&folder, &inside);
    check_memory_volumes(&inside);

    let labels = inside.join("fields/labels");
    assert_eq!(fs::read_to_string(&labels).unwrap(), "app=\"web\"\ntier=\"front\"");
    agent.write_manifest("web.json", &pod(&folder, "back")).unwrap();
    let changed = eventually(LIMIT, "the new label is in the file", async || {
        fs::read_to_string(&labels).is_ok_and(|text| text == "app=\"web\"\ntier=\"back\"")
    });
    changed.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_eq!(running(&agent).await.unwrap(), before, "nothing has restarted");
    let pod = pods(&agent).await.unwrap().into_values().next().unwrap();
    assert!(is_ready(&pod) && pod["status"]["containerStatuses"][0]["restartCount"] == 0, "{pod:#}");
    agent.end().unwrap();
}

/// Each mount is the host's path, of the right type.
fn check_host_paths(folder: &Path, inside: &Path) {
    for kind in TYPES {
        let (host, mounted) = (folder.join(kind), inside.join(kind.to_lowercase()));
        let of = |path: &Path| fs::metadata(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (host, mounted) = (of(&host), of(&mounted));
        let what = |meta: &fs::Metadata| (meta.dev(), meta.ino(), meta.rdev(), meta.mode());
        assert_eq!(what(&mounted), what(&host), "{kind}");
        let (found, is) = (mounted.file_type(), mounted.mode() & 0o7777);
        let good = match kind {
            "Directory" => found.is_dir(),
            "DirectoryOrCreate" => found.is_dir() && is == 0o755,
            "File" => found.is_file(),
            "FileOrCreate" => found.is_file() && is == 0o644 && mounted.len() == 0,
            "Socket" => found.is_socket(),
            "CharDevice" => found.is_char_device(),
            _ => found.is_block_device(),
        };
        assert!(good, "{kind}: {mounted:?}");
    }
    assert_eq!(fs::read_to_string(inside.join("file")).unwrap(), "of the host");
}

/// The volume with a limit has that size and is full beyond it; the other one has the pod's memory limit.
fn check_memory_volumes(inside: &Path) {
    for (name, wanted) in [("sized", SIZE), ("whole", MEMORY)] {
        let stat = statvfs(inside.join(name)).unwrap();
        assert_eq!(stat.f_blocks * stat.f_frsize, wanted, "{name}");
    }
    let mut file = fs::File::create(inside.join("sized/file")).unwrap();
    let full = file.write_all(&vec![1; usize::try_from(SIZE).unwrap() + 1]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull, "{full}");
}
