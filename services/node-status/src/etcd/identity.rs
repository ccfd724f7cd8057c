//! The identity that distinguishes this agent from another one with the same node name.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use keelson_config::{Config, ServiceName};
use keelson_files::Replacement;
use keelson_service_kit::now_unix_nanos;

/// The content of the file: the identity, and on a second line the ID of the machine that it was created on, if it has one.
struct IdentityFile {
    identity: String,
    machine: String,
}

/// The identity of this agent. It stays the same over restarts and reboots. A copied disk on another machine, as the machine ID
/// shows (machine-id(5)), gets another identity.
///
/// # Errors
/// The file cannot be written.
pub(super) fn identity(config: &Config) -> anyhow::Result<String> {
    let path = config.paths.state(ServiceName::NodeStatus).join("identity");
    let machine = machine(&config.resources.identity_files.machine_id);
    let identity = match read(&path) {
        // Nothing shows that this is another machine.
        Some(stored) if machine.is_empty() || stored.machine == machine => return Ok(stored.identity),
        Some(stored) if stored.machine.is_empty() => stored.identity,
        _ => format!("{:016x}{:016x}", fastrand::u64(..), now_unix_nanos()),
    };
    let folder = path.parent().context("a file is in a folder")?;
    let content = format!("{identity}\n{machine}\n");
    std::fs::create_dir_all(folder)
        .and_then(|()| Replacement::new().write(&path, content.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(identity)
}

/// The ID of the machine; empty if it has none.
fn machine(files: &[PathBuf]) -> String {
    let texts = files.iter().filter_map(|file| std::fs::read_to_string(file).ok());
    // It may say `uninitialized` at the first boot.
    let mut ids = texts.map(|text| text.trim().to_owned()).filter(|id| is_id(id));
    ids.next().unwrap_or_default()
}

fn read(path: &Path) -> Option<IdentityFile> {
    let text = std::fs::read_to_string(path).ok()?;
    let mut lines = text.lines().map(str::trim);
    let identity = lines.next().filter(|line| is_id(line))?.to_owned();
    let machine = lines.next().filter(|line| is_id(line)).unwrap_or_default().to_owned();
    Some(IdentityFile { identity, machine })
}

fn is_id(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copied_disk_gets_another_identity_and_a_restart_keeps_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.state_dir = folder.path().join("state");
        let of_machine = folder.path().join("machine-id");
        config.resources.identity_files.machine_id = vec![folder.path().join("none"), of_machine.clone()];
        let on = |machine: &str| {
            std::fs::write(&of_machine, machine).unwrap();
            identity(&config).unwrap()
        };
        let nowhere = on("uninitialized\n");
        assert_eq!(on(""), nowhere);
        let (one, other) = (format!("{}\n", "a".repeat(32)), format!("{}\n", "b".repeat(32)));
        // As an agent without a machine ID, or an earlier release, wrote it.
        assert_eq!(on(&one), nowhere);
        assert_eq!(on(&one), nowhere);
        let copied = on(&other);
        assert!(copied != nowhere && is_id(&copied), "{copied}");
        assert_eq!((on(&other), on("")), (copied.clone(), copied));
    }
}
