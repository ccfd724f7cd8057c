//! The measured agent with its private containerd.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use keelson_config::ServiceName;
use keelson_testkit::process::{ProcessId, Signal};
use keelson_testkit::{Agent, eventually};

use crate::pod_list::PodList;
use crate::pods::{NAMESPACE, Pod, Staged, flooding_pod, markers};
use crate::runtime::{self, Cri};
use crate::usage::{Named, WriteRate};
use crate::watch::{SeenProcess, Watch};
use crate::{cgroups, usage};

/// The default `maxPods` of a kubelet.
const DEFAULT_MAX_PODS: u32 = 110;

/// How long to wait for the background work that containerd and the agent do after their last response.
const SETTLE: Duration = Duration::from_secs(2);

/// The interval at which the end of a pod's process is checked.
const GONE_POLL: Duration = Duration::from_millis(2);

/// The interval at which the removal of all pods is checked.
const REMOVED_POLL: Duration = Duration::from_millis(200);

/// The agent and its folders.
#[derive(Debug)]
pub struct Subject {
    agent: Agent,
    cri: Cri,
    pods: PodList,
    /// The folder in which manifests are written before they are put in place.
    staging: PathBuf,
    /// How long one step may take for all pods.
    limit: Duration,
}

/// Pods whose processes have all started.
#[derive(Debug)]
pub struct StartedPods {
    /// The time just before the first manifest was put in place.
    pub begun: Instant,
    /// The processes in the order in which they were seen.
    pub seen: Vec<SeenProcess>,
}

/// The times that the agent needed to recover, counted from its kill.
#[derive(Debug, Clone, Copy)]
pub struct Recovery {
    /// Until pod-sync lists all pods as Ready. It may know that from its checkpoint.
    pub ready: Duration,
    /// Until the new pod-sync has seen every container running in the runtime.
    pub adopted: Duration,
}

/// How long one step may take for this number of pods.
pub fn limit_for(pods: usize) -> Duration {
    Duration::from_secs(60) + Duration::from_secs(1) * u32::try_from(pods).unwrap_or(u32::MAX)
}

impl Subject {
    /// Starts containerd and the agent with all files in `folder`, then stops the agent again.
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

    /// Configures the agent for the runtime at `endpoint` and for `pods` pods. The agent must be stopped.
    pub fn configure(&self, endpoint: String, pods: usize) -> anyhow::Result<()> {
        let mut spec = self.agent.spec().clone();
        spec.runtime_endpoint = endpoint;
        spec.max_pods = DEFAULT_MAX_PODS.max(u32::try_from(pods)?);
        spec.write()
    }

