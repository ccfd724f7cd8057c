//! The units of deploy/systemd under a real systemd, on cgroup v2, with Debian's kernel and containerd, in an emulated
//! machine: installed as docs/systemd.md says, killed, stopped, changed, rebooted, replaced by `kubelet.service`.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeMap;

use keelson_config::ServiceName;
use keelson_testkit::Scratch;
use keelson_tests::vm_node::{Node, bound, doc_commands, pack, web};
use serde_json::Value;

#[test]
#[ignore = "boots an emulated machine; minutes"]
fn pods_keep_running_when_the_units_are_stopped_killed_hung_or_changed() {
    let scratch = Scratch::new().unwrap();
    pack(&scratch.path().join("payload"));
    let mut node = Node::boot(scratch);
    node.sh(&doc_commands("Install"));
    node.until("the target is active", "systemctl is-active keelson.target");
    node.until_healthy();
    check_service_settings(&mut node);

    node.write(
        "/etc/kubernetes/manifests/greeting.yaml",
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: greeting\ndata:\n  text: hello",
    );
    node.write("/etc/kubernetes/manifests/web.yaml", &web());
    node.write("/etc/kubernetes/manifests/bound.yaml", &bound());
    let pods = node.until_ready(&["web", "bound"]);
    let before = node.containers();
    assert_eq!(before.lines().count(), 4, "two sandboxes and two containers:\n{before}");
    check_cgroups(&mut node, &pods);
    check_mounts(&mut node, &pods, "hello");

    println!("--- look around, logs");
    for title in ["Look around", "Logs"] {
        node.sh(&doc_commands(title));
    }
    stop_and_start(&mut node, &before);
    kill_services(&mut node, &before);
    stop_processes(&mut node, &before);
    change_configuration(&mut node, &before);
    run_as_kubelet(&mut node, &before);
    reboot_and_check(&mut node);

    println!("--- pods go with everything of theirs");
    node.sh("rm /etc/kubernetes/manifests/*");
    node.until_ready(&[]);
    node.until(
        "no cgroup of a pod is left",
        "! find /sys/fs/cgroup/kubepods.slice -name '*pod*-*pod*.slice' | grep .",
    );
    node.until("no mount of a pod is left", "! grep /var/lib/kubelet/pods/ /proc/1/mountinfo");
    node.until("no folder of a pod is left", "! ls /var/lib/kubelet/pods | grep .");
    node.sh(&doc_commands("Remove"));
    node.until("no process is left", "! pgrep keelson");
}

/// User, capabilities, cgroup, mount namespace and OOM score of each service, from /proc.
fn check_service_settings(node: &mut Node) {
    println!("--- each service is what its unit says");
    let machine = node.sh("readlink /proc/1/ns/mnt");
    for service in ServiceName::supervised() {
        let pid = node.pid(service);
        let unit = format!("keelson-{service}.service");
        assert_eq!(
            node.sh(&format!("readlink /proc/{pid}/exe")).trim(),
            format!("/usr/libexec/keelson/keelson-{service}")
        );
        assert_eq!(node.sh(&format!("cat /proc/{pid}/cgroup")).trim(), format!("0::/keelson.slice/{unit}"));
        assert_eq!(node.sh(&format!("cat /proc/{pid}/oom_score_adj")).trim(), "-999", "{service}");
        let user = if service.needs_root() { "root".to_owned() } else { format!("keelson-{service}") };
        let owner = node.sh(&format!("ps -o euser:32=,egroup:32= -p {pid}"));
        let group = if service.needs_root() { "root" } else { "keelson" };
        assert_eq!(owner.split_whitespace().collect::<Vec<_>>(), [user.as_str(), group], "{service}");
        // The group of the socket decides who may use it, not the group of the service.
        let socket = node.sh(&format!("stat -c '%G %a' /run/keelson/{service}/{service}.sock"));
        assert_eq!(socket.trim(), "keelson 660", "{service}");
        let status = node.sh(&format!("cat /proc/{pid}/status"));
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
        assert_eq!(field("NoNewPrivs:"), "1", "{service}");
        let kept = keelson_init_core::privileges::capability_bits(service);
        for set in ["CapEff:", "CapBnd:"] {
            assert_eq!(u64::from_str_radix(&field(set), 16).unwrap(), kept, "{service} {set}");
        }
        let own = node.sh(&format!("readlink /proc/{pid}/ns/mnt"));
        assert_eq!(own == machine, service == ServiceName::VolumeManager, "{service}");
    }
}

