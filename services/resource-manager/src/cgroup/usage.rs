//! Reads the usage of cgroups: a few files of each, found by path without walking directories.

use std::fs;
use std::path::PathBuf;
use std::time::SystemTime;

use keelson_resource_manager_core::detail::{self, Detail, Files};
use keelson_resource_manager_core::hierarchy::Version;
use keelson_resource_manager_core::layout::Qos;
use keelson_resource_manager_core::statistics::{
    self, Memory, MemoryTexts, Usage, cpu_v1, cpu_v2, memory_v1, memory_v2, pressure,
};

use super::Tree;
use super::tree::USAGE_V1;

impl Tree {
    /// The usage of the cgroup with this path from the root of the tree; `/` is the root. A missing cgroup has no usage.
    pub(crate) fn usage(&self, path: &str) -> Usage {
        let read = |controller: &str, file: &str| self.read_file(controller, path, file).unwrap_or_default();
        match self.version() {
            Version::V1 => Usage {
                cpu_nanos: cpu_v1(&read("cpuacct", "cpuacct.usage")),
                memory: memory_v1(MemoryTexts {
                    usage: &read("memory", USAGE_V1),
                    stat: &read("memory", "memory.stat"),
                    limit: &read("memory", "memory.limit_in_bytes"),
                    swap: "",
                    swap_limit: &read("memory", "memory.memsw.limit_in_bytes"),
                }),
                ..Usage::default()
            },
            Version::V2 => Usage {
                cpu_nanos: cpu_v2(&read("cpu", "cpu.stat")),
                memory: memory_v2(MemoryTexts {
                    usage: &read("memory", "memory.current"),
                    stat: &read("memory", "memory.stat"),
                    limit: &read("memory", "memory.max"),
                    swap: &read("memory", "memory.swap.current"),
                    swap_limit: &read("memory", "memory.swap.max"),
                }),
                cpu_pressure: pressure(&read("cpu", "cpu.pressure")),
                memory_pressure: pressure(&read("memory", "memory.pressure")),
                // The file exists even without the `io` controller.
                io_pressure: pressure(&read("memory", "io.pressure")),
            },
        }
    }

    /// Whether the kernel accounts swap per cgroup (runtime-and-resources.md §4.4). That depends on how it was built and booted.
    /// It is checked once, in the `kubepods` cgroup: the root of a v2 tree has no such file.
    pub(crate) fn has_swap_accounting(&self) -> bool {
        *self.has_swap_accounting.get_or_init(|| {
            let file = match self.version() {
                Version::V1 => "memory.memsw.limit_in_bytes",
                Version::V2 => "memory.swap.max",
            };
            self.read_file("memory", &self.layout().pods().to_string(), file).is_some()
        })
    }

    /// The directory of the cgroup with this path for memory notifications, and its current memory usage in bytes; none on v2,
    /// and for a missing cgroup.
    pub(crate) fn memory_usage(&self, path: &str) -> Option<(PathBuf, u64)> {
        if self.version() == Version::V2 {
            return None;
        }
        let used = self.read_file("memory", path, USAGE_V1)?.trim().parse().ok()?;
        Some((self.mount_of("memory")?.join(path.trim_start_matches('/')), used))
    }

    /// The detailed usage of a cgroup.
    pub(crate) fn detail(&self, path: &str) -> Detail {
        let files = CgroupFiles { tree: self, path };
        match self.version() {
            Version::V1 => detail::v1(&files),
            Version::V2 => detail::v2(&files),
        }
    }

    /// The usage of the machine: the root cgroup, with the sizes of `/proc/meminfo`.
    pub(crate) fn node_usage(&self) -> Usage {
        let usage = self.usage("/");
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Usage { memory: self.node_memory(usage.memory, &meminfo), ..usage }
    }

    fn node_memory(&self, root: Option<Memory>, meminfo: &str) -> Option<Memory> {
        let stat = match root {
            Some(_) => String::new(),
            None => self.read_file("memory", "/", "memory.stat").unwrap_or_default(),
        };
        statistics::node_memory(root, &stat, meminfo)
    }

