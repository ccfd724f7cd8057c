//! Pods in the slices of a real systemd, which is the first process of its own namespaces; the rest of the test
//! runs in there, too.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Options, Scratch, Systemd, eventually};
use keelson_tests::{LIMIT, http, pods, running, sleeper, until_event, until_ready, until_service};
use serde_json::{Value, json};

/// Environment variable that is set where systemd is the first process: the file that marks a test as passed.
const INSIDE: &str = "KEELSON_TEST_BESIDE_SYSTEMD";

/// Runs the test of this name in namespaces with their own systemd.
fn run_under_systemd(name: &str) {
    let scratch = Scratch::new().unwrap();
    let systemd = Systemd::boot(&scratch.path().join("s")).unwrap();
    let mut test = systemd.command(&std::env::current_exe().unwrap()).unwrap();
    // What is left in there is removed with this folder.
    let passed = scratch.path().join("passed");
    test.args(["--exact", name, "--nocapture"]).env(INSIDE, &passed).env("TMPDIR", scratch.path());
    let status = test.stdin(Stdio::null()).status().unwrap();
    assert!(status.success() && passed.exists(), "the test beside systemd: {status}");
}

fn systemctl(args: &[&str]) -> String {
    let output = Command::new("systemctl").args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A property of a unit in systemd.
fn property(unit: &str, name: &str) -> String {
    systemctl(&["show", "--property", name, "--value", unit]).trim().to_owned()
}

/// The slices of pods in systemd.
fn slices() -> Vec<String> {
    let units =
        systemctl(&["list-units", "--all", "--plain", "--no-legend", "--type", "slice", "*pods-*pod*"]);
    units.lines().filter_map(|line| line.split_whitespace().next()).map(ToOwned::to_owned).collect()
}

/// A pod with limits of half a core and 64 MiB.
fn bound(name: &str) -> String {
    let limits = json!({"cpu": "500m", "memory": "64Mi"});
    let container = json!({
        "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/sleep", "1000000"], "resources": {"limits": limits},
    });
    let spec = json!({"terminationGracePeriodSeconds": 0, "containers": [container]});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}).to_string()
}

#[test]
fn a_runtime_with_another_cgroup_driver_is_reported_with_a_remedy() {
    let Some(passed) = std::env::var_os(INSIDE) else {
        return run_under_systemd("a_runtime_with_another_cgroup_driver_is_reported_with_a_remedy");
    };
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        // The runtime has systemd's driver, the agent cgroupfs.
        let scratch = Scratch::new().unwrap();
        let options = Options { systemd_cgroup: true, ..Options::default() };
        let agent = Agent::builder(scratch.path()).containerd(options).start().await.unwrap();
        agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
        until_event(&agent, "FailedCreatePodSandBox", "set cgroupDriver to systemd here").await.unwrap();
        agent.end().unwrap();

        // The other way round a container is outside its pod's slice, and no other error shows.
        let scratch = Scratch::new().unwrap();
        let agent = Agent::builder(scratch.path())
            .configure(|spec| spec.cgroup_driver = "systemd".to_owned())
            .start()
            .await
            .unwrap();
        agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
        until_ready(&agent, &["web"]).await.unwrap();
        let text = "run outside the cgroups of their pods";
        let row = until_service(&agent, ServiceName::ResourceManager, &["degraded"], text).await.unwrap();
        let text = row["message"].as_str().unwrap();
        assert!(
            text.contains("default/web-") && text.contains("another cgroup driver than systemd"),
            "{text}"
        );
        until_event(&agent, "PodsOutsideCgroups", "SystemdCgroup").await.unwrap();
        agent.end().unwrap();
    });
    fs::write(passed, "").unwrap();
}

