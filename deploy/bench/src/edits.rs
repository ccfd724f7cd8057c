//! The time from an edit of a ConfigMap to the file in a pod: from just before the request to the API server until the volume on
//! the host has the new text. The edits are made one after the other.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use keelson_testkit::{Agent, BUSYBOX_IMAGE, KubeApiServer, eventually};
use serde_json::{Value, json};

use crate::api::Api;
use crate::api_figures::Edits;
use crate::cluster::{Cluster, NAMESPACE};
use crate::figures::Times;
use crate::progress::Progress;

/// How long one edit may take. A kubelet without a watch polls about once a minute.
const EDIT_LIMIT: Duration = Duration::from_secs(120);
/// The interval at which the file is read.
const FILE_POLL: Duration = Duration::from_millis(1);
/// The pause between two edits, so that an edit does not wait for work that the previous one caused.
const PAUSE: Duration = Duration::from_millis(200);
/// How long a pod may take until it runs.
const READY_LIMIT: Duration = Duration::from_secs(300);

/// Measures `edits` edits, one pod after the other, of `pods` pods with a ConfigMap each. All files are in `folder`.
pub async fn measure(folder: &Path, pods: usize, edits: usize, progress: &Progress) -> anyhow::Result<Edits> {
    let Cluster { server, agent, node } = Cluster::start(folder, progress).await?;
    let names: Vec<String> = (0..pods).map(|number| format!("edited-{number}")).collect();
    let objects: Vec<Value> = names.iter().flat_map(|name| [config_map(name), pod(name, &node)]).collect();
    server.apply(&json!({"apiVersion": "v1", "kind": "List", "items": objects}))?;
    let mut files = Vec::new();
    for name in &names {
        let file = wait_for_file(&server, &agent, name).await?;
        files.push(file);
    }
    progress.print(format!("{pods} pods have their files; editing"));
    let proxy = server.proxy()?;
    let mut api = Api::connect(proxy.socket()).await?;
    let mut times = Vec::new();
    for number in 0..edits {
        let index = number % names.len();
        let (Some(name), Some(file)) = (names.get(index), files.get(index)) else {
            bail!("there are no pods")
        };
        let text = format!("edit {number}");
        let path = format!("/api/v1/namespaces/{NAMESPACE}/configmaps/{name}");
        let begun = Instant::now();
        api.patch(&path, &json!({"data": {"text": text}})).await?;
        while fs::read_to_string(file).unwrap_or_default() != text {
            ensure!(begun.elapsed() < EDIT_LIMIT, "{} has not changed in {EDIT_LIMIT:?}", file.display());
            tokio::time::sleep(FILE_POLL).await;
        }
        times.push(begun.elapsed());
        tokio::time::sleep(PAUSE).await;
    }
    progress.print("removing everything");
    drop(proxy);
    agent.end()?;
    Ok(Edits { pods, times: Times::new(times.into_iter()) })
}

fn config_map(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": NAMESPACE},
        "data": {"text": "before any edit"},
    })
}

fn pod(name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "nodeName": node, "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sleep", "1000000"],
                "volumeMounts": [{"name": "files", "mountPath": "/files"}],
            }],
            "volumes": [{"name": "files", "configMap": {"name": name}}],
        },
    })
}

/// Waits until a pod runs and its volume has the file. Returns the path of the file on the host.
async fn wait_for_file(server: &KubeApiServer, agent: &Agent, name: &str) -> anyhow::Result<PathBuf> {
    let mut found = None;
    let condition = format!("{name} runs and has its file");
    eventually(READY_LIMIT, condition, async || {
        let pod = server.kubectl_json(&["-n", NAMESPACE, "get", "pod", name]).unwrap_or_default();
        let uid = pod["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
        let volumes = agent.spec().root_dir.join("pods").join(uid).join("volumes");
        let file = volumes.join("kubernetes.io~configmap/files/text");
        let is_running = pod["status"]["phase"] == "Running" && file.is_file();
        found = is_running.then_some(file);
        found.is_some()
    })
    .await
    .with_context(|| agent.log_tail())?;
    found.context("the file has just been found")
}
