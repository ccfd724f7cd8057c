//! Modes under another umask. It belongs to the whole process, so this is the only test of this file.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use keelson_files::Replacement;
use rustix::fs::Mode;

#[test]
fn umask_limits_the_default_mode_and_not_a_given_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    for (umask, default) in [(0o077, 0o600), (0o027, 0o640), (0o000, 0o666)] {
        rustix::process::umask(Mode::from_raw_mode(umask));
        let mode = |replacement: Replacement<'_>| {
            replacement.write(&path, b"x").unwrap();
            fs::metadata(&path).unwrap().permissions().mode() & 0o7777
        };
        assert_eq!(mode(Replacement::new()), default, "umask {umask:o}");
        assert_eq!(mode(Replacement::new().mode(0o664)), 0o664, "umask {umask:o}");
        assert_eq!(mode(Replacement::new().mode(0o400)), 0o400, "umask {umask:o}");
    }
}
