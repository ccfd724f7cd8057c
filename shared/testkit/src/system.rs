//! Mounts, cgroup hierarchies and our own capabilities, as reported by the kernel.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

/// A line of mountinfo (proc_pid_mountinfo(5)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mount {
    /// The folder of the filesystem that is mounted.
    pub root: String,
    /// Where it is mounted.
    pub point: PathBuf,
    /// Filesystem type.
    pub kind: String,
    /// Options of the filesystem itself.
    pub options: String,
}

/// The mounts that a process sees, in the order of mounting.
pub(crate) fn mounts_of(pid: &str) -> Vec<Mount> {
    let text = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
    text.lines().filter_map(parse_mount).collect()
}

fn parse_mount(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(3);
    let (root, point) = (left.next()?, left.next()?);
    let mut right = right.splitn(3, ' ');
    let kind = right.next()?.to_owned();
    let options = right.nth(1).unwrap_or_default().to_owned();
    let point = PathBuf::from(OsString::from_vec(unescape(point)));
    Some(Mount { root: String::from_utf8_lossy(&unescape(root)).into_owned(), point, kind, options })
}

/// Turns `\040` and the like back into bytes.
fn unescape(field: &str) -> Vec<u8> {
    let bytes = field.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let octal = bytes.get(at + 1..at + 4).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()).filter(|_| byte == b'\\') {
            Some(code) => {
                plain.push(code);
                at += 4;
            }
            None => {
                plain.push(byte);
                at += 1;
            }
        }
    }
    plain
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

/// Where the cgroup hierarchies are mounted: one on v2, one per controller on v1, both on a hybrid.
pub fn cgroup_hierarchies() -> Vec<PathBuf> {
    let mut points: Vec<PathBuf> = mounts_of("self")
        .into_iter()
        .filter(|mount| matches!(mount.kind.as_str(), "cgroup" | "cgroup2") && mount.root == "/")
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
        let mount = parse_mount(&line).unwrap();
        assert_eq!(mount.root, "/mnt1");
        assert_eq!(mount.point, Path::new("/mnt 2/a"));
        assert_eq!(mount.kind, "overlay");
        assert!(mount.options.contains("upperdir=/x"), "{mount:?}");
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
