//! What the plans of sandboxes and containers are made from that is the same for all pods of the node.

use keelson_pod_sync_core::config::{CgroupVersion, MachineInputs, RuntimeFeatures, SecuritySettings};
use keelson_proto::keelson::resource_manager::v1::Machine;

use crate::effects::Effects;
use crate::node::RuntimeView;

/// What plans of sandboxes and containers need of the machine and its settings.
pub(super) fn machine_inputs<'a>(
    effects: &Effects,
    machine: &'a Machine,
    hugepage_sizes: &'a [String],
) -> MachineInputs<'a> {
    let (resources, pods) = (&effects.context.config.resources, &effects.context.config.pods);
    let v1 = machine.cgroup_version == "v1";
    MachineInputs {
        cpu_cfs_quota: resources.cpu_cfs_quota,
        cpu_cfs_period_us: resources.cpu_cfs_period_us,
        memory_bytes: machine.capacity.get("memory").copied().unwrap_or(0),
        cgroup: if v1 { CgroupVersion::V1 } else { CgroupVersion::V2 },
        swap_accounting: machine.swap_accounting,
        limited_swap: pods.limited_swap,
        swap_bytes: machine.swap_bytes,
        single_process_oom_kill: pods.single_process_oom_kill.unwrap_or(v1),
        hugepage_sizes,
    }
}

/// The security settings of the node; `seccomp_dir` has its profiles.
pub(super) fn security_settings<'a>(effects: &'a Effects, seccomp_dir: &'a str) -> SecuritySettings<'a> {
    let host = &effects.registry.node.host;
    SecuritySettings {
        seccomp_default: effects.context.config.pods.seccomp_default,
        seccomp_dir,
        masked_paths: &host.masked_paths,
        selinux: host.selinux,
    }
}

/// What the runtime supports.
pub(super) fn runtime_features(runtime: &RuntimeView) -> RuntimeFeatures<'_> {
    RuntimeFeatures {
        name: &runtime.name,
        version: &runtime.version,
        recursive_read_only: runtime.recursive_read_only,
        image_volumes: runtime.image_volumes(),
    }
}
