//! A machine that loses its power, imitated: processes, mounts, cgroups, network namespaces and everything below /run are gone,
//! the disk is as it was.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

use std::fs;
use std::path::{Path, PathBuf};

use keelson_testkit::{Agent, mounts_below};
use rustix::mount::{UnmountFlags, unmount};
use serde_json::Value;

/// Takes away what a machine without power loses, and nothing else. The containerd and the agent have to be started anew.
///
/// # Panics
/// Something of it stays.
pub fn cut_power(agent: &mut Agent) {
    let runtime = agent.containerd().dir().to_owned();
    let volatile = [agent.spec().run_dir.clone(), runtime.join("state"), runtime.join("runc")];
    let mut gone = agent.remains();
    gone.dirs = volatile.to_vec();
    // CNI's plugins keep what they know in /var/lib.
    gone.cni_networks.clear();
    agent.kill_init();
    agent.containerd_mut().kill();
    assert_eq!(gone.remove(), Vec::<String>::new());
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

/// Where the agent remembers this boot.
fn remembered(agent: &Agent) -> PathBuf {
    agent.spec().state_dir.join("node-status/report.json")
}

/// What the agent remembers of this boot; null where it remembers nothing.
pub fn saved(agent: &Agent) -> Value {
    fs::read(remembered(agent)).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

/// Makes what the agent remembers of this boot that of another one.
///
/// # Panics
/// It remembers nothing.
pub fn forget_the_boot(agent: &Agent) {
    let mut saved = saved(agent);
    saved["bootId"] = "11111111-2222-3333-4444-555555555555".into();
    // In place, so that the file stays its owner's.
    fs::write(remembered(agent), saved.to_string()).unwrap();
}

/// The machine's boot.
///
/// # Panics
/// The kernel does not tell.
pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned()
}
