//! Detects whether SELinux is enabled (selinux(8); volumes.md §2).

use rustix::fs::StatVfsMountFlags;

/// Mount point of selinuxfs.
const FILE_SYSTEM: &str = "/sys/fs/selinux";
/// `SELINUX_MAGIC` (statfs(2)).
const SELINUX_MAGIC: i128 = 0xf97c_ff8c;

/// The visible signs of SELinux on a machine.
#[derive(Debug, Clone, Copy)]
struct Shown<'a> {
    /// selinuxfs is mounted.
    mounted: bool,
    /// The mount is read-only, as in a container from which the host's SELinux is hidden.
    read_only: bool,
    /// The label of this process (`/proc/self/attr/current`); empty when it has none.
    own_label: &'a str,
}

/// Whether SELinux has a policy on this machine, enforcing or permissive.
pub fn selinux_is_enabled() -> bool {
    let mounted = rustix::fs::statfs(FILE_SYSTEM)
        .is_ok_and(|stat| i128::from(stat.f_type) & 0xffff_ffff == SELINUX_MAGIC);
    let read_only =
        rustix::fs::statvfs(FILE_SYSTEM).is_ok_and(|stat| stat.f_flag.contains(StatVfsMountFlags::RDONLY));
    let label = std::fs::read_to_string("/proc/self/attr/current").unwrap_or_default();
    is_enabled(Shown { mounted, read_only, own_label: label.trim_end_matches(['\0', '\n']) })
}

/// Without a policy every process has the label `kernel`.
fn is_enabled(shown: Shown<'_>) -> bool {
    shown.mounted && !shown.read_only && !matches!(shown.own_label, "" | "kernel")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selinux_is_enabled_when_mounted_writable_with_a_policy() {
        let on = Shown { mounted: true, read_only: false, own_label: "system_u:system_r:init_t:s0" };
        for (shown, enabled) in [
            (on, true),
            (Shown { own_label: "unconfined_u:unconfined_r:unconfined_t:s0-s0:c0.c1023", ..on }, true),
            (Shown { mounted: false, ..on }, false),
            (Shown { read_only: true, ..on }, false),
            (Shown { own_label: "kernel", ..on }, false),
            (Shown { own_label: "", ..on }, false),
            // Another security module labels processes, too.
            (Shown { mounted: false, read_only: false, own_label: "unconfined" }, false),
        ] {
            assert_eq!(is_enabled(shown), enabled, "{shown:?}");
        }
    }
}
