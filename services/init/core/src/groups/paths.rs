//! The folders of the agent, from flags and both files (architecture §7).

use std::path::PathBuf;

use keelson_config::Config;

use crate::document::Sourced;
use crate::inputs::given;
use crate::outcome::Outcome;
use crate::paths::{absolute, is_clean};
use crate::settings::{Files, Settings};

/// The maximum length of the run dir: the path of a unix socket has at most 107 bytes (unix(7)), and
/// `/resource-manager/resource-manager.` with a process ID takes 42.
const MAX_RUN_DIR: usize = 65;
const NOT_CLEAN: &str = "this must be an absolute path without '.', '..', '//' and a trailing '/'";

/// The fields; `None` where the files do not set them.
#[derive(Debug)]
pub(crate) struct Folders {
    run: Option<Sourced<String>>,
    state: Option<Sourced<String>>,
    container_links: Option<Sourced<String>>,
    bin: Option<Sourced<String>>,
    pod_logs: Option<Sourced<String>>,
}

impl Settings for Folders {
    fn read(files: &mut Files<'_>) -> Self {
        let keelson = &mut files.keelson;
        Self {
            run: keelson.path("runDir"),
            state: keelson.path("stateDir"),
            container_links: keelson.path("containerLinksDir"),
            bin: keelson.path("binDir"),
            pod_logs: files.kubelet.path_field("podLogsDir"),
        }
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        let (flags, host) = (out.flags, out.host);
        let of_flag = |name, text: Option<&String>| {
            given(name, text).map(|path| path.map(|path| absolute(&host.cwd, &path)))
        };
        let run = of_flag("--run-dir", flags.run_dir.as_ref()).or(self.run);
        let state = of_flag("--state-dir", flags.state_dir.as_ref()).or(self.state);
        let root = of_flag("--root-dir", flags.root_dir.as_ref());
        for own in [&run, &state].into_iter().flatten() {
            if own.value.trim_matches('/').split('/').count() < 2 {
                out.refuse(own, "the agent changes the owner and mode of this folder; use a folder below it");
            }
        }
        if let Some(run) = run.as_ref().filter(|run| run.value.len() > MAX_RUN_DIR) {
            out.refuse(
                run,
                format!(
                    "this path is {} bytes long, and socket paths below it leave {MAX_RUN_DIR}; use a shorter one",
                    run.value.len()
                ),
            );
        }
        if let Some(logs) = self.pod_logs.as_ref().filter(|logs| !logs.value.is_ascii()) {
            out.refuse(logs, "the path of pod logs must be ASCII");
        }
        out.config.paths.bin_dir = PathBuf::from(&host.exe_dir);
        set(out, "paths.runDir", run, |c, v| c.paths.run_dir = v);
        set(out, "paths.stateDir", state, |c, v| c.paths.state_dir = v);
        set(out, "paths.rootDir", root, |c, v| c.paths.root_dir = v);
        set(out, "paths.containerLinksDir", self.container_links, |c, v| c.paths.container_links_dir = v);
        set(out, "paths.binDir", self.bin, |c, v| c.paths.bin_dir = v);
        set(out, "paths.podLogsDir", self.pod_logs, |c, v| c.paths.pod_logs_dir = v);
    }
}

fn set(
    out: &mut Outcome<'_>,
    path: &str,
    value: Option<Sourced<String>>,
    apply: impl FnOnce(&mut Config, PathBuf),
) {
    if let Some(value) = value.as_ref().filter(|value| !is_clean(&value.value)) {
        out.refuse(value, NOT_CLEAN);
    }
    out.set(path, value.map(|v| v.map(PathBuf::from)), apply);
}
