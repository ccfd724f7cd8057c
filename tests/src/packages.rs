//! Debian packages of the tested binaries.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use keelson_testkit::{binary_names, built_binaries, find_file};

/// Runs a command; its standard output.
///
/// # Panics
/// It fails.
pub fn command_output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Copies the binaries into a folder without their debug information.
///
/// # Panics
/// They are not built, or there is no `strip`.
pub fn strip_binaries(folder: &Path) {
    let built = built_binaries().unwrap();
    fs::create_dir_all(folder).unwrap();
    for name in binary_names() {
        command_output(
            Command::new(find_file("strip").unwrap()).arg("-o").arg(folder.join(name)).arg(built.join(name)),
        );
    }
}

/// Packs binaries as this version with `cargo xtask deb`; the packages by their name.
///
/// # Panics
/// It is not built, or fails.
pub fn make_packages(binaries: &Path, out: &Path, version: &str, umask: &str) -> BTreeMap<String, PathBuf> {
    let line = format!("umask {umask}; exec \"$0\" deb --uncompressed --version {version} --out \"$1\"");
    let mut command = Command::new("sh");
    command.arg("-c").arg(line).arg(xtask()).arg(out).env("KEELSON_BIN_DIR", binaries);
    let listed = command_output(&mut command);
    let name =
        |path: &Path| path.file_name().unwrap().to_string_lossy().split('_').next().unwrap().to_owned();
    listed.lines().map(PathBuf::from).map(|path| (name(&path), path)).collect()
}

/// The program `xtask`, built next to this test.
fn xtask() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let program = own.ancestors().skip(1).find(|folder| !folder.ends_with("deps")).unwrap().join("xtask");
    assert!(program.is_file(), "no {}; run: cargo build --workspace --bins", program.display());
    program
}
