//! The cgroups of pods in every hierarchy (runtime-and-resources.md §8).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use keelson_mountinfo::Mount;
use keelson_resource_manager_core::desire::PodCgroup;
use keelson_resource_manager_core::enforce::{self, Limits};
use keelson_resource_manager_core::hierarchy::{
    self, Hierarchies, Hierarchy, HierarchyError, REQUIRED_V2, Version,
};
use keelson_resource_manager_core::layout::{CgroupPath, Layout, Qos};
use keelson_resource_manager_core::slices::{self, Property};
use keelson_resource_manager_core::values::{self, CgroupSetting, NodeLimits};

use super::{CgroupFs, SliceError, Slices};

/// Rounds of killing before a removal fails and is retried later (§8.5).
const KILL_ROUNDS: u32 = 5;
/// The file of a v1 cgroup with its memory usage.
pub(super) const USAGE_V1: &str = "memory.usage_in_bytes";
/// Controllers of v2 that are enabled for pods if the machine has them (§8.1).
const ENABLED_V2: &[&str] = &["cpu", "cpuset", "memory", "hugetlb", "pids"];

/// An error of an operation on the tree.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TreeError {
    /// The machine lacks a hierarchy or a controller.
    #[error(transparent)]
    Hierarchy(#[from] HierarchyError),
    /// An operation of systemd has failed.
    #[error(transparent)]
    Slice(#[from] SliceError),
    /// A system call has failed.
    #[error("cannot {act} {}", path.display())]
    Io { act: String, path: PathBuf, source: io::Error },
    /// A process does not end.
    #[error("the cgroup {} still has processes or children after {KILL_ROUNDS} rounds of killing", path.display())]
    Busy { path: PathBuf },
}

fn io_error(act: impl Into<String>, path: &Path, source: io::Error) -> TreeError {
    TreeError::Io { act: act.into(), path: path.to_owned(), source }
}

/// The configuration of the cgroup driver.
#[derive(Debug)]
pub(crate) struct DriverConfig {
    pub(crate) layout: Layout,
    /// systemd, with its driver. It creates the cgroups in the hierarchies that it manages; this service creates the others, and
    /// writes all values to the files as well: systemd rounds some, and does not report errors.
    pub(crate) slices: Option<Arc<dyn Slices>>,
    /// The owner mark of this agent's cgroups: its root directory, which no two agents share.
    pub(crate) owner: String,
}

/// The pods that have a cgroup, by owner.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct FoundPods {
    /// Created by this agent.
    pub(crate) own: PodCgroups,
    /// Without an owner mark: created by an older version of the agent, or by a kubelet, which may still be running.
    pub(crate) unmarked: PodCgroups,
}

/// Cgroup paths by the UIDs of pods.
pub(crate) type PodCgroups = BTreeMap<String, BTreeSet<CgroupPath>>;

/// The cgroups of pods in every hierarchy.
#[derive(Debug)]
pub(crate) struct Tree {
    fs: Arc<dyn CgroupFs>,
    hierarchies: Hierarchies,
    driver_config: DriverConfig,
    node: NodeLimits,
    pub(super) has_swap_accounting: OnceLock<bool>,
}

impl Tree {
    /// Finds the hierarchies that are mounted at or below `root`, and checks that nothing is missing.
    pub(crate) fn open(
        fs: Arc<dyn CgroupFs>,
        mounts: &[Mount],
        root: &Path,
        driver_config: DriverConfig,
        node: NodeLimits,
    ) -> Result<Self, TreeError> {
        let mut hierarchies = hierarchy::detect(mounts, root)?;
        if hierarchies.version == Version::V2 {
            for unified in &mut hierarchies.pod_hierarchies {
                let text = fs
                    .read(&unified.mount, "cgroup.controllers")
                    .map_err(|e| io_error("read cgroup.controllers of", &unified.mount, e))?;
                unified.controllers = text.split_whitespace().map(ToOwned::to_owned).collect();
            }
        }
        hierarchy::check(&hierarchies, node.pids.is_some())?;
        Ok(Self { fs, hierarchies, driver_config, node, has_swap_accounting: OnceLock::new() })
    }

    /// The cgroup version.
    pub(crate) fn version(&self) -> Version {
        self.hierarchies.version
    }

