//! In-place resize of pods on a real runtime: the kernel's values change, and the processes stay.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, Scratch, eventually};
use keelson_tests::waits::{pod_with, until_one_ready};
use keelson_tests::{LIMIT, Process, events, pods, running, until_cause, until_event};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// A pod from a file whose UID does not depend on its content, so that an edit changes the pod in place.
fn pod(name: &str, cpu: &str, memory: &str, policy: &str) -> String {
    let container = format!(
        "    resources: {{requests: {{cpu: {cpu}, memory: {memory}}}, limits: {{cpu: {cpu}, memory: {memory}}}}}\n{policy}"
    );
    let metadata = format!("metadata:\n  name: {name}\n  uid: 00000000-0000-4000-8000-{:0>12}\n", name.len());
    pod_with(name, &container, "").replace(&format!("metadata:\n  name: {name}\n"), &metadata)
}

/// CPU quota per period, and memory limit in bytes, of the cgroup of a process; none if that has ended.
fn limits(process: &Process) -> Option<(f64, u64)> {
    let cgroups = std::fs::read_to_string(format!("/proc/{}/cgroup", process.pid)).ok()?;
    let path = |begin: &str| {
        let line = cgroups.lines().find(|line| line.split(':').nth(1).is_some_and(|names| names == begin));
        line.map(|line| line.split_once(&format!(":{begin}:")).unwrap().1.to_owned())
    };
    let read = |file: String| std::fs::read_to_string(file).ok();
    let number = |text: &str| text.trim().parse::<f64>().unwrap();
    if let Some(memory) = path("memory") {
        let cpu = cgroups.lines().find(|line| {
            line.split(':').nth(1).is_some_and(|names| names.split(',').any(|name| name == "cpu"))
        });
        let (_, names_and_path) = cpu?.split_once(':').unwrap();
        let (names, cpu) = names_and_path.split_once(':').unwrap();
        let dir = [names.to_owned(), "cpu".to_owned()]
            .into_iter()
            .map(|name| format!("/sys/fs/cgroup/{name}{cpu}"))
            .find(|dir| std::path::Path::new(dir).exists())?;
        let quota = number(&read(format!("{dir}/cpu.cfs_quota_us"))?);
        let period = number(&read(format!("{dir}/cpu.cfs_period_us"))?);
        let memory = read(format!("/sys/fs/cgroup/memory{memory}/memory.limit_in_bytes"))?;
        return Some((quota / period, memory.trim().parse().unwrap()));
    }
    let dir = format!("/sys/fs/cgroup{}", path("")?);
    let max = read(format!("{dir}/cpu.max"))?;
    let (quota, period) = max.trim().split_once(' ').unwrap();
    let memory = read(format!("{dir}/memory.max"))?;
    Some((number(quota) / number(period), memory.trim().parse().unwrap()))
}

async fn process(agent: &Agent, name: &str) -> Option<Process> {
    running(agent).await.ok()?.remove(&format!("{name}-{}/main", agent.spec().node_name))
}

async fn status(agent: &Agent, name: &str) -> Value {
    let mut pods = pods(agent).await.unwrap_or_default();
    pods.remove(&format!("{name}-{}", agent.spec().node_name)).unwrap_or_default()["status"].take()
}

fn condition<'a>(status: &'a Value, name: &str) -> Option<&'a Value> {
    status["conditions"].as_array()?.iter().find(|condition| condition["type"] == name)
}

/// Waits until the kernel and the status have these resources and no resize is left; returns the process.
async fn until_resized(agent: &Agent, name: &str, cpu: (&str, f64), memory: (&str, u64)) -> Process {
    let mut last = (Value::Null, None);
    let resized = eventually(LIMIT, format!("{name} is resized"), async || {
        let status = status(agent, name).await;
        let Some(process) = process(agent, name).await else { return false };
        let container = &status["containerStatuses"][0];
        let shown = (&container["resources"]["limits"], &container["allocatedResources"]);
        let is_shown = shown.0["cpu"] == cpu.0 && shown.0["memory"] == memory.0;
        let is_allocated = shown.1["cpu"] == cpu.0 && shown.1["memory"] == memory.0;
        let none = |name| condition(&status, name).is_none();
        let has = limits(&process) == Some((cpu.1, memory.1));
        let done = none("PodResizePending") && none("PodResizeInProgress") && container["ready"] == true;
        last = (status, Some(process));
        has && is_shown && is_allocated && done
    });
    resized.await.unwrap_or_else(|e| panic!("{e:#}: {last:#?}\n{}", agent.log_tail()));
    last.1.unwrap()
}

