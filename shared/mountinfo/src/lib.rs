//! Parses mountinfo (proc_pid_mountinfo(5)) and answers questions about the mounts in it.
//!
//! This crate is pure: its callers read `/proc/<pid>/mountinfo` themselves. A path is any sequence of bytes, so the text is,
//! too.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

/// A mount: the fields of a line that a node agent uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The mounted part of the filesystem: `/` for all of it. The kernel appends `//deleted` to a path that is gone.
    pub root: PathBuf,
    /// Where it is mounted.
    pub point: PathBuf,
    /// Whether mounts below it propagate to its peers (a `shared:` tag among the optional fields).
    pub shared: bool,
    /// The filesystem type.
    pub fs_type: String,
    /// The options of the filesystem itself (super options), separated by commas.
    pub super_options: String,
}

/// Parses a mountinfo text: the mounts in the order of mounting, without lines that do not parse.
pub fn parse(text: &[u8]) -> Vec<Mount> {
    text.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

/// The ids (first field) of the mounts that no path leads to, because another mount is on a folder above them. A bind mount of
/// a folder on itself hides all earlier mounts below that folder in this way; a recursive one shows copies of them at the
/// same paths. Mounts that are stacked on one point do not hide each other here: unmounts take them off one by one.
pub fn hidden_ids(text: &[u8]) -> HashSet<u64> {
    let mounts: Vec<(u64, u64, Mount)> = text.split(|byte| *byte == b'\n').filter_map(numbered).collect();
    let points: HashSet<(u64, &Path)> =
        mounts.iter().map(|(_, parent, mount)| (*parent, mount.point.as_path())).collect();
    let is_covered = |parent: u64, mount: &Mount| {
        mount.point.ancestors().skip(1).any(|above| points.contains(&(parent, above)))
    };
    let covered: HashMap<u64, (u64, bool)> =
        mounts.iter().map(|(id, parent, mount)| (*id, (*parent, is_covered(*parent, mount)))).collect();
    let is_hidden = |id: u64| {
        let mut next = id;
        // Each mount occurs once on the way up; the first one may be its own parent.
        for _ in 0..mounts.len() {
            match covered.get(&next) {
                Some((_, true)) => return true,
                Some((parent, false)) if *parent != next => next = *parent,
                _ => return false,
            }
        }
        false
    };
    mounts.iter().map(|(id, ..)| *id).filter(|id| is_hidden(*id)).collect()
}

/// As [`parse`], without the mounts of [`hidden_ids`].
pub fn parse_reachable(text: &[u8]) -> Vec<Mount> {
    let hidden = hidden_ids(text);
    let mounts = text.split(|byte| *byte == b'\n').filter_map(numbered);
    mounts.filter(|(id, ..)| !hidden.contains(id)).map(|(.., mount)| mount).collect()
}

/// The id, the parent's id, and the mount.
fn numbered(line: &[u8]) -> Option<(u64, u64, Mount)> {
    let mut numbers =
        line.split(|byte| *byte == b' ').map(|field| std::str::from_utf8(field).ok()?.parse().ok());
    Some((numbers.next()??, numbers.next()??, parse_line(line)?))
}

/// Parses `id parent major:minor root point options [tag …] - type source super-options`.
fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let (root, point) = (unescape(fields.nth(3)?), unescape(fields.next()?));
    fields.next()?;
    let mut shared = false;
    loop {
        match fields.next()? {
            b"-" => break,
            tag => shared |= tag.starts_with(b"shared:"),
        }
    }
    let fs_type = text_of(fields.next()?);
    let super_options = fields.nth(1).map(text_of).unwrap_or_default();
    Some(Mount { root, point, shared, fs_type, super_options })
}

fn text_of(field: &[u8]) -> String {
    String::from_utf8_lossy(field).into_owned()
}

/// Decodes a backslash and three octal digits, as in `\040`, to the byte that they encode.
fn unescape(field: &[u8]) -> PathBuf {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        match octal(rest) {
            Some(escaped) => {
                plain.push(escaped);
                rest = &rest[4..];
            }
            None => {
                plain.push(byte);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(plain))
}

/// The byte of an escape at the start of `text`.
fn octal(text: &[u8]) -> Option<u8> {
    let [b'\\', digits @ ..] = text.get(..4)? else { return None };
    let digit = |byte: u8| matches!(byte, b'0'..=b'7').then(|| u32::from(byte - b'0'));
    let value = digits.iter().try_fold(0, |value, byte| Some(value * 8 + digit(*byte)?))?;
    u8::try_from(value).ok()
}

/// The mount that `path` is on; the last of several mounts on one point hides the others.
pub fn containing<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    mounts.iter().filter(|m| path.starts_with(&m.point)).max_by_key(|m| m.point.components().count())
}