    /// When the cgroup with this path was created, in nanoseconds since 1970; 0 when unknown.
    ///
    /// The kernel does not record the creation time, so it is the earliest modification of its directories and of a file in
    /// each that is never written: a directory changes when child cgroups are created.
    pub(crate) fn created_unix_nanos(&self, path: &str) -> i64 {
        let untouched = match self.version() {
            Version::V1 => "cgroup.clone_children",
            Version::V2 => "cgroup.events",
        };
        let dirs = self.pod_mounts().map(|mount| mount.join(path.trim_start_matches('/')));
        let changes = dirs.flat_map(|dir| [self.fs().changed(&dir.join(untouched)), self.fs().changed(&dir)]);
        let first = changes.filter_map(Result::ok).min();
        let since = first.and_then(|first| first.duration_since(SystemTime::UNIX_EPOCH).ok());
        since.and_then(|since| i64::try_from(since.as_nanos()).ok()).unwrap_or(0)
    }

    /// The pid of the first process of a cgroup, and the number of processes.
    pub(crate) fn processes(&self, path: &str) -> (Option<u32>, u64) {
        let text = self.read_file("memory", path, "cgroup.procs").unwrap_or_default();
        // A process of another pid namespace shows as 0.
        let first = text.lines().next().and_then(|pid| pid.parse().ok()).filter(|pid| *pid != 0);
        (first, u64::try_from(text.lines().count()).unwrap_or(u64::MAX))
    }

    /// The path of a pod's cgroup, in whichever QoS class it exists.
    pub(crate) fn find_pod(&self, uid: &str) -> Option<String> {
        let mut paths = Qos::ALL.into_iter().map(|qos| self.layout().pod(qos, uid).to_string());
        paths.find(|path| self.has(path))
    }

    /// The path of the cgroup of a container or sandbox in the pod cgroup `pod_cgroup`.
    pub(crate) fn find_container(&self, pod_cgroup: &str, id: &str) -> Option<String> {
        self.layout().containers(pod_cgroup, id).into_iter().find(|path| self.has(path))
    }

    /// Whether the cgroup exists.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.read_file("memory", path, "cgroup.procs").is_some()
    }

    fn read_file(&self, controller: &str, path: &str, file: &str) -> Option<String> {
        let dir = self.mount_of(controller)?.join(path.trim_start_matches('/'));
        self.fs().read(&dir, file).ok()
    }
}

/// The files of one cgroup.
struct CgroupFiles<'a> {
    tree: &'a Tree,
    path: &'a str,
}

