//! The machine: what the agent manages on it, and on which machines it refuses to run (node-and-api.md §2.5, §12).

use crate::document::Sourced;
use crate::outcome::{Level, Outcome};
use crate::settings::{Files, Settings};

/// The fields; `None` where the files do not set them.
#[derive(Debug)]
pub(crate) struct Machine {
    manage_host: Option<Sourced<bool>>,
    iptables_util_chains: Option<Sourced<bool>>,
    protect_kernel: Option<Sourced<bool>>,
    fail_cgroup_v1: Option<Sourced<bool>>,
    fail_swap_on: Option<Sourced<bool>>,
}

impl Settings for Machine {
    fn read(files: &mut Files<'_>) -> Self {
        let reader = &mut files.kubelet;
        Self {
            iptables_util_chains: reader.boolean("makeIPTablesUtilChains"),
            protect_kernel: reader.boolean("protectKernelDefaults"),
            fail_cgroup_v1: reader.boolean("failCgroupV1"),
            fail_swap_on: reader.boolean("failSwapOn"),
            manage_host: files.keelson.boolean("manageHost"),
        }
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        refuse_swap(out, self.fail_swap_on);
        out.set("manageHost", self.manage_host, |c, v| c.manage_host = v);
        out.set_field(self.iptables_util_chains, |c, v| c.iptables_util_chains = v);
        out.set_field(self.protect_kernel, |c, v| c.resources.node_allocatable.protect_kernel_defaults = v);
        check_cgroup_version(out, self.fail_cgroup_v1.as_ref());
    }
}

/// Refuses swap unless `failSwapOn` is false (node-and-api.md §12).
fn refuse_swap(out: &mut Outcome<'_>, fail: Option<Sourced<bool>>) {
    let default = || Sourced { value: true, origin: "default".to_owned(), field: "failSwapOn".to_owned() };
    let fail = fail.unwrap_or_else(default);
    if fail.value && !out.host.swap.is_empty() {
        let areas = out.host.swap.join(", ");
        out.refuse(
            &fail,
            format!(
                "running with swap on is not supported, please disable swap or set --fail-swap-on flag to false: this \
                 machine has swap ({areas}), which may write secrets and other memory of pods to the disk; turn \
                 it off (swapoff -a), or set failSwapOn: false in the file of --config"
            ),
        );
    }
}

/// Refuses cgroup v1 if `failCgroupV1` is true, and warns of it if the field is not set.
fn check_cgroup_version(out: &mut Outcome<'_>, fail: Option<&Sourced<bool>>) {
    match fail {
        Some(fail) if out.host.cgroup_v1 && fail.value => out.refuse(
            fail,
            "kubelet is configured to not run on a host using cgroup v1. cgroup v1 support is unsupported and will be removed \
             in a future release: boot with systemd.unified_cgroup_hierarchy=1, or set failCgroupV1: false"
                .to_owned(),
        ),
        // The field is not set.
        None if out.host.cgroup_v1 => out.note(
            Level::Warn,
            "this machine has cgroup v1: a kubelet refuses to run on it unless failCgroupV1 is false, keelson runs on it; boot with \
             systemd.unified_cgroup_hierarchy=1 for cgroup v2",
        ),
        _ => {}
    }
}

#[cfg(test)]
mod tests;
