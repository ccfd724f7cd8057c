//! Whether memory-backed volumes may be swapped out to disk (runtime-and-resources.md §4.4).

use keelson_kube_model::kernel::has_noswap;

/// The kernel files that decide it, as texts; a file that cannot be read is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SwapFacts {
    /// `/proc/swaps`.
    pub swaps: String,
    /// The release, as `uname -r` has it.
    pub release: String,
    /// `/proc/self/uid_map` (user_namespaces(7)).
    pub uid_map: String,
}

impl SwapFacts {
    /// Whether memory-backed volumes may reach a disk: there is swap on a disk, and tmpfs is mounted without `noswap`, as
    /// volume-manager does on older kernels and in user namespaces, where the kernel does not allow it.
    pub fn volumes_may_reach_disk(&self) -> bool {
        let can_use_noswap = has_noswap(&self.release) && !self.is_in_user_namespace();
        self.is_swap_on_disk() && !can_use_noswap
    }

    /// Compressed memory (zram) does not count as a disk.
    fn is_swap_on_disk(&self) -> bool {
        self.swaps.lines().skip(1).any(|line| !line.is_empty() && !line.starts_with("/dev/zram"))
    }

    /// The initial user namespace maps every user id to itself.
    fn is_in_user_namespace(&self) -> bool {
        !self.uid_map.is_empty() && !self.uid_map.split_whitespace().eq(["0", "0", "4294967295"])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
    const ALL: &str = "         0          0 4294967295\n";

    #[test]
    fn memory_backed_volumes_may_be_swapped_out_without_noswap() {
        let disk = "/dev/dm-1 partition 8388604 0 -2\n";
        let zram = "/dev/zram0 partition 100 0 5\n";
        for (areas, release, uid_map, may) in [
            (disk, "5.10.0-30-amd64", ALL, true),
            (disk, "6.3.13", ALL, true),
            (disk, "6.4.0", ALL, false),
            (disk, "6.18.44", ALL, false),
            (disk, "7.0-rc1", "", false),
            (disk, "6.18.44", "0 100000 65536\n", true),
            ("/swap\\040file file 100 0 -3\n", "6.1.0", ALL, true),
            (zram, "5.10.0", ALL, false),
            ("", "5.10.0", ALL, false),
            (disk, "linux", ALL, true),
        ] {
            for swaps in [format!("{HEADER}{areas}"), format!("{HEADER}{zram}{areas}")] {
                let facts = SwapFacts { swaps, release: release.into(), uid_map: uid_map.into() };
                assert_eq!(facts.volumes_may_reach_disk(), may, "{facts:?}");
            }
        }
        assert!(!SwapFacts::default().volumes_may_reach_disk());
    }
}
