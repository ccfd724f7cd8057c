//! The cgroups of pods in every hierarchy (runtime-and-resources.md §8).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use keelson_resource_manager_core::desire::PodCgroup;
use keelson_resource_manager_core::enforce::{self, Limits};
use keelson_resource_manager_core::hierarchy::{
    self, Hierarchies, Hierarchy, HierarchyError, REQUIRED_V2, Version,
};
use keelson_resource_manager_core::layout::{CgroupPath, Layout, Qos};
use keelson_resource_manager_core::slices::{self, Property};
use keelson_resource_manager_core::values::{self, Bound, NodeBounds};

use super::{CgroupFs, SliceError, Slices};

/// Rounds of killing before the removal is given up for now (§8.5).
const KILL_ROUNDS: u32 = 5;
/// The file of a v1 cgroup that says how much memory it uses.
pub(super) const USAGE_V1: &str = "memory.usage_in_bytes";
/// Controllers of v2 that pods are given when the machine has them (§8.1).
const ENABLED_V2: &[&str] = &["cpu", "cpuset", "memory", "hugetlb", "pids"];

/// Why the tree is not as it should be.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TreeError {
    /// The machine lacks something.
    #[error(transparent)]
    Hierarchy(#[from] HierarchyError),
    /// systemd does not do what it is asked for.
    #[error(transparent)]
    Slice(#[from] SliceError),
    /// A system call has failed.
    #[error("cannot {act} {}", path.display())]
    Io { act: String, path: PathBuf, source: io::Error },
    /// Something does not end.
    #[error("the cgroup {} still has processes or children after {KILL_ROUNDS} rounds of killing", path.display())]
    Busy { path: PathBuf },
}

fn failed(act: impl Into<String>, path: &Path, source: io::Error) -> TreeError {
    TreeError::Io { act: act.into(), path: path.to_owned(), source }
}

/// Who makes cgroups and how they are named.
#[derive(Debug)]
pub(crate) struct Driving {
    pub(crate) layout: Layout,
    /// systemd, when its driver is configured. It makes the cgroups where it manages controllers; the rest is done by
    /// hand, and values are written into the files as well: systemd rounds some, and says nothing when it cannot.
    pub(crate) slices: Option<Arc<dyn Slices>>,
    /// What tells this agent's pods from those of others on the machine: its root folder, which no two agents share.
    pub(crate) owner: String,
}

/// The pods that have a cgroup, by whom it was made.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Stock {
    /// By this agent.
    pub(crate) own: Found,
    /// By nobody who has noted it: an agent of before there were notes, or a kubelet, be it one that runs beside this agent.
    pub(crate) unmarked: Found,
}

/// The pods that have cgroups, and where.
pub(crate) type Found = BTreeMap<String, BTreeSet<CgroupPath>>;

/// The cgroups of pods in every hierarchy.
#[derive(Debug)]
pub(crate) struct Tree {
    fs: Arc<dyn CgroupFs>,
    hierarchies: Hierarchies,
    driving: Driving,
    node: NodeBounds,
    pub(super) counts_swap: OnceLock<bool>,
}

impl Tree {
    /// Finds the hierarchies that `mountinfo` shows at or below `root`, and checks that nothing is missing.
    pub(crate) fn open(
        fs: Arc<dyn CgroupFs>,
        mountinfo: &str,
        root: &Path,
        driving: Driving,
        node: NodeBounds,
    ) -> Result<Self, TreeError> {
        let mut hierarchies = hierarchy::detect(mountinfo, root)?;
        if hierarchies.version == Version::V2 {
            for unified in &mut hierarchies.governing {
                let text = fs
                    .read(&unified.mount, "cgroup.controllers")
                    .map_err(|e| failed("read cgroup.controllers of", &unified.mount, e))?;
                unified.controllers = text.split_whitespace().map(ToOwned::to_owned).collect();
            }
        }
        hierarchy::check(&hierarchies, node.pids.is_some())?;
        Ok(Self { fs, hierarchies, driving, node, counts_swap: OnceLock::new() })
    }

    /// Which interface governs.
    pub(crate) fn version(&self) -> Version {
        self.hierarchies.version
    }

    /// How cgroups are named.
    pub(crate) fn layout(&self) -> &Layout {
        &self.driving.layout
    }

