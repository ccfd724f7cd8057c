//! The sandboxes and containers that the runtime has had for each pod: none may be duplicated, and none a second attempt.

use std::collections::{BTreeMap, BTreeSet};

use k8s_cri::v1 as cri;
use keelson_testkit::Agent;

use crate::pods;

const UID: &str = "io.kubernetes.pod.uid";

/// Collects what several reads of the runtime have shown.
#[derive(Debug, Default)]
pub struct DuplicateCheck {
    pods: BTreeMap<String, String>,
    violations: BTreeSet<String>,
}

impl DuplicateCheck {
    /// Records what the runtime has now: sandboxes and containers in any state.
    ///
    /// # Errors
    /// The runtime does not answer.
    pub async fn record_runtime(&mut self, agent: &Agent) -> anyhow::Result<()> {
        let mut runtime = agent.containerd().runtime();
        let all = cri::ListPodSandboxRequest { filter: None };
        let mut sandboxes: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for sandbox in runtime.list_pod_sandbox(all).await?.into_inner().items {
            let meta = sandbox.metadata.unwrap_or_default();
            self.pods.insert(meta.uid.clone(), meta.name.clone());
            if meta.attempt > 0 {
                self.violations.insert(format!("{}: sandbox attempt {}", meta.name, meta.attempt));
            }
            sandboxes.entry(meta.uid).or_default().push(sandbox.id);
        }
        let name = |uid: &String| self.pods.get(uid).unwrap_or(uid).clone();
        let mut containers: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
        let all = cri::ListContainersRequest { filter: None };
        for container in runtime.list_containers(all).await?.into_inner().containers {
            let uid = container.labels.get(UID).cloned().unwrap_or_default();
            let meta = container.metadata.unwrap_or_default();
            if meta.attempt > 0 {
                self.violations.insert(format!(
                    "{}/{}: container attempt {}",
                    name(&uid),
                    meta.name,
                    meta.attempt
                ));
            }
            containers.entry((uid, meta.name)).or_default().push(container.id);
        }
        let twice = sandboxes.into_iter().filter(|(_, ids)| ids.len() > 1);
        self.violations.extend(twice.map(|(uid, ids)| format!("{}: sandboxes {ids:?}", name(&uid))));
        let twice = containers.into_iter().filter(|(_, ids)| ids.len() > 1);
        self.violations
            .extend(twice.map(|((uid, container), ids)| format!("{}/{container}: {ids:?}", name(&uid))));
        Ok(())
    }

    /// Records the restart counts that the agent shows now.
    ///
    /// # Errors
    /// `keelson get pods` fails.
    pub async fn record_statuses(&mut self, agent: &Agent) -> anyhow::Result<()> {
        for (name, pod) in pods(agent).await? {
            let statuses = pod["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
            let restarted = statuses.iter().filter(|s| s["restartCount"] != 0);
            self.violations.extend(restarted.map(|s| format!("{name}: restartCount {}", s["restartCount"])));
        }
        Ok(())
    }

    /// The number of pods seen.
    pub fn pods(&self) -> usize {
        self.pods.len()
    }

    /// Duplicates and second attempts, as text; empty when there are none.
    pub fn violations(&self) -> &BTreeSet<String> {
        &self.violations
    }
}
