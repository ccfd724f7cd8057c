//! `cargo xtask down`: stops the quickstart and removes everything it created, even if parts of it have already ended.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use keelson_testkit::process::{self, ProcessId, Signal};

use crate::progress::Step;
use crate::quickstart::layout;
use crate::quickstart::record::Record;
use crate::require_root;

/// How long init may take to stop its services before they are killed.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// Removes the quickstart and prints the result.
pub fn run() -> anyhow::Result<()> {
    require_root("down")?;
    if remove_all()? {
        println!("The quickstart is gone. Installed packages and target/ are still there.");
    } else {
        println!("There is nothing to stop.");
    }
    Ok(())
}

/// Removes the quickstart. Returns `false` if there was none.
///
/// # Errors
/// Something could not be removed.
pub fn remove_all() -> anyhow::Result<bool> {
    let record = Record::load(&layout::record_file());
    let recorded = record.as_ref().and_then(|record| record.init).filter(|init| init.is_alive());
    let init = recorded.or_else(find_init);
    if record.is_none() && init.is_none() && !layout::home().exists() {
        return Ok(false);
    }
    let mut step = Step::start("Removing the quickstart");
    if let Some(init) = init {
        step.show("asking the agent to stop");
        init.signal(Signal::TERM);
        init.wait_gone(STOP_LIMIT);
    }
    step.show("stopping containers and removing mounts, network and cgroups");
    let errors = layout::remains().remove();
    remove_if_empty(&record.map(|record| record.made).unwrap_or_default());
    ensure!(errors.is_empty(), "not removed: {}", errors.join("; "));
    step.done("nothing is left");
    Ok(true)
}

/// Finds the quickstart's init among all processes, by its configuration file. Used if there is no record of it.
fn find_init() -> Option<ProcessId> {
    let config = layout::agent_spec(String::new(), 0, 0).kubelet_file();
    let is_init =
        |p: &&process::Process| p.mentions(&config) && p.exe_name().as_deref() == Some("keelson-init");
    process::all().iter().find(is_init).map(|process| process.id)
}

/// Removes those of the folders that are empty. Folders with content are in use by other programs.
fn remove_if_empty(folders: &[PathBuf]) {
    for folder in folders {
        let _ = fs::remove_dir(folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_empty_folders_are_removed() {
        let scratch = keelson_testkit::Scratch::new().unwrap();
        let (empty, used) = (scratch.path().join("empty"), scratch.path().join("used"));
        fs::create_dir_all(&empty).unwrap();
        fs::create_dir_all(used.join("x")).unwrap();
        remove_if_empty(&[empty.clone(), used.clone()]);
        assert!(!empty.exists() && used.exists());
    }
}
