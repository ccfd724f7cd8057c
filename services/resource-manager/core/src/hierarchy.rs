//! The mounted cgroup hierarchies (cgroups(7)).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use keelson_mountinfo::Mount;

/// The cgroup version that is used for pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// One hierarchy per controller.
    V1,
    /// One unified hierarchy.
    V2,
}

impl Version {
    /// `v1` or `v2`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
        }
    }
}

/// A mounted hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// Where it is mounted.
    pub mount: PathBuf,
    /// Its controllers. On v1 a named hierarchy shows as `name=…`; on v2 this is empty until `cgroup.controllers`
    /// has been read.
    pub controllers: BTreeSet<String>,
}

/// The hierarchies of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchies {
    /// The version that is used for pods.
    pub version: Version,
    /// The hierarchies in which pods get a cgroup.
    pub pod_hierarchies: Vec<Hierarchy>,
    /// On v1 the unified v2 hierarchy, without usable controllers; runtimes may leave cgroups there.
    pub unified: Option<PathBuf>,
}

/// Controllers that pods require. `cpuset`, `pids` and `hugetlb` are missing on some kernels; features that need them report
/// that themselves.
pub const REQUIRED_V1: &[&str] = &["cpu", "cpuacct", "memory"];
/// As [`REQUIRED_V1`], for v2.
pub const REQUIRED_V2: &[&str] = &["cpu", "memory"];

/// Why this machine cannot have cgroups for pods.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HierarchyError {
    /// No hierarchy is mounted.
    #[error("no cgroup hierarchy is mounted below {}; mount cgroup2 there, or the v1 controllers", root.display())]
    None {
        /// Where hierarchies are expected.
        root: PathBuf,
    },
    /// Required controllers are missing.
    #[error("the cgroup controllers {} are missing; the kernel must support them and {hint}", missing.join(", "))]
    Missing {
        /// Their names.
        missing: Vec<String>,
        /// How they are made available.
        hint: &'static str,
    },
}

/// Finds the hierarchies at or below `root` (`/sys/fs/cgroup`): v2 when cgroup2 is mounted on `root` itself, else v1. A mount
/// of a part of a hierarchy is skipped, since paths in it would be wrong.
pub fn detect(mounts: &[Mount], root: &Path) -> Result<Hierarchies, HierarchyError> {
    let mut pod_hierarchies: Vec<Hierarchy> = Vec::new();
    let mut unified = None;
    let whole = mounts.iter().filter(|m| m.root == Path::new("/"));
    for mount in whole.filter(|m| m.point.starts_with(root)) {
        let point = mount.point.clone();
        if mount.fs_type == "cgroup2" {
            if point == root {
                let v2 = Hierarchy { mount: point, controllers: BTreeSet::new() };
                return Ok(Hierarchies { version: Version::V2, pod_hierarchies: vec![v2], unified: None });
            }
            unified = Some(point);
        } else if mount.fs_type == "cgroup" {
            let options = mount.super_options.split(',');
            let controllers: BTreeSet<String> =
                options.filter(|o| is_controller(o)).map(ToOwned::to_owned).collect();
            // The same hierarchy mounted twice counts once.
            if !controllers.is_empty() && pod_hierarchies.iter().all(|h| h.controllers != controllers) {
                pod_hierarchies.push(Hierarchy { mount: point, controllers });
            }
        }
    }
    if pod_hierarchies.is_empty() {
        return Err(HierarchyError::None { root: root.to_owned() });
    }
    Ok(Hierarchies { version: Version::V1, pod_hierarchies, unified })
}

/// Fails when a required controller is missing.
pub fn check(hierarchies: &Hierarchies, pids_limited: bool) -> Result<(), HierarchyError> {
    let (required, hint) = match hierarchies.version {
        Version::V1 => (REQUIRED_V1, "each must be mounted"),
        Version::V2 => (REQUIRED_V2, "cgroup.controllers at the root of the tree must list them"),
    };
    let pids: &[&str] = if pids_limited { &["pids"] } else { &[] };
    let missing: Vec<String> = required
        .iter()
        .chain(pids)
        .filter(|name| !hierarchies.pod_hierarchies.iter().any(|h| h.controllers.contains(**name)))
        .map(|name| (*name).to_owned())
        .collect();
    if missing.is_empty() { Ok(()) } else { Err(HierarchyError::Missing { missing, hint }) }
}

/// Excludes the mount options that every cgroup mount may have; the rest are controllers.
fn is_controller(option: &str) -> bool {
    !matches!(
        option,
        "" | "rw" | "ro" | "xattr" | "clone_children" | "noprefix" | "cpuset_v2_mode" | "favordynmods"
    ) && (!option.contains('=') || option.starts_with("name="))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(mountinfo: &str, root: &str) -> Result<Hierarchies, HierarchyError> {
        super::detect(&keelson_mountinfo::parse(mountinfo.as_bytes()), Path::new(root))
    }

    const HYBRID: &str = "\
27 1 254:0 / / rw - ext4 /dev/vda rw\n\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n\
33 31 0:29 / /sys/fs/cgroup/cpu rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n\
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
36 31 0:33 /part /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n\
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,release_agent=/x,name=systemd\n\
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    fn controllers(h: &Hierarchy) -> Vec<&str> {
        h.controllers.iter().map(String::as_str).collect()
    }

    #[test]
    fn a_hybrid_machine_is_v1_with_each_hierarchy_once() {
        let found = detect(HYBRID, "/sys/fs/cgroup").unwrap();
        assert_eq!(found.version, Version::V1);
        let all: Vec<_> = found.pod_hierarchies.iter().map(controllers).collect();
        assert_eq!(all, [vec!["cpu", "cpuacct"], vec!["memory"], vec!["name=systemd"]]);
        assert_eq!(found.unified.as_deref(), Some(Path::new("/sys/fs/cgroup/unified")));
        assert_eq!(check(&found, false), Ok(()));
    }

    #[test]
    fn cgroup2_on_the_root_is_v2() {
        let text = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        let mut found = detect(text, "/sys/fs/cgroup").unwrap();
        assert_eq!((found.version, found.pod_hierarchies.len()), (Version::V2, 1));
        let error = check(&found, false).unwrap_err().to_string();
        assert!(error.contains("cpu, memory"), "{error}");
        found.pod_hierarchies[0].controllers = ["cpu", "memory"].map(str::to_owned).into();
        assert_eq!(check(&found, false), Ok(()));
        assert!(check(&found, true).unwrap_err().to_string().contains("pids"));
    }

    #[test]
    fn missing_cgroup_controllers_are_named() {
        let text = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        let found = detect(text, "/sys/fs/cgroup").unwrap();
        let error = check(&found, false).unwrap_err().to_string();
        assert!(error.contains("cpuacct, memory") && !error.contains("cpuset"), "{error}");
    }

    #[test]
    fn a_missing_cgroup_mount_error_names_the_mount_point() {
        let error = detect("27 1 254:0 / / rw - ext4 /dev/vda rw\n", "/sys/fs/cgroup").unwrap_err();
        assert!(error.to_string().contains("/sys/fs/cgroup"));
    }

    #[test]
    fn cgroup_mounts_outside_the_root_are_ignored() {
        let found = detect(HYBRID, "/elsewhere");
        assert!(matches!(found, Err(HierarchyError::None { .. })));
    }

    #[test]
    fn cgroup_versions_have_names() {
        assert_eq!((Version::V1.as_str(), Version::V2.as_str()), ("v1", "v2"));
    }
}
