//! The floor: the agent's own requests, straight at containerd.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use k8s_cri::v1::StartContainerRequest;
use keelson_testkit::AgentSpec;
use tokio::task::JoinSet;

use crate::capture::CapturedPod;
use crate::cgroups;
use crate::host_files::{Elsewhere, HostFile, remove_folder};
use crate::runtime::{Cri, WORKERS, call};

/// What is replayed.
#[derive(Debug)]
pub struct Floor {
    pods: Vec<CapturedPod>,
    files: Vec<HostFile>,
    elsewhere: Elsewhere,
    cgroup_root: String,
}

impl Floor {
    /// Makes the floor of what was captured, while the captured pods still run: their files are read.
    ///
    /// Its files lie in `folder`, so that the agent does not take them for its own.
    pub fn of(captured: Vec<CapturedPod>, spec: &AgentSpec, folder: &Path) -> anyhow::Result<Self> {
        let elsewhere = Elsewhere::new(vec![
            (spec.root_dir.clone(), folder.join("kubelet")),
            (spec.pod_logs_dir.clone(), folder.join("logs")),
        ]);
        let mut files = Vec::new();
        let mut pods = Vec::new();
        for mut pod in captured {
            files.extend(files_of(&pod, &elsewhere)?);
            move_paths(&mut pod, &elsewhere);
            pods.push(pod);
        }
        Ok(Self { pods, files, elsewhere, cgroup_root: spec.cgroup_root.clone() })
    }

    /// The markers of the processes that it starts: the captured ones.
    pub fn markers(&self) -> Vec<String> {
        let arguments = |pod: &CapturedPod| {
            let config = pod.create.config.clone().unwrap_or_default();
            config.command.into_iter().chain(config.args).next_back()
        };
        self.pods.iter().filter_map(arguments).collect()
    }

    /// Makes what the requests need to be there.
    pub fn prepare(&self) -> anyhow::Result<()> {
        for file in &self.files {
            file.make()?;
        }
        let parents: BTreeSet<&str> = self.pods.iter().filter_map(cgroup_parent).collect();
        parents.into_iter().try_for_each(cgroups::ensure_above)
    }

    /// Replays all requests; returns the moment before the first of them.
    pub async fn replay(&self, cri: &Cri) -> anyhow::Result<Instant> {
        let mut pods = self.pods.clone();
        // Taken from the end.
        pods.reverse();
        let queue = Arc::new(Mutex::new(pods));
        let begun = Instant::now();
        let mut workers = JoinSet::new();
        for _ in 0..WORKERS {
            workers.spawn(work(cri.clone(), queue.clone()));
        }
        while let Some(worker) = workers.join_next().await {
            worker.context("a worker of the floor panicked")??;
        }
        Ok(begun)
    }

    /// Removes the files and the pods' cgroups, after the sandboxes are gone.
    pub fn clean_up(&self) -> anyhow::Result<()> {
        self.elsewhere.targets().try_for_each(remove_folder)?;
        cgroups::remove_pods(&self.cgroup_root)?;
        let left = cgroups::of_pods(&self.cgroup_root);
        ensure!(left.is_empty(), "{} cgroups of pods cannot be removed", left.len());
        Ok(())
    }
}

async fn work(mut cri: Cri, queue: Arc<Mutex<Vec<CapturedPod>>>) -> anyhow::Result<()> {
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some(CapturedPod { sandbox, mut create }) = next else { return Ok(()) };
        let made = call("RunPodSandbox", cri.run_pod_sandbox(sandbox)).await?;
        create.pod_sandbox_id = made.pod_sandbox_id;
        // Boxed: the request alone makes it large.
        let creating = Box::pin(cri.create_container(create));
        let container_id = call("CreateContainer", creating).await?.container_id;
        call("StartContainer", cri.start_container(StartContainerRequest { container_id })).await?;
    }
}

fn cgroup_parent(pod: &CapturedPod) -> Option<&str> {
    let parent = pod.sandbox.config.as_ref()?.linux.as_ref()?.cgroup_parent.as_str();
    (!parent.is_empty()).then_some(parent)
}

