//! The example pods and their state as the agent reports it.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use keelson_testkit::AgentSpec;
use keelson_testkit::process::ProcessId;
use serde_json::Value;

use super::layout::{NODE_NAME, agent_log};
use crate::progress::Step;
use crate::workspace;

/// How long to wait for the example pods. Their images are local, so they normally start within seconds.
const READY_LIMIT: Duration = Duration::from_secs(120);

const POLL: Duration = Duration::from_millis(200);

/// A pod as `keelson get pods -o json` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodState {
    /// The pod's name, which ends with the node's name.
    pub name: String,
    /// Whether the condition Ready is True.
    pub ready: bool,
}

/// The example manifests. Each file has one pod and the pod's name.
pub fn examples() -> anyhow::Result<Vec<PathBuf>> {
    let folder = workspace().join("deploy/quickstart/pods");
    let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    ensure!(!files.is_empty(), "{} has no manifests", folder.display());
    Ok(files)
}

/// The names on the node of the example pods whose manifests are still in the manifest folder.
fn expected_names(spec: &AgentSpec) -> anyhow::Result<Vec<String>> {
    let name = |path: &PathBuf| {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        format!("{stem}-{NODE_NAME}")
    };
    let exists = |path: &&PathBuf| spec.manifest_dir.join(path.file_name().unwrap_or_default()).exists();
    Ok(examples()?.iter().filter(exists).map(name).collect())
}

/// Copies the example manifests into the manifest folder.
pub fn copy_examples(spec: &AgentSpec) -> anyhow::Result<()> {
    for file in examples()? {
        let target = spec.manifest_dir.join(file.file_name().unwrap_or_default());
        fs::copy(&file, &target).with_context(|| format!("cannot write {}", target.display()))?;
    }
    Ok(())
}

/// The pods on the node.
pub fn list(spec: &AgentSpec) -> anyhow::Result<Vec<PodState>> {
    let output = cli(spec, &["get", "pods", "-o", "json"])?;
    let list: Value = serde_json::from_str(&output).context("keelson get pods printed no JSON")?;
    Ok(parse_pod_list(&list))
}

/// The pods of a PodList.
fn parse_pod_list(list: &Value) -> Vec<PodState> {
    let items = list["items"].as_array().map(Vec::as_slice).unwrap_or_default();
    items
        .iter()
        .map(|pod| {
            let conditions = pod["status"]["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
            let ready = conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True");
            PodState { name: pod["metadata"]["name"].as_str().unwrap_or_default().to_owned(), ready }
        })
        .collect()
}

/// Waits until every example pod is Ready. If the time is up, prints an explanation of the pods that are not.
///
/// # Errors
/// The agent has ended or does not answer, or pods are not Ready in time.
pub fn wait_ready(spec: &AgentSpec, init: ProcessId) -> anyhow::Result<()> {
    let expected = expected_names(spec)?;
    let mut step = Step::start("Waiting for the example pods");
    let deadline = Instant::now() + READY_LIMIT;
    loop {
        let listed = list(spec);
        let pods = listed.as_deref().unwrap_or_default();
        let is_ready = |name: &&String| pods.iter().any(|pod| pod.name == **name && pod.ready);
        let waiting: Vec<&String> = expected.iter().filter(|name| !is_ready(name)).collect();
        if waiting.is_empty() {
            step.done(&format!("{} pods are Ready", expected.len()));
            return Ok(());
        }
        ensure!(init.is_alive(), "the agent has ended; its log is {}", agent_log().display());
        if Instant::now() >= deadline {
            drop(step);
            explain(spec, &waiting);
            if let Err(error) = listed {
                return Err(error.context("the agent does not answer"));
            }
            bail!(
                "{} of {} pods are not Ready after {} s; the agent's log is {}",
                waiting.len(),
                expected.len(),
                READY_LIMIT.as_secs(),
                agent_log().display()
            );
        }
        let names: Vec<&str> = waiting.iter().map(|name| name.as_str()).collect();
        step.show(&format!(
            "{} of {} are Ready; not yet: {}",
            expected.len() - names.len(),
            expected.len(),
            names.join(", ")
        ));
        std::thread::sleep(POLL);
    }
}

fn explain(spec: &AgentSpec, waiting: &[&String]) {
    for name in waiting {
        match cli(spec, &["explain", "pod", name]) {
            Ok(text) => eprintln!("{text}"),
            Err(error) => eprintln!("{name}: {error:#}"),
        }
    }
}

/// Runs `keelson` with `args` and returns its stdout.
pub fn cli(spec: &AgentSpec, args: &[&str]) -> anyhow::Result<String> {
    let mut command = spec.cli();
    let output = command
        .args(args)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", command.get_program().to_string_lossy()))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "keelson {}: {}", args.join(" "), error.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_example_manifest_has_the_name_of_its_pod() {
        for path in examples().unwrap() {
            let text = fs::read_to_string(&path).unwrap();
            let stem = path.file_stem().unwrap().to_str().unwrap();
            let names: Vec<&str> = text.lines().filter(|line| line.starts_with("  name: ")).collect();
            assert_eq!(names, [format!("  name: {stem}")], "{}", path.display());
            let image = format!("image: {}", keelson_testkit::BUSYBOX_IMAGE);
            assert!(text.contains(&image), "{} pulls an image", path.display());
        }
    }

    #[test]
    fn a_pod_is_ready_only_if_its_condition_ready_is_true() {
        let pod = |name: &str, kind: &str, status: &str| json!({"metadata": {"name": name}, "status": {"conditions": [{"type": kind, "status": status}]}});
        let list = json!({"items": [
            pod("a", "Ready", "True"),
            pod("b", "Ready", "False"),
            pod("c", "Initialized", "True"),
            {"metadata": {"name": "d"}},
        ]});
        let ready: Vec<String> =
            parse_pod_list(&list).into_iter().filter(|pod| pod.ready).map(|pod| pod.name).collect();
        assert_eq!(ready, ["a"]);
    }
}
