//! The agent that is measured, on its private containerd.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use keelson_config::ServiceName;
use keelson_proto::keelson::pod_sync::v1::pod_sync_client::PodSyncClient;
use keelson_proto::keelson::pod_sync::v1::{ExplainPodRequest, ListPodsRequest};
use keelson_testkit::process::{ProcessId, Signal};
use keelson_testkit::{Agent, eventually};
use serde::Deserialize;
use tonic::transport::{Channel, Endpoint};

use crate::pods::{NAMESPACE, Pod, Staged, flood, markers};
use crate::runtime::{self, Cri};
use crate::usage::{Flow, Named};
use crate::watch::{Seen, Watch};
use crate::{cgroups, usage};

/// `maxPods` of a kubelet.
const USUAL_MAX_PODS: u32 = 110;

/// What containerd and agent do after their last answer is over after this.
const SETTLE: Duration = Duration::from_secs(2);

/// How long a pod's process may take to end, seen every so often.
const GONE_POLL: Duration = Duration::from_millis(2);

/// Between two questions whether all pods are Ready.
const READY_POLL: Duration = Duration::from_millis(10);

/// Between two looks whether everything is removed.
const REMOVED_POLL: Duration = Duration::from_millis(200);

/// Between two questions whether one pod is adopted.
const ADOPTED_POLL: Duration = Duration::from_millis(2);

/// How long pod-sync may take to answer.
const LIST_LIMIT: Duration = Duration::from_secs(10);

/// The agent and its folders.
#[derive(Debug)]
pub struct Subject {
    agent: Agent,
    cri: Cri,
    pods: PodList,
    /// Manifests wait here.
    staging: PathBuf,
    /// How long all pods may take for anything.
    limit: Duration,
}

/// A run of pods, all of them up.
#[derive(Debug)]
pub struct Up {
    /// Just before the first manifest was put in place.
    pub begun: Instant,
    /// Their processes, in the order of their coming.
    pub seen: Vec<Seen>,
}

/// How the agent came back after it was killed, counted from the kill.
#[derive(Debug, Clone, Copy)]
pub struct Recovery {
    /// pod-sync shows all pods as Ready. It may know that from before.
    pub ready: Duration,
    /// The new pod-sync has seen every container running in the runtime.
    pub adopted: Duration,
}

/// How long so many pods may take for anything.
pub fn limit_for(pods: usize) -> Duration {
    Duration::from_secs(60) + Duration::from_secs(1) * u32::try_from(pods).unwrap_or(u32::MAX)
}

impl Subject {
    /// Starts containerd and, once, the agent with all its folders in `folder`; leaves the agent stopped.
    pub async fn start(folder: &Path, pods: usize) -> anyhow::Result<Self> {
        let name = format!("bench-{:06x}", fastrand::u32(..1 << 24));
        let agent = Agent::builder(folder).node_name(&name).start().await?;
        let mut cri = agent.containerd().runtime();
        runtime::connect(&mut cri).await?;
        let socket = agent.socket(ServiceName::PodSync);
        let pod_list = PodList::new(&socket, &agent.spec().node_name)?;
        let staging = agent.spec().config_dir.join("staging");
        let mut subject = Self { agent, cri, pods: pod_list, staging, limit: limit_for(pods) };
        subject.stop().await?;
        Ok(subject)
    }

    /// The agent.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// A client of containerd.
    pub fn cri(&self) -> Cri {
        self.cri.clone()
    }

    /// Lets the agent, which must be stopped, speak to the runtime at `endpoint`, and take `pods` pods.
    pub fn configure(&self, endpoint: String, pods: usize) -> anyhow::Result<()> {
        let mut spec = self.agent.spec().clone();
        spec.runtime_endpoint = endpoint;
        spec.max_pods = USUAL_MAX_PODS.max(u32::try_from(pods)?);
        spec.write()
    }

