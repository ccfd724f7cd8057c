//! Facts about this machine that need no call to an agent: the run folders of its agents, and the group of a socket.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use keelson_config::ServiceName;

/// The group that the packages create for operators.
const OPERATOR_GROUP: &str = "keelson";

/// The run folders of the agents on this machine, read from the command lines of their services (proc(5)).
/// An agent in another mount namespace, such as a container, is left out: its folder is not visible from here.
pub(crate) fn run_dirs() -> Vec<PathBuf> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_pid = |name: &OsStr| name.as_bytes().iter().all(u8::is_ascii_digit);
    let found: BTreeSet<PathBuf> = processes
        .filter(|entry| is_pid(&entry.file_name()))
        .filter_map(|entry| run_dir_of(&fs::read(entry.path().join("cmdline")).ok()?))
        .filter(|dir| dir.is_dir())
        .collect();
    found.into_iter().collect()
}

/// The run folder of a service from its command line, each argument ended by a zero byte; `None` for every other
/// process.
fn run_dir_of(command_line: &[u8]) -> Option<PathBuf> {
    let mut arguments = command_line.split(|byte| *byte == 0);
    let program = Path::new(OsStr::from_bytes(arguments.next()?)).file_name()?.to_str()?;
    if !ServiceName::supervised().any(|service| service.binary() == program) {
        return None;
    }
    let arguments: Vec<&[u8]> = arguments.collect();
    let config = arguments.iter().enumerate().find_map(|(index, argument)| {
        argument
            .strip_prefix(b"--config=")
            .or_else(|| (*argument == b"--config").then(|| arguments.get(index + 1).copied()).flatten())
    })?;
    let file = Path::new(OsStr::from_bytes(config));
    (file.is_absolute() && file.file_name()? == "config.json").then(|| file.parent().map(Path::to_owned))?
}

/// The group whose members may call an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Group {
    Named(String),
    /// The group has no name on this machine.
    Numbered(u32),
    /// The socket is not visible, or belongs to root's group.
    Unknown,
}

impl Group {
    /// The group of a socket, or of its folder where the socket is not visible.
    pub(crate) fn of_socket(socket: &Path) -> Self {
        let gid = |path: &Path| fs::symlink_metadata(path).ok().map(|meta| meta.gid());
        match gid(socket).or_else(|| gid(socket.parent()?)) {
            None | Some(0) => Self::Unknown,
            Some(gid) => {
                let groups = fs::read_to_string("/etc/group").unwrap_or_default();
                name_of(&groups, gid).map_or(Self::Numbered(gid), Self::Named)
            }
        }
    }

    /// How a person gets access.
    pub(crate) fn membership_hint(&self) -> String {
        let join = |name: &str| {
            format!("join the group {name} (`sudo usermod -aG {name} $USER`, then log in again), or use sudo")
        };
        match self {
            Self::Named(name) => join(name),
            Self::Unknown => join(OPERATOR_GROUP),
            Self::Numbered(gid) => format!(
                "use sudo, or join the group with the id {gid}: it has no name here yet, so \
                 `sudo groupadd --gid {gid} {OPERATOR_GROUP}`, `sudo usermod -aG {OPERATOR_GROUP} $USER`, then log in again"
            ),
        }
    }
}

/// The name of a group in the format of group(5).
fn name_of(groups: &str, gid: u32) -> Option<String> {
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(gid)).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_folder_is_read_from_a_service_command_line() {
        let run_dir = |line: &str| run_dir_of(line.replace(' ', "\0").as_bytes());
        let run = Some(PathBuf::from("/run/b"));
        assert_eq!(run_dir("/usr/libexec/keelson/keelson-pod-sync --config /run/b/config.json "), run);
        assert_eq!(run_dir("keelson-node-api --config=/run/b/config.json"), run);
        for other in [
            "",
            "keelson get pods --config /run/b/config.json",
            "keelson-init --config /etc/kubelet.yaml",
            "keelson-pod-sync --config",
            "keelson-pod-sync --config config.json",
            "keelson-pod-sync --config /run/b/other.json",
            "kubelet --config /var/lib/kubelet/config.json",
        ] {
            assert_eq!(run_dir(other), None, "{other:?}");
        }
    }

    #[test]
    fn group_name_comes_from_etc_group() {
        let groups = "root:x:0:\nbroken\noperators:x:64200:me,you\n";
        assert_eq!(name_of(groups, 64_200).as_deref(), Some("operators"));
        assert_eq!(name_of(groups, 7), None);
        assert!(Group::Named("operators".into()).membership_hint().contains("usermod -aG operators"));
        let numbered = Group::Numbered(64_200).membership_hint();
        assert!(numbered.contains("groupadd --gid 64200 keelson") && numbered.contains("sudo"), "{numbered}");
    }

    #[test]
    fn group_of_an_invisible_socket_is_the_group_of_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let gid = fs::metadata(folder.path()).unwrap().gid();
        let groups = fs::read_to_string("/etc/group").unwrap_or_default();
        let expected = match name_of(&groups, gid) {
            _ if gid == 0 => Group::Unknown,
            Some(name) => Group::Named(name),
            None => Group::Numbered(gid),
        };
        assert_eq!(Group::of_socket(&folder.path().join("absent.sock")), expected);
        assert_eq!(Group::of_socket(Path::new("/nonexistent/x/y.sock")), Group::Unknown);
    }
}
