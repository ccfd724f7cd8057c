//! Parses mountinfo (proc_pid_mountinfo(5)).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};

/// The fields of a mount that this service uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The mounted part of the filesystem: `/` for all of it. The kernel appends `//deleted` to a path that is gone.
    pub root: PathBuf,
    /// Where it is mounted.
    pub point: PathBuf,
    /// Whether mounts below it propagate to its peers (a `shared:` tag).
    pub shared: bool,
    /// The filesystem type.
    pub fs_type: String,
}

/// Parses a mountinfo text: the mounts in the order of mounting, without lines that do not parse.
pub fn parse(text: &str) -> Vec<Mount> {
    text.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Mount> {
    let mut fields = line.split(' ');
    let (root, point) = (unescape(fields.nth(3)?), unescape(fields.next()?));
    let tags = fields.skip(1);
    let mut shared = false;
    let mut rest = tags.skip_while(|tag| {
        shared |= tag.starts_with("shared:");
        *tag != "-"
    });
    rest.next()?;
    let fs_type = rest.next()?.to_owned();
    Some(Mount { root, point, shared, fs_type })
}

/// Decodes octal escapes such as `\040`.
fn unescape(field: &str) -> PathBuf {
    let bytes = field.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = (bytes[at] == b'\\')
            .then(|| field.get(at + 1..at + 4))
            .flatten()
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match octal {
            Some(byte) => {
                plain.push(byte);
                at += 4;
            }
            None => {
                plain.push(bytes[at]);
                at += 1;
            }
        }
    }
    PathBuf::from(OsString::from_vec(plain))
}

/// What the root folder needs so that mounts below it propagate to containers and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RootNeeds {
    /// Nothing: it is on a shared mount.
    Nothing,
    /// To be made shared: it is a mount point that is not.
    Sharing,
    /// To be bind-mounted on itself and made shared.
    BindAndSharing,
}

/// What `root` needs, given all mounts; a later mount on the same point hides an earlier one.
pub fn root_needs(mounts: &[Mount], root: &Path) -> RootNeeds {
    let holding =
        mounts.iter().filter(|m| root.starts_with(&m.point)).max_by_key(|m| m.point.components().count());
    match holding {
        Some(mount) if mount.shared => RootNeeds::Nothing,
        Some(mount) if mount.point == root => RootNeeds::Sharing,
        _ => RootNeeds::BindAndSharing,
    }
}

/// The mount points strictly below `folder`.
pub fn below<'a>(mounts: &'a [Mount], folder: &'a Path) -> impl Iterator<Item = &'a Mount> {
    mounts.iter().filter(move |m| m.point != folder && m.point.starts_with(folder))
}

/// Whether a path is absolute and written without `.`, `..`, doubled or trailing slashes.
pub fn is_canonical(path: &Path) -> bool {
    let rebuilt: PathBuf = path.components().collect();
    path.is_absolute()
        && !path.components().any(|c| matches!(c, Component::ParentDir | Component::CurDir))
        && rebuilt.as_os_str() == path.as_os_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
40 27 254:0 /k /var/lib/kubelet rw shared:12 - ext4 /dev/vda rw\n\
41 27 0:9 / /mnt/with\\040blank rw,noatime master:1 propagate_from:2 - tmpfs tmpfs rw,size=1k\n\
broken\n\
42 40 0:10 / /var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/v rw - tmpfs tmpfs rw\n";

    #[test]
    fn mounts_are_read_with_tags_and_blanks() {
        let mounts = parse(TEXT);
        assert_eq!(mounts.len(), 4);
        assert_eq!(
            mounts[0],
            Mount { root: "/".into(), point: "/".into(), shared: false, fs_type: "ext4".into() }
        );
        assert!(mounts[1].shared);
        assert_eq!(mounts[2].point, Path::new("/mnt/with blank"));
        assert_eq!(mounts[2].fs_type, "tmpfs");
    }

    #[test]
    fn a_root_on_a_shared_mount_needs_nothing() {
        let mounts = parse(TEXT);
        assert_eq!(root_needs(&mounts, Path::new("/var/lib/kubelet")), RootNeeds::Nothing);
        assert_eq!(root_needs(&mounts, Path::new("/var/lib/kubelet/deeper")), RootNeeds::Nothing);
        assert_eq!(root_needs(&mounts, Path::new("/srv/root")), RootNeeds::BindAndSharing);
        assert_eq!(root_needs(&mounts, Path::new("/mnt/with blank")), RootNeeds::Sharing);
        assert_eq!(root_needs(&[], Path::new("/x")), RootNeeds::BindAndSharing);
    }

    #[test]
    fn the_last_mount_on_a_point_counts() {
        let mut mounts = parse(TEXT);
        mounts.push(Mount {
            root: "/".into(),
            point: "/var/lib/kubelet".into(),
            shared: false,
            fs_type: "ext4".into(),
        });
        assert_eq!(root_needs(&mounts, Path::new("/var/lib/kubelet")), RootNeeds::Sharing);
    }

    #[test]
    fn only_a_plain_absolute_path_is_canonical() {
        for (path, good) in [
            ("/var/lib/kubelet", true),
            ("/", true),
            ("var/lib", false),
            ("/var/../lib", false),
            ("/var/./lib", false),
            ("/var//lib", false),
            ("/var/lib/", false),
        ] {
            assert_eq!(is_canonical(Path::new(path)), good, "{path}");
        }
    }

    #[test]
    fn mounts_below_a_folder_do_not_include_the_folder_itself() {
        let mounts = parse(TEXT);
        let points = |folder: &str| -> Vec<PathBuf> {
            below(&mounts, Path::new(folder)).map(|m| m.point.clone()).collect()
        };
        let volume = PathBuf::from("/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/v");
        assert_eq!(points("/var/lib/kubelet"), [volume]);
        // A folder whose name only shares the prefix.
        assert_eq!(points("/var/lib/kube"), Vec::<PathBuf>::new());
    }
}