    /// Stops the agent. Pods keep running.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        self.agent.stop().await
    }

    /// Starts the agent and waits until it answers and its start-up work is done.
    pub async fn resume(&mut self) -> anyhow::Result<()> {
        self.agent.start().await?;
        let pods = &self.pods;
        let answers = || async { pods.ready().await.is_ok() };
        eventually(self.limit, "pod-sync lists its pods", answers).await.with_context(|| self.log())?;
        settle().await;
        Ok(())
    }

    /// Puts the manifests of `pods` in place and waits until all their processes run.
    pub async fn start_pods(&self, pods: &[Pod]) -> anyhow::Result<StartedPods> {
        let staged = Staged::write(pods, &self.staging, self.agent.manifest_dir())?;
        let watch = Watch::start(markers(pods))?;
        let begun = Instant::now();
        staged.put_in_place()?;
        let seen = watch.until(begun + self.limit).await;
        if seen.len() < pods.len() {
            let started: HashSet<&str> = seen.iter().map(|seen| seen.marker.as_str()).collect();
            let missing = pods.iter().find(|pod| !started.contains(pod.marker.as_str()));
            bail!(
                "the agent has started only {} of {} pods in {} s\n{}\n{}",
                seen.len(),
                pods.len(),
                self.limit.as_secs(),
                self.explain(missing).await,
                self.log()
            );
        }
        Ok(StartedPods { begun, seen })
    }

    /// Starts a pod that writes its log as fast as it can, and waits until it writes at full rate.
    pub async fn start_flood(&self) -> anyhow::Result<WriteRate> {
        let up = self.start_pods(&[flooding_pod()]).await?;
        WriteRate::start(&up.seen).await
    }

    /// Waits until pod-sync lists each of `pods` as Ready.
    pub async fn wait_ready(&self, pods: &[Pod]) -> anyhow::Result<()> {
        let ready = self.pods.wait_ready(pods, self.limit).await;
        if let Err(error) = ready {
            return Err(error.context(format!("{}\n{}", self.explain(pods.first()).await, self.log())));
        }
        Ok(())
    }

    /// Removes the manifest of `pod`. Returns the time until its process has ended.
    pub async fn remove_pod(&self, pod: &Pod, process: ProcessId) -> anyhow::Result<Duration> {
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

    /// Removes all manifests and waits until the agent has ended all pods and removed their cgroups.
    pub async fn remove_all_manifests(&self) -> anyhow::Result<()> {
        let folder = self.agent.manifest_dir();
        for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let path = entry?.path();
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
        let deadline = Instant::now() + self.limit;
        loop {
            let sandboxes = runtime::ready_sandboxes(&mut self.cri()).await?;
            let cgroups = cgroups::pod_cgroups(&self.agent.spec().cgroup_root);
            if sandboxes == 0 && cgroups.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let example = cgroups.first().map(|path| format!(", such as {}", path.display()));
                bail!(
                    "{} s after all manifests were removed, {sandboxes} sandboxes still run and {} cgroups of \
                     pods still exist{}\n{}",
                    self.limit.as_secs(),
                    cgroups.len(),
                    example.unwrap_or_default(),
                    self.log()
                );
            }
            tokio::time::sleep(REMOVED_POLL).await;
        }
    }

    /// Removes the sandboxes that the stopped agent has left in containerd, and waits for containerd's background work.
    pub async fn remove_sandboxes(&self) -> anyhow::Result<()> {
        runtime::remove_all(&mut self.cri()).await?;
        settle().await;
        Ok(())
    }

    /// Kills init and all services at once, starts init again and waits for the recovery.
    ///
    /// # Errors
    /// The agent does not recover in time, or a container or process has changed.
    pub async fn kill_and_recover(&mut self, pods: &[Pod], seen: &[SeenProcess]) -> anyhow::Result<Recovery> {
        let before = runtime::ids(&mut self.cri()).await?;
        let services = self.service_processes()?;
        let begun = Instant::now();
        // init first, so that it restarts no service.
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
        let recovered = async {
            // A process ends a moment after the signal. The killed services must not answer the requests below.
            let ended = || std::future::ready(!killed.iter().any(|process| process.is_alive()));
            eventually(limit, "the killed services have ended", ended).await?;
            list.wait_ready(pods, limit).await?;
            let ready = begun.elapsed();
            list.wait_adopted(pods, limit).await?;
            Ok(Recovery { ready, adopted: begun.elapsed() })
        };
        let recovery = match tokio::try_join!(self.agent.start(), recovered) {
            Ok(((), recovery)) => recovery,
            Err(error) => {
                return Err(error.context(format!(
                    "the agent has not recovered from a kill of all services\n{}\n{}",
                    self.explain(pods.first()).await,
                    self.log()
                )));
            }
        };
        // If the agent wrongly restarts containers, it does so within this time.
        settle().await;
        let after = runtime::ids(&mut self.cri()).await?;
        let ended = seen.iter().filter(|seen| !seen.process.is_alive()).count();
        let (new, lost) = (after.difference(&before).count(), before.difference(&after).count());
        ensure!(
            ended + new + lost == 0,
            "the restart of the agent affected pods: of {} processes {ended} have ended, {new} sandboxes and \
             containers are new, {lost} are lost\n{}",
            seen.len(),
            self.log()
        );
        Ok(recovery)
    }

    /// The processes of init and all services.
    pub fn service_processes(&self) -> anyhow::Result<Named> {
        let of = |name: ServiceName| {
            let process = self.agent.service(name);
            let process = process.with_context(|| format!("{name} is not running\n{}", self.log()))?;
            Ok((name.to_string(), process))
        };
        ServiceName::ALL.into_iter().map(of).collect()
    }

    /// The memory of each service in KiB (PSS).
    pub fn pss_kib(&self) -> anyhow::Result<BTreeMap<String, u64>> {
        let services = self.service_processes()?;
        services.iter().map(|(name, process)| Ok((name.clone(), usage::pss_kib(*process)?))).collect()
    }

    /// Stops the agent and containerd and removes everything.
    pub fn end(self) -> anyhow::Result<()> {
        self.agent.end()
    }

    /// The output of `keelson explain pod`, or its error.
    async fn explain(&self, pod: Option<&Pod>) -> String {
        let Some(pod) = pod else { return String::new() };
        let name = self.pods.full_name(pod);
        match self.agent.keelson(&["explain", "pod", &name, "--namespace", NAMESPACE]).await {
            Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).into_owned(),
            Ok(output) => format!("keelson explain pod {name}: {}", String::from_utf8_lossy(&output.stderr)),
            Err(error) => format!("{error:#}"),
        }
    }

    /// The last lines of the agent's log.
    fn log(&self) -> String {
        format!("the end of the agent's log:\n{}", self.agent.log_tail())
    }
}

/// Waits for background work of containerd and the agent.
async fn settle() {
    tokio::time::sleep(SETTLE).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_grows_with_the_number_of_pods() {
        assert_eq!(limit_for(0), Duration::from_secs(60));
        assert_eq!(limit_for(250), Duration::from_secs(310));
    }
}