    /// Ends the agent; pods go on.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        self.agent.stop().await
    }

    /// Starts the agent and waits until it answers and has come to rest.
    pub async fn resume(&mut self) -> anyhow::Result<()> {
        self.agent.start().await?;
        let pods = &self.pods;
        let answers = || async { pods.ready().await.is_ok() };
        eventually(self.limit, "pod-sync lists its pods", answers).await.with_context(|| self.log())?;
        settle().await;
        Ok(())
    }

    /// Puts the manifests of `pods` in place and waits until all their processes are there.
    pub async fn up(&self, pods: &[Pod]) -> anyhow::Result<Up> {
        let staged = Staged::write(pods, &self.staging, self.agent.manifest_dir())?;
        let watch = Watch::start(markers(pods))?;
        let begun = Instant::now();
        staged.put_in_place()?;
        let seen = watch.until(begun + self.limit).await;
        if seen.len() < pods.len() {
            let there: HashSet<&str> = seen.iter().map(|seen| seen.marker.as_str()).collect();
            let missing = pods.iter().find(|pod| !there.contains(pod.marker.as_str()));
            bail!(
                "the agent has brought up {} of {} pods in {} s\n{}\n{}",
                seen.len(),
                pods.len(),
                self.limit.as_secs(),
                self.explain(missing).await,
                self.log()
            );
        }
        Ok(Up { begun, seen })
    }

    /// Starts a pod that writes its log as fast as it can, and waits until it flows.
    pub async fn flood(&self) -> anyhow::Result<Flow> {
        let up = self.up(&[flood()]).await?;
        Flow::of(&up.seen).await
    }

    /// Waits until pod-sync shows each of `pods` as Ready.
    pub async fn wait_ready(&self, pods: &[Pod]) -> anyhow::Result<()> {
        let ready = self.pods.wait_ready(pods, self.limit).await;
        if let Err(error) = ready {
            return Err(error.context(format!("{}\n{}", self.explain(pods.first()).await, self.log())));
        }
        Ok(())
    }

    /// Removes the manifest of `pod`; returns how long its process goes on.
    pub async fn remove_one(&self, pod: &Pod, process: ProcessId) -> anyhow::Result<Duration> {
        ensure!(process.is_alive(), "the pod {} has ended before its manifest was removed", pod.name);
        let begun = Instant::now();
        self.agent.remove_manifest(&pod.file())?;
        while process.is_alive() {
            if begun.elapsed() > self.limit {
                let explained = self.explain(Some(pod)).await;
                bail!(
                    "the pod {} still runs {} s after its manifest was removed\n{explained}\n{}",
                    pod.name,
                    self.limit.as_secs(),
                    self.log()
                );
            }
            tokio::time::sleep(GONE_POLL).await;
        }
        Ok(begun.elapsed())
    }

    /// Removes the manifests that are left and waits until the agent has ended all pods and removed their
    /// cgroups.
    pub async fn remove_rest(&self) -> anyhow::Result<()> {
        let folder = self.agent.manifest_dir();
        for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let path = entry?.path();
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
        let deadline = Instant::now() + self.limit;
        loop {
            let sandboxes = runtime::ready_sandboxes(&mut self.cri()).await?;
            let cgroups = cgroups::of_pods(&self.agent.spec().cgroup_root);
            if sandboxes == 0 && cgroups.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let example = cgroups.first().map(|path| format!(" such as {}", path.display()));
                bail!(
                    "{} s after all manifests were removed, {sandboxes} sandboxes still run and {} cgroups of \
                     pods are there{}\n{}",
                    self.limit.as_secs(),
                    cgroups.len(),
                    example.unwrap_or_default(),
                    self.log()
                );
            }
            tokio::time::sleep(REMOVED_POLL).await;
        }
    }

    /// Removes what the stopped agent has left in containerd, and lets containerd come to rest.
    pub async fn purge(&self) -> anyhow::Result<()> {
        runtime::remove_all(&mut self.cri()).await?;
        settle().await;
        Ok(())
    }

    /// Kills init and all services at once and starts init again. Fails when a container has noticed.
    pub async fn recover(&mut self, pods: &[Pod], seen: &[Seen]) -> anyhow::Result<Recovery> {
        let before = runtime::ids(&mut self.cri()).await?;
        let services = self.services()?;
        let begun = Instant::now();
        // init first, so that it starts nothing again.
        if let Some(init) = services.get(ServiceName::Init.as_str()) {
            init.signal(Signal::KILL);
        }
        for service in services.values() {
            service.signal(Signal::KILL);
        }
        self.agent.kill_init();
        let limit = self.limit;
        let list = self.pods.clone();
        let killed: Vec<ProcessId> = services.into_values().collect();
        let watched = async {
            // A process ends a moment after the signal; none of the old ones may answer.
            let ended = || std::future::ready(!killed.iter().any(|process| process.is_alive()));
            eventually(limit, "the killed services have ended", ended).await?;
            list.wait_ready(pods, limit).await?;
            let ready = begun.elapsed();
            list.wait_adopted(pods, limit).await?;
            Ok(Recovery { ready, adopted: begun.elapsed() })
        };
        let took = match tokio::try_join!(self.agent.start(), watched) {
            Ok(((), took)) => took,
            Err(error) => {
                return Err(error.context(format!(
                    "all services were killed and started again\n{}\n{}",
                    self.explain(pods.first()).await,
                    self.log()
                )));
            }
        };
        // What the agent would wrongly do, it would do by now.
        settle().await;
        let after = runtime::ids(&mut self.cri()).await?;
        let ended = seen.iter().filter(|seen| !seen.process.is_alive()).count();
        let (new, lost) = (after.difference(&before).count(), before.difference(&after).count());
        ensure!(
            ended + new + lost == 0,
            "the restart of the agent was noticed: of {} processes {ended} have ended, {new} sandboxes and \
             containers are new, {lost} are lost\n{}",
            seen.len(),
            self.log()
        );
        Ok(took)
    }

    /// init and the services.
    pub fn services(&self) -> anyhow::Result<Named> {
        let of = |name: ServiceName| {
            let process = self.agent.service(name);
            let process = process.with_context(|| format!("{name} does not run\n{}", self.log()))?;
            Ok((name.to_string(), process))
        };
        ServiceName::ALL.into_iter().map(of).collect()
    }

    /// KiB of each service.
    pub fn pss_kib(&self) -> anyhow::Result<BTreeMap<String, u64>> {
        let services = self.services()?;
        services.iter().map(|(name, process)| Ok((name.clone(), usage::pss_kib(*process)?))).collect()
    }

    /// Ends and removes everything.
    pub fn end(self) -> anyhow::Result<()> {
        self.agent.end()
    }

    async fn explain(&self, pod: Option<&Pod>) -> String {
        let Some(pod) = pod else { return String::new() };
        let name = self.pods.full_name(pod);
        match self.agent.keelson(&["explain", "pod", &name, "--namespace", NAMESPACE]).await {
            Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).into_owned(),
            Ok(output) => format!("keelson explain pod {name}: {}", String::from_utf8_lossy(&output.stderr)),
            Err(error) => format!("{error:#}"),
        }
    }

    fn log(&self) -> String {
        format!("the end of the agent's log:\n{}", self.agent.log_tail())
    }
}