fn check_cgroups(node: &mut Node, pods: &BTreeMap<String, Value>) {
    println!("--- cgroups");
    let slice = |name: &str| {
        format!("pod{}.slice", pods[name]["metadata"]["uid"].as_str().unwrap().replace('-', "_"))
    };
    let web = format!("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-{}", slice("web-vm"));
    let bound = format!("/kubepods.slice/kubepods-{}", slice("bound-vm"));
    // 250m and 500m are 256 and 512 shares.
    for (name, place, weight, max, memory) in
        [("web", &web, "10", "max 100000", 128 << 20), ("bound", &bound, "20", "50000 100000", 64 << 20)]
    {
        let scopes = node.sh(&format!("ls -d /sys/fs/cgroup{place}/cri-containerd-*.scope"));
        assert_eq!(scopes.lines().count(), 2, "{name}: a sandbox and a container:\n{scopes}");
        let id =
            pods[&format!("{name}-vm")]["status"]["containerStatuses"][0]["containerID"].as_str().unwrap();
        let id = id.rsplit('/').next().unwrap();
        let scope = format!("{place}/cri-containerd-{id}.scope");
        let process = node.sh(&format!("ctr -n k8s.io tasks list | while read -r id pid _; do [ $id = {id} ] && cat /proc/$pid/cgroup; done; true"));
        assert_eq!(process.trim(), format!("0::{scope}"), "{name}");
        for dir in [place, &scope] {
            let read = |node: &mut Node, file: &str| {
                node.sh(&format!("cat /sys/fs/cgroup{dir}/{file}")).trim().to_owned()
            };
            assert_eq!(read(node, "cpu.weight"), weight, "{dir}");
            assert_eq!(read(node, "cpu.max"), max, "{dir}");
            assert_eq!(read(node, "memory.max"), memory.to_string(), "{dir}");
        }
        // systemd has the same values, so a daemon-reload does not revert them.
        let unit = place.rsplit('/').next().unwrap();
        assert_eq!(node.property(unit, "MemoryMax"), memory.to_string());
        assert_eq!(node.property(unit, "CPUWeight"), weight);
    }
    node.sh("systemctl daemon-reload");
    assert_eq!(node.sh(&format!("cat /sys/fs/cgroup{bound}/memory.max")).trim(), (64 << 20).to_string());
    assert!(node.sh("cat /sys/fs/cgroup/kubepods.slice/cgroup.controllers").contains("memory"));
}

fn check_mounts(node: &mut Node, pods: &BTreeMap<String, Value>, text: &str) {
    println!("--- mounts");
    let uid = pods["web-vm"]["metadata"]["uid"].as_str().unwrap();
    let volumes = format!("/var/lib/kubelet/pods/{uid}/volumes");
    let on_host = node.sh(&format!("findmnt -n -o FSTYPE {volumes}/kubernetes.io~empty-dir/scratch"));
    assert_eq!(on_host.trim(), "tmpfs");
    assert_eq!(node.sh(&format!("cat {volumes}/kubernetes.io~configmap/conf/text")).trim(), text);
    assert_eq!(node.sh("keelson exec web-vm -- cat /conf/text").trim(), text);
    let in_pod = node.sh("keelson exec web-vm -- sh -c 'grep \" /scratch \" /proc/mounts'");
    assert!(in_pod.starts_with("tmpfs /scratch tmpfs"), "{in_pod}");
    // The same volume: what is written inside is read outside.
    node.sh("keelson exec web-vm -- sh -c 'echo inside > /scratch/mark'");
    assert_eq!(node.sh(&format!("cat {volumes}/kubernetes.io~empty-dir/scratch/mark")).trim(), "inside");
}

