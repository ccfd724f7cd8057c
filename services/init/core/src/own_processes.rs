//! The limits, reported version and identity files of the agent's processes, from the KubeletConfiguration and flags
//! (node-and-api.md §1.3, §1.4, §2.5).

use std::path::PathBuf;

use crate::document::{Reader, Sourced};
use crate::kubelet_file::{KubeletFile, absolute};
use crate::resolve::Resolver;

pub(crate) const VERSION: &str = "version";
pub(crate) const MACHINE_ID: &str = "machine-id-file";
pub(crate) const BOOT_ID: &str = "boot-id-file";

/// The fields; `None` where the file does not set them.
#[derive(Debug, Default)]
pub(crate) struct OwnProcessesFile {
    oom_score_adj: Option<Sourced<i64>>,
    max_open_files: Option<Sourced<i64>>,
}

impl OwnProcessesFile {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        Self {
            oom_score_adj: reader.integer("oomScoreAdj", -1000..=1000),
            // Zero means the default: a process cannot work without open files.
            max_open_files: reader.integer("maxOpenFiles", 0..=i64::MAX).filter(|files| files.value > 0),
        }
    }
}

/// Applies the fields and the flags to the configuration.
pub(crate) fn resolve(resolver: &mut Resolver<'_>, kubelet: &mut KubeletFile) {
    let OwnProcessesFile { oom_score_adj, max_open_files } = std::mem::take(&mut kubelet.own_processes);
    resolver.set("ownProcesses.oomScoreAdj", oom_score_adj, |c, v| {
        c.own_processes.oom_score_adj = i32::try_from(v).unwrap_or_default();
    });
    resolver.set("ownProcesses.maxOpenFiles", max_open_files, |c, v| {
        c.own_processes.max_open_files = v.unsigned_abs();
    });
    let version = given(resolver, VERSION).map(|uses| uses.map(|uses| last(&uses).to_owned()));
    let version = version.filter(|version| version.value.starts_with('v'));
    resolver.set("ownProcesses.kubeletVersion", version, |c, v| c.own_processes.kubelet_version = v);
    let (machine, boot) = (files(resolver, MACHINE_ID), files(resolver, BOOT_ID));
    resolver
        .set("resources.identityFiles.machineId", machine, |c, v| c.resources.identity_files.machine_id = v);
    resolver.set("resources.identityFiles.bootId", boot, |c, v| c.resources.identity_files.boot_id = v);
}

/// The given text of a flag, repeated uses joined by commas.
fn given(resolver: &Resolver<'_>, name: &'static str) -> Option<Sourced<String>> {
    let uses = resolver.flags.others.get(name).filter(|uses| !uses.is_empty())?;
    let flag = format!("--{name}");
    Some(Sourced { value: uses.clone(), origin: flag.clone(), field: flag })
}

/// The last of repeated uses.
pub(crate) fn last(uses: &str) -> &str {
    uses.rsplit(',').next().unwrap_or_default()
}

/// The paths in a comma-separated list, starting from the working directory.
fn files(resolver: &Resolver<'_>, name: &'static str) -> Option<Sourced<Vec<PathBuf>>> {
    let cwd = &resolver.host.cwd;
    let list = given(resolver, name)?.map(|uses| {
        let paths = uses.split(',').map(str::trim).filter(|path| !path.is_empty());
        paths.map(|path| PathBuf::from(absolute(cwd, path))).collect::<Vec<_>>()
    });
    Some(list).filter(|list| !list.value.is_empty())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use keelson_config::{Config, KUBELET_VERSION};
    use serde_json::json;

    use crate::resolve::tests::{host, kubelet, run};
    use crate::resolve::{Flags, Resolved};

    fn with_flags(others: &[(&'static str, &str)]) -> Resolved {
        let others = others.iter().map(|(name, text)| (*name, (*text).to_owned())).collect();
        let resolved = run(&Flags { others, ..Flags::default() }, None, None, &host()).unwrap();
        assert!(
            resolved.notes.iter().all(|note| !note.text.contains("no effect yet")),
            "{:?}",
            resolved.notes
        );
        resolved
    }

    #[test]
    fn oom_score_adj_and_max_open_files_are_applied() {
        for (fields, oom_score_adj, max_open_files) in [
            (json!({}), -999, 1_000_000),
            (json!({"oomScoreAdj": 0, "maxOpenFiles": 0}), 0, 1_000_000),
            (json!({"oomScoreAdj": -1000, "maxOpenFiles": 5_000_000_000_i64}), -1000, 5_000_000_000),
        ] {
            let resolved = run(&Flags::default(), Some(&kubelet(fields.clone())), None, &host()).unwrap();
            let own = &resolved.config.own_processes;
            assert_eq!((own.oom_score_adj, own.max_open_files), (oom_score_adj, max_open_files), "{fields}");
            assert!(resolved.notes.iter().all(|note| !note.text.contains("no effect yet")), "{fields}");
            assert_eq!(resolved.kubelet_configuration["maxOpenFiles"], max_open_files, "{fields}");
        }
    }

    #[test]
    fn a_version_override_is_applied_and_a_version_query_is_not() {
        for (text, version) in [
            ("v1.36.2-ours.1", "v1.36.2-ours.1"),
            ("v1.36.2-a,v1.36.2-b", "v1.36.2-b"),
            ("false", KUBELET_VERSION),
        ] {
            let resolved = with_flags(&[("version", text)]);
            assert_eq!(resolved.config.own_processes.kubelet_version, version, "{text}");
            let is_set = resolved.config.provenance.contains_key("ownProcesses.kubeletVersion");
            assert_eq!(is_set, version != KUBELET_VERSION);
        }
    }

    #[test]
    fn machine_id_and_boot_id_files_are_relative_to_the_working_directory() {
        let resolved = with_flags(&[("machine-id-file", "/a, b"), ("boot-id-file", "/c")]);
        let files = &resolved.config.resources.identity_files;
        assert_eq!(files.machine_id, [Path::new("/a"), Path::new("/srv/b")]);
        assert_eq!(files.boot_id, [Path::new("/c")]);
        assert_eq!(resolved.config.provenance["resources.identityFiles.machineId"], "--machine-id-file");
        let none = with_flags(&[("machine-id-file", ""), ("boot-id-file", ",")]);
        assert_eq!(none.config.resources.identity_files, Config::default().resources.identity_files);
    }
}
