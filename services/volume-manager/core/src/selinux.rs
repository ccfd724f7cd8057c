//! Whether SELinux is on, and the label of the agent's folders then (volumes.md §2).

/// The label of the folders in which plugins meet the agent: a container may use what lies there.
pub const FOLDER_LABEL: &str = "system_u:object_r:container_file_t:s0";

/// What a machine shows of SELinux.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shown<'a> {
    /// Its file system is mounted.
    pub mounted: bool,
    /// That mount cannot be written, as in a container from which the host's SELinux is to be hidden.
    pub read_only: bool,
    /// The label of this process (`/proc/self/attr/current`); empty when it has none.
    pub own_label: &'a str,
}

/// Whether SELinux enforces a policy or would permit by one. Without a policy every process is a `kernel`.
pub fn is_enabled(shown: Shown<'_>) -> bool {
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
