//! Helpers of the whole-agent tests in `tests/tests`: manifests, and checks of the agent, the runtime and /proc.

#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

pub mod bystander;
pub mod cluster;
pub mod csi_driver;
pub mod disk;
pub mod duplicates;
pub mod ending;
pub mod http;
pub mod link;
pub mod packages;
pub mod power;
pub mod promql;
pub mod screen;
pub mod vm_node;
pub mod waits;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Output;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use k8s_cri::v1 as cri;
use keelson_config::ServiceName;
use keelson_testkit::{Agent, AgentSpec, BUSYBOX_IMAGE, copy_binaries, eventually};
use serde_json::Value;

/// Time limit of every wait, with room for a busy machine.
pub const LIMIT: Duration = Duration::from_secs(60);

/// A pod that sleeps, ends at once on SIGTERM, and logs its name.
pub fn sleeper(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  terminationGracePeriodSeconds: 0\n  \
         containers:\n  - name: main\n    image: {BUSYBOX_IMAGE}\n    imagePullPolicy: IfNotPresent\n    \
         command: [\"/bin/sh\", \"-c\", \"echo hello from {name}; exec sleep 1000000\"]\n    \
         volumeMounts:\n    - name: scratch\n      mountPath: /scratch\n  volumes:\n  - name: scratch\n    emptyDir: {{}}\n"
    )
}

/// Makes an agent that is not started yet run another program in place of a service.
///
/// # Panics
/// The agent's binaries cannot be copied, or the program cannot be put among them.
pub fn replace_service(spec: &mut AgentSpec, service: ServiceName, program: &str) {
    let bins = spec.config_dir.with_file_name("other-bin");
    copy_binaries(&spec.bin_dir, &bins).expect("the agent's binaries are there");
    let own = bins.join(service.binary());
    fs::remove_file(&own).expect("it is among them");
    fs::copy(program, &own).expect("the program is there");
    fs::set_permissions(&own, fs::Permissions::from_mode(0o755)).expect("it is ours");
    spec.bin_dir = bins;
}

/// A running container as the runtime and /proc know it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    /// Runtime id.
    pub id: String,
    /// Process id on the host.
    pub pid: u32,
    /// Start time of that process in clock ticks since boot (proc(5), stat field 22).
    pub started_ticks: u64,
}

/// Every running container, by `<pod>/<container>`, from the runtime and /proc, never from the agent.
///
/// # Errors
/// The runtime does not answer.
pub async fn running(agent: &Agent) -> anyhow::Result<BTreeMap<String, Process>> {
    let mut runtime = agent.containerd().runtime();
    let list = runtime.list_containers(cri::ListContainersRequest { filter: None }).await?.into_inner();
    let mut found = BTreeMap::new();
    for container in list.containers {
        if container.state != cri::ContainerState::ContainerRunning as i32 {
            continue;
        }
        let request = cri::ContainerStatusRequest { container_id: container.id.clone(), verbose: true };
        let Ok(status) = runtime.container_status(request).await else { continue };
        let info = status.into_inner().info;
        let info: Value = serde_json::from_str(info.get("info").map_or("{}", String::as_str))?;
        let Some(pid) = info["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()) else { continue };
        let label = |key: &str| container.labels.get(key).cloned().unwrap_or_default();
        let name = format!("{}/{}", label("io.kubernetes.pod.name"), label("io.kubernetes.container.name"));
        // It may have ended meanwhile.
        let Ok(started_ticks) = started_ticks(pid) else { continue };
        let process = Process { id: container.id, pid, started_ticks };
        ensure!(found.insert(name.clone(), process).is_none(), "two running containers are {name}");
    }
    Ok(found)
}

fn started_ticks(pid: u32) -> anyhow::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The command may hold spaces and brackets; what follows the last bracket begins with field 3.
    let rest = stat.rsplit_once(')').context("no command in stat")?.1;
    rest.split_whitespace().nth(19).and_then(|t| t.parse().ok()).context("no start time in stat")
}

/// The pods that the agent shows, by name.
///
/// # Errors
/// `keelson get pods` fails.
pub async fn pods(agent: &Agent) -> anyhow::Result<BTreeMap<String, Value>> {
    let list = agent.keelson_json(&["get", "pods", "-A", "-o", "json"]).await?;
    ensure!(list["kind"] == "PodList", "not a PodList: {list}");
    let items = list["items"].as_array().context("items is no list")?;
    Ok(items
        .iter()
        .map(|p| (p["metadata"]["name"].as_str().unwrap_or_default().to_owned(), p.clone()))
        .collect())
}

/// Whether a pod's condition `Ready` is True.
pub fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

/// Waits until exactly these manifests' pods exist and are Ready.
///
/// # Errors
/// They are not within [`LIMIT`]; the error shows their statuses.
pub async fn until_ready(agent: &Agent, names: &[&str]) -> anyhow::Result<()> {
    let node = &agent.spec().node_name;
    let mut wanted: Vec<String> = names.iter().map(|n| format!("{n}-{node}")).collect();
    wanted.sort();
    let mut last = String::new();
    let ready = eventually(LIMIT, format!("{names:?} are Ready"), async || match pods(agent).await {
        Ok(pods) => {
            last = pods.values().map(|p| format!("{}: {}\n", p["metadata"]["name"], p["status"])).collect();
            pods.keys().eq(wanted.iter()) && pods.values().all(is_ready)
        }
        Err(error) => {
            last = format!("{error:#}");
            false
        }
    });
    let result = ready.await;
    result.with_context(|| format!("{last}\n{}", agent.log_tail()))
}

