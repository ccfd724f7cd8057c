//! hostPath volumes (volumes.md §10.2): what must be at the path, and what is made when nothing is.

use std::path::Path;

/// What is at a path, after following symlinks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Nothing.
    Nothing,
    /// A directory.
    Directory,
    /// A regular file.
    File,
    /// A unix socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// Something else, a named pipe for example.
    Other,
}

/// What to do about a hostPath.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Look at the path first.
    Look,
    /// Take it as it is, without a look.
    Take,
}

/// What a look at the path leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is what the volume asks for.
    Good,
    /// Make the directory with its parents, 0755.
    MakeDirectory,
    /// Make an empty file, 0644, without its parent.
    MakeFile,
}

/// Why a hostPath cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostPathError {
    /// The path leads upwards.
    #[error("invalid path {path:?}: must not contain \"..\"")]
    Upwards {
        /// The path.
        path: String,
    },
    /// The type is not one of the API.
    #[error("hostPath type check failed: {path} has the unknown type {kind:?}")]
    UnknownType {
        /// The path.
        path: String,
        /// The type as written.
        kind: String,
    },
    /// Something else, or nothing, is there.
    #[error("hostPath type check failed: {path} is not {wanted}")]
    NotA {
        /// The path.
        path: String,
        /// What the type asks for, with its article.
        wanted: &'static str,
    },
    /// The path leads to the agent's sockets without saying so.
    #[error(
        "hostPath {path} leads by a link into the folder of the agent's sockets, {run_dir}, which pods may not see that way"
    )]
    AgentRunFolder {
        /// The path.
        path: String,
        /// The folder.
        run_dir: String,
    },
}

/// Refuses a path that leads into `run_dir` and does not say so: where it `resolves` to. What a path says is judged at admission, where
/// the operator's word counts, too (ADR 0004).
pub fn no_way_into(run_dir: &Path, path: &str, resolves: &Path) -> Result<(), HostPathError> {
    let says_so = Path::new(path).starts_with(run_dir);
    if says_so || !resolves.starts_with(run_dir) {
        return Ok(());
    }
    Err(HostPathError::AgentRunFolder { path: path.to_owned(), run_dir: run_dir.display().to_string() })
}

/// Whether the path has to be looked at.
pub fn begin(path: &str, kind: &str) -> Result<Act, HostPathError> {
    if path.split('/').any(|part| part == "..") {
        return Err(HostPathError::Upwards { path: path.to_owned() });
    }
    if kind.is_empty() {
        return Ok(Act::Take);
    }
    wanted(kind)
        .map(|_| Act::Look)
        .ok_or_else(|| HostPathError::UnknownType { path: path.to_owned(), kind: kind.to_owned() })
}

/// Whether `found` is what a volume of type `kind` asks for.
pub fn check(path: &str, kind: &str, found: Found) -> Result<Verdict, HostPathError> {
    let Some((good, text, make)) = wanted(kind) else {
        return Err(HostPathError::UnknownType { path: path.to_owned(), kind: kind.to_owned() });
    };
    match (found, make) {
        (Found::Nothing, Some(make)) => Ok(make),
        (found, _) if found == good => Ok(Verdict::Good),
        _ => Err(HostPathError::NotA { path: path.to_owned(), wanted: text }),
    }
}

fn wanted(kind: &str) -> Option<(Found, &'static str, Option<Verdict>)> {
    Some(match kind {
        "DirectoryOrCreate" => (Found::Directory, "a directory", Some(Verdict::MakeDirectory)),
        "Directory" => (Found::Directory, "a directory", None),
        "FileOrCreate" => (Found::File, "a file", Some(Verdict::MakeFile)),
        "File" => (Found::File, "a file", None),
        "Socket" => (Found::Socket, "a socket file", None),
        "CharDevice" => (Found::CharDevice, "a character device", None),
        "BlockDevice" => (Found::BlockDevice, "a block device", None),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_into_the_agents_folder_is_refused_and_what_says_so_was_judged_before() {
        let run_dir = Path::new("/run/keelson");
        for (path, resolves, is_refused) in [
            ("/run/keelson/x", "/run/keelson/x", false),
            ("/data/link", "/run/keelson", true),
            ("/data/link", "/run/keelson/pod-sync", true),
            ("/data/link", "/run/keelson-other", false),
            ("/run", "/run", false),
        ] {
            let result = no_way_into(run_dir, path, Path::new(resolves));
            assert_eq!(result.is_err(), is_refused, "{path} {resolves}: {result:?}");
        }
    }

    const ALL: [Found; 7] = [
        Found::Nothing,
        Found::Directory,
        Found::File,
        Found::Socket,
        Found::CharDevice,
        Found::BlockDevice,
        Found::Other,
    ];

    #[test]
    fn each_type_takes_its_own_kind_and_only_the_creating_ones_take_nothing() {
        let table = [
            ("DirectoryOrCreate", Found::Directory, Some(Verdict::MakeDirectory)),
            ("Directory", Found::Directory, None),
            ("FileOrCreate", Found::File, Some(Verdict::MakeFile)),
            ("File", Found::File, None),
            ("Socket", Found::Socket, None),
            ("CharDevice", Found::CharDevice, None),
            ("BlockDevice", Found::BlockDevice, None),
        ];
        for (kind, good, make) in table {
            assert_eq!(begin("/x", kind), Ok(Act::Look));
            for found in ALL {
                let verdict = check("/x", kind, found);
                match found {
                    Found::Nothing if make.is_some() => assert_eq!(verdict.ok(), make),
                    f if f == good => assert_eq!(verdict, Ok(Verdict::Good)),
                    _ => {
                        let text = verdict.unwrap_err().to_string();
                        assert!(text.contains("hostPath type check failed"), "{text}");
                    }
                }
            }
        }
    }

    #[test]
    fn without_a_type_nothing_is_checked_but_the_dots() {
        assert_eq!(begin("/var/..x/run", ""), Ok(Act::Take));
        assert!(matches!(begin("/var/../etc", ""), Err(HostPathError::Upwards { .. })));
    }

    #[test]
    fn a_type_that_the_api_does_not_know_is_named() {
        let text = begin("/x", "Pipe").unwrap_err().to_string();
        assert!(text.contains("Pipe") && text.contains("hostPath type check failed"), "{text}");
    }
}
