//! A reboot and a cancelled one with the real systemd-logind, in an emulated machine, with the units of deploy/systemd
//! (node-and-api.md §11).

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::path::Path;

use keelson_testkit::Scratch;
use keelson_tests::ending::ending_pod;
use keelson_tests::vm_node::{Node, doc_commands, pack};

const MARKS: &str = "/var/lib/marks";

fn write_pod(node: &mut Node, name: &str, priority: i32) {
    let manifest = ending_pod(Path::new(MARKS), name, priority);
    node.write(&format!("/etc/kubernetes/manifests/{name}.yaml"), &manifest);
}

fn until_inhibited(node: &mut Node) {
    node.until("a shutdown is delayed", "systemd-inhibit --list --no-pager | grep -q kubelet");
}

fn until_mark(node: &mut Node, file: &str, content: &str) {
    node.until(
        &format!("{file} is {content:?}"),
        &format!("[ \"$(echo $(cat {MARKS}/{file}))\" = '{content}' ]"),
    );
}

#[test]
#[ignore = "boots an emulated machine; minutes"]
fn a_reboot_waits_for_pods_and_a_cancelled_one_lets_the_node_continue() {
    let scratch = Scratch::new().unwrap();
    pack(&scratch.path().join("payload"));
    let mut node = Node::boot(scratch);
    node.sh(&doc_commands("Install"));
    node.until_healthy();
    node.sh(&format!("mkdir {MARKS}"));
    node.sh("cat >> /etc/keelson/kubelet.yaml <<'END'\nshutdownGracePeriodByPodPriority:\n\
         - {priority: 0, shutdownGracePeriodSeconds: 240}\n\
         - {priority: 1000, shutdownGracePeriodSeconds: 120}\nEND");
    until_inhibited(&mut node);
    let limit = node.sh("cat /etc/systemd/logind.conf.d/99-kubelet.conf");
    assert_eq!(limit, "# Kubelet logind override\n[Login]\nInhibitDelayMaxSec=360\n");
    for (name, priority) in [("low", 0), ("high", 1000)] {
        write_pod(&mut node, name, priority);
    }
    node.until_ready(&["low", "high"]);
    cancel(&mut node);
    reboot(&mut node);
}

/// systemd-logind cancels a shutdown when its target cannot be started: it is masked during the delay.
fn cancel(node: &mut Node) {
    println!("--- a cancelled reboot");
    node.sh("systemctl reboot");
    until_mark(node, "ended", "low");
    node.until("the node is not ready", "keelson get node -o json | grep -q 'node is shutting down'");
    write_pod(node, "next", 0);
    node.until("a new pod is refused", "keelson get pods -A -o json | grep -q NodeShutdown");
    node.sh("systemctl mask --runtime reboot.target");
    node.sh(&format!("touch {MARKS}/let-low"));
    until_mark(node, "ended", "low high");
    node.sh(&format!("touch {MARKS}/let-high"));
    node.until(
        "the cancellation is an event",
        "keelson get events | grep -q 'detected shutdown cancellation'",
    );
    until_inhibited(node);
    node.until("the new pod starts", &format!("grep -q next {MARKS}/started"));
    let pods = node.pods();
    for name in ["low-vm", "high-vm"] {
        assert_eq!(pods[name]["status"]["reason"], "Terminated", "{:#}", pods[name]);
    }
    node.until("the node is ready", "keelson get node | grep -qw Ready");
    node.sh("systemctl unmask --runtime reboot.target");
}

fn reboot(node: &mut Node) {
    println!("--- a reboot");
    node.sh(&format!("touch {MARKS}/let-next; sync"));
    node.reboot();
    node.until("the target is active", "systemctl is-active keelson.target");
    node.until_healthy();
    // What has ended before and what the reboot has ended starts again: no controller replaces static pods.
    node.until_ready(&["low", "high", "next"]);
    until_mark(node, "ended", "low high next");
    assert_eq!(node.sh(&format!("sort {MARKS}/started | uniq -c | wc -l")).trim(), "3");
    assert_eq!(node.sh(&format!("wc -l < {MARKS}/started")).trim(), "6");
    let times = node.sh("cat /var/lib/kubelet/graceful_node_shutdown_state");
    let times: serde_json::Value = serde_json::from_str(&times).unwrap();
    let time = |name: &str| times[name].as_str().unwrap_or_default().to_owned();
    assert!(time("startTime").as_str() > "2020" && time("endTime") >= time("startTime"), "{times}");
    until_inhibited(node);
}
