//! The facts about the machine that the configuration depends on.

use std::ffi::CString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use keelson_config::ServiceName;
use keelson_init_core::{Host, SYSTEM_BUS_ADDRESS};
use rustix::process::{Resource, Rlimit, getegid, geteuid, getrlimit, setrlimit};

/// The name of the operator group.
const OPERATOR_GROUP: &str = "keelson";

/// Reads the facts. Percentages of nodefs refer to the file system of `root_dir`.
pub fn facts(root_dir: &Path) -> Host {
    let exe_dir = std::env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_owned));
    Host {
        hostname: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        uid: geteuid().as_raw(),
        gid: getegid().as_raw(),
        exe_dir: exe_dir.unwrap_or_default().to_string_lossy().into_owned(),
        cwd: std::env::current_dir().unwrap_or_default().to_string_lossy().into_owned(),
        service_users: ServiceName::supervised()
            .filter_map(|service| Some((service, user_id(&format!("keelson-{service}"))?)))
            .collect(),
        operator_group: group_id(OPERATOR_GROUP),
        cgroup_v1: !Path::new("/sys/fs/cgroup/cgroup.controllers").exists(),
        swap: fs::read_to_string("/proc/swaps").map(|text| swap_areas(&text)).unwrap_or_default(),
        online_cpus: fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default(),
        memory_bytes: memory_bytes().unwrap_or(0),
        nodefs_bytes: file_system_bytes(root_dir).unwrap_or(0),
        system_bus_address: environment_text(SYSTEM_BUS_ADDRESS),
    }
}

/// A variable of the environment; empty if it is not set. Bytes that are not UTF-8 are replaced, and refused later.
fn environment_text(name: &str) -> String {
    std::env::var_os(name).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The areas of a `/proc/swaps`, except those in compressed memory (zram), whose pages stay in memory.
fn swap_areas(text: &str) -> Vec<String> {
    let names = text.lines().skip(1).filter_map(|line| line.split_ascii_whitespace().next());
    names.filter(|name| !name.starts_with("/dev/zram")).map(str::to_owned).collect()
}

/// The user ID of this user.
fn user_id(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0u8; 16 * 1024];
    // SAFETY: passwd is plain data, all zeros are valid; the pointers outlive the call and the length is the
    // buffer's.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: see above.
    let result = unsafe {
        libc::getpwnam_r(
            name.as_ptr(),
            &raw mut entry,
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            &raw mut found,
        )
    };
    (result == 0 && !found.is_null()).then_some(entry.pw_uid)
}

/// The group ID of this group.
fn group_id(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    // A group with many members needs a large buffer.
    let mut buffer = vec![0u8; 256 * 1024];
    // SAFETY: group is plain data, all zeros are valid; the pointers outlive the call and the length is the
    // buffer's.
    let mut entry: libc::group = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: see above.
    let result = unsafe {
        libc::getgrnam_r(
            name.as_ptr(),
            &raw mut entry,
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            &raw mut found,
        )
    };
    (result == 0 && !found.is_null()).then_some(entry.gr_gid)
}

fn memory_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// The size of the file system of `path`, or of its nearest parent that exists.
fn file_system_bytes(path: &Path) -> Option<u64> {
    let existing = path.ancestors().find(|folder| folder.exists())?;
    let stat = rustix::fs::statvfs(existing).ok()?;
    Some(stat.f_blocks * stat.f_frsize)
}

/// The effective capabilities of this process, as bits (proc(5), `CapEff`).
pub fn effective_capabilities() -> u64 {
    fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
            u64::from_str_radix(line.trim(), 16).ok()
        })
        .unwrap_or(0)
}

/// Sets the oom score of this process, which the services inherit (`oomScoreAdj`).
pub fn set_oom_score(score: i32) -> io::Result<()> {
    const FILE: &str = "/proc/self/oom_score_adj";
    if fs::read_to_string(FILE)?.trim().parse() == Ok(score) {
        return Ok(());
    }
    fs::write(FILE, score.to_string())
}