/// Waits until the status says that the resize is pending for this reason.
async fn until_pending(agent: &Agent, name: &str, reason: &str) {
    let pending = eventually(LIMIT, format!("the resize of {name} is {reason}"), async || {
        condition(&status(agent, name).await, "PodResizePending").is_some_and(|c| c["reason"] == reason)
    });
    pending.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
}

#[tokio::test]
async fn an_edited_file_resizes_its_pod_in_both_directions_without_a_restart() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("web.yaml", &pod("web", "100m", "64Mi", "")).unwrap();
    until_one_ready(&agent, "web").await;
    let first = process(&agent, "web").await.unwrap();
    assert_eq!(limits(&first), Some((0.1, 64 * MIB)));

    agent.write_manifest("web.yaml", &pod("web", "200m", "128Mi", "")).unwrap();
    let grown = until_resized(&agent, "web", ("200m", 0.2), ("128Mi", 128 * MIB)).await;
    until_event(&agent, "ResizeCompleted", "Pod resize completed: {").await.unwrap();
    for killed in [ServiceName::PodSync, ServiceName::ResourceManager, ServiceName::RuntimeShim] {
        let killed = agent.service(killed).unwrap();
        agent.write_manifest("web.yaml", &pod("web", "150m", "96Mi", "")).unwrap();
        killed.signal(Signal::KILL);
        killed.wait_gone(LIMIT);
        until_resized(&agent, "web", ("150m", 0.15), ("96Mi", 96 * MIB)).await;
        agent.write_manifest("web.yaml", &pod("web", "100m", "32Mi", "")).unwrap();
        let shrunk = until_resized(&agent, "web", ("100m", 0.1), ("32Mi", 32 * MIB)).await;
        assert_eq!((&shrunk, &grown), (&first, &first), "the process has stayed");
    }
    assert_eq!(status(&agent, "web").await["containerStatuses"][0]["restartCount"], 0);
    agent.end().unwrap();
}

#[tokio::test]
async fn a_resize_that_demands_a_restart_restarts_the_container_once() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let policy = "    resizePolicy: [{resourceName: memory, restartPolicy: RestartContainer}]\n";
    agent.write_manifest("web.yaml", &pod("web", "100m", "64Mi", policy)).unwrap();
    until_one_ready(&agent, "web").await;
    let first = process(&agent, "web").await.unwrap();
    agent.write_manifest("web.yaml", &pod("web", "100m", "128Mi", policy)).unwrap();
    let second = until_resized(&agent, "web", ("100m", 0.1), ("128Mi", 128 * MIB)).await;
    assert_ne!(first.id, second.id);
    assert_eq!(status(&agent, "web").await["containerStatuses"][0]["restartCount"], 1);
    agent.end().unwrap();
}

#[tokio::test]
async fn a_resize_without_room_is_deferred_and_one_above_the_node_is_infeasible() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let online = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let cores = online.lines().filter(|line| line.starts_with("processor")).count();
    let most = format!("{}m", cores * 600);
    agent.write_manifest("other.yaml", &pod("other", &most, "64Mi", "")).unwrap();
    agent.write_manifest("web.yaml", &pod("web", "100m", "64Mi", "")).unwrap();
    for name in ["other", "web"] {
        until_one_ready(&agent, name).await;
    }
    let first = process(&agent, "web").await.unwrap();
    let name = format!("web-{}", agent.spec().node_name);
    agent.write_manifest("web.yaml", &pod("web", &most, "64Mi", "")).unwrap();
    until_cause(&agent, &name, "resize", "resource-manager", "enough resource: cpu").await.unwrap();
    until_pending(&agent, "web", "Deferred").await;
    agent.remove_manifest("other.yaml").unwrap();
    let cpu = cores as f64 * 0.6;
    let resized = until_resized(&agent, "web", (&most, cpu), ("64Mi", 64 * MIB)).await;

    agent.write_manifest("web.yaml", &pod("web", "1000", "64Mi", "")).unwrap();
    until_cause(&agent, &name, "resize", "you", "enough resource: cpu").await.unwrap();
    until_pending(&agent, "web", "Infeasible").await;
    until_event(&agent, "ResizeInfeasible", "Pod resize infeasible: {").await.unwrap();
    assert_eq!((&resized, &process(&agent, "web").await.unwrap()), (&first, &first));
    let all = events(&agent).await.unwrap();
    for reason in ["ResizeDeferred", "ResizeStarted", "ResizeCompleted", "ResizeInfeasible"] {
        assert_eq!(all.iter().filter(|event| event["reason"] == reason).count(), 1, "{reason}: {all:#?}");
    }
    agent.end().unwrap();
}
