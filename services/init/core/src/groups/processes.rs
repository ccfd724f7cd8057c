//! The limits, reported version and identity files of the agent's processes, from the KubeletConfiguration and flags
//! (node-and-api.md §1.3, §1.4, §2.5).

use std::path::PathBuf;

use crate::document::Sourced;
use crate::inputs::last_use;
use crate::outcome::Outcome;
use crate::paths::absolute;
use crate::settings::{Files, Settings};

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(crate) struct Processes {
    oom_score_adj: Option<Sourced<i64>>,
    max_open_files: Option<Sourced<i64>>,
}

impl Settings for Processes {
    fn read(files: &mut Files<'_>) -> Self {
        Self {
            oom_score_adj: files.kubelet.int_field("oomScoreAdj"),
            max_open_files: files.kubelet.int_field("maxOpenFiles"),
        }
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        out.set_field(self.oom_score_adj, |c, v| {
            c.own_processes.oom_score_adj = i32::try_from(v).unwrap_or_default();
        });
        out.set_field(self.max_open_files, |c, v| c.own_processes.max_open_files = v.unsigned_abs());
        let version = out.flags.other("version").map(|uses| uses.map(|uses| last_use(&uses).to_owned()));
        let version = version.filter(|version| version.value.starts_with('v'));
        out.set("ownProcesses.kubeletVersion", version, |c, v| c.own_processes.kubelet_version = v);
        let (machine, boot) = (files(out, "machine-id-file"), files(out, "boot-id-file"));
        out.set("resources.identityFiles.machineId", machine, |c, v| {
            c.resources.identity_files.machine_id = v
        });
        out.set("resources.identityFiles.bootId", boot, |c, v| c.resources.identity_files.boot_id = v);
    }
}

/// The paths in a comma-separated list, starting from the working directory.
fn files(out: &Outcome<'_>, name: &str) -> Option<Sourced<Vec<PathBuf>>> {
    let cwd = &out.host.cwd;
    let list = out.flags.other(name)?.map(|uses| {
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

    use crate::inputs::Flags;
    use crate::outcome::WITHOUT_EFFECT;
    use crate::resolve::Resolved;
    use crate::testing::{assert_refused, host, kubelet, run};

    fn with_flags(others: &[(&'static str, &str)]) -> Resolved {
        let others = others.iter().map(|(name, text)| (*name, (*text).to_owned())).collect();
        let resolved = run(&Flags { others, ..Flags::default() }, None, None, &host()).unwrap();
        assert!(resolved.notes.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{:?}", resolved.notes);
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
            assert!(resolved.notes.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{fields}");
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

    #[test]
    fn invalid_process_limits_are_refused_with_a_remedy() {
        assert_refused(&[
            (json!({"maxOpenFiles": -1}), "maxOpenFiles = -1", "from 0"),
            (json!({"oomScoreAdj": -1001}), "oomScoreAdj = -1001", "from -1000 to 1000"),
            (json!({"oomScoreAdj": 1001}), "oomScoreAdj = 1001", "from -1000 to 1000"),
        ]);
    }
}
