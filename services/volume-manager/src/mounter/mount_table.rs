//! Questions about the mounts of this process, answered from mountinfo, so that nothing touches a mount that hangs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use keelson_mountinfo::Mount;

const MOUNTINFO: &str = "/proc/self/mountinfo";
/// The number of attempts to read the same table twice.
const MAX_READS: usize = 10;
/// What the kernel appends to a path whose file was removed.
const DELETED: [&str; 2] = ["//deleted", " (deleted)"];

/// A mount with its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// `major:minor` of its filesystem.
    device: String,
    /// The options of the mount itself, not of its filesystem.
    options: String,
    mount: Mount,
    /// No path leads to it (see [`keelson_mountinfo::hidden_ids`]). It holds what is mounted all the same.
    is_hidden: bool,
}

/// Reads the mounts in the order of mounting. A kernel before 5.8 can leave mounts out while others change, so the table
/// is read until it is twice the same (volumes.md §7).
pub(super) fn read() -> io::Result<Vec<Entry>> {
    let mut text = fs::read(MOUNTINFO)?;
    if is_consistent_kernel() {
        return Ok(parse(&text));
    }
    for _ in 0..MAX_READS {
        let next = fs::read(MOUNTINFO)?;
        if next == text {
            return Ok(parse(&text));
        }
        text = next;
    }
    Err(io::Error::other("the mounts change constantly"))
}

/// Whether the kernel is 5.8 or newer.
fn is_consistent_kernel() -> bool {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (5, 8)
}

fn parse(text: &[u8]) -> Vec<Entry> {
    let hidden = keelson_mountinfo::hidden_ids(text);
    let is_hidden = |id: &str| id.parse().is_ok_and(|id: u64| hidden.contains(&id));
    text.split(|byte| *byte == b'\n').filter_map(|line| parse_line(line, is_hidden)).collect()
}

fn parse_line(line: &[u8], is_hidden: impl Fn(&str) -> bool) -> Option<Entry> {
    let field = |index| {
        let field = line.split(|byte| *byte == b' ').nth(index);
        field.map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    };
    let mount = keelson_mountinfo::parse(line).pop()?;
    Some(Entry { device: field(2)?, options: field(5)?, mount, is_hidden: is_hidden(&field(0)?) })
}

/// The path as mountinfo has it. Resolves the folder that contains it, but never touches the path itself. A folder that
/// cannot be resolved stays as it is.
pub(super) fn resolve(path: &Path) -> PathBuf {
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => parent.canonicalize().unwrap_or_else(|_| parent.to_owned()).join(name),
        _ => path.to_owned(),
    }
}

fn reachable(entries: &[Entry]) -> impl DoubleEndedIterator<Item = &Entry> {
    entries.iter().filter(|entry| !entry.is_hidden)
}

/// Whether something is mounted exactly on `path`, which [`resolve`] has returned. Hidden mounts do not count: an unmount of
/// the path does not find them.
pub(super) fn is_mount_point(entries: &[Entry], path: &Path) -> bool {
    reachable(entries).any(|entry| {
        let point = &entry.mount.point;
        point == path
            || DELETED.iter().any(|suffix| {
                let plain = point.to_str().and_then(|point| point.strip_suffix(suffix));
                plain.is_some_and(|plain| Path::new(plain) == path)
            })
    })
}

/// The options of the mount on exactly `path`; the last one hides others. `None`: nothing is mounted there.
pub(super) fn options_at<'a>(entries: &'a [Entry], path: &Path) -> Option<&'a str> {
    let topmost = reachable(entries).rev().find(|entry| entry.mount.point == path);
    topmost.map(|entry| entry.options.as_str())
}

/// The options of the mount that `path` is on, and then those of its filesystem; empty if no mount is known.
pub(super) fn filesystem_options(entries: &[Entry], path: &Path) -> String {
    // The last of several mounts on one point hides the others.
    let containing = reachable(entries).filter(|entry| path.starts_with(&entry.mount.point));
    let own = containing.max_by_key(|entry| entry.mount.point.components().count());
    own.map(|own| format!("{},{}", own.options, own.mount.super_options)).unwrap_or_default()
}

/// The other mounts of what is at `path`: those with the same part of the same filesystem (volumes.md §7), without hidden ones
/// at the same path, which nobody can unmount.
pub(super) fn references(entries: &[Entry], path: &Path) -> Vec<PathBuf> {
    // The last of several mounts on one point hides the others.
    let containing = entries
        .iter()
        .enumerate()
        .filter(|(_, entry)| !entry.is_hidden && path.starts_with(&entry.mount.point));
    let Some((index, own)) = containing.max_by_key(|(_, entry)| entry.mount.point.components().count())
    else {
        return Vec::new();
    };
    let below = path.strip_prefix(&own.mount.point).unwrap_or(Path::new(""));
    let root = if below.as_os_str().is_empty() { own.mount.root.clone() } else { own.mount.root.join(below) };
    let others = entries
        .iter()
        .enumerate()
        .filter(|(other, entry)| *other != index && !(entry.is_hidden && entry.mount.point == path))
        .filter(|(_, entry)| entry.device == own.device && entry.mount.root == root);
    others.map(|(_, entry)| entry.mount.point.clone()).collect()
}