    /// The names and paths of cgroups.
    pub(crate) fn layout(&self) -> &Layout {
        &self.driver_config.layout
    }

    /// Creates the parent cgroups of pods.
    pub(crate) fn set_up(&self) -> Result<(), TreeError> {
        // The set is sorted: parents come before their children.
        let slices: BTreeSet<CgroupPath> =
            Qos::ALL.iter().flat_map(|qos| self.layout().class(*qos).lineage().collect::<Vec<_>>()).collect();
        for path in slices {
            let properties = self.cpuset_properties(&path);
            if !self.start(&path, &properties)? {
                self.set(&path, &properties)?;
            }
        }
        for hierarchy in &self.hierarchies.pod_hierarchies {
            self.enable(hierarchy, &hierarchy.mount)?;
            for qos in Qos::ALL {
                for path in self.layout().class(qos).lineage() {
                    self.create_one(hierarchy, &path)?;
                }
            }
        }
        self.set_class_shares(Qos::BestEffort, values::MIN_SHARES)
    }

    /// Sets the limits of all pods together (§9). It fails while their usage is above a limit, and must be retried then.
    pub(crate) fn limit_pods(&self, limits: &Limits) -> Result<(), TreeError> {
        self.apply(self.layout().pods(), &enforce::settings(limits))
    }

    /// Sets the limits of a reserved cgroup, by its name in the configuration. It must exist in every hierarchy of the limits.
    pub(crate) fn limit_reserved(&self, name: &str, limits: &Limits) -> Result<(), TreeError> {
        let path = self.layout().reserved(name).ok_or_else(|| {
            let why = io::Error::new(
                io::ErrorKind::InvalidInput,
                "it is the root of the tree; name a cgroup in it",
            );
            io_error("set the limits of the reserved cgroup", Path::new(name), why)
        })?;
        let settings = enforce::settings(limits);
        self.set_unit_limits(&path, &settings)?;
        for write in settings.iter().flat_map(|setting| setting.writes(self.version())) {
            let Some(mount) = self.mount_of(write.controller) else { continue };
            let dir = dir_in(mount, &path);
            let act = || format!("write {} to {} of the reserved cgroup", write.value, write.file);
            self.fs.write(&dir, &write.file, &write.value).map_err(|e| io_error(act(), &dir, e))?;
        }
        Ok(())
    }

    /// Sets the CPU weight of a QoS class.
    pub(crate) fn set_class_shares(&self, qos: Qos, shares: u64) -> Result<(), TreeError> {
        self.apply(&self.layout().class(qos), &[CgroupSetting::CpuShares(shares)])
    }

    /// Every pod that has a cgroup, by owner; pods of other agents are left out.
    pub(crate) fn scan_by_owner(&self) -> Result<FoundPods, TreeError> {
        let mut found = FoundPods::default();
        for (uid, paths) in self.scan()? {
            let dirs = || paths.iter().flat_map(|path| self.mounts().map(move |mount| dir_in(mount, path)));
            let owners: BTreeSet<String> = dirs().filter_map(|dir| self.fs.owner(&dir)).collect();
            if owners.contains(&self.driver_config.owner) {
                found.own.insert(uid, paths);
            } else if owners.is_empty() {
                found.unmarked.insert(uid, paths);
            }
        }
        Ok(found)
    }

    /// Every pod that has a cgroup in any hierarchy, with its paths.
    pub(crate) fn scan(&self) -> Result<PodCgroups, TreeError> {
        let mut found = PodCgroups::new();
        for mount in self.mounts() {
            for qos in Qos::ALL {
                let dir = dir_in(mount, &self.layout().class(qos));
                let names = self.fs.children(&dir).map_err(|e| io_error("list the cgroups of", &dir, e))?;
                for uid in names.iter().filter_map(|name| self.layout().pod_uid(qos, name)) {
                    let path = self.layout().pod(qos, &uid);
                    found.entry(uid).or_default().insert(path);
                }
            }
        }
        Ok(found)
    }

