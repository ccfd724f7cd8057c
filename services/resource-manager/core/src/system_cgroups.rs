//! The system cgroups: those other than pods that have statistics (node-and-api.md §8.10).

use crate::hierarchy::Version;

/// A system cgroup with its own statistics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SystemCgroup {
    /// Its name in the summary: `kubelet`, `runtime` or `misc`.
    pub name: &'static str,
    /// The path from the root of the tree.
    pub path: String,
}

/// The system cgroups by their configured paths; an empty path is skipped. Without a path for `kubelet` it is the cgroup of
/// this process, from the text of `/proc/self/cgroup`.
pub fn system_cgroups(
    [kubelet, runtime, misc]: [&str; 3],
    self_cgroup: &str,
    version: Version,
) -> Vec<SystemCgroup> {
    let named = |path: &str| (!path.is_empty()).then(|| path.to_owned());
    let kubelet = named(kubelet).or_else(|| own_cgroup(self_cgroup, version));
    [("kubelet", kubelet), ("runtime", named(runtime)), ("misc", named(misc))]
        .into_iter()
        .filter_map(|(name, path)| Some(SystemCgroup { name, path: path? }))
        .collect()
}

/// The cgroup of a process, from the text of its `/proc/<pid>/cgroup` (cgroups(7)): lines
/// `<hierarchy>:<controllers>:<path>`.
///
/// On v1 it is the cgroup where both CPU and memory are accounted, or that of systemd's hierarchy if there is one; none when
/// CPU and memory differ. A path that leads out of the visible tree is none, too.
pub fn own_cgroup(text: &str, version: Version) -> Option<String> {
    let path_of = |controller: &str| {
        let lines = text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let mut found = lines.filter(|(controllers, _)| controllers.split(',').any(|c| c == controller));
        found.next().map(|(_, path)| path)
    };
    let path = match version {
        Version::V2 => path_of("")?,
        Version::V1 => {
            let cpu = path_of("cpu").filter(|cpu| path_of("memory") == Some(cpu))?;
            path_of("name=systemd").unwrap_or(cpu)
        }
    };
    let is_inside = path.starts_with('/') && path.split('/').all(|part| part != "..");
    is_inside.then(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_cgroup_is_where_cpu_and_memory_are_accounted() {
        const V2: &str = "0::/system.slice/kubelet.service\n";
        let v1 = |cpu: &str, memory: &str, more: &str| {
            format!("5:devices:/x\n4:memory:{memory}\n3:cpuset:/y\n2:cpu,cpuacct:{cpu}\n{more}0::/unified\n")
        };
        let systemd = "1:name=systemd:/system.slice/kubelet.service\n";
        for (text, version, found) in [
            (V2.to_owned(), Version::V2, Some("/system.slice/kubelet.service")),
            ("0::/\n".to_owned(), Version::V2, Some("/")),
            ("0::/../../a\n".to_owned(), Version::V2, None),
            (v1("/a", "/a", ""), Version::V1, Some("/a")),
            (v1("/a", "/b", ""), Version::V1, None),
            (v1("/", "/", systemd), Version::V1, Some("/system.slice/kubelet.service")),
            (v1("/a", "/b", systemd), Version::V1, None),
            ("4:memory:/a\n".to_owned(), Version::V1, None),
            (String::new(), Version::V1, None),
            (String::new(), Version::V2, None),
        ] {
            assert_eq!(own_cgroup(&text, version).as_deref(), found, "{text}");
        }
    }

    #[test]
    fn system_cgroups_come_from_the_configuration_or_the_agents_own_cgroup() {
        let found = |named| {
            let found = system_cgroups(named, "0::/own\n", Version::V2);
            found.into_iter().map(|cgroup| format!("{}={}", cgroup.name, cgroup.path)).collect::<Vec<_>>()
        };
        assert_eq!(found(["", "", ""]), ["kubelet=/own"]);
        assert_eq!(found(["/k", "/r", "/m"]), ["kubelet=/k", "runtime=/r", "misc=/m"]);
        assert_eq!(system_cgroups(["", "", "/m"], "", Version::V2).len(), 1);
    }
}
