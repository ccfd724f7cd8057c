//! The Debian packages on a node with running pods: installed, upgraded, removed, reinstalled, switched to the
//! kubelet's name and back, purged, and installed next to and in place of another agent, in an emulated machine with systemd.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use keelson_config::ServiceName;
use keelson_testkit::Scratch;
use keelson_tests::packages::{command_output, make_packages, strip_binaries};
use keelson_tests::vm_node::{Node, bound, web};

/// Two releases in order. Their binaries are the same; only dpkg's handling is tested.
const RELEASES: [(&str, &str); 2] = [("old", "1.2.3~test"), ("new", "1.2.4~test")];

const PODS: [&str; 2] = ["web", "bound"];

/// The restart count of each pod's container after the reboot.
const AFTER_REBOOT: u32 = 1;

#[test]
#[ignore = "boots an emulated machine; minutes"]
fn packages_are_installed_upgraded_and_removed_while_pods_run() {
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

    refuse_with_swap(&mut node);
    println!("--- install");
    node.sh("systemctl restart keelson.target");
    node.until("the target is active", "systemctl is-active keelson.target");
    node.until_healthy();
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

    upgrade(&mut node, &before);
    refuse_upgrade(&mut node, &before);
    remove_and_reinstall(&mut node, &before);
    switch_to_kubelet(&mut node, &before);
    purge(&mut node);
    assert_nothing_left(&mut node);
}

/// A package `kubelet` that changes a machine as the real one does, with a process that only has the name.
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
    command_output(
        command.args(["--root-owner-group", "--build"]).arg(folder).arg(payload.join("kubelet.deb")),
    );
}

/// A new installation on an unsuitable machine is refused with a message.
fn refuse_with_swap(node: &mut Node) {
    println!("--- install on a machine with swap");
    node.sh("dd if=/dev/zero of=/swap bs=1M count=16 && chmod 600 /swap && mkswap /swap && swapon /swap");
    let output = node.sh("dpkg -i /payload/old/keelson.deb 2>&1");
    assert!(output.contains("refused, as with swap on") && output.contains("failSwapOn: false"), "{output}");
    assert!(output.contains("systemctl restart keelson.target"), "no remedy: {output}");
    node.sh("journalctl -b -u keelson-config.service --no-pager | grep swapoff");
    node.until_all_are("inactive");
    node.sh("swapoff /swap && rm /swap");
}

/// Every service is replaced by a new process, one after the other; an edited file is kept.
fn upgrade(node: &mut Node, before: &str) {
    println!("--- upgrade");
    node.sh("echo 'maxPods: 55' >> /etc/keelson/kubelet.yaml");
    node.until("the node has it", "keelson get node -o json | grep -Eq '\"pods\": ?\"55\"'");
    node.until_healthy();
    let pids: Vec<u32> = ServiceName::supervised().map(|service| node.pid(service)).collect();
    node.sh("DEBIAN_FRONTEND=noninteractive dpkg -i /payload/new/keelson.deb");
    node.until_healthy();
    for (service, pid) in ServiceName::supervised().zip(pids) {
        let now = node.pid(service);
        assert_ne!(now, pid, "{service}");
        let exe = node.sh(&format!("readlink /proc/{now}/exe"));
        assert_eq!(exe.trim(), format!("/usr/libexec/keelson/keelson-{service}"), "of the new files");
    }
    assert_eq!(node.sh("dpkg-query -W -f '${Version}' keelson"), RELEASES[1].1);
    node.sh("grep -q 'maxPods: 55' /etc/keelson/kubelet.yaml");
    assert_pods_unaffected(node, before, 0);
}

/// A release that rejects the configuration leaves running services alone, and its message has a remedy.
fn refuse_upgrade(node: &mut Node, before: &str) {
    println!("--- a configuration that is refused");
    node.sh("cp /etc/keelson/kubelet.yaml /root/ && echo 'maxPods: many' >> /etc/keelson/kubelet.yaml");
    node.until("it is refused", "systemctl is-failed keelson-config.service");
    let pids: Vec<u32> = ServiceName::supervised().map(|service| node.pid(service)).collect();
    let output = node.sh("DEBIAN_FRONTEND=noninteractive dpkg -i /payload/old/keelson.deb 2>&1");
    assert!(output.contains("keelson: this release refuses the configuration"), "{output}");
    assert!(output.contains("systemctl restart keelson.target"), "no remedy: {output}");
    let now: Vec<u32> = ServiceName::supervised().map(|service| node.pid(service)).collect();
    if now != pids {
        let log = node.sh("journalctl -b --no-pager -n 200 -u 'keelson*' -u init.scope");
        panic!("a service was restarted: {pids:?}, then {now:?}\n{log}");
    }
    assert_pods_unaffected(node, before, 0);

    node.sh("cp /root/kubelet.yaml /etc/keelson/");
    node.until(
        "the configuration is valid again",
        "[ $(systemctl show -P Result keelson-config) = success ]",
    );
    node.sh("systemctl restart keelson.target");
    node.until_healthy();
    assert_pods_unaffected(node, before, 0);
}

