//! A cgroup tree in memory that behaves like the kernel's as far as the tests need it.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use keelson_resource_manager_core::slices::Property;

use super::{CgroupFs, SliceError, Slices};

/// The files of a v1 cgroup, for simplicity in every hierarchy.
const V1_FILES: &[&str] = &[
    "cpu.shares",
    "cpu.cfs_quota_us",
    "cpu.cfs_period_us",
    "memory.limit_in_bytes",
    "pids.max",
    "hugetlb.2MB.limit_in_bytes",
    "cpuset.cpus",
    "cpuset.mems",
];

#[derive(Debug, Default)]
struct Dir {
    files: BTreeMap<String, String>,
    owner: Option<String>,
    /// Rounds of killing until its processes are dead.
    lives: u32,
}

/// The tree; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct FakeCgroups {
    dirs: Arc<Mutex<BTreeMap<PathBuf, Dir>>>,
    /// How many more cgroups can be removed.
    removals: Arc<Mutex<usize>>,
    v2: bool,
}

impl FakeCgroups {
    /// A machine with the v1 hierarchies of the tests, all below `/cg`.
    pub(crate) fn v1() -> Self {
        let fake = Self { dirs: Arc::default(), removals: Arc::new(Mutex::new(usize::MAX)), v2: false };
        for name in ["cpu", "cpuacct", "cpuset", "hugetlb", "memory", "pids", "systemd", "unified"] {
            let mut dir = Dir::default();
            for (file, value) in [("cpuset.cpus", "0-1\n"), ("cpuset.mems", "0\n")] {
                dir.files.insert(file.to_owned(), value.to_owned());
            }
            fake.dirs.lock().unwrap().insert(Path::new("/cg").join(name), dir);
        }
        fake
    }

    /// A machine with v2 at `/cg` and these controllers.
    pub(crate) fn v2(controllers: &[&str]) -> Self {
        let fake = Self { dirs: Arc::default(), removals: Arc::new(Mutex::new(usize::MAX)), v2: true };
        let mut dir = Dir::default();
        dir.files.insert("cgroup.controllers".to_owned(), controllers.join(" "));
        dir.files.insert("cgroup.subtree_control".to_owned(), String::new());
        fake.dirs.lock().unwrap().insert("/cg".into(), dir);
        fake
    }

    pub(crate) fn has(&self, dir: &str) -> bool {
        self.dirs.lock().unwrap().contains_key(Path::new(dir))
    }

    pub(crate) fn value(&self, file: &str) -> String {
        let path = Path::new(file);
        self.read(path.parent().unwrap(), path.file_name().unwrap().to_str().unwrap()).unwrap()
    }

    /// Writes a file of a cgroup, which is created with its parents.
    pub(crate) fn add_file(&self, dir: &str, file: &str, content: &str) {
        let mut dirs = self.dirs.lock().unwrap();
        for above in Path::new(dir).ancestors().skip(1).filter(|above| above.starts_with("/cg/")) {
            dirs.entry(above.to_owned()).or_default();
        }
        let dir = dirs.entry(dir.into()).or_default();
        dir.files.insert(file.to_owned(), content.to_owned());
    }

    /// Sets or removes the owner mark of a cgroup.
    pub(crate) fn mark_owner(&self, dir: &Path, owner: Option<&str>) {
        self.dirs.lock().unwrap().get_mut(dir).unwrap().owner = owner.map(ToOwned::to_owned);
    }

    /// Runs `work` while at most this many cgroups can be removed.
    pub(crate) fn removes_at_most<T>(&self, count: usize, work: impl FnOnce() -> T) -> T {
        *self.removals.lock().unwrap() = count;
        let done = work();
        *self.removals.lock().unwrap() = usize::MAX;
        done
    }

    /// The number of cgroups with this name.
    pub(crate) fn count(&self, name: &str) -> usize {
        self.dirs.lock().unwrap().keys().filter(|dir| dir.ends_with(name)).count()
    }

    /// Puts processes into a cgroup that die in this round of killing.
    pub(crate) fn add_processes(&self, dir: &str, lives: u32) {
        self.dirs.lock().unwrap().get_mut(Path::new(dir)).unwrap().lives = lives;
    }
}

/// The files that a v2 controller adds to the children of a cgroup.
fn files_of(controller: &str) -> &'static [&'static str] {
    match controller {
        "cpu" => &["cpu.weight", "cpu.max"],
        "memory" => &["memory.max"],
        "pids" => &["pids.max"],
        "hugetlb" => &["hugetlb.2MB.max"],
        "cpuset" => &["cpuset.cpus", "cpuset.mems"],
        _ => &[],
    }
}

impl Dir {
    /// Sets the available controllers of the cgroup.
    fn set_controllers(&mut self, controllers: &str) {
        let before = self.files.get("cgroup.controllers").cloned().unwrap_or_default();
        for file in before.split_whitespace().filter(|name| !has(controllers, name)).flat_map(files_of) {
            self.files.remove(*file);
        }
        for file in controllers.split_whitespace().flat_map(files_of) {
            self.files.entry((*file).to_owned()).or_default();
        }
        self.files.insert("cgroup.controllers".to_owned(), controllers.to_owned());
    }
}

