//! `cargo xtask down`: ends a quickstart and removes everything that it has made, also when half of it
//! is dead already.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use keelson_testkit::process::{self, ProcessId, Signal};

use crate::progress::Step;
use crate::quickstart::places;
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
    step.say("ending containers and removing mounts, network and cgroups");
    let problems = places::remains().remove();
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

/// Removes the folders that are empty; others have come to use the rest.
fn remove_if_empty(folders: &[PathBuf]) {
    for folder in folders {
        let _ = fs::remove_dir(folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