/// The host's files that the pod mounts and the folders that its log is written to.
fn files_of(pod: &CapturedPod, elsewhere: &Elsewhere) -> anyhow::Result<Vec<HostFile>> {
    let config = pod.create.config.clone().unwrap_or_default();
    let mut files = Vec::new();
    for mount in &config.mounts {
        let path = Path::new(&mount.host_path);
        if let Some(target) = elsewhere.of(path) {
            files.push(HostFile::read(path, target)?);
        }
    }
    let logs = pod.sandbox.config.clone().unwrap_or_default().log_directory;
    if let Some(folder) = elsewhere.of(Path::new(&logs)) {
        let log = folder.join(&config.log_path);
        let parent = log.parent().unwrap_or(&folder).to_owned();
        files.extend([HostFile::folder(folder), HostFile::folder(parent)]);
    }
    Ok(files)
}

/// Lets the requests name the floor's folders instead of the agent's.
fn move_paths(pod: &mut CapturedPod, elsewhere: &Elsewhere) {
    let move_path = |path: &mut String| {
        if let Some(target) = elsewhere.of(Path::new(path.as_str())) {
            *path = target.to_string_lossy().into_owned();
        }
    };
    let configs = [&mut pod.sandbox.config, &mut pod.create.sandbox_config];
    configs.into_iter().flatten().for_each(|config| move_path(&mut config.log_directory));
    let mounts = pod.create.config.iter_mut().flat_map(|config| &mut config.mounts);
    mounts.for_each(|mount| move_path(&mut mount.host_path));
}

#[cfg(test)]
mod tests {
    use std::fs;

    use k8s_cri::v1::{
        ContainerConfig, CreateContainerRequest, LinuxPodSandboxConfig, Mount, PodSandboxConfig,
        RunPodSandboxRequest,
    };
    use keelson_testkit::Scratch;

    use super::*;

    fn pod(root: &Path) -> CapturedPod {
        let path = |name: &str| root.join(name).to_string_lossy().into_owned();
        let sandbox = PodSandboxConfig {
            log_directory: path("logs/default_x_u"),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: "/k/kubepods/podu".into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let mounts = [path("kubelet/pods/u/etc-hosts"), "/etc/hostname".to_owned()];
        let mounts = mounts.map(|host_path| Mount { host_path, ..Default::default() }).to_vec();
        let config = ContainerConfig {
            command: vec!["/bin/sleep".into(), "1234".into()],
            log_path: "main/0.log".into(),
            mounts,
            ..Default::default()
        };
        CapturedPod {
            sandbox: RunPodSandboxRequest { config: Some(sandbox.clone()), ..Default::default() },
            create: CreateContainerRequest {
                config: Some(config),
                sandbox_config: Some(sandbox),
                ..Default::default()
            },
        }
    }

    #[test]
    fn the_agents_files_are_made_anew_in_the_floors_folder() {
        let scratch = Scratch::new().unwrap();
        let agent = scratch.path().join("a");
        fs::create_dir_all(agent.join("kubelet/pods/u")).unwrap();
        fs::write(agent.join("kubelet/pods/u/etc-hosts"), "hosts").unwrap();
        let spec = AgentSpec::below(&agent, "/bin".into(), "n", "unix:///x".into());
        let folder = scratch.path().join("f");
        let floor = Floor::of(vec![pod(&agent)], &spec, &folder).unwrap();
        assert_eq!(floor.markers(), ["1234"]);

        let in_folder = |name: &str| folder.join(name).to_string_lossy().into_owned();
        let create = floor.pods[0].create.clone();
        let logs = in_folder("logs/default_x_u");
        assert_eq!(create.sandbox_config.unwrap().log_directory, logs);
        assert_eq!(floor.pods[0].sandbox.config.clone().unwrap().log_directory, logs);
        let mounts = create.config.unwrap().mounts;
        let paths: Vec<&str> = mounts.iter().map(|mount| mount.host_path.as_str()).collect();
        assert_eq!(paths, [in_folder("kubelet/pods/u/etc-hosts").as_str(), "/etc/hostname"]);

        floor.files.iter().for_each(|file| file.make().unwrap());
        assert_eq!(fs::read_to_string(paths[0]).unwrap(), "hosts");
        assert!(folder.join("logs/default_x_u/main").is_dir());
        assert_eq!(cgroup_parent(&floor.pods[0]), Some("/k/kubepods/podu"));
    }

    #[test]
    fn a_file_that_the_agent_has_not_made_is_an_error() {
        let scratch = Scratch::new().unwrap();
        let spec = AgentSpec::below(scratch.path(), "/bin".into(), "n", "unix:///x".into());
        let error = Floor::of(vec![pod(scratch.path())], &spec, Path::new("/nonexistent")).unwrap_err();
        assert!(error.to_string().contains("etc-hosts"), "{error:#}");
    }
}
