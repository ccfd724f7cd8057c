//! hostPath volumes (volumes.md §10.2): which file type each hostPath type requires, and what is created when the path
//! is missing.

use std::path::Path;

/// The type of the file at a path, after following symlinks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// The path does not exist.
    Missing,
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
    /// Another type, such as a named pipe.
    Other,
}

#[cfg(test)]
impl FileKind {
    /// Every kind.
    pub(crate) const ALL: [Self; 7] = [
        Self::Missing,
        Self::Directory,
        Self::File,
        Self::Socket,
        Self::CharDevice,
        Self::BlockDevice,
        Self::Other,
    ];
}

/// Whether the file at a hostPath is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TypeCheck {
    /// Check its type.
    Required,
    /// Use the path without a check.
    Skipped,
}

/// The result of a successful check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckResult {
    /// The file has the required type.
    Matches,
    /// Create the directory with its parents, mode 0755.
    CreateDirectory,
    /// Create an empty file, mode 0644, without its parents.
    CreateFile,
}

/// Why a hostPath cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostPathError {
    /// The path contains `..`.
    #[error("invalid path {path:?}: must not contain \"..\"")]
    ParentReference {
        /// The path.
        path: String,
    },
    /// The API has no such type.
    #[error("hostPath type check failed: {path} has the unknown type {kind:?}")]
    UnknownType {
        /// The path.
        path: String,
        /// The type as written.
        kind: String,
    },
    /// The path is missing or has another type.
    #[error("hostPath type check failed: {path} is not {wanted}")]
    WrongType {
        /// The path.
        path: String,
        /// The required type, with its article.
        wanted: &'static str,
    },
    /// The path leads to the agent's sockets through a symlink.
    #[error(
        "hostPath {path} leads through a symlink into the folder of the agent's sockets, {run_dir}; pods may not mount it that way"
    )]
    AgentRunFolder {
        /// The path.
        path: String,
        /// The folder.
        run_dir: String,
    },
}

/// Refuses a path that resolves to `resolves` inside `run_dir`, unless the path itself is written as one in `run_dir`:
/// such a path was already judged at admission, where the operator's configuration counts, too (ADR 0004).
pub fn reject_link_into(run_dir: &Path, path: &str, resolves: &Path) -> Result<(), HostPathError> {
    let is_explicit = Path::new(path).starts_with(run_dir);
    if is_explicit || !resolves.starts_with(run_dir) {
        return Ok(());
    }
    Err(HostPathError::AgentRunFolder { path: path.to_owned(), run_dir: run_dir.display().to_string() })
}

/// Whether the file at the path must be checked.
pub fn type_check(path: &str, kind: &str) -> Result<TypeCheck, HostPathError> {
    if path.split('/').any(|part| part == "..") {
        return Err(HostPathError::ParentReference { path: path.to_owned() });
    }
    if kind.is_empty() {
        return Ok(TypeCheck::Skipped);
    }
    required(kind)
        .map(|_| TypeCheck::Required)
        .ok_or_else(|| HostPathError::UnknownType { path: path.to_owned(), kind: kind.to_owned() })
}

/// Checks whether `found` is what a volume of type `kind` requires.
pub fn check_type(path: &str, kind: &str, found: FileKind) -> Result<CheckResult, HostPathError> {
    let Some((required_kind, text, create)) = required(kind) else {
        return Err(HostPathError::UnknownType { path: path.to_owned(), kind: kind.to_owned() });
    };
    match (found, create) {
        (FileKind::Missing, Some(create)) => Ok(create),
        (found, _) if found == required_kind => Ok(CheckResult::Matches),
        _ => Err(HostPathError::WrongType { path: path.to_owned(), wanted: text }),
    }
}

fn required(kind: &str) -> Option<(FileKind, &'static str, Option<CheckResult>)> {
    Some(match kind {
        "DirectoryOrCreate" => (FileKind::Directory, "a directory", Some(CheckResult::CreateDirectory)),
        "Directory" => (FileKind::Directory, "a directory", None),
        "FileOrCreate" => (FileKind::File, "a file", Some(CheckResult::CreateFile)),
        "File" => (FileKind::File, "a file", None),
        "Socket" => (FileKind::Socket, "a socket file", None),
        "CharDevice" => (FileKind::CharDevice, "a character device", None),
        "BlockDevice" => (FileKind::BlockDevice, "a block device", None),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_path_link_into_the_run_dir_is_rejected_but_an_explicit_path_is_not() {
        let run_dir = Path::new("/run/keelson");
        for (path, resolves, is_refused) in [
            ("/run/keelson/x", "/run/keelson/x", false),
            ("/data/link", "/run/keelson", true),
            ("/data/link", "/run/keelson/pod-sync", true),
            ("/data/link", "/run/keelson-other", false),
            ("/run", "/run", false),
        ] {
            let result = reject_link_into(run_dir, path, Path::new(resolves));
            assert_eq!(result.is_err(), is_refused, "{path} {resolves}: {result:?}");
        }
    }

    #[test]
    fn each_host_path_type_requires_its_kind_and_only_or_create_allows_a_missing_file() {
        let table = [
            ("DirectoryOrCreate", FileKind::Directory, Some(CheckResult::CreateDirectory)),
            ("Directory", FileKind::Directory, None),
            ("FileOrCreate", FileKind::File, Some(CheckResult::CreateFile)),
            ("File", FileKind::File, None),
            ("Socket", FileKind::Socket, None),
            ("CharDevice", FileKind::CharDevice, None),
            ("BlockDevice", FileKind::BlockDevice, None),
        ];
        for (kind, required_kind, create) in table {
            assert_eq!(type_check("/x", kind), Ok(TypeCheck::Required));
            for found in FileKind::ALL {
                let result = check_type("/x", kind, found);
                match found {
                    FileKind::Missing if create.is_some() => assert_eq!(result.ok(), create),
                    f if f == required_kind => assert_eq!(result, Ok(CheckResult::Matches)),
                    _ => {
                        let text = result.unwrap_err().to_string();
                        assert!(text.contains("hostPath type check failed"), "{text}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_host_path_without_a_type_is_only_checked_for_dot_dot() {
        assert_eq!(type_check("/var/..x/run", ""), Ok(TypeCheck::Skipped));
        assert!(matches!(type_check("/var/../etc", ""), Err(HostPathError::ParentReference { .. })));
    }

    #[test]
    fn an_unknown_host_path_type_is_named_in_the_error() {
        let text = type_check("/x", "Pipe").unwrap_err().to_string();
        assert!(text.contains("Pipe") && text.contains("hostPath type check failed"), "{text}");
    }
}
