//! How pods are run and what they may set, from the KubeletConfiguration (node-and-api.md §2.5).

use std::time::Duration;

use keelson_kube_model::sysctl::is_namespaced;

use crate::document::{Reader, Sourced, YEAR};
use crate::resolve::{Resolver, millis};

/// The `memorySwap.swapBehavior` that lets pods use swap.
const LIMITED_SWAP: &str = "LimitedSwap";

/// The fields; `None` where the file does not set them.
#[derive(Debug, Default)]
pub(crate) struct PodSettingsFile {
    sync_frequency: Option<Sourced<Duration>>,
    max_restart_period: Option<Sourced<Duration>>,
    unsafe_sysctls: Option<Sourced<Vec<String>>>,
    seccomp_default: Option<Sourced<bool>>,
    single_process_oom_kill: Option<Sourced<bool>>,
    swap_behavior: Option<Sourced<String>>,
}

impl PodSettingsFile {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        // Zero means the default, as for every duration of a KubeletConfiguration.
        let sync_frequency =
            reader.duration("syncFrequency", Duration::ZERO..=YEAR).filter(|period| !period.value.is_zero());
        let max_restart_period = reader
            .object("crashLoopBackOff")
            .then(|| {
                let range = Duration::from_secs(1)..=Duration::from_secs(300);
                reader.duration("crashLoopBackOff.maxContainerRestartPeriod", range)
            })
            .flatten();
        let unsafe_sysctls = reader.strings("allowedUnsafeSysctls");
        if let Some(list) = &unsafe_sysctls {
            for pattern in list.value.iter().filter(|pattern| !is_namespaced(pattern)) {
                let one = Sourced { value: pattern, origin: list.origin.clone(), field: list.field.clone() };
                let remedy = "this sysctl is not namespaced; only names below net., fs.mqueue., kernel.shm, \
                               kernel.msg and kernel.sem can be allowed";
                reader.refuse(&one, remedy);
            }
        }
        let swap_behavior = reader
            .object("memorySwap")
            .then(|| reader.choice("memorySwap.swapBehavior", &["", "NoSwap", LIMITED_SWAP]))
            .flatten();
        Self {
            sync_frequency,
            max_restart_period,
            unsafe_sysctls,
            seccomp_default: reader.boolean("seccompDefault"),
            single_process_oom_kill: reader.boolean("singleProcessOOMKill"),
            swap_behavior,
        }
    }

    /// Applies the fields to the configuration.
    pub(crate) fn resolve(self, resolver: &mut Resolver<'_>) {
        resolver
            .set("pods.syncFrequencyMs", self.sync_frequency, |c, v| c.pods.sync_frequency_ms = millis(v));
        resolver.set("pods.maxRestartBackoffMs", self.max_restart_period, |c, v| {
            c.pods.max_restart_backoff_ms = millis(v);
        });
        resolver
            .set("pods.allowedUnsafeSysctls", self.unsafe_sysctls, |c, v| c.pods.allowed_unsafe_sysctls = v);
        resolver.set("pods.seccompDefault", self.seccomp_default, |c, v| c.pods.seccomp_default = v);
        if let Some(single) = self.single_process_oom_kill.as_ref().filter(|single| !single.value)
            && resolver.host.cgroup_v1
        {
            let remedy = "cgroup v1 cannot kill a whole container; remove this field or use cgroup v2";
            resolver.refuse(single, remedy);
        }
        resolver.set("pods.singleProcessOomKill", self.single_process_oom_kill, |c, v| {
            c.pods.single_process_oom_kill = Some(v);
        });
        let limited_swap = self.swap_behavior.map(|behavior| behavior.map(|text| text == LIMITED_SWAP));
        if let Some(limited) = limited_swap.as_ref().filter(|limited| limited.value)
            && resolver.host.cgroup_v1
        {
            let named = limited.clone().map(|_| LIMITED_SWAP);
            resolver
                .refuse(&named, "cgroup v1 cannot limit swap separately; remove this field or use cgroup v2");
        }
        resolver.set("pods.limitedSwap", limited_swap, |c, v| c.pods.limited_swap = v);
    }
}