fn stop_and_start(node: &mut Node, before: &str) {
    println!("--- restart, stop, start");
    node.sh("systemctl stop keelson.target");
    node.until_all_are("inactive");
    assert_eq!(node.property("keelson-config.path", "ActiveState"), "inactive");
    node.until("no process is left", "! pgrep keelson");
    assert_eq!(node.containers(), before, "pods keep running without the agent");
    node.sh("systemctl start keelson.target");
    node.until_healthy();
    node.until_ready(&["web", "bound"]);
    assert_eq!(node.containers(), before);

    node.sh(&doc_commands("Restart, stop"));
    node.until_healthy();
    let pods = node.until_ready(&["web", "bound"]);
    assert_eq!(node.containers(), before);
    for (name, pod) in pods {
        assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0, "{name}");
    }
}

fn kill_services(node: &mut Node, before: &str) {
    for service in ServiceName::supervised() {
        println!("--- kill -9 {service}");
        let pid = node.pid(service);
        node.sh(&format!("kill -9 {pid}"));
        let unit = format!("keelson-{service}.service");
        let line = format!("[ $(systemctl show -P MainPID {unit}) != {pid} ] && systemctl is-active {unit}");
        node.until(&format!("{service} is started again"), &line);
    }
    node.until_healthy();
    node.until_ready(&["web", "bound"]);
    assert_eq!(node.containers(), before);
}

fn stop_processes(node: &mut Node, before: &str) {
    println!("--- stopped beyond the watchdog");
    for service in [ServiceName::PodSync, ServiceName::VolumeManager] {
        let (pid, unit) = (node.pid(service), format!("keelson-{service}.service"));
        let restarts: u32 = node.property(&unit, "NRestarts").parse().unwrap();
        node.sh(&format!("kill -STOP {pid}"));
        let line =
            format!("[ $(systemctl show -P NRestarts {unit}) -gt {restarts} ] && systemctl is-active {unit}");
        node.until(&format!("{service} is killed and started again"), &line);
        node.sh(&format!("journalctl -b -u {unit} --no-pager | grep -i 'watchdog timeout'"));
        assert_eq!(node.containers(), before);
    }
    node.until_healthy();
    node.until_ready(&["web", "bound"]);
    assert_eq!(node.containers(), before);
}

fn change_configuration(node: &mut Node, before: &str) {
    println!("--- another configuration");
    let config = "/run/keelson/config.json";
    let pids: Vec<u32> = ServiceName::supervised().map(|service| node.pid(service)).collect();
    node.sh("echo 'maxPods: 55' >> /etc/keelson/kubelet.yaml");
    node.until("it is resolved", &format!("grep -q '\"maxPods\": 55' {config}"));
    for (service, pid) in ServiceName::supervised().zip(pids) {
        let line = format!("[ $(systemctl show -P MainPID keelson-{service}) != {pid} ]");
        node.until(&format!("{service} takes it"), &line);
    }
    node.until_healthy();
    node.until("the node has it", "keelson get node -o json | grep -Eq '\"pods\": ?\"55\"'");

    // An invalid configuration changes nothing and is reported.
    let good = node.sh(&format!("cat {config}"));
    node.sh("cp /etc/keelson/kubelet.yaml /root/ && echo 'maxPods: many' >> /etc/keelson/kubelet.yaml");
    node.until("it is refused", "systemctl is-failed keelson-config.service");
    node.sh("journalctl -b -u keelson-config.service --no-pager | grep maxPods");
    assert_eq!(node.sh(&format!("cat {config}")), good);
    node.until_healthy();
    node.sh("cp /root/kubelet.yaml /etc/keelson/");
    // From its start on, a resolution holds the lock of the run dir; its result is success until it ends.
    let resolved = "[ $(systemctl show -P Result keelson-config) = success ] && \
                    [ $(systemctl show -P ActiveState keelson-config) != activating ]";
    node.until("the old configuration is valid again", resolved);
    assert_one_agent(node);
    node.sh("echo 'KEELSON_ARGS=--node-labels=rack=7' > /etc/default/keelson");
    node.until("flags are taken", "keelson get node -o json | grep -Eq '\"rack\": ?\"7\"'");
    node.until_healthy();
    node.sh("rm /etc/default/keelson && systemctl start keelson-config.service");
    node.sh(&doc_commands("Configuration"));
    node.until_ready(&["web", "bound"]);
    assert_eq!(node.containers(), before);
}

