//! Volumes of real servers: nfsd and the iSCSI target tgtd run next to a node in an emulated machine, at an address that iptables
//! can take away. The agent runs as its units declare it. Mounts, sessions and files are read from the machine and the servers,
//! never from the agent.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_testkit::{BUSYBOX_IMAGE, Scratch};
use keelson_tests::is_ready;
use keelson_tests::packages::{make_packages, strip_binaries};
use keelson_tests::vm_node::{LIMIT, Node};
use serde_json::{Value, json};

/// The address of both servers.
const SERVER: &str = "10.99.0.1";
/// The name of the iSCSI target.
const IQN: &str = "iqn.2026-01.org.example:disk";
/// The user of the target, its password, and a wrong one.
const USER: &str = "initiator";
const PASSWORD: &str = "correct-horse-battery";
const WRONG_PASSWORD: &str = "wrong-horse-battery";

const MANIFESTS: &str = "/etc/kubernetes/manifests";

/// Sets up the servers, and what the node needs for them.
fn server_commands() -> String {
    format!(
        "set -e
ip address add {SERVER}/32 dev lo
mkdir -p /srv/nfs/claimed /srv/nfs/inline /srv/nfs/late /srv/iscsi
echo '/srv/nfs {SERVER}(rw,sync,no_subtree_check,no_root_squash)' > /etc/exports
systemctl start nfs-server
truncate -s 64M /srv/iscsi/disk.img
printf '<target {IQN}>\\nbacking-store /srv/iscsi/disk.img\\nincominguser {USER} {PASSWORD}\\n</target>\\n' \
  > /etc/tgt/conf.d/disk.conf
systemctl start tgt
echo iscsi_tcp > /etc/modules-load.d/iscsi.conf
modprobe iscsi_tcp"
    )
}

/// A PersistentVolume and the claim that is bound to it.
fn claimed(name: &str, source: &Value) -> String {
    let mut volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": format!("pv-{name}")},
        "spec": {
            "capacity": {"storage": "64Mi"}, "accessModes": ["ReadWriteOnce"],
            "claimRef": {"namespace": "default", "name": name},
        },
    });
    volume["spec"].as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "volumeName": format!("pv-{name}"),
            "resources": {"requests": {"storage": "64Mi"}},
        },
    });
    format!("{volume}\n---\n{claim}\n")
}

fn nfs_source(path: &str) -> Value {
    json!({"nfs": {"server": SERVER, "path": format!("/srv/nfs/{path}")}})
}

fn iscsi_source() -> Value {
    json!({"iscsi": {
        "targetPortal": SERVER, "iqn": IQN, "lun": 1, "fsType": "ext4", "chapAuthSession": true,
        "secretRef": {"name": "chap", "namespace": "default"},
    }})
}

fn chap(password: &str) -> String {
    json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "chap"}, "type": "kubernetes.io/iscsi-chap",
        "stringData": {"node.session.auth.username": USER, "node.session.auth.password": password},
    })
    .to_string()
}

fn claim_source(name: &str) -> Value {
    json!({"persistentVolumeClaim": {"claimName": name}})
}

/// A pod that appends its name to a file in its volume, if it has one, and then sleeps.
fn pod(name: &str, source: Option<Value>) -> String {
    let (mut mounts, mut volumes, mut first) = (vec![], vec![], String::new());
    if let Some(mut volume) = source {
        volume["name"] = "data".into();
        volumes.push(volume);
        mounts.push(json!({"name": "data", "mountPath": "/data"}));
        first = format!("echo {name} >> /data/log && sync && ");
    }
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sh", "-c", format!("{first}exec sleep 1000000")], "volumeMounts": mounts,
            }],
            "volumes": volumes,
        },
    })
    .to_string()
}

