//! The state of pods as pod-sync reports it.

use std::collections::HashSet;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use keelson_proto::keelson::pod_sync::v1::pod_sync_client::PodSyncClient;
use keelson_proto::keelson::pod_sync::v1::{ExplainPodRequest, ListPodsRequest};
use serde::Deserialize;
use tonic::transport::{Channel, Endpoint};

use crate::pods::{NAMESPACE, Pod};

/// The interval at which [`PodList::wait_ready`] lists the pods.
const READY_POLL: Duration = Duration::from_millis(10);

/// The interval at which [`PodList::wait_adopted`] checks one pod.
const ADOPTED_POLL: Duration = Duration::from_millis(2);

/// The deadline of a call to pod-sync.
const CALL_LIMIT: Duration = Duration::from_secs(10);

/// A client of pod-sync.
#[derive(Debug, Clone)]
pub struct PodList {
    client: PodSyncClient<Channel>,
    node: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PodView {
    status: StatusView,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StatusView {
    conditions: Vec<ConditionView>,
}

#[derive(Debug, Deserialize)]
struct ConditionView {
    r#type: String,
    status: String,
}

impl PodList {
    /// A client for the socket of pod-sync. It connects at the first call.
    ///
    /// # Errors
    /// The path of the socket cannot be part of a URI.
    pub fn new(socket: &Path, node: &str) -> anyhow::Result<Self> {
        let endpoint = Endpoint::try_from(format!("unix:{}", socket.display()))?;
        Ok(Self { client: PodSyncClient::new(endpoint.connect_lazy()), node: node.to_owned() })
    }

    /// The name of the pod on this node: the name in the manifest, followed by the node's name.
    pub fn full_name(&self, pod: &Pod) -> String {
        format!("{}-{}", pod.name, self.node)
    }

    /// The names of all pods that are Ready.
    pub async fn ready(&self) -> anyhow::Result<HashSet<String>> {
        tokio::time::timeout(CALL_LIMIT, self.list_ready()).await.context("ListPods has no answer in time")?
    }

    async fn list_ready(&self) -> anyhow::Result<HashSet<String>> {
        let mut client = self.client.clone();
        let mut stream = client.list_pods(ListPodsRequest {}).await?.into_inner();
        let mut names = HashSet::new();
        while let Some(document) = stream.message().await? {
            if is_ready(&document.pod_json)? {
                names.insert(document.name);
            }
        }
        Ok(names)
    }

    /// Waits until all of these pods are Ready.
    ///
    /// # Errors
    /// They are not all Ready within `limit`.
    pub async fn wait_ready(&self, pods: &[Pod], limit: Duration) -> anyhow::Result<()> {
        let begun = Instant::now();
        loop {
            let listed = self.ready().await;
            let count = listed
                .as_ref()
                .map_or(0, |ready| pods.iter().filter(|pod| ready.contains(&self.full_name(pod))).count());
            if count == pods.len() {
                return Ok(());
            }
            if begun.elapsed() >= limit {
                listed.context("pod-sync does not answer")?;
                bail!("{count} of {} pods are Ready after {} s", pods.len(), limit.as_secs());
            }
            tokio::time::sleep(READY_POLL).await;
        }
    }

    /// Waits until pod-sync has seen each container running since its own start.
    ///
    /// # Errors
    /// It has not seen all within `limit`, or it does not answer.
    pub async fn wait_adopted(&self, pods: &[Pod], limit: Duration) -> anyhow::Result<()> {
        let begun = Instant::now();
        for pod in pods {
            while !self.is_adopted(pod).await? {
                ensure!(
                    begun.elapsed() < limit,
                    "pod-sync has not seen the container of {} in {} s",
                    self.full_name(pod),
                    limit.as_secs()
                );
                tokio::time::sleep(ADOPTED_POLL).await;
            }
        }
        Ok(())
    }

    async fn is_adopted(&self, pod: &Pod) -> anyhow::Result<bool> {
        let mut client = self.client.clone();
        let request = ExplainPodRequest {
            namespace: NAMESPACE.to_owned(),
            name: self.full_name(pod),
            uid: String::new(),
        };
        let answer = tokio::time::timeout(CALL_LIMIT, client.explain_pod(request)).await;
        let steps = answer.context("ExplainPod has no answer in time")??.into_inner().steps;
        Ok(steps.iter().any(|step| step.name == "container" && step.state == "done"))
    }
}

/// Whether the condition Ready of a Pod is True.
fn is_ready(pod_json: &[u8]) -> anyhow::Result<bool> {
    let pod: PodView =
        serde_json::from_slice(pod_json).context("pod-sync lists a pod that is not valid JSON")?;
    Ok(pod
        .status
        .conditions
        .iter()
        .any(|condition| condition.r#type == "Ready" && condition.status == "True"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_ready_only_if_its_condition_ready_is_true() {
        let with = |kind: &str, status: &str| {
            let pod = format!(
                r#"{{"spec":{{}},"status":{{"conditions":[{{"type":"{kind}","status":"{status}"}}]}}}}"#
            );
            is_ready(pod.as_bytes()).unwrap()
        };
        assert!(with("Ready", "True"));
        assert!(!with("Ready", "False"));
        assert!(!with("ContainersReady", "True"));
        assert!(!is_ready(br#"{"metadata":{}}"#).unwrap());
        assert!(is_ready(b"").is_err());
    }
}