    /// Creates the cgroup of a pod in every hierarchy, with these values.
    pub(crate) fn create_pod(&self, path: &CgroupPath, values: &PodCgroup) -> Result<(), TreeError> {
        let settings = values::pod_settings(values, &self.node);
        let properties = slices::properties(self.version(), &settings);
        if !self.start(path, &properties)? {
            self.set(path, &properties)?;
        }
        let mut fresh = BTreeSet::new();
        for hierarchy in &self.hierarchies.pod_hierarchies {
            let made =
                match self.enable_above(hierarchy, path).and_then(|()| self.create_one(hierarchy, path)) {
                    // A parent cgroup was removed.
                    Err(TreeError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                        for above in path.lineage() {
                            self.create_one(hierarchy, &above)?;
                        }
                        true
                    }
                    other => other?,
                };
            if made {
                fresh.insert(hierarchy.mount.clone());
            }
            let dir = dir_in(&hierarchy.mount, path);
            if made || self.fs.owner(&dir).is_none() {
                self.mark(&dir);
            }
        }
        self.write(path, &settings, &fresh)
    }

    /// The usage of a pod's memory in bytes if the limit in `values` is lower than the present one and not above the usage: the kernel
    /// would kill processes of the pod, or refuse the limit (runtime-and-resources.md §13.2).
    pub(crate) fn usage_above(&self, path: &CgroupPath, values: &PodCgroup) -> Option<u64> {
        let limit = values.memory_limit?;
        let dir = dir_in(self.mount_of("memory")?, path);
        let (limit_file, usage_file) = match self.version() {
            Version::V1 => ("memory.limit_in_bytes", USAGE_V1),
            Version::V2 => ("memory.max", "memory.current"),
        };
        let read = |file: &str| self.fs.read(&dir, file).ok();
        let usage: u64 = read(usage_file)?.trim().parse().ok()?;
        // `max` is no number: there is no limit.
        let present = read(limit_file)?.trim().parse().unwrap_or(u64::MAX);
        (limit < present && usage >= limit).then_some(usage)
    }

    /// Marks a cgroup as this agent's. A cgroup without a mark works as well; it only stays if its pod is removed while the agent
    /// is down.
    fn mark(&self, dir: &Path) {
        if let Err(error) = self.fs.mark(dir, &self.driver_config.owner) {
            tracing::debug!(cgroup = %dir.display(), %error, "cannot mark the owner of the pod's cgroup");
        }
    }

    /// Kills leftover processes in a cgroup and removes it from every hierarchy. A missing one is fine.
    pub(crate) fn remove(&self, path: &CgroupPath) -> Result<(), TreeError> {
        // Hierarchies with the mark come last: after a kill of this service, the rest is still known as ours.
        let mut left: Vec<PathBuf> = self.mounts().map(|mount| dir_in(mount, path)).collect();
        left.reverse();
        // A cgroup that was created with another driver may not be a slice.
        if let Some(slices) = self.driver_config.slices.as_ref().filter(|_| path.is_slice()) {
            // systemd would wait for the end of leftover processes.
            for _ in 0..KILL_ROUNDS {
                if self.kill(path, &left)?.1 == 0 {
                    break;
                }
            }
            slices.stop(path.name())?;
        }
        for _ in 0..KILL_ROUNDS {
            left = self.try_remove(left)?;
            if left.is_empty() {
                return Ok(());
            }
            let (all, _) = self.kill(path, &left)?;
            self.try_remove(all)?;
        }
        match self.try_remove(left)?.into_iter().next() {
            Some(path) => Err(TreeError::Busy { path }),
            None => Ok(()),
        }
    }

    /// Kills all processes in these directories of a cgroup and below. Returns all directories, children before their parent,
    /// and the number of processes.
    fn kill(&self, path: &CgroupPath, dirs: &[PathBuf]) -> Result<(Vec<PathBuf>, usize), TreeError> {
        let mut all = Vec::new();
        for dir in dirs {
            self.descend(dir, &mut all)?;
        }
        let first = || dirs.first().map_or(Path::new(""), PathBuf::as_path);
        let killed = self.fs.kill(&all).map_err(|e| io_error("kill the processes of", first(), e))?;
        if killed > 0 {
            tracing::info!(cgroup = %path, killed, "killed leftover processes in the pod's cgroup");
        }
        Ok((all, killed))
    }

