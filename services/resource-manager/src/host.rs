//! Reads the machine's resources and identity. Everything here blocks.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use keelson_config::{Config, IdentityFiles};
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_resource_manager_core::enforce;
use keelson_resource_manager_core::machine::{
    self, Filesystem, MachineReading, Processes, go_arch, huge_page_resource, parse_cpu_list, parse_meminfo,
    parse_pretty_name,
};
use keelson_resource_manager_core::statistics::threads;
use keelson_resource_manager_core::topology::{Topology, node_memory};
use keelson_service_kit::now_unix_nanos;

/// Why the machine could not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HostError {
    /// A file or a filesystem cannot be read.
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// A file lacks expected content.
    #[error("{} does not report {what}", path.display())]
    Content { path: PathBuf, what: &'static str },
}

fn read(path: &str) -> Result<String, HostError> {
    fs::read_to_string(path).map_err(|source| HostError::Read { path: path.into(), source })
}

/// The resources of the machine; `root` is on the node's filesystem.
pub(crate) fn read_machine(root: &Path) -> Result<MachineReading, HostError> {
    const MEMINFO: &str = "/proc/meminfo";
    const ONLINE: &str = "/sys/devices/system/cpu/online";
    let memory = parse_meminfo(&read(MEMINFO)?)
        .ok_or(HostError::Content { path: MEMINFO.into(), what: "how much memory there is" })?;
    let cpus = parse_cpu_list(&read(ONLINE)?)
        .ok_or(HostError::Content { path: ONLINE.into(), what: "which CPUs are online" })?;
    Ok(MachineReading {
        cpus,
        memory,
        nodefs: filesystem(root)?,
        huge_pages: huge_pages(),
        processes: processes(),
    })
}

/// The maximum and current number of threads; both 0 where the kernel does not report them.
pub(crate) fn processes() -> Processes {
    let number = |file: &str| fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let limits = [number("/proc/sys/kernel/pid_max"), number("/proc/sys/kernel/threads-max")];
    let running = fs::read_to_string("/proc/loadavg").ok().and_then(|text| threads(&text));
    match (limits.into_iter().flatten().min(), running) {
        (Some(max), Some(running)) => Processes { max, running },
        _ => Processes::default(),
    }
}

/// Whether two paths are on the same filesystem; none when one of them cannot be read.
pub(crate) fn same_filesystem(one: &Path, other: &Path) -> Option<bool> {
    use std::os::unix::fs::MetadataExt as _;
    Some(fs::metadata(one).ok()?.dev() == fs::metadata(other).ok()?.dev())
}

/// The huge page sizes of this kernel, as in the resource names.
pub(crate) fn page_sizes() -> Vec<String> {
    let names = huge_pages().into_keys().map(huge_page_resource);
    names.filter_map(|name| name.strip_prefix("hugepages-").map(ToOwned::to_owned)).collect()
}

fn filesystem(root: &Path) -> Result<Filesystem, HostError> {
    let stat = rustix::fs::statvfs(root)
        .map_err(|errno| HostError::Read { path: root.to_owned(), source: errno.into() })?;
    Ok(Filesystem {
        total: stat.f_blocks.saturating_mul(stat.f_frsize),
        available: stat.f_bavail.saturating_mul(stat.f_frsize),
        inodes: stat.f_files,
        inodes_free: stat.f_ffree,
    })
}

/// The usage of the filesystem that contains `path`.
pub(crate) fn filesystem_usage(path: &Path) -> Result<pb::FilesystemUsage, HostError> {
    let stat = rustix::fs::statvfs(path)
        .map_err(|errno| HostError::Read { path: path.to_owned(), source: errno.into() })?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    Ok(pb::FilesystemUsage {
        taken_unix_nanos: now_unix_nanos(),
        capacity: bytes(stat.f_blocks),
        available: bytes(stat.f_bavail),
        // Blocks reserved for root are free but not available.
        used: bytes(stat.f_blocks.saturating_sub(stat.f_bfree)),
        inodes: stat.f_files,
        inodes_free: stat.f_ffree,
        inodes_used: stat.f_files.saturating_sub(stat.f_ffree),
    })
}

/// Allocated huge pages by page size in KiB; empty on kernels without huge pages.
fn huge_pages() -> BTreeMap<u64, u64> {
    let Ok(entries) = fs::read_dir("/sys/kernel/mm/hugepages") else { return BTreeMap::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let kib = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            let count = fs::read_to_string(entry.path().join("nr_hugepages")).ok()?;
            Some((kib, count.trim().parse().ok()?))
        })
        .collect()
}

/// The topology from the directories `cpu/cpu<N>` and `node/node<N>`. CPUs that are offline have none.
fn topology(system: &Path) -> Topology {
    let numbered = |dir: &str, name: &'static str| {
        let entries = fs::read_dir(system.join(dir)).into_iter().flatten().flatten();
        entries.filter_map(move |entry| {
            let number: u32 = entry.file_name().to_str()?.strip_prefix(name)?.parse().ok()?;
            Some((number, entry.path()))
        })
    };
    let position = |(_, dir): (u32, PathBuf)| {
        let number =
            |file: &str| fs::read_to_string(dir.join("topology").join(file)).ok()?.trim().parse().ok();
        Some((number("physical_package_id")?, number("core_id")?))
    };
    let cpus: Vec<(i32, i32)> = numbered("cpu", "cpu").filter_map(position).collect();
    let memory = numbered("node", "node")
        .filter_map(|(node, dir)| Some((node, node_memory(&fs::read_to_string(dir.join("meminfo")).ok()?)?)));
    Topology::of(&cpus, memory.collect())
}