/// The open files limit cannot be raised as far as requested.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot set the open files limit to {wanted} (maxOpenFiles), it is {actual}: raising it needs \
     CAP_SYS_RESOURCE and a large enough fs.nr_open"
)]
pub struct OpenFilesError {
    wanted: u64,
    actual: u64,
}

/// Sets the open files limit of this process and its children; if the machine does not allow it, sets the highest allowed
/// limit (setrlimit(2)).
pub fn allow_open_files(files: u64) -> Result<(), OpenFilesError> {
    let of = |current, maximum| Rlimit { current: Some(current), maximum };
    let before = getrlimit(Resource::Nofile);
    let wanted = of(files, Some(files));
    if before == wanted || setrlimit(Resource::Nofile, wanted).is_ok() {
        return Ok(());
    }
    let actual = before.maximum.map_or(files, |most| most.min(files));
    // Raising up to the hard limit needs no privileges; on an error the limits stay as they were.
    let _ = setrlimit(Resource::Nofile, of(actual, before.maximum));
    let actual = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if actual >= files { Ok(()) } else { Err(OpenFilesError { wanted: files, actual }) }
}

/// The start time of a process in clock ticks since boot (field 22 of /proc/PID/stat), which tells it from a later one with
/// the same pid. `None` if there is no such process.
pub fn start_ticks(pid: u32) -> Option<u64> {
    parse_start_ticks(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The name in parentheses may contain parentheses and spaces.
fn parse_start_ticks(stat: &str) -> Option<u64> {
    let fields: Vec<&str> = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X") {
        return None;
    }
    fields.get(19)?.parse().ok()
}

/// The program of a process, even if its file was replaced.
pub fn exe(pid: u32) -> Option<PathBuf> {
    keelson_service_kit::program(&Path::new("/proc").join(pid.to_string()))
}

/// The proportional set size of a process in KiB.
pub fn pss_kib(pid: u32) -> Option<u64> {
    parse_pss(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?)
}

fn parse_pss(rollup: &str) -> Option<u64> {
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// Whether this process was started under this name.
pub fn invoked_as(name: &str) -> bool {
    std::env::args_os().next().is_some_and(|arg| Path::new(&arg).file_name().is_some_and(|file| file == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_areas_exclude_zram() {
        let header = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        assert_eq!(swap_areas(header), Vec::<String>::new());
        assert_eq!(swap_areas(""), Vec::<String>::new());
        let text = format!(
            "{header}/dev/zram0 partition 100 0 5\n/dev/dm-1 partition 8388604 0 -2\n/swap\\040file file 100 0 -3\n"
        );
        assert_eq!(swap_areas(&text), ["/dev/dm-1", "/swap\\040file"]);
    }

    #[test]
    fn user_and_group_ids_are_looked_up() {
        assert_eq!((user_id("root"), group_id("root")), (Some(0), Some(0)));
        assert_eq!((user_id("no-such-user-here"), group_id("no-such-group-here")), (None, None));
    }

    #[test]
    fn process_start_time_is_parsed_after_any_name() {
        let stat = "7 (a ) (b) S 3 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        assert_eq!(parse_start_ticks(stat), Some(4242));
        assert_eq!(parse_start_ticks(&stat.replace(" S ", " Z ")), None);
        assert!(start_ticks(std::process::id()).is_some());
    }

    #[test]
    fn pss_is_parsed() {
        let text = "55d4-7ffc ---p 00000000 00:00 0 [rollup]\nRss: 900 kB\nPss:                 684 kB\nPss_Dirty: 1 kB\n";
        assert_eq!(parse_pss(text), Some(684));
        assert!(pss_kib(std::process::id()).is_some_and(|kib| kib > 0));
    }

    #[test]
    fn host_facts_have_memory_file_system_and_cpus() {
        let host = facts(Path::new("/nonexistent/below/root"));
        assert!(host.memory_bytes > 0 && host.nodefs_bytes > 0 && !host.hostname.is_empty());
        assert!(host.online_cpus.starts_with('0'), "{}", host.online_cpus);
    }
}
