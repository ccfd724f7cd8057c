//! nfs volumes (volumes.md §10.3): what is mounted, with which options, and what a failed mount says.

use std::collections::BTreeSet;

use crate::sources::NfsSource;

/// The filesystem type of the mount.
pub const FS_TYPE: &str = "nfs";

/// Why an nfs volume cannot be mounted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NfsError {
    /// A field of the source cannot be part of a mount.
    #[error("nfs volume {volume}: {field} {value:?} {problem}; correct it in the volume's source")]
    InvalidField {
        /// The volume's inner name.
        volume: String,
        /// `server` or `path`.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// mount(8) failed.
    #[error(
        "nfs volume {volume}: mount of {source_text} failed with {exit}: {output}{advice}",
        exit = exit_text(*exit)
    )]
    MountFailed {
        /// The volume's inner name.
        volume: String,
        /// `<server>:<path>`.
        source_text: String,
        /// The exit code; `None` after a signal.
        exit: Option<i32>,
        /// What mount(8) and its helper wrote, without surrounding white space.
        output: String,
        /// What to do about it; empty if that is not known.
        advice: &'static str,
    },
}

/// The arguments of an nfs mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NfsMount {
    /// `<server>:<path>`, with an IPv6 address in brackets.
    pub source: String,
    /// Options, sorted and each once.
    pub options: Vec<String>,
}

impl NfsMount {
    /// The mount of `volume`, with the mount options of its PersistentVolume.
    pub fn new(
        volume: &str,
        from: &NfsSource,
        options: &[String],
        read_only: bool,
    ) -> Result<Self, NfsError> {
        let refuse = |field, value: &str, problem| {
            Err(NfsError::InvalidField { volume: volume.to_owned(), field, value: value.to_owned(), problem })
        };
        if from.server.is_empty() {
            return refuse("server", &from.server, "is empty");
        }
        if from.server.starts_with('-') {
            return refuse("server", &from.server, "would be read as an option of mount");
        }
        if !from.path.starts_with('/') {
            return refuse("path", &from.path, "is not absolute");
        }
        for (field, value) in [("server", &from.server), ("path", &from.path)] {
            if value.contains('\0') {
                return refuse(field, value, "contains a zero byte");
            }
        }
        let mut all: BTreeSet<&str> = options.iter().map(String::as_str).collect();
        if read_only {
            all.insert("ro");
        }
        let options = all.into_iter().map(str::to_owned).collect();
        Ok(Self { source: format!("{}:{}", bracketed(&from.server), from.path), options })
    }

    /// The arguments of mount(8) for a mount at `target`.
    pub fn arguments(&self, target: &str) -> Vec<String> {
        let mut arguments = vec!["-t".to_owned(), FS_TYPE.to_owned()];
        if !self.options.is_empty() {
            arguments.extend(["-o".to_owned(), self.options.join(",")]);
        }
        arguments.extend([self.source.clone(), target.to_owned()]);
        arguments
    }

    /// The error of a mount of `volume` that ended with `exit` and wrote `output`.
    pub fn failed(&self, volume: &str, exit: Option<i32>, output: &str) -> NfsError {
        let lacks_helper = output.contains("helper program") || output.contains("unknown filesystem type");
        NfsError::MountFailed {
            volume: volume.to_owned(),
            source_text: self.source.clone(),
            exit,
            output: output.trim().to_owned(),
            advice: if lacks_helper {
                "; install the NFS client on the node (package nfs-common or nfs-utils)"
            } else {
                ""
            },
        }
    }
}

/// An IPv6 address in brackets; every other server as it is. Only IPv6 addresses have more than one colon.
fn bracketed(server: &str) -> String {
    if server.matches(':').count() > 1 && !server.starts_with('[') {
        format!("[{server}]")
    } else {
        server.to_owned()
    }
}

fn exit_text(exit: Option<i32>) -> String {
    exit.map_or_else(|| "a signal".to_owned(), |code| format!("exit code {code}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(server: &str, path: &str) -> NfsSource {
        NfsSource { server: server.into(), path: path.into(), read_only: false }
    }

    fn mount(server: &str, options: &[&str], read_only: bool) -> NfsMount {
        let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
        NfsMount::new("v", &source(server, "/export"), &options, read_only).unwrap()
    }

    #[test]
    fn an_ipv6_server_is_put_in_brackets_once() {
        for (server, expected) in [
            ("nfs.example.com", "nfs.example.com:/export"),
            ("10.0.0.1", "10.0.0.1:/export"),
            ("fd00::1", "[fd00::1]:/export"),
            ("::1", "[::1]:/export"),
            ("fe80::1%eth0", "[fe80::1%eth0]:/export"),
            ("[fd00::1]", "[fd00::1]:/export"),
        ] {
            assert_eq!(mount(server, &[], false).source, expected);
        }
    }

    #[test]
    fn nfs_options_are_sorted_and_unique_and_read_only_adds_ro() {
        assert_eq!(mount("s", &["vers=4", "hard", "vers=4"], false).options, ["hard", "vers=4"]);
        assert_eq!(mount("s", &["vers=4", "hard", "ro"], true).options, ["hard", "ro", "vers=4"]);
        assert_eq!(mount("s", &["soft"], true).options, ["ro", "soft"]);
        assert!(mount("s", &[], false).options.is_empty());
    }

    #[test]
    fn the_mount_has_an_option_list_only_if_there_are_options() {
        assert_eq!(mount("s", &[], false).arguments("/t"), ["-t", "nfs", "s:/export", "/t"]);
        let arguments = mount("s", &["hard"], true).arguments("/t");
        assert_eq!(arguments, ["-t", "nfs", "-o", "hard,ro", "s:/export", "/t"]);
    }

    #[test]
    fn a_source_that_mount_would_misread_is_refused_with_its_field() {
        for (server, path, expected) in [
            ("", "/p", "nfs volume v: server \"\" is empty"),
            ("-obind", "/p", "server \"-obind\" would be read as an option"),
            ("s", "", "path \"\" is not absolute"),
            ("s", "p", "path \"p\" is not absolute"),
            ("s\0", "/p", "contains a zero byte"),
            ("s", "/p\0", "contains a zero byte"),
        ] {
            let text = NfsMount::new("v", &source(server, path), &[], false).unwrap_err().to_string();
            assert!(text.contains(expected) && text.contains("correct it"), "{text}");
        }
    }

    #[test]
    fn a_failed_mount_shows_the_output_and_advises_only_on_a_missing_helper() {
        let plain = mount("s", &[], false).failed("v", Some(32), " mount.nfs: access denied by server\n");
        assert_eq!(
            plain.to_string(),
            "nfs volume v: mount of s:/export failed with exit code 32: mount.nfs: access denied by server"
        );
        for output in ["you might need a /sbin/mount.<type> helper program.", "unknown filesystem type 'nfs'"]
        {
            let text = mount("s", &[], false).failed("v", Some(32), output).to_string();
            assert!(text.contains(output) && text.ends_with("(package nfs-common or nfs-utils)"), "{text}");
        }
        let killed = mount("s", &[], false).failed("v", None, "").to_string();
        assert!(killed.contains("failed with a signal"), "{killed}");
    }
}