/// The mount points strictly below `folder` whose last component is `name`.
pub(super) fn with_name(entries: &[Entry], folder: &Path, name: &str) -> Vec<PathBuf> {
    let points = reachable(entries).map(|entry| &entry.mount.point);
    let has_name = |point: &&PathBuf| point.file_name().is_some_and(|last| last == name);
    points.filter(has_name).filter(|point| *point != folder && point.starts_with(folder)).cloned().collect()
}

/// What is mounted below `path`, for the error of an unmount; empty if there is nothing.
pub(super) fn below(entries: &[Entry], path: &Path) -> String {
    let points = reachable(entries).map(|entry| &entry.mount.point);
    let below = points.filter(|point| *point != path && point.starts_with(path));
    let names: Vec<String> = below.map(|point| point.display().to_string()).collect();
    if names.is_empty() { String::new() } else { format!("; below it are mounted {}", names.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"\
21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n\
30 21 0:5 / /mnt/nfs rw - nfs4 srv:/a rw\n\
31 21 0:5 / /k/pods/u/v rw - nfs4 srv:/a rw\n\
32 21 0:5 /sub /k/pods/u/sub rw - nfs4 srv:/a rw\n\
33 21 8:1 /data/disk /k/pods/u/local rw - ext4 /dev/sda1 rw\n\
34 21 0:6 / /k/gone//deleted rw - tmpfs tmpfs rw\n\
35 21 0:7 / /k/gone\\040(deleted) rw - tmpfs tmpfs rw\n";

    #[test]
    fn only_the_exact_path_is_a_mount_point_even_if_its_folder_was_removed() {
        let table = parse(TABLE);
        for (path, expected) in [
            ("/mnt/nfs", true),
            ("/mnt", false),
            ("/mnt/nfs/x", false),
            ("/k/gone", true),
            ("/k/pods/u/v", true),
        ] {
            assert_eq!(is_mount_point(&table, Path::new(path)), expected, "{path}");
        }
    }

    #[test]
    fn the_options_of_a_mount_are_those_of_the_last_one_on_its_point() {
        let table = parse(
            b"\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
30 21 8:1 /a /k/v rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
31 30 8:1 /a /k/v ro,noexec - ext4 /dev/sda1 rw\n",
        );
        let of = |path: &str| options_at(&table, Path::new(path));
        assert_eq!((of("/k/v"), of("/"), of("/k")), (Some("ro,noexec"), Some("rw,relatime"), None));
    }

    #[test]
    fn a_mount_that_a_later_one_above_it_hides_is_no_mount_point_and_holds_its_device() {
        // The root /k was bind-mounted on itself with what was mounted below it; one copy was unmounted.
        let table = parse(
            b"\
27 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
40 27 8:16 / /k/pods/u/a rw - ext4 /dev/sdb rw\n\
41 27 8:32 / /k/pods/u/b ro - ext4 /dev/sdc rw\n\
50 27 8:1 /k /k rw shared:1 - ext4 /dev/sda1 rw\n\
51 50 8:16 / /k/pods/u/a rw shared:2 - ext4 /dev/sdb rw\n\
60 27 8:32 / /mnt rw - ext4 /dev/sdc rw\n",
        );
        let points = ["/k/pods/u/a", "/k/pods/u/b"].map(Path::new);
        assert_eq!(points.map(|path| is_mount_point(&table, path)), [true, false]);
        assert_eq!(points.map(|path| options_at(&table, path)), [Some("rw"), None]);
        assert_eq!(below(&table, Path::new("/k/pods")), "; below it are mounted /k/pods/u/a");
        assert_eq!(references(&table, points[0]), Vec::<PathBuf>::new());
        assert_eq!(references(&table, Path::new("/mnt")), [points[1].to_owned()], "it is in use");
    }

    #[test]
    fn options_of_a_filesystem_are_those_of_the_mount_that_a_path_is_on() {
        let table = parse(
            b"\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,seclabel\n\
30 21 8:2 / /k/v rw - ext4 /dev/sdb rw,seclabel\n\
31 30 8:3 / /k/v ro,noexec - ext4 /dev/sdc rw,context=\"u:object_r:t:s0:c1,c2\"\n",
        );
        let of = |path: &str| filesystem_options(&table, Path::new(path));
        let labelled = "ro,noexec,rw,context=\"u:object_r:t:s0:c1,c2\"";
        assert_eq!((of("/k/v"), of("/k/v/sub")), (labelled.into(), labelled.into()));
        assert_eq!(
            (of("/k/vv"), of("/")),
            ("rw,relatime,rw,seclabel".into(), "rw,relatime,rw,seclabel".into())
        );
        assert_eq!(filesystem_options(&[], Path::new("/k")), "");
    }

    #[test]
    fn references_have_the_same_part_of_the_same_filesystem() {
        let table = parse(TABLE);
        let of = |path: &str| references(&table, Path::new(path));
        assert_eq!(of("/mnt/nfs"), [PathBuf::from("/k/pods/u/v")]);
        assert_eq!(of("/k/pods/u/v"), [PathBuf::from("/mnt/nfs")]);
        // A folder on a mount, which is bound elsewhere.
        assert_eq!(of("/data/disk"), [PathBuf::from("/k/pods/u/local")]);
        assert_eq!(of("/mnt/nfs/sub"), [PathBuf::from("/k/pods/u/sub")]);
        assert_eq!(of("/k/pods/u/local"), Vec::<PathBuf>::new());
        assert_eq!(of("/data"), Vec::<PathBuf>::new());
    }
}
