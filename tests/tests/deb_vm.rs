//! The Debian packages on a node with running pods: installed, upgraded, removed, installed again, changed to the
//! kubelet's name and back, purged, and installed beside and in the place of another agent, in an emulated machine with systemd.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use keelson_config::ServiceName;
use keelson_testkit::Scratch;
use keelson_tests::packages::{make_packages, said, strip_binaries};
use keelson_tests::vm_node::{Node, bound, web};

/// Two releases in their order. The binaries are the same; what dpkg does with them is what counts here.
const RELEASES: [(&str, &str); 2] = [("old", "1.2.3~test"), ("new", "1.2.4~test")];

const PODS: [&str; 2] = ["web", "bound"];

/// How often the containers of the pods are told to have been restarted after the reboot: each once, by it.
const AFTER_REBOOT: u32 = 1;

#[test]
#[ignore = "boots an emulated machine; minutes"]
fn packages_come_and_go_while_pods_run_on() {
    let scratch = Scratch::new().unwrap();
    let (payload, binaries) = (scratch.path().join("payload"), scratch.path().join("bin"));
    strip_binaries(&binaries);
    for (folder, version) in RELEASES {
        for (name, file) in make_packages(&binaries, &scratch.path().join(folder), version, "022") {
            let place = payload.join(folder);
            fs::create_dir_all(&place).unwrap();
            fs::rename(file, place.join(format!("{name}.deb"))).unwrap();
        }
    }
    pack_other_kubelet(&scratch.path().join("kubelet"), &payload);
    let mut node = Node::boot(scratch);

    with_swap(&mut node);
    println!("--- install");
    node.sh("systemctl restart keelson.target");
    node.until("the target is active", "systemctl is-active keelson.target");
    node.until_well();
    assert_eq!(node.sh("systemctl is-enabled keelson.target").trim(), "enabled");
    for service in ServiceName::supervised().filter(|service| !service.needs_root()) {
        node.sh(&format!("getent passwd keelson-{service}"));
    }
    node.write(
        "/etc/kubernetes/manifests/greeting.yaml",
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: greeting\ndata:\n  text: hello",
    );
    node.write("/etc/kubernetes/manifests/web.yaml", &web());
    node.write("/etc/kubernetes/manifests/bound.yaml", &bound());
    node.until_ready(&PODS);
    let before = node.containers();
    assert_eq!(before.lines().count(), 4, "two sandboxes and two containers:\n{before}");

    upgraded(&mut node, &before);
    refused(&mut node, &before);
    removed_and_back(&mut node, &before);
    as_kubelet(&mut node, &before);
    purged(&mut node);
    nothing_left(&mut node);
}