/// Waits until what was just asked for is over in the background, too.
async fn settle() {
    tokio::time::sleep(SETTLE).await;
}

/// What pod-sync says of its pods.
#[derive(Debug, Clone)]
struct PodList {
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
    fn new(socket: &Path, node: &str) -> anyhow::Result<Self> {
        let endpoint = Endpoint::try_from(format!("unix:{}", socket.display()))?;
        Ok(Self { client: PodSyncClient::new(endpoint.connect_lazy()), node: node.to_owned() })
    }

    /// The name that a pod from a manifest has on this node.
    fn full_name(&self, pod: &Pod) -> String {
        format!("{}-{}", pod.name, self.node)
    }

    /// The names of the pods that are Ready.
    async fn ready(&self) -> anyhow::Result<HashSet<String>> {
        tokio::time::timeout(LIST_LIMIT, self.list_ready()).await.context("ListPods hangs")?
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

    async fn wait_ready(&self, pods: &[Pod], limit: Duration) -> anyhow::Result<()> {
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

    /// Waits until pod-sync says of each container that it runs, which it never knows from before.
    async fn wait_adopted(&self, pods: &[Pod], limit: Duration) -> anyhow::Result<()> {
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
        let answer = tokio::time::timeout(LIST_LIMIT, client.explain_pod(request)).await;
        let steps = answer.context("ExplainPod hangs")??.into_inner().steps;
        Ok(steps.iter().any(|step| step.name == "container" && step.state == "done"))
    }
}

/// Whether the condition Ready of this Pod is True.
fn is_ready(pod_json: &[u8]) -> anyhow::Result<bool> {
    let pod: PodView = serde_json::from_slice(pod_json).context("pod-sync lists something that is no pod")?;
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
    fn only_the_condition_ready_makes_a_pod_ready() {
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

    #[test]
    fn more_pods_may_take_longer() {
        assert_eq!(limit_for(0), Duration::from_secs(60));
        assert_eq!(limit_for(250), Duration::from_secs(310));
    }
}
