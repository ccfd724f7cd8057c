//! The agent that is measured, on its private containerd.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use keelson_config::ServiceName;
use keelson_testkit::process::{ProcessId, Signal};
use keelson_testkit::{Agent, eventually};

use crate::pod_list::PodList;
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

/// Between two looks whether everything is removed.
const REMOVED_POLL: Duration = Duration::from_millis(200);

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

    /// Ends the agent; pods keep running.
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

    /// Removes the manifest of `pod`. Returns how long its process keeps running.
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

    /// Kills init and all services at once and starts init again. Fails if a container was affected.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_pods_may_take_longer() {
        assert_eq!(limit_for(0), Duration::from_secs(60));
        assert_eq!(limit_for(250), Duration::from_secs(310));
    }
}