/// The identity of the machine and its constant properties. A missing file leaves its field empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) machine_id: String,
    pub(crate) system_uuid: String,
    pub(crate) boot_id: String,
    pub(crate) kernel_version: String,
    pub(crate) os_image: String,
    pub(crate) architecture: String,
    pub(crate) topology: Topology,
}

impl Identity {
    pub(crate) fn read(files: &IdentityFiles) -> Self {
        let first = |paths: &[&Path]| {
            let texts = paths.iter().filter_map(|path| fs::read_to_string(path).ok());
            let mut texts = texts.map(|text| text.trim_matches(['\0', '\n', ' ']).to_owned());
            texts.find(|text| !text.is_empty()).unwrap_or_default()
        };
        let own = |paths: &[PathBuf]| first(&paths.iter().map(PathBuf::as_path).collect::<Vec<_>>());
        let fixed = |paths: &[&str]| first(&paths.iter().map(Path::new).collect::<Vec<_>>());
        let machine_id = own(&files.machine_id);
        let uuid = fixed(&[
            "/sys/class/dmi/id/product_uuid",
            "/proc/device-tree/system-id",
            "/proc/device-tree/vm,uuid",
        ]);
        let release = fixed(&["/etc/os-release", "/usr/lib/os-release"]);
        let uname = rustix::system::uname();
        Self {
            system_uuid: if uuid.is_empty() { machine_id.clone() } else { uuid },
            machine_id,
            boot_id: own(&files.boot_id),
            kernel_version: uname.release().to_string_lossy().into_owned(),
            os_image: parse_pretty_name(&release).unwrap_or_else(|| "Linux".to_owned()),
            architecture: go_arch(&uname.machine().to_string_lossy()).to_owned(),
            topology: topology(Path::new("/sys/devices/system")),
        }
    }
}

/// What pods may use: capacity less reservations.
pub(crate) fn allocatable(
    capacity: &keelson_resource_manager_core::desire::Amounts,
    reserved: &BTreeMap<String, String>,
) -> Result<keelson_resource_manager_core::desire::Amounts, machine::ReservationError> {
    Ok(machine::allocatable(capacity, &machine::reservations(reserved, capacity)?))
}

/// Fails when reservations exceed the capacity of the machine (§9).
pub(crate) async fn check_reservations(config: &Config) -> anyhow::Result<()> {
    let (root, reserved) = (config.paths.root_dir.clone(), config.resources.reserved.clone());
    let checked = tokio::task::spawn_blocking(move || {
        // If the machine cannot be read now, `machine_loop` retries.
        let Ok(reading) = read_machine(&root) else { return None };
        let capacity = machine::capacity(&reading, 0);
        enforce::above_capacity(&capacity, &machine::reservations(&reserved, &capacity).ok()?)
    });
    match checked.await? {
        Some(text) => Err(anyhow::anyhow!(text)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_reading_has_cpus_memory_and_a_disk() {
        let reading = read_machine(Path::new("/")).unwrap();
        assert!(reading.cpus > 0 && reading.memory.total > 0 && reading.nodefs.total > 0, "{reading:?}");
        assert!(reading.memory.free <= reading.memory.total);
    }

    #[test]
    fn filesystem_used_and_available_are_within_its_capacity() {
        let usage = filesystem_usage(Path::new("/")).unwrap();
        assert!(usage.used > 0 && usage.used + usage.available <= usage.capacity, "{usage:?}");
        assert!(usage.taken_unix_nanos > 0);
    }

    #[test]
    fn the_machine_identity_has_boot_id_and_kernel_version() {
        let identity = Identity::read(&IdentityFiles::default());
        assert_eq!(identity.boot_id.len(), 36);
        assert!(!identity.kernel_version.is_empty() && !identity.os_image.is_empty());
        assert!(!identity.architecture.contains("x86"), "{}", identity.architecture);
    }

    #[test]
    fn the_first_nonempty_identity_file_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let files = IdentityFiles {
            machine_id: vec![
                dir.path().join("none"),
                at("empty", "\n"),
                at("machine", "m-1\n"),
                at("other", "m-2\n"),
            ],
            boot_id: vec![at("boot", "b-1\n")],
        };
        let identity = Identity::read(&files);
        assert_eq!((identity.machine_id.as_str(), identity.boot_id.as_str()), ("m-1", "b-1"));
    }

    #[test]
    fn cpu_topology_and_numa_memory_are_read_from_sysfs() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (cpu, socket, core) in [(0, 0, 0), (1, 0, 0), (2, 1, 0), (3, 1, 0)] {
            write(&format!("cpu/cpu{cpu}/topology/physical_package_id"), &format!("{socket}\n"));
            write(&format!("cpu/cpu{cpu}/topology/core_id"), &format!("{core}\n"));
        }
        write("cpu/cpu4/online", "0\n");
        write("cpu/cpufreq/boost", "0\n");
        write("node/node1/meminfo", "Node 1 MemTotal: 4 kB\n");
        let found = topology(dir.path());
        assert_eq!((found.cores, found.sockets, found.node_memory), (2, 2, [(1, 4096)].into()));
        let nothing = topology(&dir.path().join("absent"));
        assert_eq!(nothing, Topology::default());
    }

    #[test]
    fn a_missing_root_directory_is_named_in_the_error() {
        let error = read_machine(Path::new("/nonexistent-keelson")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent-keelson"));
    }
}