/// Waits until `keelson explain pod` satisfies `wanted`.
///
/// # Errors
/// It does not within [`LIMIT`]; the error shows the last explanation.
pub async fn until_explained(
    agent: &Agent,
    pod: &str,
    what: &str,
    wanted: impl Fn(&Value) -> bool,
) -> anyhow::Result<Value> {
    let mut last = Value::Null;
    eventually(LIMIT, what, async || {
        if let Ok(output) = agent.keelson(&["explain", "pod", pod, "-o", "json"]).await {
            last = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        }
        wanted(&last)
    })
    .await
    .with_context(|| format!("{last:#}\n{}", agent.log_tail()))?;
    Ok(last)
}

/// The events that the agent shows.
///
/// # Errors
/// `keelson get events` fails.
pub async fn events(agent: &Agent) -> anyhow::Result<Vec<Value>> {
    let list = agent.keelson_json(&["get", "events", "-A", "-o", "json"]).await?;
    Ok(list["items"].as_array().cloned().unwrap_or_default())
}

/// Waits for an event with this reason whose message contains `text`.
///
/// # Errors
/// There is none within [`LIMIT`].
pub async fn until_event(agent: &Agent, reason: &str, text: &str) -> anyhow::Result<()> {
    let fits = |e: &Value| e["reason"] == reason && e["message"].as_str().is_some_and(|m| m.contains(text));
    let mut last = Vec::new();
    eventually(LIMIT, format!("an event {reason} with {text:?}"), async || {
        last = events(agent).await.unwrap_or_default();
        last.iter().any(fits)
    })
    .await
    .with_context(|| format!("{last:#?}"))
}

/// The standard output and error of a command.
pub fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// A row of `keelson get services`.
///
/// # Errors
/// The command fails or does not list the service.
pub async fn service_row(agent: &Agent, service: ServiceName) -> anyhow::Result<Value> {
    let list = agent.keelson_json(&["get", "services", "-o", "json"]).await?;
    let rows = list["items"].as_array().context("items is no list")?;
    rows.iter().find(|row| row["name"] == service.as_str()).cloned().context("the service is not listed")
}

/// Waits until `keelson get services` shows a service in one of the states (any, when empty) with `text` in its message.
///
/// # Errors
/// It does not within [`LIMIT`]; the error shows the last row.
pub async fn until_service(
    agent: &Agent,
    service: ServiceName,
    states: &[&str],
    text: &str,
) -> anyhow::Result<Value> {
    let mut last = Value::Null;
    eventually(LIMIT, format!("{service} is {states:?} with {text:?}"), async || {
        last = service_row(agent, service).await.unwrap_or_default();
        let message = last["message"].as_str().unwrap_or_default();
        (states.is_empty() || states.iter().any(|s| last["state"] == *s)) && message.contains(text)
    })
    .await
    .with_context(|| format!("{last:#}\n{}", agent.log_tail()))?;
    Ok(last)
}

/// The services that have been restarted, with the number of restarts.
///
/// # Errors
/// `keelson get services` fails.
pub async fn restarts(agent: &Agent) -> anyhow::Result<BTreeMap<String, u64>> {
    let list = agent.keelson_json(&["get", "services", "-o", "json"]).await?;
    let rows = list["items"].as_array().context("items is no list")?;
    let count = |row: &Value| {
        Some((row["name"].as_str()?.to_owned(), row["restarts"].as_u64()?)).filter(|(_, count)| *count > 0)
    };
    Ok(rows.iter().filter_map(count).collect())
}

/// Waits for a step of a pod in `keelson explain` that is waiting, failed or working, with this owner and `text` in its
/// message.
///
/// # Errors
/// There is none within [`LIMIT`], or it has no start time; the error shows the last explanation.
pub async fn until_cause(
    agent: &Agent,
    pod: &str,
    step: &str,
    owner: &str,
    text: &str,
) -> anyhow::Result<Value> {
    let find = |explained: &Value| {
        let steps = explained["steps"].as_array();
        let open = |s: &&Value| s["state"] == "waiting" || s["state"] == "failed" || s["state"] == "working";
        let fits = |s: &&Value| {
            s["name"] == step
                && s["owner"] == owner
                && s["message"].as_str().is_some_and(|m| m.contains(text))
        };
        steps.into_iter().flatten().filter(open).find(fits).cloned()
    };
    let what = format!("the step {step} of {pod} waits for {owner} with {text:?}");
    let explained = until_explained(agent, pod, &what, |e| find(e).is_some()).await?;
    let found = find(&explained).context("found before")?;
    ensure!(found["since"].is_string(), "no start time: {found}");
    Ok(found)
}

/// Waits until `keelson explain` says that a pod waits for nothing.
///
/// # Errors
/// It does not within [`LIMIT`]; the error shows the last explanation.
pub async fn until_no_cause(agent: &Agent, pod: &str) -> anyhow::Result<Value> {
    until_explained(agent, pod, &format!("{pod} waits for nothing"), |e| {
        e["steps"].as_array().is_some_and(|s| !s.is_empty() && s.iter().all(|s| s["state"] == "done"))
            && e["summary"].as_str().is_some_and(|s| s.contains("waits for nothing"))
    })
    .await
}

/// The anonymous memory of a process in KiB (`Anonymous` of smaps_rollup, proc(5)); 0 when it is gone. Unlike its share of
/// the binaries, it does not depend on how many other agents run on the machine.
pub fn own_kib(pid: u32) -> u64 {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0)
}