    /// Makes the cgroups above the pods.
    pub(crate) fn set_up(&self) -> Result<(), TreeError> {
        // Parents come before what is in them.
        let slices: BTreeSet<CgroupPath> =
            Qos::ALL.iter().flat_map(|qos| self.layout().class(*qos).lineage().collect::<Vec<_>>()).collect();
        for path in slices {
            let properties = self.kept_enabled(&path);
            if !self.start(&path, &properties)? {
                self.set(&path, &properties)?;
            }
        }
        for hierarchy in &self.hierarchies.governing {
            self.enable(hierarchy, &hierarchy.mount)?;
            for qos in Qos::ALL {
                for path in self.layout().class(qos).lineage() {
                    self.make_one(hierarchy, &path)?;
                }
            }
        }
        self.set_class_shares(Qos::BestEffort, values::MIN_SHARES)
    }

    /// Binds all pods together (§9). What they use already may be above a limit; then it is to be tried again.
    pub(crate) fn bind_pods(&self, limits: &Limits) -> Result<(), TreeError> {
        self.bind(self.layout().pods(), &enforce::bounds(limits))
    }

    /// Binds a cgroup that is somebody else's, by its name in the configuration. It must exist in every hierarchy that
    /// it is bound in.
    pub(crate) fn bind_reserved(&self, name: &str, limits: &Limits) -> Result<(), TreeError> {
        let path = self.layout().reserved(name).ok_or_else(|| {
            let why =
                io::Error::new(io::ErrorKind::InvalidInput, "it is the top of the tree, name a cgroup in it");
            failed("bind the reserved cgroup", Path::new(name), why)
        })?;
        let bounds = enforce::bounds(limits);
        self.tell(&path, &bounds)?;
        for write in bounds.iter().flat_map(|bound| bound.writes(self.version())) {
            let Some(mount) = self.mount_of(write.controller) else { continue };
            let dir = dir_in(mount, &path);
            let act = || format!("write {} into {} of the reserved cgroup", write.value, write.file);
            self.fs.write(&dir, &write.file, &write.value).map_err(|e| failed(act(), &dir, e))?;
        }
        Ok(())
    }

    /// The weight of a class against the others.
    pub(crate) fn set_class_shares(&self, qos: Qos, shares: u64) -> Result<(), TreeError> {
        self.bind(&self.layout().class(qos), &[Bound::CpuShares(shares)])
    }

    /// The same by whom the cgroups were made; what another agent has made is left out.
    pub(crate) fn take_stock(&self) -> Result<Stock, TreeError> {
        let mut stock = Stock::default();
        for (uid, paths) in self.scan()? {
            let dirs = || paths.iter().flat_map(|path| self.mounts().map(move |mount| dir_in(mount, path)));
            let owners: BTreeSet<String> = dirs().filter_map(|dir| self.fs.owner(&dir)).collect();
            if owners.contains(&self.driving.owner) {
                stock.own.insert(uid, paths);
            } else if owners.is_empty() {
                stock.unmarked.insert(uid, paths);
            }
        }
        Ok(stock)
    }

    /// Every pod that has a cgroup in some hierarchy, with where.
    pub(crate) fn scan(&self) -> Result<Found, TreeError> {
        let mut found = Found::new();
        for mount in self.mounts() {
            for qos in Qos::ALL {
                let dir = dir_in(mount, &self.layout().class(qos));
                let names = self.fs.children(&dir).map_err(|e| failed("list the cgroups of", &dir, e))?;
                for uid in names.iter().filter_map(|name| self.layout().pod_uid(qos, name)) {
                    let path = self.layout().pod(qos, &uid);
                    found.entry(uid).or_default().insert(path);
                }
            }
        }
        Ok(found)
    }