/// A package `kubelet` that does to a machine what a kubelet's does, with a process that has only the name.
fn pack_other_kubelet(folder: &Path, payload: &Path) {
    let control = "Package: kubelet\nVersion: 1.30.0-1.1\nArchitecture: all\n\
        Maintainer: Nobody <nobody@keelson.invalid>\nDescription: A process of that name\n";
    let unit = "[Service]\nExecStart=/usr/bin/kubelet\n[Install]\nWantedBy=multi-user.target\n";
    for (name, text, mode) in [
        ("DEBIAN/control", control, 0o644),
        (
            "DEBIAN/postinst",
            "#!/bin/sh\nsystemctl daemon-reload\nsystemctl enable --now kubelet.service\n",
            0o755,
        ),
        ("DEBIAN/prerm", "#!/bin/sh\nsystemctl stop kubelet.service\n", 0o755),
        ("usr/bin/kubelet", "#!/bin/sh\nwhile :; do sleep 1000; done\n", 0o755),
        ("usr/lib/systemd/system/kubelet.service", unit, 0o644),
    ] {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let mut command = Command::new("dpkg-deb");
    said(command.args(["--root-owner-group", "--build"]).arg(folder).arg(payload.join("kubelet.deb")));
}

/// A new installation that refuses the machine says so.
fn with_swap(node: &mut Node) {
    println!("--- install on a machine with swap");
    node.sh("dd if=/dev/zero of=/swap bs=1M count=16 && chmod 600 /swap && mkswap /swap && swapon /swap");
    let said = node.sh("dpkg -i /payload/old/keelson.deb 2>&1");
    assert!(said.contains("refused, as with swap on") && said.contains("failSwapOn: false"), "{said}");
    assert!(said.contains("systemctl restart keelson.target"), "the way out: {said}");
    node.sh("journalctl -b -u keelson-config.service --no-pager | grep swapoff");
    node.until_all_are("inactive");
    node.sh("swapoff /swap && rm /swap");
}

/// Every service is a new process of the new files, one after the other; an edited file is kept.
fn upgraded(node: &mut Node, before: &str) {
    println!("--- upgrade");
    node.sh("echo 'maxPods: 55' >> /etc/keelson/kubelet.yaml");
    node.until("the node has it", "keelson get node -o json | grep -Eq '\"pods\": ?\"55\"'");
    node.until_well();
    let pids: Vec<u32> = ServiceName::supervised().map(|service| node.pid(service)).collect();
    node.sh("DEBIAN_FRONTEND=noninteractive dpkg -i /payload/new/keelson.deb");
    node.until_well();
    for (service, pid) in ServiceName::supervised().zip(pids) {
        let now = node.pid(service);
        assert_ne!(now, pid, "{service}");
        let exe = node.sh(&format!("readlink /proc/{now}/exe"));
        assert_eq!(exe.trim(), format!("/usr/libexec/keelson/keelson-{service}"), "of the new files");
    }
    assert_eq!(node.sh("dpkg-query -W -f '${Version}' keelson"), RELEASES[1].1);
    node.sh("grep -q 'maxPods: 55' /etc/keelson/kubelet.yaml");
    undisturbed(node, before, 0);
}

/// A release that takes exception to the configuration leaves what runs alone, and says what to do.
fn refused(node: &mut Node, before: &str) {
    println!("--- a configuration that is refused");
    node.sh("cp /etc/keelson/kubelet.yaml /root/ && echo 'maxPods: many' >> /etc/keelson/kubelet.yaml");
    node.until("it is refused", "systemctl is-failed keelson-config.service");
    let pids: Vec<u32> = ServiceName::supervised().map(|service| node.pid(service)).collect();
    let said = node.sh("DEBIAN_FRONTEND=noninteractive dpkg -i /payload/old/keelson.deb 2>&1");
    assert!(said.contains("keelson: this release refuses the configuration"), "{said}");
    assert!(said.contains("systemctl restart keelson.target"), "the way out: {said}");
    let now: Vec<u32> = ServiceName::supervised().map(|service| node.pid(service)).collect();
    assert_eq!(now, pids, "the services go on with what they have");
    undisturbed(node, before, 0);

    node.sh("cp /root/kubelet.yaml /etc/keelson/");
    node.until("it is good again", "[ $(systemctl show -P Result keelson-config) = success ]");
    node.sh("systemctl restart keelson.target");
    node.until_well();
    undisturbed(node, before, 0);
}

fn removed_and_back(node: &mut Node, before: &str) {
    println!("--- remove");
    node.sh("dpkg -r keelson");
    node.until("no process is left", "! pgrep keelson");
    assert_eq!(node.containers(), before, "pods go on without the agent");
    node.sh("grep -q 'maxPods: 55' /etc/keelson/kubelet.yaml");
    node.sh("! systemctl cat keelson.target 2> /dev/null");

    println!("--- install again");
    node.sh("DEBIAN_FRONTEND=noninteractive dpkg -i /payload/old/keelson.deb");
    node.until_well();
    node.until("the node has what was edited", "keelson get node -o json | grep -Eq '\"pods\": ?\"55\"'");
    undisturbed(node, before, 0);

    println!("--- stopped by hand");
    node.sh("systemctl stop keelson.target");
    node.until_all_are("inactive");
    node.sh("DEBIAN_FRONTEND=noninteractive dpkg -i /payload/new/keelson.deb");
    node.until_all_are("inactive");
    node.sh("systemctl start keelson.target");
    node.until_well();
    undisturbed(node, before, 0);
    node.sh("DEBIAN_FRONTEND=noninteractive dpkg -i /payload/old/keelson.deb");
    node.until_well();
}

fn as_kubelet(node: &mut Node, before: &str) {
    println!("--- keelson-kubelet");
    node.sh("dpkg -i /payload/old/keelson-kubelet.deb");
    node.until("it is active", "systemctl is-active kubelet");
    node.until_all_are("inactive");
    assert_eq!(node.sh("systemctl is-enabled kubelet").trim(), "enabled");
    assert_eq!(node.sh("systemctl is-enabled keelson.target || true").trim(), "disabled");
    undisturbed(node, before, 0);

    println!("--- upgrade of both");
    let pid = node.property("kubelet.service", "MainPID");
    node.sh("DEBIAN_FRONTEND=noninteractive dpkg -i /payload/new/*.deb");
    node.until(
        "it is another process",
        &format!("[ $(systemctl show -P MainPID kubelet) != {pid} ] && systemctl is-active kubelet"),
    );
    node.until_all_are("inactive");
    undisturbed(node, before, 0);

    println!("--- after a reboot it is the kubelet still");
    node.reboot();
    node.until("it is active", "systemctl is-active kubelet");
    node.until_ready(&PODS);
    node.until_all_are("inactive");
    let before = &node.containers();

    println!("--- and back");
    let said = node.sh("dpkg -r keelson-kubelet 2>&1");
    assert!(said.contains("systemctl enable --now keelson.target"), "{said}");
    assert!(said.contains("ends pods that neither"), "{said}");
    node.until("no process is left", "! pgrep keelson");
    assert_eq!(&node.containers(), before);
    node.sh("systemctl enable --now keelson.target");
    node.until_well();
    undisturbed(node, before, AFTER_REBOOT);
}

/// What pods use stays, and is named; a package that comes back takes the pods over.
fn purged(node: &mut Node) {
    println!("--- purge with running pods");
    let before = node.containers();
    let said = node.sh("dpkg -P keelson-kubelet keelson 2>&1");
    node.until("no process is left", "! pgrep keelson");
    assert_eq!(node.containers(), before);
    for kept in ["/var/lib/kubelet", "/var/log/pods", "/etc/kubernetes/manifests"] {
        assert!(said.contains(kept), "{kept} is named: {said}");
        node.sh(&format!("test -d {kept}"));
    }
    for gone in ["/etc/keelson", "/run/keelson", "/var/lib/keelson", "/usr/libexec/keelson"] {
        node.sh(&format!("! test -e {gone}"));
    }
    assert_eq!(node.sh("dpkg-query -W -f '${Package} ' 'keelson*' 2> /dev/null || true").trim(), "");

    // Whose pods these were is not known any more, and no manifest names them.
    node.sh("mkdir /root/manifests && mv /etc/kubernetes/manifests/* /root/manifests/");
    println!("--- install where another agent's pods are");
    let said = node.sh("dpkg -i /payload/new/keelson.deb 2>&1");
    assert!(said.contains("/var/lib/kubelet/pods has pods of another agent"), "{said}");
    nothing_is_started(node, &said, &before);
    beside_another_kubelet(node, &before);
    in_the_place_of_another_kubelet(node, &before);

    println!("--- the pods are taken over");
    node.sh("mv /root/manifests/* /etc/kubernetes/manifests/ && rmdir /root/manifests");
    node.sh("systemctl enable --now keelson.target");
    node.until_well();
    undisturbed(node, &before, AFTER_REBOOT);
}

fn nothing_is_started(node: &mut Node, said: &str, before: &str) {
    assert!(said.contains("keelson: the services are neither started nor enabled"), "{said}");
    assert!(said.contains("systemctl enable --now keelson.target, which ends pods"), "{said}");
    assert_eq!(node.sh("systemctl is-enabled keelson.target || true").trim(), "disabled");
    assert_eq!(node.property("keelson.target", "ActiveState"), "inactive");
    node.until_all_are("inactive");
    assert_eq!(node.containers(), before);
}

fn beside_another_kubelet(node: &mut Node, before: &str) {
    println!("--- beside another kubelet");
    node.sh("dpkg -P keelson && dpkg -i /payload/kubelet.deb");
    let said = node.sh("dpkg -i /payload/new/keelson.deb 2>&1");
    assert!(said.contains("kubelet.service runs"), "{said}");
    nothing_is_started(node, &said, before);

    // By hand neither.
    node.sh("systemctl start keelson.target; systemctl is-failed keelson-config.service");
    node.sh("journalctl -b -u keelson-config.service --no-pager | grep 'a kubelet (pid'");
    node.until_all_are("inactive");
    assert_eq!(node.containers(), before);
}

/// As on a node of an API server, which cannot be asked which pods there are to be.
fn in_the_place_of_another_kubelet(node: &mut Node, before: &str) {
    println!("--- in the place of another kubelet");
    node.sh("systemctl stop keelson.target && dpkg -P keelson && mkdir -p /etc/systemd/system/kubelet.service.d /etc/kubernetes");
    node.write(
        "/etc/kubernetes/kubelet.conf",
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         clusters: [{name: k, cluster: {server: 'https://127.0.0.1:1'}}]\n\
         contexts: [{name: c, context: {cluster: k, user: u}}]\nusers: [{name: u, user: {token: t}}]",
    );
    let line =
        "/usr/bin/kubelet --config=/etc/keelson/kubelet.yaml --kubeconfig=/etc/kubernetes/kubelet.conf";
    let drop_in = format!("[Service]\nExecStart=\nExecStart={line}");
    node.write("/etc/systemd/system/kubelet.service.d/10-kubeadm.conf", &drop_in);
    let said = node.sh("DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
         /payload/new/keelson.deb /payload/new/keelson-kubelet.deb 2>&1");
    assert!(said.contains("keelson: the services are neither started nor enabled"), "{said}");
    node.until("it is active", "systemctl is-active kubelet");
    let pid = node.property("kubelet.service", "MainPID");
    let exe = node.sh(&format!("readlink /proc/{pid}/exe"));
    assert_eq!(exe.trim(), "/usr/libexec/keelson/keelson-init", "{said}");
    assert_eq!(node.sh("systemctl is-enabled kubelet").trim(), "enabled");
    assert_eq!(node.sh("systemctl is-enabled keelson.target || true").trim(), "disabled");
    node.until_all_are("inactive");
    assert_eq!(
        node.sh("systemctl show -P ActiveEnterTimestampMonotonic keelson-pod-sync").trim(),
        "0",
        "{said}"
    );
    assert_eq!(node.containers(), before, "{said}");

    node.sh("dpkg -P keelson-kubelet");
    node.until("no process is left", "! pgrep keelson");
    assert_eq!(node.containers(), before);
    node.sh("rm -r /etc/systemd/system/kubelet.service.d /etc/kubernetes/kubelet.conf /var/lib/kubelet/pki; systemctl daemon-reload");
}

fn nothing_left(node: &mut Node) {
    println!("--- purge without pods");
    node.sh("rm -r /etc/kubernetes/manifests/*");
    node.until_ready(&[]);
    node.until("no folder of a pod is left", "! ls /var/lib/kubelet/pods | grep .");
    // Another program's, in a folder that many use.
    node.sh("mkdir -p /var/lib/kubelet/plugins/other && touch /var/lib/kubelet/plugins/other/state");
    let said = node.sh("dpkg -P keelson 2>&1");
    assert!(said.contains("stay: /var/lib/kubelet\n"), "{said}");
    let left = node.sh("find /var/lib/kubelet -type f");
    assert_eq!(left.trim(), "/var/lib/kubelet/plugins/other/state");
    for gone in
        ["/var/lib/keelson", "/var/log/pods", "/var/log/containers", "/etc/keelson", "/etc/kubernetes"]
    {
        node.sh(&format!("! test -e {gone}"));
    }
    let left = node.sh("find / -xdev -name '*keelson*' -not -path '/proc/*' -not -path '/var/log/*'");
    assert_eq!(left.trim(), "");
}

/// The pods are Ready, in the containers that they had, and as often restarted as then.
fn undisturbed(node: &mut Node, before: &str, restarts: u32) {
    let pods = node.until_ready(&PODS);
    assert_eq!(node.containers(), before);
    for (name, pod) in pods {
        assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], restarts, "{name}");
    }
}
