//! How the CPUs and the memory of the machine lie (sysfs: `cpu*/topology`, `node*/meminfo`).

use std::collections::{BTreeMap, BTreeSet};

/// What is counted of it; 0 and nothing where the kernel does not say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// Cores, each of which may be several CPUs.
    pub cores: u32,
    /// Sockets.
    pub sockets: u32,
    /// Bytes of memory of each NUMA node.
    pub node_memory: BTreeMap<u32, u64>,
}

impl Topology {
    /// Of CPUs by the numbers of their socket and of their core in it, and of the memory of each node.
    pub fn of(cpus: &[(i32, i32)], node_memory: BTreeMap<u32, u64>) -> Self {
        let count = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        let cores: BTreeSet<_> = cpus.iter().collect();
        let sockets: BTreeSet<i32> = cpus.iter().map(|(socket, _)| *socket).collect();
        Self { cores: count(cores.len()), sockets: count(sockets.len()), node_memory }
    }
}

/// Bytes of memory by the `meminfo` of a NUMA node, whose lines begin with its name.
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
    fn the_memory_of_a_node_is_told_in_bytes() {
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
