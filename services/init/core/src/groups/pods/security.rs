//! What pods may set, and how they are isolated.

use keelson_kube_model::sysctl::is_namespaced;

use crate::document::Sourced;
use crate::outcome::Outcome;
use crate::reader::Reader;

/// The `memorySwap.swapBehavior` that lets pods use swap.
const LIMITED_SWAP: &str = "LimitedSwap";

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(super) struct Security {
    unsafe_sysctls: Option<Sourced<Vec<String>>>,
    seccomp_default: Option<Sourced<bool>>,
    single_process_oom_kill: Option<Sourced<bool>>,
    swap_behavior: Option<Sourced<String>>,
}

impl Security {
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        let unsafe_sysctls = reader.strings("allowedUnsafeSysctls");
        if let Some(list) = &unsafe_sysctls {
            for pattern in list.value.iter().filter(|pattern| !is_namespaced(pattern)) {
                let one = Sourced { value: pattern, origin: list.origin.clone(), field: list.field.clone() };
                let remedy = "this sysctl is not namespaced; only names below net., fs.mqueue., kernel.shm, \
                               kernel.msg and kernel.sem can be allowed";
                reader.refuse(&one, remedy);
            }
        }
        let swap_behavior =
            reader.object("memorySwap").then(|| reader.choice_field("memorySwap.swapBehavior")).flatten();
        Self {
            unsafe_sysctls,
            seccomp_default: reader.boolean("seccompDefault"),
            single_process_oom_kill: reader.boolean("singleProcessOOMKill"),
            swap_behavior,
        }
    }

    pub(super) fn resolve(self, out: &mut Outcome<'_>) {
        out.set_field(self.unsafe_sysctls, |c, v| c.pods.allowed_unsafe_sysctls = v);
        out.set_field(self.seccomp_default, |c, v| c.pods.seccomp_default = v);
        if let Some(single) = self.single_process_oom_kill.as_ref().filter(|single| !single.value)
            && out.host.cgroup_v1
        {
            let remedy = "cgroup v1 cannot kill a whole container; remove this field or use cgroup v2";
            out.refuse(single, remedy);
        }
        out.set_field(self.single_process_oom_kill, |c, v| c.pods.single_process_oom_kill = Some(v));
        let limited_swap = self.swap_behavior.map(|behavior| behavior.map(|text| text == LIMITED_SWAP));
        if let Some(limited) = limited_swap.as_ref().filter(|limited| limited.value)
            && out.host.cgroup_v1
        {
            let named = limited.clone().map(|_| LIMITED_SWAP);
            out.refuse(&named, "cgroup v1 cannot limit swap separately; remove this field or use cgroup v2");
        }
        out.set_field(limited_swap, |c, v| c.pods.limited_swap = v);
    }
}