/// init is refused while units run, and units are refused while an init runs.
fn assert_one_agent(node: &mut Node) {
    println!("--- a second agent");
    let init = "/usr/libexec/keelson/keelson-init --config /etc/keelson/kubelet.yaml";
    let output = node.sh(&format!("! timeout 60 {init} 2>&1"));
    assert!(output.contains("services run without init in /run/keelson"), "{output}");
    assert!(output.contains("systemctl stop keelson.target"), "{output}");
    node.until_healthy();

    node.sh("systemctl stop keelson.target");
    node.until_all_are("inactive");
    node.sh(&format!("systemd-run --unit=by-hand {init}"));
    node.until("an init runs", "keelson get services | grep -q pod-sync");
    node.sh("systemctl start keelson.target");
    node.sh("systemctl is-failed keelson-config.service");
    node.until_all_are("inactive");
    node.sh("systemctl stop by-hand keelson.target");
    node.until("no process is left", "! pgrep keelson");
    node.sh("systemctl start keelson.target");
    node.until_healthy();
}

fn run_as_kubelet(node: &mut Node, before: &str) {
    println!("--- as the kubelet, with a drop-in");
    node.sh("mkdir -p /etc/systemd/system/kubelet.service.d");
    let drop_in = "[Service]\n\
        Environment=\"KUBELET_CONFIG_ARGS=--config=/etc/keelson/kubelet.yaml\"\n\
        EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env\n\
        EnvironmentFile=-/etc/default/kubelet\n\
        ExecStart=\n\
        ExecStart=/usr/bin/kubelet $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS";
    node.write("/etc/systemd/system/kubelet.service.d/10-kubeadm.conf", drop_in);
    node.sh("echo 'KUBELET_EXTRA_ARGS=--node-labels=from=drop-in' > /etc/default/kubelet");
    node.sh(&doc_commands("As the kubelet"));
    node.until("it is active", "systemctl is-active kubelet");
    assert_eq!(node.property("keelson.target", "ActiveState"), "inactive");
    for (unit, state) in [("keelson.target", "disabled"), ("kubelet.service", "enabled")] {
        assert_eq!(node.property(unit, "UnitFileState"), state, "at the next boot: {unit}");
    }
    node.until_all_are("inactive");
    node.until_ready(&["web", "bound"]);
    assert_eq!(node.containers(), before, "the same pods keep running");
    node.until("the drop-in counts", "keelson get node -o json | grep -Eq '\"from\": ?\"drop-in\"'");
    let asked =
        "exec 4<>/dev/tcp/127.0.0.1/10248; printf 'GET /healthz HTTP/1.0\\r\\n\\r\\n' >&4; tail -n 1 <&4";
    assert_eq!(node.sh(asked).trim(), "ok");

    let pid = node.property("kubelet.service", "MainPID");
    node.sh(&format!("kill -9 {pid}"));
    node.until(
        "it is started again",
        &format!("[ $(systemctl show -P MainPID kubelet) != {pid} ] && systemctl is-active kubelet"),
    );
    node.until_ready(&["web", "bound"]);
    node.sh("systemctl stop kubelet");
    node.until("no process is left", "! pgrep keelson");
    assert_eq!(node.containers(), before);
    node.sh("systemctl disable --now kubelet.service");
    node.sh("systemctl enable --now keelson.target");
    node.until_healthy();
    node.until_ready(&["web", "bound"]);
    assert_eq!(node.containers(), before);
}

fn reboot_and_check(node: &mut Node) {
    println!("--- reboot");
    let before = node.pods();
    node.reboot();
    node.until("the target is active", "systemctl is-active keelson.target");
    node.until_healthy();
    let pods = node.until_ready(&["web", "bound"]);
    assert_eq!(node.containers().lines().count(), 4);
    for (name, pod) in &pods {
        assert_eq!(pod["metadata"]["uid"], before[name]["metadata"]["uid"], "{name}");
    }
    check_cgroups(node, &pods);
    check_mounts(node, &pods, "hello");
}