/// The mounts strictly below `folder`.
pub fn below<'a>(mounts: &'a [Mount], folder: &'a Path) -> impl Iterator<Item = &'a Mount> {
    mounts.iter().filter(move |m| m.point != folder && m.point.starts_with(folder))
}

/// What a folder needs so that mounts below it propagate to containers and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RootNeeds {
    /// Nothing: it is on a shared mount.
    Nothing,
    /// To be made shared: it is a mount point that is not.
    Sharing,
    /// To be bind-mounted on itself and made shared.
    BindAndSharing,
}

/// What the agent's root folder needs, given all mounts (volumes.md §2).
pub fn root_needs(mounts: &[Mount], root: &Path) -> RootNeeds {
    match containing(mounts, root) {
        Some(mount) if mount.shared => RootNeeds::Nothing,
        Some(mount) if mount.point == root => RootNeeds::Sharing,
        _ => RootNeeds::BindAndSharing,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;

    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    const TEXT: &[u8] = b"\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
40 27 254:0 /k /var/lib/kubelet rw shared:12 - ext4 /dev/vda rw\n\
41 27 0:9 / /mnt/with\\040blank rw,noatime master:1 propagate_from:2 - tmpfs tmpfs rw,size=1k\n\
broken\n\
42 40 0:10 / /var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/v rw - tmpfs tmpfs rw\n";

    fn mount(point: &str, shared: bool) -> Mount {
        let (fs_type, super_options) = ("ext4".to_owned(), "rw".to_owned());
        Mount { root: "/".into(), point: point.into(), shared, fs_type, super_options }
    }

    #[test]
    fn mounts_are_read_with_tags_and_blanks() {
        let mounts = parse(TEXT);
        assert_eq!(mounts.len(), 4);
        assert_eq!(mounts[0], mount("/", false));
        assert!(mounts[1].shared);
        assert_eq!(mounts[1].root, Path::new("/k"));
        assert_eq!(mounts[2].point, Path::new("/mnt/with blank"));
        assert_eq!(
            (mounts[2].fs_type.as_str(), mounts[2].super_options.as_str(), mounts[2].shared),
            ("tmpfs", "rw,size=1k", false)
        );
    }

    #[test]
    fn an_empty_source_and_missing_super_options_are_read() {
        let mounts = parse(b"1 0 0:1 / /a rw - tmpfs  rw,x\n2 0 0:1 / /b rw shared:1 - tmpfs");
        assert_eq!([mounts[0].super_options.as_str(), mounts[1].super_options.as_str()], ["rw,x", ""]);
        assert_eq!([mounts[0].shared, mounts[1].shared], [false, true]);
        for line in [
            "1 0 0:1 / /a rw shared:1",
            "1 0 0:1 / /a rw shared:1 -",
            "1 0 0:1 / /a - tmpfs t rw",
            "1 0 0:1 /",
        ] {
            assert_eq!(parse(line.as_bytes()), [], "{line:?}");
        }
    }

    #[test]
    fn only_three_octal_digits_of_a_byte_are_an_escape() {
        for (field, path) in [
            (r"/a\040b\011c\012d\134e", "/a b\tc\nd\\e"),
            (r"/a\040b\x", r"/a b\x"),
            (r"/a\134040", r"/a\040"),
            (r"/a\04", r"/a\04"),
            (r"/a\+12", r"/a\+12"),
            (r"/a\089", r"/a\089"),
            (r"/a\777", r"/a\777"),
            (r"/a\\040", r"/a\ "),
            (r"/a\", r"/a\"),
        ] {
            assert_eq!(unescape(field.as_bytes()), Path::new(path), "{field}");
        }
        assert_eq!(unescape(b"/\xff\\303\\244").as_os_str().as_bytes(), b"/\xff\xc3\xa4");
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
    fn mounts_below_a_later_mount_of_a_folder_above_are_hidden() {
        let text = b"\
1 1 0:1 / / rw - rootfs rootfs rw\n\
27 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
40 27 0:9 / /k/pods/u/v rw - tmpfs tmpfs rw\n\
41 40 0:10 / /k/pods/u/v/deep rw - tmpfs tmpfs rw\n\
42 27 0:11 / /kk rw - tmpfs tmpfs rw\n\
50 27 8:1 /k /k rw shared:1 - ext4 /dev/sda1 rw\n\
51 50 0:9 / /k/pods/u/v rw shared:2 - tmpfs tmpfs rw\n\
52 51 0:10 / /k/pods/u/v/deep rw shared:3 - tmpfs tmpfs rw\n\
53 51 0:12 / /k/pods/u/v rw shared:4 - tmpfs tmpfs rw\n\
54 999 0:13 / /of/an/unknown/parent rw - tmpfs tmpfs rw\n";
        let mut hidden: Vec<u64> = hidden_ids(text).into_iter().collect();
        hidden.sort_unstable();
        // 52 is below 53, which is stacked on 51.
        assert_eq!(hidden, [40, 41, 52]);
        let points: Vec<PathBuf> = parse_reachable(text).into_iter().map(|mount| mount.point).collect();
        let expected = ["/", "/", "/kk", "/k", "/k/pods/u/v", "/k/pods/u/v", "/of/an/unknown/parent"];
        assert_eq!(points, expected.map(PathBuf::from));
        // Each is reachable again when what is above it is gone.
        let without = |id: &str| {
            let lines = std::str::from_utf8(text).unwrap().lines();
            lines.filter(|line| !line.starts_with(id)).collect::<Vec<_>>().join("\n")
        };
        assert!(!hidden_ids(without("53 ").as_bytes()).contains(&52));
        assert!(!hidden_ids(without("50 ").as_bytes()).contains(&40));
    }

    #[test]
    fn the_last_mount_on_a_point_counts() {
        let mut mounts = parse(TEXT);
        mounts.push(mount("/var/lib/kubelet", false));
        assert_eq!(root_needs(&mounts, Path::new("/var/lib/kubelet")), RootNeeds::Sharing);
    }

    #[test]
    fn the_mount_of_a_path_and_its_propagation_are_read() {
        let table = b"21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n\
                     30 21 0:5 / /var/lib/a\\040b rw - tmpfs tmpfs rw\n\
                     31 21 0:6 / /var/lib/kubelet rw master:2 shared:9 - tmpfs tmpfs rw\n";
        let mounts = parse(table);
        let of = |path: &str| {
            containing(&mounts, Path::new(path)).map(|mount| (mount.point.clone(), mount.shared))
        };
        assert_eq!(of("/var/lib/kubelet/pods"), Some(("/var/lib/kubelet".into(), true)));
        assert_eq!(of("/var/lib/a b"), Some(("/var/lib/a b".into(), false)));
        assert_eq!(of("/etc"), Some(("/".into(), true)));
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

    /// The path as the kernel writes it (seq_path() in fs/seq_file.c).
    fn escape(path: &[u8]) -> Vec<u8> {
        let mut escaped = Vec::new();
        for byte in path {
            match byte {
                b' ' | b'\t' | b'\n' | b'\\' => escaped.extend(format!("\\{byte:03o}").bytes()),
                other => escaped.push(*other),
            }
        }
        escaped
    }

    #[test]
    fn a_line_as_the_kernel_writes_it_is_read_as_its_mount() {
        let reached = &Reached::default();
        let path = || {
            proptest::collection::vec(prop_oneof![1 => any::<u8>(), 1 => Just(b' '), 1 => Just(b'\\')], 0..12)
        };
        let tags = proptest::collection::vec(prop_oneof!["shared:[0-9]", "master:[0-9]", "unbindable"], 0..3);
        proptest!(ProptestConfig::with_cases(512), |(root in path(), point in path(), tags in tags)| {
            let [root, point] = [root, point].map(|path| [b"/".as_slice(), &path].concat());
            let tag_text: String = tags.iter().map(|tag| format!("{tag} ")).collect();
            let line = [
                b"36 35 98:0 ".as_slice(), &escape(&root), b" ", &escape(&point), b" rw,noatime ",
                tag_text.as_bytes(), b"- ext3 /dev/root rw,errors=continue\n",
            ]
            .concat();
            let shared = tags.iter().any(|tag| tag.starts_with("shared:"));
            let path = |bytes: &[u8]| PathBuf::from(OsString::from_vec(bytes.to_vec()));
            let mount = Mount {
                root: path(&root),
                point: path(&point),
                shared,
                fs_type: "ext3".into(),
                super_options: "rw,errors=continue".into(),
            };
            prop_assert_eq!(parse(&line), [mount]);
            reached.case([
                ("a shared mount", shared),
                ("tags of another kind", !tags.is_empty() && !shared),
                ("a path with an escape", escape(&point) != point),
                ("a path that is not UTF-8", std::str::from_utf8(&point).is_err()),
            ]);
        });
        // The rarest: "a shared mount", in one case of 3.
        reached.assert_each();
    }
}
