//! mountinfo (proc_pid_mountinfo(5)). The bytes are used in two ways: as the text of a mountinfo file, and as the description of
//! mounts for which the kernel's text is generated.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use keelson_mountinfo::{self as mountinfo, Mount, RootNeeds};
use keelson_volume_manager_core::names::is_canonical;

use crate::Outcome;

/// Checks `bytes` as a mountinfo file and as a description of mounts.
///
/// # Panics
/// A property is violated.
pub fn check(bytes: &[u8]) -> Outcome {
    assert_kernel_lines_parse_as_their_mounts(bytes);
    let mounts = mountinfo::parse(bytes);
    let mut line_by_line = Vec::new();
    for line in bytes.split(|byte| *byte == b'\n') {
        let parsed = mountinfo::parse(line);
        assert!(parsed.len() <= 1, "{line:?} is {parsed:?}");
        if let Some(mount) = parsed.first() {
            assert!(line.split(|byte| *byte == b' ').count() >= 8, "{line:?} is {mount:?}");
            assert!(
                ![&mount.fs_type, &mount.super_options].iter().any(|text| text.contains(' ')),
                "{mount:?}"
            );
            assert!(mount.point.as_os_str().len() <= line.len(), "{line:?} is {mount:?}");
        }
        line_by_line.extend(parsed);
    }
    assert_eq!(line_by_line, mounts, "a line is parsed differently together with others");
    assert_queries_agree_with_the_mounts(&mounts);
    if mounts.is_empty() { Outcome::Rejected } else { Outcome::Accepted }
}

fn assert_queries_agree_with_the_mounts(mounts: &[Mount]) {
    for folder in mounts.iter().map(|m| m.point.as_path()).chain([Path::new("/"), Path::new("/a")]).take(8) {
        let found = mountinfo::below(mounts, folder).count();
        let expected = mounts.iter().filter(|m| m.point != folder && m.point.starts_with(folder)).count();
        assert_eq!(found, expected, "below {folder:?}");
        let contains_folder = |m: &&Mount| folder.starts_with(&m.point);
        match mountinfo::root_needs(mounts, folder) {
            RootNeeds::Nothing => {
                assert!(mounts.iter().filter(contains_folder).any(|m| m.shared), "{folder:?}")
            }
            RootNeeds::Sharing => {
                assert!(mounts.iter().any(|m| m.point == folder && !m.shared), "{folder:?}");
            }
            // A folder that is a mount point already needs no bind mount.
            RootNeeds::BindAndSharing => {
                let own = mounts.iter().rfind(|m| m.point == folder);
                assert!(own.is_none(), "{folder:?} is {own:?}");
            }
        }
        if is_canonical(folder) {
            let bytes = folder.as_os_str().as_bytes();
            assert!(bytes.starts_with(b"/") && !bytes.windows(2).any(|pair| pair == b"//"), "{folder:?}");
            assert!(bytes == b"/" || !bytes.ends_with(b"/"), "{folder:?}");
        }
    }
}

fn assert_kernel_lines_parse_as_their_mounts(bytes: &[u8]) {
    let mounts: Vec<Mount> = bytes.split(|b| *b == 0).take(32).map(mount).collect();
    let text: Vec<u8> = mounts.iter().enumerate().flat_map(|(number, mount)| line(number, mount)).collect();
    assert_eq!(mountinfo::parse(&text), mounts, "{text:?}");
}

/// A mount with any path. The first byte selects its type and whether it is shared.
fn mount(bytes: &[u8]) -> Mount {
    let (seed, path) = bytes.split_first().unwrap_or((&0, b""));
    let point = PathBuf::from(OsString::from_vec([b"/", path].concat()));
    let fs_type = ["ext4", "tmpfs", "overlay", "fuse.own"][usize::from(seed % 4)].to_owned();
    let super_options = "rw,size=1k".to_owned();
    Mount { root: "/".into(), point, shared: seed & 4 != 0, fs_type, super_options }
}

/// The line that the kernel writes for a mount: blanks, tabs, newlines and backslashes are three octal digits. Optional fields
/// surround the field `shared`.
fn line(number: usize, mount: &Mount) -> Vec<u8> {
    let mut point = Vec::new();
    for byte in mount.point.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => point.extend(format!("\\{byte:03o}").bytes()),
            other => point.push(*other),
        }
    }
    let tags = match (mount.shared, number % 3) {
        (true, 0) => "shared:7 ",
        (true, 1) => "shared:7 master:3 ",
        (true, _) => "shared:12 propagate_from:2 future:9 ",
        (false, 0) => "",
        (false, 1) => "master:1 propagate_from:2 ",
        (false, _) => "unbindable ",
    };
    let head = format!("{number} 1 254:0 / ");
    let tail = format!(" rw,relatime {tags}- {} source rw,size=1k\n", mount.fs_type);
    [head.as_bytes(), point.as_slice(), tail.as_bytes()].concat()
}
