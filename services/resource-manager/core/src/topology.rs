//! The CPU and NUMA topology of the machine (sysfs: `cpu*/topology`, `node*/meminfo`).

use std::collections::{BTreeMap, BTreeSet};

/// Counts of cores and sockets, and memory per NUMA node; 0 and empty where the kernel reports nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// Physical cores; each may have several logical CPUs.
    pub cores: u32,
    /// Sockets.
    pub sockets: u32,
    /// Bytes of memory of each NUMA node.
    pub node_memory: BTreeMap<u32, u64>,
}

impl Topology {
    /// Builds the topology from the (socket, core) numbers of each CPU and the memory of each node.
    pub fn of(cpus: &[(i32, i32)], node_memory: BTreeMap<u32, u64>) -> Self {
        let count = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        let cores: BTreeSet<_> = cpus.iter().collect();
        let sockets: BTreeSet<i32> = cpus.iter().map(|(socket, _)| *socket).collect();
        Self { cores: count(cores.len()), sockets: count(sockets.len()), node_memory }
    }
}

/// The bytes of memory in the `meminfo` of a NUMA node, whose lines begin with the node's name.
pub fn node_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.split_once(" MemTotal:"))?;
    let kib: u64 = line.1.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_and_sockets_are_counted_once() {
        let memory = BTreeMap::from([(0, 5), (1, 6)]);
        for (cpus, cores, sockets) in [
            (vec![(0, 0), (0, 1), (0, 0), (0, 1)], 2, 1),
            (vec![(0, 0), (1, 0)], 2, 2),
            (vec![(-1, 0), (-1, 1)], 2, 1),
            (vec![], 0, 0),
        ] {
            let found = Topology::of(&cpus, memory.clone());
            assert_eq!(
                (found.cores, found.sockets, &found.node_memory),
                (cores, sockets, &memory),
                "{cpus:?}"
            );
        }
    }

    #[test]
    fn numa_node_memory_is_parsed_in_bytes() {
        for (text, bytes) in [
            ("Node 0 MemTotal:       2048 kB\nNode 0 MemFree:  1 kB\n", Some(2 << 20)),
            ("Node 12 MemUsed: 1 kB\nNode 12 MemTotal: 1 kB\n", Some(1024)),
            ("MemTotal", None),
            ("", None),
        ] {
            assert_eq!(node_memory(text), bytes, "{text}");
        }
    }
}
