//! Ending the processes of a run, and no others.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{Remains, cgroups};
use crate::process::{self, Process, ProcessId, Signal};
use crate::system::mounts_of;

/// SIGKILL needs longer only when a process hangs in the kernel.
const LIMIT: Duration = Duration::from_secs(15);

/// Kills everything of the run: first who starts others, then the rest, until nothing is left.
pub(super) fn kill(remains: &Remains) -> Vec<String> {
    for process in &remains.processes {
        process.signal(Signal::KILL);
        process.wait_gone(LIMIT);
    }
    // Set by the first signal: on a busy machine with many pods a look at all processes takes seconds.
    let mut deadline = None;
    loop {
        let left = find(remains);
        if left.is_empty() {
            return Vec::new();
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return left.iter().map(|id| format!("process {} does not end", id.pid)).collect();
        }
        for id in left {
            id.signal(Signal::KILL);
        }
        deadline = deadline.or_else(|| Some(Instant::now() + LIMIT));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Every living process of the run.
fn find(remains: &Remains) -> Vec<ProcessId> {
    let all = process::all();
    let parents: Vec<u32> = all.iter().filter(|p| starts_others(p, remains)).map(|p| p.id.pid).collect();
    let mut found = process::descendants(&all, &parents);
    found.extend(all.iter().filter(|p| parents.contains(&p.id.pid)).map(|p| p.id));
    found.extend(remains.processes.iter().filter(|id| id.is_alive()));
    found.extend(remains.cgroup_roots.iter().flat_map(|root| cgroups::processes(root)));
    let mut known = BTreeMap::new();
    found.extend(all.iter().filter(|p| lives_in(p, &remains.dirs, &mut known)).map(|p| p.id));
    let me = std::process::id();
    found.retain(|id| id.pid != me);
    found
}

/// Whether `process` is a service or a shim of the run, or containerd itself.
fn starts_others(process: &Process, remains: &Remains) -> bool {
    let exe = || process.exe_name().unwrap_or_default();
    let shim = process.args.iter().any(|arg| arg == "-address")
        && remains.containerd_sockets.iter().any(|socket| process.mentions(socket))
        && exe().starts_with("containerd-shim");
    shim || service(process, &remains.run_dirs, exe) || containerd(process, &remains.dirs, exe)
}

fn service(process: &Process, run_dirs: &[PathBuf], exe: impl Fn() -> String) -> bool {
    run_dirs.iter().any(|dir| process.mentions(dir)) && exe().starts_with("keelson")
}

fn containerd(process: &Process, dirs: &[PathBuf], exe: impl Fn() -> String) -> bool {
    dirs.iter().any(|dir| process.mentions(dir)) && exe() == "containerd"
}

/// Whether the root filesystem of `process` is a snapshot in one of `dirs`: a container whose shim is dead.
///
/// `known` remembers the answer for each mount namespace and root: most processes share both, and the table of
/// mounts can be long.
fn lives_in(process: &Process, dirs: &[PathBuf], known: &mut BTreeMap<[PathBuf; 2], bool>) -> bool {
    if process.args.is_empty() || dirs.is_empty() {
        return false;
    }
    let link = |name: &str| fs::read_link(format!("/proc/{}/{name}", process.id.pid));
    let (Ok(namespace), Ok(root)) = (link("ns/mnt"), link("root")) else { return false };
    *known.entry([namespace, root]).or_insert_with(|| is_root_in(process, dirs))
}

fn is_root_in(process: &Process, dirs: &[PathBuf]) -> bool {
    let mounts = mounts_of(&process.id.pid.to_string());
    let Some(root) = mounts.iter().find(|mount| mount.point == Path::new("/")) else { return false };
    dirs.iter().filter_map(|dir| dir.to_str()).any(|dir| {
        let below = format!("{dir}/");
        match root.fs_type.as_str() {
            "overlay" => root.super_options.split([',', ':', '=']).any(|part| part.starts_with(&below)),
            _ => root.root.to_string_lossy().starts_with(&below),
        }
    })
}
