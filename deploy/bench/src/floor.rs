//! The floor: the agent's own requests, sent directly to containerd.

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
use crate::host_files::{HostFile, PathMap, remove_folder};
use crate::runtime::{Cri, WORKERS, call};

/// The captured requests and the host files that they need.
#[derive(Debug)]
pub struct Floor {
    pods: Vec<CapturedPod>,
    files: Vec<HostFile>,
    /// From the agent's folders to those of the floor.
    path_map: PathMap,
    cgroup_root: String,
}

impl Floor {
    /// Creates a floor from captured requests. The captured pods must still run, because their files are read.
    ///
    /// The files of the floor are in `folder`, so that the agent does not treat them as its own.
    pub fn new(captured: Vec<CapturedPod>, spec: &AgentSpec, folder: &Path) -> anyhow::Result<Self> {
        let path_map = PathMap::new(vec![
            (spec.root_dir.clone(), folder.join("kubelet")),
            (spec.pod_logs_dir.clone(), folder.join("logs")),
        ]);
        let mut files = Vec::new();
        let mut pods = Vec::new();
        for mut pod in captured {
            files.extend(files_of(&pod, &path_map)?);
            move_paths(&mut pod, &path_map);
            pods.push(pod);
        }
        Ok(Self { pods, files, path_map, cgroup_root: spec.cgroup_root.clone() })
    }

    /// The markers of the processes that the floor starts. They are those of the captured pods.
    pub fn markers(&self) -> Vec<String> {
        let arguments = |pod: &CapturedPod| {
            let config = pod.create.config.clone().unwrap_or_default();
            config.command.into_iter().chain(config.args).next_back()
        };
        self.pods.iter().filter_map(arguments).collect()
    }

    /// Creates the host files and cgroups that the requests need.
    pub fn prepare(&self) -> anyhow::Result<()> {
        for file in &self.files {
            file.create()?;
        }
        let parents: BTreeSet<&str> = self.pods.iter().filter_map(cgroup_parent).collect();
        parents.into_iter().try_for_each(cgroups::create_parent)
    }

    /// Replays all requests. Returns the time just before the first one.
    pub async fn replay(&self, cri: &Cri) -> anyhow::Result<Instant> {
        let mut pods = self.pods.clone();
        // The workers take pods from the end.
        pods.reverse();
        let queue = Arc::new(Mutex::new(pods));
        let begun = Instant::now();
        let mut workers = JoinSet::new();
        for _ in 0..WORKERS {
            workers.spawn(replay_pods(cri.clone(), queue.clone()));
        }
        while let Some(worker) = workers.join_next().await {
            worker.context("a worker of the replay panicked")??;
        }
        Ok(begun)
    }

    /// Removes the files and the pods' cgroups. The sandboxes must have been removed before.
    pub fn clean_up(&self) -> anyhow::Result<()> {
        self.path_map.targets().try_for_each(remove_folder)?;
        cgroups::remove_pods(&self.cgroup_root)?;
        let left = cgroups::pod_cgroups(&self.cgroup_root);
        ensure!(left.is_empty(), "{} cgroups of pods cannot be removed", left.len());
        Ok(())
    }
}

/// Replays the requests of pods from `queue` until it is empty.
async fn replay_pods(mut cri: Cri, queue: Arc<Mutex<Vec<CapturedPod>>>) -> anyhow::Result<()> {
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some(CapturedPod { sandbox, mut create }) = next else { return Ok(()) };
        let response = call("RunPodSandbox", cri.run_pod_sandbox(sandbox)).await?;
        create.pod_sandbox_id = response.pod_sandbox_id;
        // Boxed, because the request makes the future large.
        let creating = Box::pin(cri.create_container(create));
        let container_id = call("CreateContainer", creating).await?.container_id;
        call("StartContainer", cri.start_container(StartContainerRequest { container_id })).await?;
    }
}

fn cgroup_parent(pod: &CapturedPod) -> Option<&str> {
    let parent = pod.sandbox.config.as_ref()?.linux.as_ref()?.cgroup_parent.as_str();
    (!parent.is_empty()).then_some(parent)
}

/// The host files that the pod mounts and the folders of its log.
fn files_of(pod: &CapturedPod, path_map: &PathMap) -> anyhow::Result<Vec<HostFile>> {
    let config = pod.create.config.clone().unwrap_or_default();
    let mut files = Vec::new();
    for mount in &config.mounts {
        let path = Path::new(&mount.host_path);
        if let Some(target) = path_map.map(path) {
            files.push(HostFile::read(path, target)?);
        }
    }
    let logs = pod.sandbox.config.clone().unwrap_or_default().log_directory;
    if let Some(folder) = path_map.map(Path::new(&logs)) {
        let log = folder.join(&config.log_path);
        let parent = log.parent().unwrap_or(&folder).to_owned();
        files.extend([HostFile::folder(folder), HostFile::folder(parent)]);
    }
    Ok(files)
}

/// Replaces the agent's folders by those of the floor in the requests of a pod.
fn move_paths(pod: &mut CapturedPod, path_map: &PathMap) {
    let move_path = |path: &mut String| {
        if let Some(target) = path_map.map(Path::new(path.as_str())) {
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
    fn host_files_are_created_again_in_the_folder_of_the_floor() {
        let scratch = Scratch::new().unwrap();
        let agent = scratch.path().join("a");
        fs::create_dir_all(agent.join("kubelet/pods/u")).unwrap();
        fs::write(agent.join("kubelet/pods/u/etc-hosts"), "hosts").unwrap();
        let spec = AgentSpec::below(&agent, "/bin".into(), "n", "unix:///x".into());
        let folder = scratch.path().join("f");
        let floor = Floor::new(vec![pod(&agent)], &spec, &folder).unwrap();
        assert_eq!(floor.markers(), ["1234"]);

        let in_folder = |name: &str| folder.join(name).to_string_lossy().into_owned();
        let create = floor.pods[0].create.clone();
        let logs = in_folder("logs/default_x_u");
        assert_eq!(create.sandbox_config.unwrap().log_directory, logs);
        assert_eq!(floor.pods[0].sandbox.config.clone().unwrap().log_directory, logs);
        let mounts = create.config.unwrap().mounts;
        let paths: Vec<&str> = mounts.iter().map(|mount| mount.host_path.as_str()).collect();
        assert_eq!(paths, [in_folder("kubelet/pods/u/etc-hosts").as_str(), "/etc/hostname"]);

        floor.files.iter().for_each(|file| file.create().unwrap());
        assert_eq!(fs::read_to_string(paths[0]).unwrap(), "hosts");
        assert!(folder.join("logs/default_x_u/main").is_dir());
        assert_eq!(cgroup_parent(&floor.pods[0]), Some("/k/kubepods/podu"));
    }

    #[test]
    fn a_missing_host_file_is_an_error() {
        let scratch = Scratch::new().unwrap();
        let spec = AgentSpec::below(scratch.path(), "/bin".into(), "n", "unix:///x".into());
        let error = Floor::new(vec![pod(scratch.path())], &spec, Path::new("/nonexistent")).unwrap_err();
        assert!(error.to_string().contains("etc-hosts"), "{error:#}");
    }
}
