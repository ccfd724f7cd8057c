use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Describes owner and mode of a file or folder that users other than root and this process may write. `None` when no other
/// user may, or when the path cannot be read. Links are followed.
pub fn writable_by_others(path: &Path) -> Option<String> {
    let found = fs::metadata(path).ok()?;
    let by_owner = ![0, rustix::process::geteuid().as_raw()].contains(&found.uid());
    let by_group = found.mode() & 0o020 != 0 && found.gid() != 0;
    let by_all = found.mode() & 0o002 != 0;
    (by_owner || by_group || by_all).then(|| {
        let (uid, gid, mode) = (found.uid(), found.gid(), found.mode() & 0o7777);
        format!("{} (owner {uid}:{gid}, mode {mode:04o})", path.display())
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

    use super::*;

    fn set(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn paths_writable_by_others_are_described_with_owner_and_mode() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        assert_eq!(writable_by_others(&file), None, "there is none");
        fs::write(&file, "x").unwrap();
        symlink(&file, &link).unwrap();
        for (mode, named) in [(0o644, false), (0o600, false), (0o755, false), (0o602, true), (0o777, true)] {
            set(&file, mode);
            for path in [&file, &link] {
                let found = writable_by_others(path);
                assert_eq!(found.is_some(), named, "{mode:o}");
                let described = format!("{} (owner ", path.display());
                assert!(found.is_none_or(
                    |text| text.starts_with(&described) && text.ends_with(&format!(", mode {mode:04o})"))
                ));
            }
        }
        assert!(rustix::process::geteuid().is_root(), "this test changes owners; run it as root");
        for (uid, gid, mode, named) in
            [(1000, 0, 0o644, true), (0, 1000, 0o644, false), (0, 1000, 0o664, true), (0, 0, 0o664, false)]
        {
            chown(&file, Some(uid), Some(gid)).unwrap();
            set(&file, mode);
            assert_eq!(writable_by_others(&file).is_some(), named, "{uid}:{gid} {mode:o}");
        }
    }
}
