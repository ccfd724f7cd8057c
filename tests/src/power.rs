//! A simulated power failure: processes, mounts, cgroups, network namespaces and everything below /run are gone,
//! the disk is unchanged.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::path::{Path, PathBuf};

use keelson_testkit::{Agent, mounts_below};
use rustix::mount::{UnmountFlags, unmount};
use serde_json::Value;

/// Removes what a machine without power loses, and nothing else. Containerd and the agent have to be started again.
///
/// # Panics
/// A part of it cannot be removed.
pub fn cut_power(agent: &mut Agent) {
    let runtime = agent.containerd().dir().to_owned();
    let volatile = [agent.spec().run_dir.clone(), runtime.join("state"), runtime.join("runc")];
    let mut lost = agent.remains();
    lost.dirs = volatile.to_vec();
    // CNI plugins keep their state in /var/lib.
    lost.cni_networks.clear();
    agent.kill_init();
    agent.containerd_mut().kill();
    assert_eq!(lost.remove(), Vec::<String>::new());
    for socket in ["c.sock", "c.ttrpc"] {
        let _ = fs::remove_file(runtime.join(socket));
    }
    let folders = [agent.spec().config_dir.clone(), runtime];
    // Mounts may be stacked on one point.
    for _ in 0..8 {
        for point in folders.iter().flat_map(|folder| mounts_below(folder)) {
            unmount(&point, UnmountFlags::DETACH).unwrap();
        }
    }
    assert!(folders.iter().all(|folder| mounts_below(folder).is_empty()));
    assert!(volatile.iter().all(|folder| !folder.exists()));
    assert!(!Path::new("/sys/class/net").join(&agent.containerd().network().bridge).exists());
}

/// The file in which node-status stores the boot id.
fn boot_file(agent: &Agent) -> PathBuf {
    agent.spec().state_dir.join("node-status/report.json")
}

/// The content of that file; null if there is none.
pub fn stored_boot(agent: &Agent) -> Value {
    fs::read(boot_file(agent)).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

/// Replaces the stored boot id by that of another boot.
///
/// # Panics
/// None is stored.
pub fn replace_boot_id(agent: &Agent) {
    let mut stored_boot = stored_boot(agent);
    stored_boot["bootId"] = "11111111-2222-3333-4444-555555555555".into();
    // In place, so that the file keeps its owner.
    fs::write(boot_file(agent), stored_boot.to_string()).unwrap();
}

/// The boot id of the machine.
///
/// # Panics
/// The kernel does not provide it.
pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned()
}