fn remove_and_reinstall(node: &mut Node, before: &str) {
    println!("--- remove");
    node.sh("dpkg -r keelson");
    node.until("no process is left", "! pgrep keelson");
    assert_eq!(node.containers(), before, "pods keep running without the agent");
    node.sh("grep -q 'maxPods: 55' /etc/keelson/kubelet.yaml");
    node.sh("! systemctl cat keelson.target 2> /dev/null");

    println!("--- install again");
    node.sh("DEBIAN_FRONTEND=noninteractive dpkg -i /payload/old/keelson.deb");
    node.until_healthy();
    node.until("the node has what was edited", "keelson get node -o json | grep -Eq '\"pods\": ?\"55\"'");
    assert_pods_unaffected(node, before, 0);

    println!("--- stopped by hand");
    node.sh("systemctl stop keelson.target");
    node.until_all_are("inactive");
    node.sh("DEBIAN_FRONTEND=noninteractive dpkg -i /payload/new/keelson.deb");
    node.until_all_are("inactive");
    node.sh("systemctl start keelson.target");
    node.until_healthy();
    assert_pods_unaffected(node, before, 0);
    node.sh("DEBIAN_FRONTEND=noninteractive dpkg -i /payload/old/keelson.deb");
    node.until_healthy();
}

fn switch_to_kubelet(node: &mut Node, before: &str) {
    println!("--- keelson-kubelet");
    node.sh("dpkg -i /payload/old/keelson-kubelet.deb");
    node.until("it is active", "systemctl is-active kubelet");
    node.until_all_are("inactive");
    assert_eq!(node.sh("systemctl is-enabled kubelet").trim(), "enabled");
    assert_eq!(node.sh("systemctl is-enabled keelson.target || true").trim(), "disabled");
    assert_pods_unaffected(node, before, 0);

    println!("--- upgrade of both");
    let pid = node.property("kubelet.service", "MainPID");
    node.sh("DEBIAN_FRONTEND=noninteractive dpkg -i /payload/new/*.deb");
    node.until(
        "it is another process",
        &format!("[ $(systemctl show -P MainPID kubelet) != {pid} ] && systemctl is-active kubelet"),
    );
    node.until_all_are("inactive");
    assert_pods_unaffected(node, before, 0);

    println!("--- after a reboot it is the kubelet still");
    node.reboot();
    node.until("it is active", "systemctl is-active kubelet");
    node.until_ready(&PODS);
    node.until_all_are("inactive");
    let before = &node.containers();

    println!("--- and back");
    let output = node.sh("dpkg -r keelson-kubelet 2>&1");
    assert!(output.contains("systemctl enable --now keelson.target"), "{output}");
    assert!(output.contains("ends pods that neither"), "{output}");
    node.until("no process is left", "! pgrep keelson");
    assert_eq!(&node.containers(), before);
    node.sh("systemctl enable --now keelson.target");
    node.until_healthy();
    assert_pods_unaffected(node, before, AFTER_REBOOT);
}

