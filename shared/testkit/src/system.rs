//! Mounts, cgroup hierarchies and our own capabilities, as reported by the kernel.

use std::fs;
use std::path::{Path, PathBuf};

use keelson_mountinfo::Mount;

/// The mounts that a process sees, in the order of mounting.
pub(crate) fn mounts_of(pid: &str) -> Vec<Mount> {
    keelson_mountinfo::parse(&fs::read(format!("/proc/{pid}/mountinfo")).unwrap_or_default())
}

/// The mount points at and below `folder`, the deepest first.
pub fn mounts_below(folder: &Path) -> Vec<PathBuf> {
    let mut points: Vec<PathBuf> =
        mounts_of("self").into_iter().map(|m| m.point).filter(|point| point.starts_with(folder)).collect();
    // A later mount may lie on an earlier one.
    points.reverse();
    points.sort_by_key(|point| std::cmp::Reverse(point.components().count()));
    points
}

/// The mount points of the cgroup hierarchies: one on v2, one per controller on v1, both on a hybrid.
pub fn cgroup_hierarchies() -> Vec<PathBuf> {
    let mut points: Vec<PathBuf> = mounts_of("self")
        .into_iter()
        .filter(|mount| {
            matches!(mount.fs_type.as_str(), "cgroup" | "cgroup2") && mount.root == Path::new("/")
        })
        .map(|mount| mount.point)
        .collect();
    points.sort();
    points.dedup();
    points
}

/// Whether this process has CAP_SYS_RESOURCE, without which runc cannot lower an `oom_score_adj`.
pub fn has_cap_sys_resource() -> bool {
    const CAP_SYS_RESOURCE: u32 = 24;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    effective_capabilities(&status).is_some_and(|caps| caps >> CAP_SYS_RESOURCE & 1 == 1)
}

fn effective_capabilities(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_line_with_optional_fields_and_blanks_is_read() {
        let line =
            r"36 35 98:0 /mnt1 /mnt\0402/a rw,noatime master:1 shared:2 - overlay over lay,upperdir=/x rw,b";
        let line = line.replace("over lay", "overlay rw");
        let [mount] = keelson_mountinfo::parse(line.as_bytes()).try_into().unwrap();
        assert_eq!(mount.root, Path::new("/mnt1"));
        assert_eq!(mount.point, Path::new("/mnt 2/a"));
        assert_eq!(mount.fs_type, "overlay");
        assert!(mount.super_options.contains("upperdir=/x"), "{mount:?}");
    }

    #[test]
    fn capabilities_are_read_as_hex() {
        let status = "Name:\tx\nCapEff:\t0000000001000000\n";
        assert_eq!(effective_capabilities(status), Some(1 << 24));
    }

    #[test]
    fn this_machine_has_a_cgroup_hierarchy() {
        assert!(!cgroup_hierarchies().is_empty());
    }
}