#[test]
fn pod_slices_survive_a_daemon_reload_and_the_death_of_the_agent() {
    let Some(passed) = std::env::var_os(INSIDE) else {
        return run_under_systemd("pod_slices_survive_a_daemon_reload_and_the_death_of_the_agent");
    };
    assert_eq!(fs::read_to_string("/proc/1/comm").unwrap().trim(), "systemd");
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let scratch = Scratch::new().unwrap();
        let options = Options { systemd_cgroup: true, ..Options::default() };
        let agent = Agent::builder(scratch.path())
            .containerd(options)
            .configure(|spec| spec.cgroup_driver = "systemd".to_owned())
            .start()
            .await
            .unwrap();
        agent.write_manifest("bound.yaml", &bound("bound")).unwrap();
        agent.write_manifest("free.yaml", &sleeper("free")).unwrap();
        until_ready(&agent, &["bound", "free"]).await.unwrap();
        let before = running(&agent).await.unwrap();
        let known = pods(&agent).await.unwrap();
        let place = |name: &str, class: &str| {
            let uid =
                known[&format!("{name}-{}", agent.spec().node_name)]["metadata"]["uid"].as_str().unwrap();
            let root = agent.spec().cgroup_root.trim_start_matches('/').replace('-', "_");
            format!("{root}-kubepods{class}-pod{}.slice", uid.replace('-', "_"))
        };
        let (of_bound, of_free) = (place("bound", ""), place("free", "-besteffort"));

        // systemd, the agent and the runtime agree on the cgroup of the processes.
        for (name, slice) in [("bound", &of_bound), ("free", &of_free)] {
            let process = &before[&format!("{name}-{}/main", agent.spec().node_name)];
            let cgroups = fs::read_to_string(format!("/proc/{}/cgroup", process.pid)).unwrap();
            let end = format!("/{slice}/cri-containerd-{}.scope", process.id);
            let systemds = cgroups.lines().find(|l| l.contains(":name=systemd:") || l.starts_with("0::/"));
            assert!(systemds.unwrap().ends_with(&end), "{end}\n{cgroups}");
        }
        assert_limits(&of_bound);
        systemctl(&["daemon-reload"]);
        assert_limits(&of_bound);

        until_measured(&agent).await;

        // An existing slice is adopted, and the next pod gets a new one.
        let process = agent.service(ServiceName::ResourceManager).unwrap();
        process.signal(Signal::KILL);
        agent.write_manifest("late.yaml", &sleeper("late")).unwrap();
        until_ready(&agent, &["bound", "free", "late"]).await.unwrap();
        let now = running(&agent).await.unwrap();
        assert!(before.iter().all(|(name, process)| now.get(name) == Some(process)), "{before:?} {now:?}");
        assert_limits(&of_bound);

        assert_eq!(slices().len(), 3, "{:?}", slices());
        for name in ["bound", "free", "late"] {
            agent.remove_manifest(&format!("{name}.yaml")).unwrap();
        }
        let mut left = Vec::new();
        eventually(LIMIT, "no slice of a pod is left", async || {
            left = slices();
            left.is_empty()
        })
        .await
        .unwrap_or_else(|e| panic!("{e:#}: {left:?}\n{}", agent.log_tail()));
        agent.end().unwrap();
    });
    fs::write(passed, "").unwrap();
}

/// systemd and the kernel have the limits of half a core and 64 MiB for a slice.
fn assert_limits(slice: &str) {
    let is_v2 = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let memory = if is_v2 { "MemoryMax" } else { "MemoryLimit" };
    assert_eq!(property(slice, memory), (64 << 20).to_string());
    assert_eq!(property(slice, "CPUQuotaPerSecUSec"), "500ms");
    let file = if is_v2 { "memory.max" } else { "memory.limit_in_bytes" };
    let dirs = systemctl(&["show", "--property", "ControlGroup", "--value", slice]);
    let mount = if is_v2 { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/memory" };
    let text = fs::read_to_string(format!("{mount}{}/{file}", dirs.trim())).unwrap();
    assert_eq!(text.trim(), (64 << 20).to_string());
}

/// Waits until the statistics include both pods' containers, which are in scopes.
async fn until_measured(agent: &Agent) {
    let mut last = Value::Null;
    let summary = format!("{}/stats/summary", agent.api_url());
    eventually(LIMIT, "both pods' containers are measured", async || {
        last = serde_json::from_str(&http::get_ok(&summary).await.unwrap()).unwrap();
        let pods = last["pods"].as_array().map_or(&[][..], Vec::as_slice);
        pods.len() == 2
            && pods.iter().all(|pod| pod["containers"][0]["memory"]["workingSetBytes"].as_u64() > Some(0))
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{last:#}"));
}