impl Files for CgroupFiles<'_> {
    fn read(&self, controller: &str, file: &str) -> String {
        self.tree.read_file(controller, self.path, file).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use keelson_resource_manager_core::layout::{Driver, Layout};
    use keelson_resource_manager_core::values::NodeLimits;

    use super::super::DriverConfig;
    use super::super::fake::FakeCgroups;
    use super::*;

    const V1: &str = "\
31 23 0:28 / /cg rw - tmpfs tmpfs rw\n\
32 31 0:29 / /cg/cpu rw - cgroup cgroup rw,cpu\n\
33 31 0:30 / /cg/cpuacct rw - cgroup cgroup rw,cpuacct\n\
34 31 0:31 / /cg/memory rw - cgroup cgroup rw,memory\n";
    const V2: &str = "31 23 0:28 / /cg rw,nosuid - cgroup2 cgroup2 rw\n";

    fn tree(fake: &FakeCgroups, mountinfo: &str) -> Tree {
        let driver_config = DriverConfig {
            layout: Layout::new(Driver::Cgroupfs, "/own").unwrap(),
            slices: None,
            owner: "/var/lib/kubelet".into(),
        };
        let mounts = keelson_mountinfo::parse(mountinfo.as_bytes());
        Tree::open(Arc::new(fake.clone()), &mounts, Path::new("/cg"), driver_config, NodeLimits::default())
            .unwrap()
    }

    #[test]
    fn on_v1_usage_is_read_from_each_controllers_hierarchy() {
        let fake = FakeCgroups::v1();
        let tree = tree(&fake, V1);
        let path = format!("{}/abc", tree.layout().pod(Qos::Burstable, "u"));
        assert!(!tree.has(&path));
        assert_eq!(tree.usage(&path), Usage::default());
        for (controller, file, content) in [
            ("cpuacct", "cpuacct.usage", "1500\n"),
            ("memory", "memory.usage_in_bytes", "900\n"),
            ("memory", "memory.stat", "total_rss 500\ntotal_inactive_file 100\n"),
            ("memory", "memory.limit_in_bytes", "1000\n"),
            ("memory", "cgroup.procs", "12\n13\n"),
        ] {
            fake.add_file(&format!("/cg/{controller}{path}"), file, content);
        }
        let usage = tree.usage(&path);
        let memory = usage.memory.unwrap();
        assert_eq!((usage.cpu_nanos, memory.working_set, memory.available), (Some(1500), 800, Some(200)));
        assert_eq!((memory.rss, memory.swap_available, usage.cpu_pressure), (500, None, None));
        assert!(tree.has(&path));
        assert_eq!(tree.processes(&path), (Some(12), 2));
    }

    #[test]
    fn on_v2_usage_and_pressure_are_read_from_one_directory() {
        let fake = FakeCgroups::v2(&["cpu", "memory"]);
        let tree = tree(&fake, V2);
        let path = format!("{}/abc", tree.layout().pod(Qos::BestEffort, "u"));
        for (file, content) in [
            ("cpu.stat", "usage_usec 2\nuser_usec 1\n"),
            ("memory.current", "900\n"),
            ("memory.stat", "anon 500\ninactive_file 100\n"),
            ("memory.max", "max\n"),
            ("memory.swap.current", "7\n"),
            ("memory.swap.max", "10\n"),
            ("cpu.pressure", "some avg10=1.00 avg60=0.00 avg300=0.00 total=5\n"),
            ("io.pressure", "some avg10=2.00 avg60=0.00 avg300=0.00 total=6\n"),
            ("cgroup.procs", "0\n0\n"),
        ] {
            fake.add_file(&format!("/cg{path}"), file, content);
        }
        let usage = tree.usage(&path);
        let memory = usage.memory.unwrap();
        assert_eq!((usage.cpu_nanos, memory.working_set, memory.available), (Some(2000), 800, None));
        assert_eq!((memory.swap_usage, memory.swap_available), (Some(7), Some(3)));
        assert_eq!(usage.cpu_pressure.unwrap().some.total_nanos, 5000);
        assert_eq!(usage.io_pressure.unwrap().some.avg10, 2.0);
        assert_eq!(usage.memory_pressure, None);
        // Processes of another pid namespace are counted, but have no number here.
        assert_eq!(tree.processes(&path), (None, 2));
    }

    #[test]
    fn swap_accounting_is_detected_by_the_kubepods_swap_file() {
        let kernels = [
            (FakeCgroups::v1(), V1, "/cg/memory/own/kubepods", "memory.memsw.limit_in_bytes"),
            (FakeCgroups::v2(&["cpu", "memory"]), V2, "/cg/own/kubepods", "memory.swap.max"),
        ];
        for (fake, mountinfo, pods, file) in kernels {
            assert!(!tree(&fake, mountinfo).has_swap_accounting(), "{file}");
            fake.add_file(pods, file, "max\n");
            assert!(tree(&fake, mountinfo).has_swap_accounting(), "{file}");
        }
    }

    #[test]
    fn cgroup_creation_time_is_the_earliest_directory_change() {
        let fake = FakeCgroups::v1();
        let tree = tree(&fake, V1);
        assert_eq!(tree.created_unix_nanos("/own"), 0);
        fake.add_file("/cg/cpu/own", "changed", "30\n");
        fake.add_file("/cg/memory/own", "changed", "40\n");
        assert_eq!(tree.created_unix_nanos("/own"), 30_000_000_000);
        fake.add_file("/cg/memory/own", "cgroup.clone_children changed", "20\n");
        assert_eq!(tree.created_unix_nanos("/own"), 20_000_000_000);
        fake.add_file("/cg/memory/own", "cgroup.events changed", "10\n");
        assert_eq!(tree.created_unix_nanos("/own"), 20_000_000_000, "a file of v2");
    }

    #[test]
    fn on_v2_root_memory_usage_comes_from_meminfo() {
        let fake = FakeCgroups::v2(&["cpu", "memory"]);
        let tree = tree(&fake, V2);
        fake.add_file("/cg", "memory.stat", "anon 500\ninactive_file 1024\n");
        fake.add_file("/cg", "cpu.stat", "usage_usec 3\n");
        let usage = tree.usage("/");
        assert_eq!((usage.cpu_nanos, usage.memory), (Some(3000), None));
        let memory = tree.node_memory(usage.memory, "MemTotal: 10 kB\nMemFree: 4 kB\n").unwrap();
        assert_eq!((memory.usage, memory.working_set, memory.rss), (6 << 10, 5 << 10, 500));
    }
}