    /// Removes the directories that can be removed, in this order; returns the others.
    fn try_remove(&self, dirs: Vec<PathBuf>) -> Result<Vec<PathBuf>, TreeError> {
        let mut busy = Vec::new();
        for dir in dirs {
            match self.fs.remove(&dir) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => busy.push(dir),
                Err(error) => return Err(io_error("remove the cgroup", &dir, error)),
            }
        }
        Ok(busy)
    }

    /// Adds `dir` and all directories below it to `all`, children before their parent.
    fn descend(&self, dir: &Path, all: &mut Vec<PathBuf>) -> Result<(), TreeError> {
        for name in self.fs.children(dir).map_err(|e| io_error("list the cgroups of", dir, e))? {
            self.descend(&dir.join(name), all)?;
        }
        all.push(dir.to_owned());
        Ok(())
    }

    /// Whether the cgroup has children; the runtime creates one for each container.
    pub(crate) fn has_child_cgroups(&self, path: &CgroupPath) -> bool {
        let mut dirs = self.mounts().map(|mount| dir_in(mount, path));
        dirs.any(|dir| self.fs.children(&dir).is_ok_and(|children| !children.is_empty()))
    }

    /// Where the hierarchy of a controller is mounted; on v2 it is the same for all controllers.
    pub(super) fn mount_of(&self, controller: &str) -> Option<&Path> {
        let has = |h: &&Hierarchy| h.controllers.contains(controller);
        self.hierarchies.pod_hierarchies.iter().find(has).map(|h| h.mount.as_path())
    }

    /// The operations on cgroups.
    pub(super) fn fs(&self) -> &dyn CgroupFs {
        &*self.fs
    }

    fn mounts(&self) -> impl Iterator<Item = &Path> {
        self.pod_mounts().chain(self.hierarchies.unified.as_deref())
    }

    /// Where the hierarchies in which pods have cgroups are mounted.
    pub(super) fn pod_mounts(&self) -> impl Iterator<Item = &Path> {
        self.hierarchies.pod_hierarchies.iter().map(|h| h.mount.as_path())
    }

    /// Creates one cgroup in one hierarchy, ready for processes. False when it existed.
    fn create_one(&self, hierarchy: &Hierarchy, path: &CgroupPath) -> Result<bool, TreeError> {
        let dir = dir_in(&hierarchy.mount, path);
        let made = self.fs.create(&dir).map_err(|e| io_error("create the cgroup", &dir, e))?;
        match self.version() {
            Version::V1 if hierarchy.controllers.contains("cpuset") => self.copy_cpuset(&dir, made)?,
            Version::V1 => {}
            Version::V2 => self.enable(hierarchy, &dir)?,
        }
        Ok(made)
    }

    /// Copies the parent's cpuset: a v1 cpuset accepts no process before it has CPUs and memory nodes (cpuset(7)).
    fn copy_cpuset(&self, dir: &Path, new: bool) -> Result<(), TreeError> {
        let Some(parent) = dir.parent() else { return Ok(()) };
        let read = |dir: &Path, file: &str| {
            self.fs.read(dir, file).map_err(|e| io_error(format!("read {file} of"), dir, e))
        };
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if !new && !read(dir, file)?.trim().is_empty() {
                continue;
            }
            let value = read(parent, file)?;
            let value = value.trim();
            self.fs
                .write(dir, file, value)
                .map_err(|e| io_error(format!("write {value} to {file} of"), dir, e))?;
        }
        Ok(())
    }

    /// Enables the controllers that pods need for the children of a v2 cgroup. A controller that cannot be enabled is an error
    /// only if pods require it.
    fn enable(&self, hierarchy: &Hierarchy, dir: &Path) -> Result<(), TreeError> {
        const FILE: &str = "cgroup.subtree_control";
        if self.version() == Version::V1 {
            return Ok(());
        }
        let enabled = self.fs.read(dir, FILE).map_err(|e| io_error(format!("read {FILE} of"), dir, e))?;
        let missing: Vec<&str> = ENABLED_V2
            .iter()
            .copied()
            .filter(|name| hierarchy.controllers.contains(*name))
            .filter(|name| !enabled.split_whitespace().any(|e| e == *name))
            .collect();
        let text: Vec<String> = missing.iter().map(|name| format!("+{name}")).collect();
        if missing.is_empty() || self.fs.write(dir, FILE, &text.join(" ")).is_ok() {
            return Ok(());
        }
        for (name, text) in missing.iter().zip(&text) {
            if let Err(error) = self.fs.write(dir, FILE, text) {
                if REQUIRED_V2.contains(name) {
                    return Err(io_error(format!("enable the controller {name} below"), dir, error));
                }
                tracing::warn!(
                    controller = name,
                    cgroup = %dir.display(),
                    %error,
                    "cannot enable an optional controller for pods"
                );
            }
        }
        Ok(())
    }

    /// Enables the controllers that systemd does not enable in all parents of a cgroup, from the root down (§8.1): when it starts
    /// a slice, systemd disables `cpuset` where none of its units uses it, and it does not know `hugetlb`. It cannot disable a
    /// controller that is in use below (`EBUSY`). Without systemd the controllers stay as set up.
    fn enable_above(&self, hierarchy: &Hierarchy, path: &CgroupPath) -> Result<(), TreeError> {
        if self.driver_config.slices.is_none() {
            return Ok(());
        }
        self.enable(hierarchy, &hierarchy.mount)?;
        for above in path.lineage().filter(|above| above != path) {
            self.enable(hierarchy, &dir_in(&hierarchy.mount, &above))?;
        }
        Ok(())
    }

    /// Starts the slice of a cgroup; true without systemd and when the slice is new.
    fn start(&self, path: &CgroupPath, properties: &[Property]) -> Result<bool, TreeError> {
        let Some(slices) = &self.driver_config.slices else { return Ok(true) };
        let mut all = slices::new_slice(self.version(), path.name());
        all.extend_from_slice(properties);
        Ok(slices.start(path.name(), &all)?)
    }

    /// The properties that keep the cpuset controller enabled for all pods when systemd reloads (§9).
    fn cpuset_properties(&self, path: &CgroupPath) -> Vec<Property> {
        let is_all_pods = path == self.layout().pods() && self.version() == Version::V2;
        let mount = self.mount_of("cpuset").filter(|_| is_all_pods);
        let cpus = mount.and_then(|mount| self.fs.read(mount, "cpuset.cpus.effective").ok());
        cpus.and_then(|list| slices::allowed_cpus(&list)).into_iter().collect()
    }

    /// Sets the limits of a unit in systemd.
    fn set_unit_limits(&self, path: &CgroupPath, settings: &[CgroupSetting]) -> Result<(), TreeError> {
        self.set(path, &slices::properties(self.version(), settings))
    }

    fn set(&self, path: &CgroupPath, properties: &[Property]) -> Result<(), TreeError> {
        match &self.driver_config.slices {
            Some(slices) if !properties.is_empty() => Ok(slices.set(path.name(), properties)?),
            _ => Ok(()),
        }
    }

    fn apply(&self, path: &CgroupPath, settings: &[CgroupSetting]) -> Result<(), TreeError> {
        self.set_unit_limits(path, settings)?;
        self.write(path, settings, &BTreeSet::new())
    }

    /// Writes values to the hierarchies of their controllers; default values are skipped in fresh cgroups.
    fn write(
        &self,
        path: &CgroupPath,
        settings: &[CgroupSetting],
        fresh: &BTreeSet<PathBuf>,
    ) -> Result<(), TreeError> {
        for write in settings.iter().flat_map(|setting| setting.writes(self.version())) {
            let with = |h: &&Hierarchy| h.controllers.contains(write.controller);
            let Some(hierarchy) = self.hierarchies.pod_hierarchies.iter().find(with) else { continue };
            if write.initial && fresh.contains(&hierarchy.mount) {
                continue;
            }
            let dir = dir_in(&hierarchy.mount, path);
            match self.fs.write(&dir, &write.file, &write.value) {
                Ok(()) => {}
                Err(error) if write.initial && error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    let act = format!("write {} to {} of", write.value, write.file);
                    return Err(io_error(act, &dir, error));
                }
            }
        }
        Ok(())
    }
}

fn dir_in(mount: &Path, path: &CgroupPath) -> PathBuf {
    let mut dir = mount.to_owned();
    dir.extend(path.components());
    dir
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
