//! `cargo xtask down`: ends a quickstart and removes everything that it has made, also when half of it
//! is dead already.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::ensure;
use keelson_config::Paths;
use keelson_testkit::process::{self, ProcessId, Signal};

use crate::progress::Step;
use crate::quickstart::places::{self, NODE_NAME};
use crate::quickstart::record::Record;
use crate::require_root;

/// How long init may take to end its services in good order; then they are killed.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// Removes all of a quickstart, and says so.
pub fn run() -> anyhow::Result<()> {
    require_root("down")?;
    if remove_all()? {
        println!("The quickstart is gone. Installed packages and target/ stay.");
    } else {
        println!("There is nothing to stop.");
    }
    Ok(())
}

/// Removes all of a quickstart; `false` when there was none.
pub fn remove_all() -> anyhow::Result<bool> {
    let record = Record::load(&places::record_file());
    let recorded = record.as_ref().and_then(|record| record.init).filter(|init| init.is_alive());
    let init = recorded.or_else(agent);
    if record.is_none() && init.is_none() && !places::home().exists() {
        return Ok(false);
    }
    let mut step = Step::start("Removing the quickstart");
    if let Some(init) = init {
        step.say("asking the agent to end");
        init.signal(Signal::TERM);
        init.wait_gone(STOP_LIMIT);
    }
    // The pods' folders name the logs that are ours, so these are looked for first.
    let logs = log_folders(&Paths::default().pod_logs_dir, &pod_uids());
    step.say("ending containers and removing mounts, network and cgroups");
    let mut problems = places::remains().remove();
    problems.extend(remove_logs(&logs, &Paths::default().container_links_dir));
    remove_if_empty(&record.map(|record| record.made).unwrap_or_default());
    ensure!(problems.is_empty(), "left behind: {}", problems.join("; "));
    step.done("nothing is left");
    Ok(true)
}

/// The init of the quickstart, whatever has become of its record.
fn agent() -> Option<ProcessId> {
    let config = places::agent_spec(String::new(), 0, 0).kubelet_file();
    let ours = |p: &&process::Process| p.mentions(&config) && p.exe_name().as_deref() == Some("keelson-init");
    process::all().iter().find(ours).map(|process| process.id)
}

/// The pods whose folders are below the quickstart's root.
fn pod_uids() -> BTreeSet<String> {
    let folder = places::agent_spec(String::new(), 0, 0).root_dir.join("pods");
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// The folders `<namespace>_<name>_<uid>` of our pods: by their uid, or by the name of our node.
fn log_folders(logs: &Path, uids: &BTreeSet<String>) -> Vec<PathBuf> {
    let entries = fs::read_dir(logs).into_iter().flatten().flatten();
    let ours = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some((pod, uid)) = name.rsplit_once('_') else { return false };
        uids.contains(uid) || pod.ends_with(&format!("-{NODE_NAME}"))
    };
    entries.map(|entry| entry.path()).filter(ours).collect()
}

/// Removes log folders and the links into them.
fn remove_logs(folders: &[PathBuf], links: &Path) -> Vec<String> {
    let mut problems = Vec::new();
    for link in fs::read_dir(links).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let ours = fs::read_link(&link).is_ok_and(|to| folders.iter().any(|folder| to.starts_with(folder)));
        if ours && let Err(error) = fs::remove_file(&link) {
            problems.push(format!("{} cannot be removed: {error}", link.display()));
        }
    }
    for folder in folders {
        if let Err(error) = fs::remove_dir_all(folder) {
            problems.push(format!("{} cannot be removed: {error}", folder.display()));
        }
    }
    problems
}

/// Removes the folders that are empty; others have come to use the rest.
fn remove_if_empty(folders: &[PathBuf]) {
    for folder in folders {
        let _ = fs::remove_dir(folder);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_our_pods_logs_and_links_are_removed() {
        let scratch = keelson_testkit::Scratch::new().unwrap();
        let (logs, links) = (scratch.path().join("pods"), scratch.path().join("containers"));
        let names = ["default_web-quickstart_u1", "default_gone_u2", "default_other_u3"];
        fs::create_dir_all(&links).unwrap();
        for name in names {
            fs::create_dir_all(logs.join(name)).unwrap();
            symlink(logs.join(name).join("c/0.log"), links.join(format!("{name}.log"))).unwrap();
        }
        let folders = log_folders(&logs, &BTreeSet::from(["u2".to_owned()]));
        assert_eq!(remove_logs(&folders, &links), Vec::<String>::new());
        let left = |folder: &Path| -> Vec<String> {
            let entries = fs::read_dir(folder).unwrap().flatten();
            entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
        };
        assert_eq!(left(&logs), ["default_other_u3"]);
        assert_eq!(left(&links), ["default_other_u3.log"]);
    }

    #[test]
    fn a_folder_that_others_use_stays() {
        let scratch = keelson_testkit::Scratch::new().unwrap();
        let (empty, used) = (scratch.path().join("empty"), scratch.path().join("used"));
        fs::create_dir_all(&empty).unwrap();
        fs::create_dir_all(used.join("x")).unwrap();
        remove_if_empty(&[empty.clone(), used.clone()]);
        assert!(!empty.exists() && used.exists());
    }
}
