//! A running pod that must not be affected by what a test does to others.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use keelson_testkit::Agent;
use serde_json::Value;

use crate::waits::until_one_ready;
use crate::{Process, is_ready, pods, running, sleeper};

/// A Ready pod whose process and whole status have to stay the same.
#[derive(Debug)]
pub struct BystanderPod {
    name: String,
    process: Process,
    status: Value,
}

impl BystanderPod {
    /// Starts the pod, with a readiness probe each second, and waits until it is Ready.
    ///
    /// # Panics
    /// It does not become Ready.
    pub async fn start(agent: &Agent, name: &str) -> Self {
        let probe = "    readinessProbe:\n      exec: {command: [\"true\"]}\n      periodSeconds: 1\n      \
                     timeoutSeconds: 20\n";
        let manifest = sleeper(name).replace("    volumeMounts:\n", &format!("{probe}    volumeMounts:\n"));
        assert!(manifest.contains(probe), "{manifest}");
        agent.write_manifest(&format!("{name}.yaml"), &manifest).unwrap();
        until_one_ready(agent, name).await;
        let name = format!("{name}-{}", agent.spec().node_name);
        let process = running(agent).await.unwrap().remove(&format!("{name}/main")).expect("it is Ready");
        let status = pods(agent).await.unwrap()[&name]["status"].clone();
        Self { name, process, status }
    }

    /// Checks that the pod has not changed since it was started: the same process in the same container, no restart, and
    /// Ready without interruption, as the transition times of its conditions show.
    ///
    /// # Panics
    /// It has changed.
    pub async fn assert_untouched(&self, agent: &Agent) {
        assert_eq!(running(agent).await.unwrap().get(&format!("{}/main", self.name)), Some(&self.process));
        let pod = pods(agent).await.unwrap().remove(&self.name).expect("it is wanted");
        assert!(is_ready(&pod), "{pod:#}");
        assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0, "{pod:#}");
        // The transition times show a condition that has changed and changed back.
        assert_eq!(pod["status"], self.status);
    }
}