/// Files that pods use stay and are named; a reinstalled package adopts the pods.
fn purge(node: &mut Node) {
    println!("--- purge with running pods");
    let before = node.containers();
    let output = node.sh("dpkg -P keelson-kubelet keelson 2>&1");
    node.until("no process is left", "! pgrep keelson");
    assert_eq!(node.containers(), before);
    for kept in ["/var/lib/kubelet", "/var/log/pods", "/etc/kubernetes/manifests"] {
        assert!(output.contains(kept), "{kept} is not named: {output}");
        node.sh(&format!("test -d {kept}"));
    }
    for gone in ["/etc/keelson", "/run/keelson", "/var/lib/keelson", "/usr/libexec/keelson"] {
        node.sh(&format!("! test -e {gone}"));
    }
    assert_eq!(node.sh("dpkg-query -W -f '${Package} ' 'keelson*' 2> /dev/null || true").trim(), "");

    // The owner of these pods is no longer known, and no manifest names them.
    node.sh("mkdir /root/manifests && mv /etc/kubernetes/manifests/* /root/manifests/");
    println!("--- install where another agent's pods are");
    let output = node.sh("dpkg -i /payload/new/keelson.deb 2>&1");
    assert!(output.contains("/var/lib/kubelet/pods has pods of another agent"), "{output}");
    assert_nothing_started(node, &output, &before);
    install_next_to_another_kubelet(node, &before);
    replace_another_kubelet(node, &before);

    println!("--- the pods are taken over");
    node.sh("mv /root/manifests/* /etc/kubernetes/manifests/ && rmdir /root/manifests");
    node.sh("systemctl enable --now keelson.target");
    node.until_healthy();
    assert_pods_unaffected(node, &before, AFTER_REBOOT);
}

fn assert_nothing_started(node: &mut Node, output: &str, before: &str) {
    assert!(output.contains("keelson: the services are neither started nor enabled"), "{output}");
    assert!(output.contains("systemctl enable --now keelson.target, which ends pods"), "{output}");
    assert_eq!(node.sh("systemctl is-enabled keelson.target || true").trim(), "disabled");
    assert_eq!(node.property("keelson.target", "ActiveState"), "inactive");
    node.until_all_are("inactive");
    assert_eq!(node.containers(), before);
}

fn install_next_to_another_kubelet(node: &mut Node, before: &str) {
    println!("--- beside another kubelet");
    node.sh("dpkg -P keelson && dpkg -i /payload/kubelet.deb");
    let output = node.sh("dpkg -i /payload/new/keelson.deb 2>&1");
    assert!(output.contains("kubelet.service runs"), "{output}");
    assert_nothing_started(node, &output, before);

    // A manual start is refused, too.
    node.sh("systemctl start keelson.target; systemctl is-failed keelson-config.service");
    node.sh("journalctl -b -u keelson-config.service --no-pager | grep 'a kubelet (pid'");
    node.until_all_are("inactive");
    assert_eq!(node.containers(), before);
}

/// As on a node of an API server that is unreachable, so that the desired pods are unknown.
fn replace_another_kubelet(node: &mut Node, before: &str) {
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
    let output = node.sh("DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
         /payload/new/keelson.deb /payload/new/keelson-kubelet.deb 2>&1");
    assert!(output.contains("keelson: the services are neither started nor enabled"), "{output}");
    node.until("it is active", "systemctl is-active kubelet");
    let pid = node.property("kubelet.service", "MainPID");
    let exe = node.sh(&format!("readlink /proc/{pid}/exe"));
    assert_eq!(exe.trim(), "/usr/libexec/keelson/keelson-init", "{output}");
    assert_eq!(node.sh("systemctl is-enabled kubelet").trim(), "enabled");
    assert_eq!(node.sh("systemctl is-enabled keelson.target || true").trim(), "disabled");
    node.until_all_are("inactive");
    assert_eq!(
        node.sh("systemctl show -P ActiveEnterTimestampMonotonic keelson-pod-sync").trim(),
        "0",
        "{output}"
    );
    assert_eq!(node.containers(), before, "{output}");

    node.sh("dpkg -P keelson-kubelet");
    node.until("no process is left", "! pgrep keelson");
    assert_eq!(node.containers(), before);
    node.sh("rm -r /etc/systemd/system/kubelet.service.d /etc/kubernetes/kubelet.conf /var/lib/kubelet/pki; systemctl daemon-reload");
}

fn assert_nothing_left(node: &mut Node) {
    println!("--- purge without pods");
    node.sh("rm -r /etc/kubernetes/manifests/*");
    node.until_ready(&[]);
    node.until("no folder of a pod is left", "! ls /var/lib/kubelet/pods | grep .");
    // A file of another program in a shared folder.
    node.sh("mkdir -p /var/lib/kubelet/plugins/other && touch /var/lib/kubelet/plugins/other/state");
    let output = node.sh("dpkg -P keelson 2>&1");
    assert!(output.contains("stay: /var/lib/kubelet\n"), "{output}");
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

/// The pods are Ready, in the same containers, with these restart counts.
fn assert_pods_unaffected(node: &mut Node, before: &str, restarts: u32) {
    let pods = node.until_ready(&PODS);
    assert_eq!(node.containers(), before);
    for (name, pod) in pods {
        assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], restarts, "{name}");
    }
}
