//! Whether SELinux is on (selinux(8); volumes.md §2).

use rustix::fs::StatVfsMountFlags;

/// Where it shows itself.
const FILE_SYSTEM: &str = "/sys/fs/selinux";
/// `SELINUX_MAGIC` (statfs(2)).
const SELINUX_MAGIC: i128 = 0xf97c_ff8c;

/// What a machine shows of it.
#[derive(Debug, Clone, Copy)]
struct Shown<'a> {
    /// Its file system is mounted.
    mounted: bool,
    /// That mount cannot be written, as in a container from which the host's SELinux is to be hidden.
    read_only: bool,
    /// The label of this process (`/proc/self/attr/current`); empty when it has none.
    own_label: &'a str,
}

/// Whether SELinux enforces a policy on this machine, or would permit by one.
pub fn selinux_is_enabled() -> bool {
    let mounted = rustix::fs::statfs(FILE_SYSTEM)
        .is_ok_and(|stat| i128::from(stat.f_type) & 0xffff_ffff == SELINUX_MAGIC);
    let read_only =
        rustix::fs::statvfs(FILE_SYSTEM).is_ok_and(|stat| stat.f_flag.contains(StatVfsMountFlags::RDONLY));
    let label = std::fs::read_to_string("/proc/self/attr/current").unwrap_or_default();
    is_enabled(Shown { mounted, read_only, own_label: label.trim_end_matches(['\0', '\n']) })
}

/// Without a policy every process is a `kernel`.
fn is_enabled(shown: Shown<'_>) -> bool {
    shown.mounted && !shown.read_only && !matches!(shown.own_label, "" | "kernel")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selinux_is_on_where_it_is_mounted_to_be_written_and_has_a_policy() {
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
