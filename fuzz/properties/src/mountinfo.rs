//! mountinfo (proc_pid_mountinfo(5)). The bytes are read as such a text, and as the description of a few mounts of
//! which the kernel's text is made.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use keelson_mountinfo::{self as mountinfo, Mount, RootNeeds};
use keelson_volume_manager_core::names::is_canonical;

use crate::Met;

/// Checks `bytes` as mounts.
///
/// # Panics
/// Something does not hold.
pub fn check(bytes: &[u8]) -> Met {
    mounts_are_read_as_the_kernel_writes_them(bytes);
    let mounts = mountinfo::parse(bytes);
    let mut alone = Vec::new();
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
        alone.extend(parsed);
    }
    assert_eq!(alone, mounts, "a line does not depend on the others");
    what_lies_below_is_below(&mounts);
    if mounts.is_empty() { Met::Refused } else { Met::Good }
}

fn what_lies_below_is_below(mounts: &[Mount]) {
    for folder in mounts.iter().map(|m| m.point.as_path()).chain([Path::new("/"), Path::new("/a")]).take(8) {
        let found = mountinfo::below(mounts, folder).count();
        let expected = mounts.iter().filter(|m| m.point != folder && m.point.starts_with(folder)).count();
        assert_eq!(found, expected, "below {folder:?}");
        let holding = |m: &&Mount| folder.starts_with(&m.point);
        match mountinfo::root_needs(mounts, folder) {
            RootNeeds::Nothing => assert!(mounts.iter().filter(holding).any(|m| m.shared), "{folder:?}"),
            RootNeeds::Sharing => {
                assert!(mounts.iter().any(|m| m.point == folder && !m.shared), "{folder:?}");
            }
            // A mount of its own, the newest of those on it, would need no other.
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

fn mounts_are_read_as_the_kernel_writes_them(bytes: &[u8]) {
    let mounts: Vec<Mount> = bytes.split(|b| *b == 0).take(32).map(mount).collect();
    let text: Vec<u8> = mounts.iter().enumerate().flat_map(|(number, mount)| line(number, mount)).collect();
    assert_eq!(mountinfo::parse(&text), mounts, "{text:?}");
}

/// A mount of any path; its first byte says what it is.
fn mount(bytes: &[u8]) -> Mount {
    let (seed, path) = bytes.split_first().unwrap_or((&0, b""));
    let point = PathBuf::from(OsString::from_vec([b"/", path].concat()));
    let fs_type = ["ext4", "tmpfs", "overlay", "fuse.own"][usize::from(seed % 4)].to_owned();
    let super_options = "rw,size=1k".to_owned();
    Mount { root: "/".into(), point, shared: seed & 4 != 0, fs_type, super_options }
}

/// The line of a mount: blanks, tabs, newlines and backslashes as three octal digits, and optional fields before
/// and behind the one that counts.
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
