//! The time until pods that are deleted at once at a real API server are gone: from just before the request until the server has
//! none of them. Like most pods of a cluster, each has a token of its service account. The grace period is five seconds, and the
//! process ends on SIGTERM.
//!
//! The floor is the same number of pods without a node: the time that the server itself needs.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use keelson_testkit::{BUSYBOX_IMAGE, KubeApiServer, eventually};
use serde_json::{Value, json};

use crate::api::Api;
use crate::api_figures::Deletions;
use crate::cluster::{Cluster, NAMESPACE};
use crate::progress::Progress;

/// How long starting or deleting all pods may take.
const LIMIT: Duration = Duration::from_secs(300);
/// The interval at which the pods are listed.
const LIST_POLL: Duration = Duration::from_millis(20);

/// Measures `rounds` rounds of `pods` pods with all files in `folder`.
pub async fn measure(
    folder: &Path,
    pods: usize,
    rounds: usize,
    progress: &Progress,
) -> anyhow::Result<Deletions> {
    let Cluster { server, agent, node } = Cluster::start(folder, progress).await?;
    let proxy = server.proxy()?;
    let mut api = Api::connect(proxy.socket()).await?;
    let (mut times, mut floor) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        progress.print(format!("round {} of {rounds}", round + 1));
        create(&server, pods, None)?;
        floor.push(delete_all(&mut api).await?);
        create(&server, pods, Some(&node))?;
        eventually(LIMIT, "all pods are ready", async || {
            let list = api.get(&list_path()).await.unwrap_or_default();
            let items = list["items"].as_array().map(Vec::as_slice).unwrap_or_default();
            items.len() == pods && items.iter().all(is_ready)
        })
        .await
        .with_context(|| agent.log_tail())?;
        times.push(delete_all(&mut api).await.with_context(|| agent.log_tail())?);
    }
    progress.print("removing everything");
    drop(proxy);
    agent.end()?;
    Ok(Deletions { pods, times, floor })
}

/// The path of the list of pods.
fn list_path() -> String {
    format!("/api/v1/namespaces/{NAMESPACE}/pods")
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"))
}

fn create(server: &KubeApiServer, pods: usize, node: Option<&str>) -> anyhow::Result<()> {
    let items: Vec<Value> = (0..pods).map(|number| pod(&format!("deleted-{number}"), node)).collect();
    server.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}))
}

/// Deletes all pods. Returns the time until the server has none.
async fn delete_all(api: &mut Api) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    api.delete(&list_path()).await?;
    while api.get(&format!("{}?limit=1", list_path())).await?["items"]
        .as_array()
        .is_none_or(|items| !items.is_empty())
    {
        ensure!(begun.elapsed() < LIMIT, "the API server still has pods {LIMIT:?} after their deletion");
        tokio::time::sleep(LIST_POLL).await;
    }
    Ok(begun.elapsed())
}

fn pod(name: &str, node: Option<&str>) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "nodeName": node, "terminationGracePeriodSeconds": 5,
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 1000000 & wait"],
            }],
        },
    })
}