/// The pods with volumes.
fn pods_with_volumes() -> [(&'static str, String); 3] {
    [
        ("claimed", pod("claimed", Some(claim_source("claimed")))),
        ("inline", pod("inline", Some(nfs_source("inline")))),
        ("disk", pod("disk", Some(claim_source("disk")))),
    ]
}

fn start(node: &mut Node, name: &str, manifest: &str) {
    node.write(&format!("{MANIFESTS}/{name}.yaml"), manifest);
}

fn remove(node: &mut Node, names: &[&str]) {
    let files: Vec<String> = names.iter().map(|name| format!("{MANIFESTS}/{name}.yaml")).collect();
    node.sh(&format!("rm {}", files.join(" ")));
}

/// The folder of a pod.
fn folder(node: &mut Node, name: &str) -> String {
    let pods = node.pods();
    format!("/var/lib/kubelet/pods/{}", pods[&format!("{name}-vm")]["metadata"]["uid"].as_str().unwrap())
}

/// Waits until no pod has a folder, a mount or a session.
fn until_nothing_left(node: &mut Node) {
    node.until_ready(&[]);
    let mounts = "awk '{print $5}' /proc/1/mountinfo | grep -E '^/var/lib/kubelet/(pods|plugins)/'";
    node.until("no volume is mounted", &format!("! {mounts}"));
    node.until("no session is left", "! iscsiadm -m session");
    node.until("no folder of a pod is left", "! ls /var/lib/kubelet/pods | grep .");
    node.until("no record of a disk is left", "! find /var/lib/kubelet/plugins -name iscsi.json | grep .");
}

/// Waits until `explain` says that the pod's volumes wait for volume-manager with a message that contains `text`.
fn until_waits(node: &mut Node, pod: &str, text: &str) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let output = node.sh(&format!("keelson explain pod {pod}-vm -o json || true"));
        let explained: Value = serde_json::from_str(&output).unwrap_or_default();
        let is_it = |step: &Value| {
            let says = step["message"].as_str().is_some_and(|message| message.contains(text));
            says && step["name"] == "volumes" && step["state"] != "done" && step["owner"] == "volume-manager"
        };
        if explained["steps"].as_array().is_some_and(|steps| steps.iter().any(is_it)) {
            return;
        }
        assert!(Instant::now() < deadline, "{pod} does not wait for {text:?}: {explained:#}");
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Waits until a pod is Ready, in any state of the others.
fn until_one_ready(node: &mut Node, name: &str) {
    let deadline = Instant::now() + LIMIT;
    let full = format!("{name}-vm");
    while !node.pods().get(&full).is_some_and(is_ready) {
        assert!(Instant::now() < deadline, "{name} is not Ready: {:#?}", node.pods().get(&full));
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// The name of the volume's folder in the pod's.
fn volume(node: &mut Node, pod: &str) -> String {
    let place = match pod {
        "claimed" => "kubernetes.io~nfs/pv-claimed",
        "disk" => "kubernetes.io~iscsi/pv-disk",
        _ => "kubernetes.io~nfs/data",
    };
    format!("{}/volumes/{place}", folder(node, pod))
}

#[test]
#[ignore = "boots an emulated machine; minutes"]
fn pods_keep_data_on_nfs_and_iscsi_servers_and_a_lost_server_delays_only_its_own() {
    let scratch = Scratch::new().unwrap();
    let (payload, binaries) = (scratch.path().join("payload"), scratch.path().join("bin"));
    std::fs::create_dir_all(&payload).unwrap();
    strip_binaries(&binaries);
    let mut packages = make_packages(&binaries, &scratch.path().join("packages"), "1.2.3~test", "022");
    std::fs::rename(packages.remove("keelson").unwrap(), payload.join("keelson.deb")).unwrap();
    let mut node = Node::boot(scratch);
    node.sh(&server_commands());
    node.sh("dpkg -i /payload/keelson.deb");
    node.until_healthy();

    wrong_then_right_password(&mut node);
    mount_and_keep_data(&mut node);
    lose_the_servers(&mut node);
    println!("--- pods go with everything of theirs");
    node.sh(&format!("rm {MANIFESTS}/*"));
    until_nothing_left(&mut node);
    for service in ServiceName::supervised() {
        assert_eq!(node.property(&format!("keelson-{service}.service"), "NRestarts"), "0", "{service}");
    }
}

/// A login that the target refuses is an error that names the call and no password; with the right one the pod starts.
fn wrong_then_right_password(node: &mut Node) {
    println!("--- a wrong password");
    start(
        node,
        "storage",
        &format!("{}---\n{}", claimed("claimed", &nfs_source("claimed")), claimed("disk", &iscsi_source())),
    );
    start(node, "chap", &chap(WRONG_PASSWORD));
    start(node, "disk", &pod("disk", Some(claim_source("disk"))));
    let refused = "keelson get events -A -o json | grep FailedMount > /dev/null && \
                   keelson get events -A -o json | grep -e '--login ended with exit code 24'";
    node.until("the login is refused", refused);
    node.sh("! iscsiadm -m session");
    start(node, "chap", &chap(PASSWORD));
    node.until_ready(&["disk"]);
    let shown = "{ journalctl -b --no-pager -u 'keelson*'; keelson get events -A -o json; keelson explain pod disk-vm; }";
    node.sh(&format!("! {shown} | grep -F -e {PASSWORD} -e {WRONG_PASSWORD}"));
}

/// The data of each volume outlive its pod, and nothing of it stays on the node.
fn mount_and_keep_data(node: &mut Node) {
    let names = ["claimed", "disk", "inline"];
    for round in 1..=2 {
        println!("--- round {round}: pods with volumes");
        for (name, manifest) in pods_with_volumes() {
            start(node, name, &manifest);
        }
        node.until_ready(&names);
        for name in names {
            let path = volume(node, name);
            let mounted = node.sh(&format!("findmnt -n -o FSTYPE,SOURCE {path}"));
            let expected = match name {
                "disk" => "ext4 /dev/sd".to_owned(),
                _ => format!("nfs4 {SERVER}:/srv/nfs/{name}"),
            };
            let words: Vec<&str> = mounted.split_whitespace().collect();
            assert!(words.join(" ").starts_with(&expected), "{name}: {mounted}");
            let log = node.sh(&format!("cat {path}/log"));
            assert_eq!(log, format!("{name}\n").repeat(round), "{name}, round {round}");
        }
        for name in ["claimed", "inline"] {
            let log = node.sh(&format!("cat /srv/nfs/{name}/log"));
            assert_eq!(log.lines().count(), round, "{name} on the server");
        }
        assert_eq!(node.sh("iscsiadm -m session").lines().count(), 1);
        if round == 1 {
            remove(node, &names);
            until_nothing_left(node);
        }
    }
}

/// While the servers do not answer, pods without them start and end, and `explain` names the server for the others.
fn lose_the_servers(node: &mut Node) {
    println!("--- the servers do not answer");
    let id = |node: &mut Node| node.pods()["claimed-vm"]["status"]["containerStatuses"][0].clone();
    let before = id(node);
    remove(node, &["disk"]);
    node.until("the node has logged out", "! iscsiadm -m session");
    node.until_ready(&["claimed", "inline"]);
    let released = folder(node, "inline");
    node.sh(&format!("iptables -I INPUT -d {SERVER} -j DROP"));
    start(node, "disk", &pod("disk", Some(claim_source("disk"))));
    start(node, "late", &pod("late", Some(nfs_source("late"))));
    until_waits(node, "late", &format!("the NFS server {SERVER}"));
    until_waits(node, "disk", &format!("the iSCSI portal {SERVER}"));
    remove(node, &["inline"]);
    for name in ["other", "another"] {
        start(node, name, &pod(name, None));
        until_one_ready(node, name);
    }
    let ended = folder(node, "another");
    remove(node, &["another"]);
    node.until("a pod ends meanwhile", &format!("! test -e {ended}"));
    node.until("a pod with a mounted volume ends meanwhile", &format!("! test -e {released}"));
    node.until_healthy();

    println!("--- the servers answer again");
    node.sh(&format!("iptables -D INPUT -d {SERVER} -j DROP"));
    node.until_ready(&["claimed", "disk", "late", "other"]);
    assert_eq!(id(node)["containerID"], before["containerID"]);
    assert_eq!(id(node)["restartCount"], 0);
    for (name, lines) in [("claimed", 2), ("disk", 3), ("late", 1)] {
        let path = volume(node, name);
        assert_eq!(node.sh(&format!("cat {path}/log")).lines().count(), lines, "{name}");
    }
    node.sh("keelson exec claimed-vm -- sh -c 'echo after >> /data/log && sync'");
    assert_eq!(node.sh("tail -n 1 /srv/nfs/claimed/log").trim(), "after");
}
