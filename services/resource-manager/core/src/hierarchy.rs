//! Which cgroup hierarchies are mounted (cgroups(7)).

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

/// Which interface pods are governed by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// A hierarchy per controller.
    V1,
    /// One hierarchy.
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
    /// Which interface governs.
    pub version: Version,
    /// Where pods get a cgroup.
    pub governing: Vec<Hierarchy>,
    /// The v2 hierarchy beside v1, without controllers of use; a runtime may leave cgroups there.
    pub beside: Option<PathBuf>,
}

/// Controllers that pods cannot do without. `cpuset`, `pids` and `hugetlb` are missing on odd kernels, and what
/// needs them says so itself.
pub const REQUIRED_V1: &[&str] = &["cpu", "cpuacct", "memory"];
/// As [`REQUIRED_V1`], for v2.
pub const REQUIRED_V2: &[&str] = &["cpu", "memory"];

/// Why pods cannot be governed on this machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HierarchyError {
    /// Nothing is mounted.
    #[error("no cgroup hierarchy is mounted below {}; mount cgroup2 there, or the v1 controllers", root.display())]
    None {
        /// Where they are expected.
        root: PathBuf,
    },
    /// Something that must be there is not.
    #[error("the cgroup controllers {} are missing; the kernel must have them and {hint}", missing.join(", "))]
    Missing {
        /// Their names.
        missing: Vec<String>,
        /// Where they must be.
        hint: &'static str,
    },
}

/// The hierarchies that a mountinfo text shows at or below `root` (`/sys/fs/cgroup`): v2 when cgroup2 is mounted
/// on `root` itself, else v1.
pub fn detect(mountinfo: &str, root: &Path) -> Result<Hierarchies, HierarchyError> {
    let mut governing: Vec<Hierarchy> = Vec::new();
    let mut beside = None;
    for mount in mountinfo.lines().filter_map(parse_line).filter(|m| m.point.starts_with(root)) {
        if mount.fs_type == "cgroup2" {
            if mount.point == root {
                let unified = Hierarchy { mount: mount.point, controllers: BTreeSet::new() };
                return Ok(Hierarchies { version: Version::V2, governing: vec![unified], beside: None });
            }
            beside = Some(mount.point);
        } else if mount.fs_type == "cgroup" {
            let controllers: BTreeSet<String> =
                mount.options.split(',').filter(|o| is_controller(o)).map(ToOwned::to_owned).collect();
            // The same hierarchy mounted twice counts once.
            if !controllers.is_empty() && governing.iter().all(|h| h.controllers != controllers) {
                governing.push(Hierarchy { mount: mount.point, controllers });
            }
        }
    }
    if governing.is_empty() {
        return Err(HierarchyError::None { root: root.to_owned() });
    }
    Ok(Hierarchies { version: Version::V1, governing, beside })
}

/// Fails when a controller that pods cannot do without is missing.
pub fn check(hierarchies: &Hierarchies, pids_limited: bool) -> Result<(), HierarchyError> {
    let (required, hint) = match hierarchies.version {
        Version::V1 => (REQUIRED_V1, "each must be mounted"),
        Version::V2 => (REQUIRED_V2, "cgroup.controllers at the top of the tree must list them"),
    };
    let pids: &[&str] = if pids_limited { &["pids"] } else { &[] };
    let missing: Vec<String> = required
        .iter()
        .chain(pids)
        .filter(|name| !hierarchies.governing.iter().any(|h| h.controllers.contains(**name)))
        .map(|name| (*name).to_owned())
        .collect();
    if missing.is_empty() { Ok(()) } else { Err(HierarchyError::Missing { missing, hint }) }
}

/// Mount options that every cgroup mount may carry; the rest are controllers.
fn is_controller(option: &str) -> bool {
    !matches!(
        option,
        "" | "rw" | "ro" | "xattr" | "clone_children" | "noprefix" | "cpuset_v2_mode" | "favordynmods"
    ) && (!option.contains('=') || option.starts_with("name="))
}

struct Mount {
    point: PathBuf,
    fs_type: String,
    options: String,
}

/// A mount of a whole hierarchy; one that shows only a part of it cannot be written by path.
fn parse_line(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(3);
    let (root, point) = (left.next()?, left.next()?);
    let mut right = right.split(' ');
    let (fs_type, _, options) = (right.next()?, right.next()?, right.next()?);
    (root == "/").then(|| Mount {
        point: unescape(point),
        fs_type: fs_type.to_owned(),
        options: options.to_owned(),
    })
}

fn unescape(field: &str) -> PathBuf {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some(at) = rest.find('\\') {
        plain.extend_from_slice(&rest.as_bytes()[..at]);
        match rest.get(at + 1..at + 4).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                plain.push(byte);
                rest = &rest[at + 4..];
            }
            None => {
                plain.push(b'\\');
                rest = &rest[at + 1..];
            }
        }
    }
    plain.extend_from_slice(rest.as_bytes());
    PathBuf::from(OsString::from_vec(plain))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let found = detect(HYBRID, Path::new("/sys/fs/cgroup")).unwrap();
        assert_eq!(found.version, Version::V1);
        let all: Vec<_> = found.governing.iter().map(controllers).collect();
        assert_eq!(all, [vec!["cpu", "cpuacct"], vec!["memory"], vec!["name=systemd"]]);
        assert_eq!(found.beside.as_deref(), Some(Path::new("/sys/fs/cgroup/unified")));
        assert_eq!(check(&found, false), Ok(()));
    }

    #[test]
    fn cgroup2_on_the_root_is_v2() {
        let text = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        let mut found = detect(text, Path::new("/sys/fs/cgroup")).unwrap();
        assert_eq!((found.version, found.governing.len()), (Version::V2, 1));
        let error = check(&found, false).unwrap_err().to_string();
        assert!(error.contains("cpu, memory"), "{error}");
        found.governing[0].controllers = ["cpu", "memory"].map(str::to_owned).into();
        assert_eq!(check(&found, false), Ok(()));
        assert!(check(&found, true).unwrap_err().to_string().contains("pids"));
    }

    #[test]
    fn what_is_missing_is_named() {
        let text = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        let found = detect(text, Path::new("/sys/fs/cgroup")).unwrap();
        let error = check(&found, false).unwrap_err().to_string();
        assert!(error.contains("cpuacct, memory") && !error.contains("cpuset"), "{error}");
    }

    #[test]
    fn a_machine_without_hierarchies_is_told_where_they_belong() {
        let error =
            detect("27 1 254:0 / / rw - ext4 /dev/vda rw\n", Path::new("/sys/fs/cgroup")).unwrap_err();
        assert!(error.to_string().contains("/sys/fs/cgroup"));
    }

    #[test]
    fn hierarchies_elsewhere_do_not_count() {
        let found = detect(HYBRID, Path::new("/elsewhere"));
        assert!(matches!(found, Err(HierarchyError::None { .. })));
    }

    #[test]
    fn escaped_mount_points_are_read() {
        assert_eq!(unescape("/a\\040b\\x"), Path::new("/a b\\x"));
    }

    #[test]
    fn versions_are_told_by_name() {
        assert_eq!((Version::V1.as_str(), Version::V2.as_str()), ("v1", "v2"));
    }
}