/// Whether a list such as `cpu memory` names a controller.
fn has(list: &str, controller: &str) -> bool {
    list.split_whitespace().any(|name| name == controller)
}

fn missing() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl CgroupFs for FakeCgroups {
    fn create(&self, dir: &Path) -> io::Result<bool> {
        let mut dirs = self.dirs.lock().unwrap();
        if dirs.contains_key(dir) {
            return Ok(false);
        }
        let parent = dirs.get(dir.parent().unwrap()).ok_or_else(missing)?;
        let mut new = Dir::default();
        if self.v2 {
            new.set_controllers(&parent.files["cgroup.subtree_control"]);
            new.files.insert("cgroup.subtree_control".to_owned(), String::new());
        } else {
            new.files = V1_FILES.iter().map(|file| ((*file).to_owned(), String::new())).collect();
        }
        dirs.insert(dir.to_owned(), new);
        Ok(true)
    }

    fn remove(&self, dir: &Path) -> io::Result<()> {
        let mut dirs = self.dirs.lock().unwrap();
        let has_child = dirs.keys().any(|d| d.parent() == Some(dir));
        if has_child || dirs.get(dir).is_some_and(|d| d.lives > 0) {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        if dirs.contains_key(dir) {
            let mut removals = self.removals.lock().unwrap();
            // As if the service had been killed.
            *removals = removals.checked_sub(1).ok_or(io::ErrorKind::Interrupted)?;
        }
        dirs.remove(dir);
        Ok(())
    }

    fn children(&self, dir: &Path) -> io::Result<Vec<String>> {
        let dirs = self.dirs.lock().unwrap();
        let names = dirs.keys().filter(|d| d.parent() == Some(dir));
        Ok(names.map(|d| d.file_name().unwrap().to_str().unwrap().to_owned()).collect())
    }

    fn read(&self, dir: &Path, file: &str) -> io::Result<String> {
        let dirs = self.dirs.lock().unwrap();
        dirs.get(dir).and_then(|d| d.files.get(file)).cloned().ok_or_else(missing)
    }

    fn write(&self, dir: &Path, file: &str, value: &str) -> io::Result<()> {
        let mut dirs = self.dirs.lock().unwrap();
        let is_child = |path: &Path| path.parent() == Some(dir);
        let used_below = |controller: &str| {
            dirs.iter().filter(|(path, _)| is_child(path)).any(|(_, child)| {
                child.files.get("cgroup.subtree_control").is_some_and(|enabled| has(enabled, controller))
            })
        };
        if file == "cgroup.subtree_control"
            && value.split_whitespace().filter_map(|part| part.strip_prefix('-')).any(used_below)
        {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let cgroup = dirs.get_mut(dir).ok_or_else(missing)?;
        let available = cgroup.files.get("cgroup.controllers").cloned().unwrap_or_default();
        let slot = cgroup.files.get_mut(file).ok_or_else(missing)?;
        if file == "cgroup.subtree_control" {
            let mut enabled: Vec<&str> = slot.split_whitespace().collect();
            for part in value.split_whitespace() {
                let name = &part[1..];
                enabled.retain(|existing| *existing != name);
                if part.starts_with('+') {
                    if !has(&available, name) {
                        return Err(missing());
                    }
                    enabled.push(name);
                }
            }
            let given = enabled.join(" ");
            slot.clone_from(&given);
            for (_, child) in dirs.iter_mut().filter(|(path, _)| is_child(path)) {
                child.set_controllers(&given);
            }
        } else {
            value.clone_into(slot);
        }
        Ok(())
    }

    fn mark(&self, dir: &Path, owner: &str) -> io::Result<()> {
        self.dirs.lock().unwrap().get_mut(dir).ok_or_else(missing)?.owner = Some(owner.to_owned());
        Ok(())
    }

    fn owner(&self, dir: &Path) -> Option<String> {
        self.dirs.lock().unwrap().get(dir)?.owner.clone()
    }

    /// The files `changed` and `<file> changed` of a cgroup have the times of the cgroup and of the file, in seconds since 1970.
    fn changed(&self, path: &Path) -> io::Result<SystemTime> {
        let text = self.read(path, "changed").or_else(|_| {
            let file = path.file_name().and_then(|name| name.to_str()).ok_or_else(missing)?;
            self.read(path.parent().ok_or_else(missing)?, &format!("{file} changed"))
        })?;
        let seconds = text.trim().parse().map_err(io::Error::other)?;
        Ok(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
    }

    fn kill(&self, dirs: &[PathBuf]) -> io::Result<usize> {
        let mut all = self.dirs.lock().unwrap();
        let mut found = 0;
        for dir in dirs {
            if let Some(dir) = all.get_mut(dir).filter(|d| d.lives > 0) {
                dir.lives -= 1;
                found += 1;
            }
        }
        Ok(found)
    }
}

/// A systemd that creates the cgroups of its slices in a tree: on v1 in the hierarchies that it manages. On v2 it enables its own
/// choice of controllers, and disables `cpuset` unless `AllowedCPUs` is set.
#[derive(Debug, Clone)]
pub(crate) struct FakeSlices {
    tree: FakeCgroups,
    units: Arc<Mutex<BTreeMap<String, BTreeMap<&'static str, String>>>>,
    /// The cgroups for which it has disabled `cpuset`.
    disabled: Arc<Mutex<Vec<String>>>,
}

impl FakeSlices {
    pub(crate) fn of(tree: &FakeCgroups) -> Self {
        Self { tree: tree.clone(), units: Arc::default(), disabled: Arc::default() }
    }

    /// The last value of a property of a unit.
    pub(crate) fn property(&self, unit: &str, name: &str) -> String {
        self.units.lock().unwrap()[unit].get(name).cloned().unwrap_or_default()
    }

    /// The cgroups for which it has disabled `cpuset` since the last call.
    pub(crate) fn take_disabled(&self) -> Vec<String> {
        std::mem::take(&mut self.disabled.lock().unwrap())
    }

    /// Disables `cpuset` below a cgroup, unless it is in use further down or `AllowedCPUs` is set.
    fn disable_cpuset(&self, dir: &Path) {
        const FILE: &str = "cgroup.subtree_control";
        let is_enabled = self.tree.read(dir, FILE).is_ok_and(|enabled| has(&enabled, "cpuset"));
        let is_root = dir == Path::new("/cg");
        let is_used = self.units.lock().unwrap().values().any(|unit| unit.contains_key("AllowedCPUs"));
        if is_enabled && !(is_root && is_used) && self.tree.write(dir, FILE, "-cpuset").is_ok() {
            self.disabled.lock().unwrap().push(dir.display().to_string());
        }
    }

    pub(crate) fn runs(&self, unit: &str) -> bool {
        self.units.lock().unwrap().contains_key(unit)
    }

    /// Adds a unit that the service has not started.
    pub(crate) fn add(&self, unit: &str) {
        self.units.lock().unwrap().entry(unit.to_owned()).or_default();
        self.create_cgroups(unit);
    }

    /// Creates the cgroups of a slice and of its parent slices.
    fn create_cgroups(&self, slice: &str) {
        let mounts: &[&str] =
            if self.tree.v2 { &[""] } else { &["cpu", "cpuacct", "memory", "pids", "systemd"] };
        let stem = slice.strip_suffix(".slice").unwrap();
        for mount in mounts {
            let mut dir = Path::new("/cg").join(mount);
            let mut above = Vec::new();
            for (at, _) in stem.match_indices('-').chain([(stem.len(), "")]) {
                above.push(dir.clone());
                if self.tree.v2 {
                    let controllers = self.tree.read(&dir, "cgroup.controllers").unwrap();
                    let enabled: Vec<String> = controllers
                        .split_whitespace()
                        .filter(|name| ["cpu", "memory", "pids"].contains(name))
                        .filter(|name| !has(&self.tree.read(&dir, "cgroup.subtree_control").unwrap(), name))
                        .map(|name| format!("+{name}"))
                        .collect();
                    self.tree.write(&dir, "cgroup.subtree_control", &enabled.join(" ")).unwrap();
                }
                dir.push(format!("{}.slice", &stem[..at]));
                self.tree.create(&dir).unwrap();
            }
            // A controller that is in use below cannot be disabled: from the bottom up.
            for dir in above.iter().rev().filter(|_| self.tree.v2) {
                self.disable_cpuset(dir);
            }
        }
    }
}

impl Slices for FakeSlices {
    fn start(&self, slice: &str, properties: &[Property]) -> Result<bool, SliceError> {
        if self.runs(slice) {
            return Ok(false);
        }
        self.add(slice);
        self.set(slice, properties)?;
        Ok(true)
    }

    fn set(&self, unit: &str, properties: &[Property]) -> Result<(), SliceError> {
        // A slice that does not run is loaded, and keeps the properties until it is started.
        let set = properties.iter().map(|p| (p.name, format!("{:?}", p.value)));
        self.units.lock().unwrap().entry(unit.to_owned()).or_default().extend(set);
        if self.tree.v2 {
            let stem = unit.strip_suffix(".slice").unwrap_or(unit);
            let ends = stem.match_indices('-').map(|(at, _)| at).chain([stem.len()]);
            let mut dir = PathBuf::from("/cg");
            dir.extend(ends.map(|end| format!("{}.slice", &stem[..end])));
            self.disable_cpuset(&dir);
        }
        Ok(())
    }

    fn stop(&self, slice: &str) -> Result<(), SliceError> {
        if !slice.ends_with(".slice") {
            let why = format!("Unit name {slice} is not valid.");
            return Err(SliceError::Refused { act: "stop", unit: slice.to_owned(), why });
        }
        let full = self.tree.dirs.lock().unwrap().iter().any(|(dir, d)| d.lives > 0 && dir.ends_with(slice));
        if full {
            let why = "the job has not ended".to_owned();
            return Err(SliceError::Refused { act: "stop", unit: slice.to_owned(), why });
        }
        self.units.lock().unwrap().remove(slice);
        Ok(())
    }
}