    /// Makes the cgroup of a pod in every hierarchy, with these values.
    pub(crate) fn make_pod(&self, path: &CgroupPath, values: &PodCgroup) -> Result<(), TreeError> {
        let bounds = values::pod(values, &self.node);
        let properties = slices::properties(self.version(), &bounds);
        if !self.start(path, &properties)? {
            self.set(path, &properties)?;
        }
        let mut fresh = BTreeSet::new();
        for hierarchy in &self.hierarchies.governing {
            let made = match self.enable_above(hierarchy, path).and_then(|()| self.make_one(hierarchy, path))
            {
                // Somebody has removed what is above.
                Err(TreeError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                    for above in path.lineage() {
                        self.make_one(hierarchy, &above)?;
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
        self.write(path, &bounds, &fresh)
    }

    /// A cgroup without a note works as well; it only stays where its pod is forgotten while the agent is away.
    fn mark(&self, dir: &Path) {
        if let Err(error) = self.fs.mark(dir, &self.driving.owner) {
            tracing::debug!(cgroup = %dir.display(), %error, "cannot note whose pod it is");
        }
    }

    /// Ends what is left in a cgroup and removes it from every hierarchy. Missing is fine.
    pub(crate) fn remove(&self, path: &CgroupPath) -> Result<(), TreeError> {
        // Those with a note go last: what a kill leaves of them is still known as ours.
        let mut left: Vec<PathBuf> = self.mounts().map(|mount| dir_in(mount, path)).collect();
        left.reverse();
        // Under another driver than now a pod's cgroup may be none of systemd's.
        if let Some(slices) = self.driving.slices.as_ref().filter(|_| path.is_slice()) {
            // systemd would wait for the end of what is left.
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

    /// Kills what is in these folders of a cgroup and below; all of them, children before their parent, and how many
    /// processes there were.
    fn kill(&self, path: &CgroupPath, dirs: &[PathBuf]) -> Result<(Vec<PathBuf>, usize), TreeError> {
        let mut all = Vec::new();
        for dir in dirs {
            self.descend(dir, &mut all)?;
        }
        let first = || dirs.first().map_or(Path::new(""), PathBuf::as_path);
        let killed = self.fs.kill(&all).map_err(|e| failed("kill the processes of", first(), e))?;
        if killed > 0 {
            tracing::info!(cgroup = %path, killed, "killed what was left in the pod's cgroup");
        }
        Ok((all, killed))
    }

    /// Removes what can be removed, in this order; the rest.
    fn try_remove(&self, dirs: Vec<PathBuf>) -> Result<Vec<PathBuf>, TreeError> {
        let mut busy = Vec::new();
        for dir in dirs {
            match self.fs.remove(&dir) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => busy.push(dir),
                Err(error) => return Err(failed("remove the cgroup", &dir, error)),
            }
        }
        Ok(busy)
    }

    /// Adds `dir` and all below it to `all`, children before their parent.
    fn descend(&self, dir: &Path, all: &mut Vec<PathBuf>) -> Result<(), TreeError> {
        for name in self.fs.children(dir).map_err(|e| failed("list the cgroups of", dir, e))? {
            self.descend(&dir.join(name), all)?;
        }
        all.push(dir.to_owned());
        Ok(())
    }

    /// Whether there is a cgroup in this one, as the runtime makes one for each container.
    pub(crate) fn is_inhabited(&self, path: &CgroupPath) -> bool {
        let mut dirs = self.mounts().map(|mount| dir_in(mount, path));
        dirs.any(|dir| self.fs.children(&dir).is_ok_and(|children| !children.is_empty()))
    }

    /// Where the hierarchy of a controller is mounted; on v2 all of them have one.
    pub(super) fn mount_of(&self, controller: &str) -> Option<&Path> {
        let has = |h: &&Hierarchy| h.controllers.contains(controller);
        self.hierarchies.governing.iter().find(has).map(|h| h.mount.as_path())
    }

    /// The port.
    pub(super) fn fs(&self) -> &dyn CgroupFs {
        &*self.fs
    }

    fn mounts(&self) -> impl Iterator<Item = &Path> {
        self.governing().chain(self.hierarchies.beside.as_deref())
    }

    /// Where the hierarchies that pods have cgroups in are mounted.
    pub(super) fn governing(&self) -> impl Iterator<Item = &Path> {
        self.hierarchies.governing.iter().map(|h| h.mount.as_path())
    }

    /// Makes one cgroup in one hierarchy, so that processes can be put into it. False when it was there.
    fn make_one(&self, hierarchy: &Hierarchy, path: &CgroupPath) -> Result<bool, TreeError> {
        let dir = dir_in(&hierarchy.mount, path);
        let made = self.fs.make(&dir).map_err(|e| failed("make the cgroup", &dir, e))?;
        match self.version() {
            Version::V1 if hierarchy.controllers.contains("cpuset") => self.copy_cpuset(&dir, made)?,
            Version::V1 => {}
            Version::V2 => self.enable(hierarchy, &dir)?,
        }
        Ok(made)
    }

    /// A v1 cpuset takes no process before it has CPUs and memory nodes (cpuset(7)).
    fn copy_cpuset(&self, dir: &Path, new: bool) -> Result<(), TreeError> {
        let Some(parent) = dir.parent() else { return Ok(()) };
        let read = |dir: &Path, file: &str| {
            self.fs.read(dir, file).map_err(|e| failed(format!("read {file} of"), dir, e))
        };
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if !new && !read(dir, file)?.trim().is_empty() {
                continue;
            }
            let value = read(parent, file)?;
            let value = value.trim();
            self.fs
                .write(dir, file, value)
                .map_err(|e| failed(format!("write {value} into {file} of"), dir, e))?;
        }
        Ok(())
    }

    /// Gives the children of a v2 cgroup the controllers that pods need. One that is there but cannot be given is
    /// an error only when pods cannot do without it.
    fn enable(&self, hierarchy: &Hierarchy, dir: &Path) -> Result<(), TreeError> {
        const FILE: &str = "cgroup.subtree_control";
        if self.version() == Version::V1 {
            return Ok(());
        }
        let enabled = self.fs.read(dir, FILE).map_err(|e| failed(format!("read {FILE} of"), dir, e))?;
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
                    return Err(failed(format!("enable the controller {name} below"), dir, error));
                }
                tracing::warn!(controller = name, cgroup = %dir.display(), %error, "pods go without a controller");
            }
        }
        Ok(())
    }

    /// Gives everything above a cgroup the controllers that systemd has not enabled there, from the top down (§8.1): when it
    /// starts a slice it takes `cpuset` away again where none of its units asks for it, and of `hugetlb` it knows nothing. What
    /// is in use below it leaves alone from then on (`EBUSY`). Without systemd they stay as they were set up.
    fn enable_above(&self, hierarchy: &Hierarchy, path: &CgroupPath) -> Result<(), TreeError> {
        if self.driving.slices.is_none() {
            return Ok(());
        }
        self.enable(hierarchy, &hierarchy.mount)?;
        for above in path.lineage().filter(|above| above != path) {
            self.enable(hierarchy, &dir_in(&hierarchy.mount, &above))?;
        }
        Ok(())
    }

    /// Has systemd start the slice of a cgroup; true without systemd and when it is new.
    fn start(&self, path: &CgroupPath, properties: &[Property]) -> Result<bool, TreeError> {
        let Some(slices) = &self.driving.slices else { return Ok(true) };
        let mut all = slices::new_slice(self.version(), path.name());
        all.extend_from_slice(properties);
        Ok(slices.start(path.name(), &all)?)
    }

    /// What keeps the controllers of all pods enabled when systemd reloads (§9).
    fn kept_enabled(&self, path: &CgroupPath) -> Vec<Property> {
        let is_all_pods = path == self.layout().pods() && self.version() == Version::V2;
        let mount = self.mount_of("cpuset").filter(|_| is_all_pods);
        let cpus = mount.and_then(|mount| self.fs.read(mount, "cpuset.cpus.effective").ok());
        cpus.and_then(|list| slices::allowed_cpus(&list)).into_iter().collect()
    }

    /// Tells systemd what a unit is bound by.
    fn tell(&self, path: &CgroupPath, bounds: &[Bound]) -> Result<(), TreeError> {
        self.set(path, &slices::properties(self.version(), bounds))
    }

    fn set(&self, path: &CgroupPath, properties: &[Property]) -> Result<(), TreeError> {
        match &self.driving.slices {
            Some(slices) if !properties.is_empty() => Ok(slices.set(path.name(), properties)?),
            _ => Ok(()),
        }
    }

    fn bind(&self, path: &CgroupPath, bounds: &[Bound]) -> Result<(), TreeError> {
        self.tell(path, bounds)?;
        self.write(path, bounds, &BTreeSet::new())
    }

    /// Writes values where their controllers are; what is initial anyway is left out where the cgroup is fresh.
    fn write(&self, path: &CgroupPath, bounds: &[Bound], fresh: &BTreeSet<PathBuf>) -> Result<(), TreeError> {
        for write in bounds.iter().flat_map(|bound| bound.writes(self.version())) {
            let with = |h: &&Hierarchy| h.controllers.contains(write.controller);
            let Some(hierarchy) = self.hierarchies.governing.iter().find(with) else { continue };
            if write.initial && fresh.contains(&hierarchy.mount) {
                continue;
            }
            let dir = dir_in(&hierarchy.mount, path);
            match self.fs.write(&dir, &write.file, &write.value) {
                Ok(()) => {}
                Err(error) if write.initial && error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    let act = format!("write {} into {} of", write.value, write.file);
                    return Err(failed(act, &dir, error));
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
