//! Owners of the files that the agent makes for pods and in a kubelet's folders: root and root's group, as a kubelet's.
//! The container's view is checked by the container itself.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use keelson_testkit::{Agent, Scratch};
use keelson_tests::{running, until_ready};

const OBJECTS: &str = "apiVersion: v1
kind: ConfigMap
metadata:
  name: conf
data:
  colour: red
---
apiVersion: v1
kind: Secret
metadata:
  name: key
stringData:
  token: hunter2
";

/// A container that is not root, in root's group, which mode 0440 lets read.
const POD: &str = "apiVersion: v1
kind: Pod
metadata:
  name: web
  labels: {tier: front}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: main
    image: keelson.local/busybox:1
    imagePullPolicy: Never
    command: [sh, -ec, 'cat /conf/colour /key/token /all/colour /down/labels /part > /empty/seen; exec sleep 1000']
    securityContext: {runAsUser: 1000, runAsGroup: 0}
    volumeMounts:
    - {name: conf, mountPath: /conf}
    - {name: key, mountPath: /key}
    - {name: all, mountPath: /all}
    - {name: down, mountPath: /down}
    - {name: empty, mountPath: /empty}
    - {name: below, mountPath: /below, subPath: made/for/it}
    - {name: conf, mountPath: /part, subPath: colour}
  volumes:
  - {name: conf, configMap: {name: conf, defaultMode: 0440}}
  - {name: key, secret: {secretName: key, defaultMode: 0440}}
  - {name: all, projected: {defaultMode: 0440, sources: [{configMap: {name: conf}}]}}
  - {name: down, downwardAPI: {defaultMode: 0440, items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}
  - {name: empty, emptyDir: {}}
  - {name: below, emptyDir: {}}
";

/// The files of a folder that do not belong to root: user and group of each.
fn not_owned_by_root(folder: &Path, found: &mut BTreeMap<String, (u32, u32)>) {
    let meta = std::fs::symlink_metadata(folder).unwrap();
    if (meta.uid(), meta.gid()) != (0, 0) {
        found.insert(folder.display().to_string(), (meta.uid(), meta.gid()));
    }
    if meta.is_dir() {
        for entry in std::fs::read_dir(folder).unwrap() {
            not_owned_by_root(&entry.unwrap().path(), found);
        }
    }
}

#[tokio::test]
async fn files_made_for_pods_belong_to_root_and_mode_0440_is_group_readable() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("objects.yaml", OBJECTS).unwrap();
    agent.write_manifest("web.yaml", POD).unwrap();
    // The container exits at once if it may not read one of the files.
    until_ready(&agent, &["web"]).await.unwrap();

    let full = format!("web-{}/main", agent.spec().node_name);
    let process = running(&agent).await.unwrap().remove(&full).expect("the container runs");
    let inside = Path::new("/proc").join(process.pid.to_string()).join("root");
    let seen = std::fs::read_to_string(inside.join("empty/seen")).unwrap();
    assert_eq!(seen, "redhunter2redtier=\"front\"red");
    for path in ["below", "etc/hosts", "dev/termination-log", "conf", "key", "all", "down", "empty"] {
        let meta = std::fs::metadata(inside.join(path)).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (0, 0), "/{path}");
    }
    std::fs::remove_file(inside.join("empty/seen")).unwrap();

    let spec = agent.spec();
    let mut found = BTreeMap::new();
    for folder in [&spec.root_dir, &spec.pod_logs_dir, &spec.links_dir] {
        not_owned_by_root(folder, &mut found);
    }
    assert!(found.is_empty(), "{found:#?}");
}
