//! Enforcement of node allocatable and the eviction settings, from the KubeletConfiguration (node-and-api.md §2.5).

use std::collections::BTreeMap;
use std::time::Duration;

use keelson_kube_model::parse_go_duration;

use crate::document::{Reader, Sourced, YEAR};
use crate::kubelet_file::KubeletFile;
use crate::reserved::{SIGNALS, check_online, entry, threshold};
use crate::resolve::{Level, Resolver, millis};

/// The values of `enforceNodeAllocatable`.
const ENFORCED: &[&str] = &[
    "pods",
    "kube-reserved",
    "system-reserved",
    "kube-reserved-compressible",
    "system-reserved-compressible",
    "none",
];

/// The fields; `None` where the file does not set them.
#[derive(Debug, Default)]
pub(crate) struct EvictionFile {
    soft: Option<Sourced<BTreeMap<String, String>>>,
    soft_grace: Option<Sourced<BTreeMap<String, u64>>>,
    minimum_reclaim: Option<Sourced<BTreeMap<String, String>>>,
    transition: Option<Sourced<Duration>>,
    max_pod_grace: Option<Sourced<i64>>,
    local_storage: Option<Sourced<bool>>,
    memcg_notification: Option<Sourced<bool>>,
    enforce: Option<Sourced<Vec<String>>>,
    kube_cgroup: Option<Sourced<String>>,
    system_cgroup: Option<Sourced<String>>,
    protect_kernel: Option<Sourced<bool>>,
    pods_per_core: Option<Sourced<u32>>,
}

impl EvictionFile {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        let soft_grace = grace_periods(reader);
        let soft = thresholds_by_signal(reader, "evictionSoft");
        if let Some(soft) = &soft {
            for (signal, text) in &soft.value {
                if soft_grace.as_ref().is_none_or(|grace_periods| !grace_periods.value.contains_key(signal)) {
                    let one = entry(soft, signal, text);
                    reader.refuse(
                        &one,
                        format!("this requires evictionSoftGracePeriod.{signal}, such as 1m30s"),
                    );
                }
            }
        }
        Self {
            soft,
            soft_grace,
            minimum_reclaim: thresholds_by_signal(reader, "evictionMinimumReclaim"),
            // Zero means the default, as for every duration of a KubeletConfiguration.
            transition: reader
                .duration("evictionPressureTransitionPeriod", Duration::ZERO..=YEAR)
                .filter(|period| !period.value.is_zero()),
            max_pod_grace: reader.integer("evictionMaxPodGracePeriod", 0..=i64::from(u32::MAX)),
            local_storage: reader.boolean("localStorageCapacityIsolation"),
            memcg_notification: reader.boolean("kernelMemcgNotification"),
            enforce: reader.strings("enforceNodeAllocatable"),
            kube_cgroup: reader.string("kubeReservedCgroup"),
            system_cgroup: reader.string("systemReservedCgroup"),
            protect_kernel: reader.boolean("protectKernelDefaults"),
            pods_per_core: reader.u32("podsPerCore", 0..=1_000_000),
        }
    }
}

impl EvictionFile {
    /// `kubeReservedCgroup`, if the file sets it.
    pub(crate) fn kube_reserved_cgroup(&self) -> Option<&str> {
        self.kube_cgroup.as_ref().map(|cgroup| cgroup.value.as_str()).filter(|cgroup| !cgroup.is_empty())
    }
}

/// Quantities or percentages by signal.
fn thresholds_by_signal(reader: &mut Reader<'_>, field: &str) -> Option<Sourced<BTreeMap<String, String>>> {
    let mut map = reader.map(field)?;
    let given = map.clone();
    map.value.retain(|signal, text| {
        let one = entry(&given, signal, text);
        if !SIGNALS.contains(&signal.as_str()) {
            reader.refuse(&one, format!("there is no such signal; the signals are {}", SIGNALS.join(", ")));
            return false;
        }
        let good = threshold(text, 0).is_some();
        if !good {
            reader.refuse(&one, "this must be a quantity such as 100Mi or a percentage from 0% to 100%");
        }
        good
    });
    Some(map)
}

fn grace_periods(reader: &mut Reader<'_>) -> Option<Sourced<BTreeMap<String, u64>>> {
    let given = reader.map("evictionSoftGracePeriod")?;
    let mut grace_periods = BTreeMap::new();
    for (signal, text) in &given.value {
        match parse_go_duration(text) {
            Some(grace) => {
                grace_periods.insert(signal.clone(), millis(grace));
            }
            None => {
                let one = entry(&given, signal, text);
                reader.refuse(&one, "this must be a duration of at least 0, such as 1m30s");
            }
        }
    }
    Some(given.map(|_| grace_periods))
}

/// Applies the fields to the configuration, and checks those that depend on each other.
pub(crate) fn resolve(resolver: &mut Resolver<'_>, kubelet: &mut KubeletFile) {
    let file = std::mem::take(&mut kubelet.eviction);
    if let Some(reserved) = kubelet.reserved.take() {
        if resolver.with_file && !reserved.dropped.is_empty() {
            resolver.note(
                Level::Warn,
                format!(
                    "evictionHard ({}) sets some thresholds and so drops the defaults of {}; set them too, or set \
                     mergeDefaultEvictionSettings",
                    reserved.hard.origin,
                    reserved.dropped.join(", ")
                ),
            );
        }
        check_online(resolver, reserved.cpus.as_ref());
        let of_part = |part| reserved.all.clone().map(|_| part);
        let (kube, system) = (of_part(reserved.kube), of_part(reserved.system));
        resolver.set("resources.nodeAllocatable.kubeReserved", Some(kube), |c, v| {
            c.resources.node_allocatable.kube_reserved = v;
        });
        resolver.set("resources.nodeAllocatable.systemReserved", Some(system), |c, v| {
            c.resources.node_allocatable.system_reserved = v;
        });
        resolver.set("resources.reserved", Some(reserved.all), |c, v| c.resources.reserved = v);
        resolver.set("resources.eviction.hard", Some(reserved.hard), |c, v| c.resources.eviction.hard = v);
    }
    resolver.set("resources.eviction.soft", file.soft, |c, v| c.resources.eviction.soft = v);
    resolver.set("resources.eviction.softGraceMs", file.soft_grace, |c, v| {
        c.resources.eviction.soft_grace_ms = v;
    });
    resolver.set("resources.eviction.minimumReclaim", file.minimum_reclaim, |c, v| {
        c.resources.eviction.minimum_reclaim = v;
    });
    resolver.set("resources.eviction.pressureTransitionMs", file.transition, |c, v| {
        c.resources.eviction.pressure_transition_ms = millis(v);
    });
    resolver.set("resources.eviction.maxPodGraceSeconds", file.max_pod_grace, |c, v| {
        c.resources.eviction.max_pod_grace_seconds = v;
    });
    resolver.set("resources.eviction.localStorageLimits", file.local_storage, |c, v| {
        c.resources.eviction.local_storage_limits = v;
    });
    if let Some(asked) = file.memcg_notification.as_ref().filter(|asked| asked.value)
        && !resolver.host.cgroup_v1
    {
        let origin = &asked.origin;
        let text = format!(
            "kernelMemcgNotification ({origin}) has no effect with cgroup v2, as in a kubelet: memory is checked every 10 s"
        );
        resolver.note(Level::Info, text);
    }
    resolver.set("resources.eviction.kernelMemcgNotification", file.memcg_notification, |c, v| {
        c.resources.eviction.kernel_memcg_notification = v;
    });
    resolver.set("resources.podsPerCore", file.pods_per_core, |c, v| c.resources.pods_per_core = v);
    resolver.set("resources.nodeAllocatable.protectKernelDefaults", file.protect_kernel, |c, v| {
        c.resources.node_allocatable.protect_kernel_defaults = v;
    });
    enforcement(resolver, file.enforce, file.kube_cgroup, file.system_cgroup);
}

fn enforcement(
    resolver: &mut Resolver<'_>,
    enforce: Option<Sourced<Vec<String>>>,
    kube: Option<Sourced<String>>,
    system: Option<Sourced<String>>,
) {
    if let Some(enforce) = &enforce {
        let words = &enforce.value;
        let has = |word: &str| words.iter().any(|w| w == word);
        let named = |cgroup: &Option<Sourced<String>>| cgroup.as_ref().is_some_and(|c| !c.value.is_empty());
        let mut sorted = words.clone();
        sorted.sort();
        sorted.dedup();
        if words.iter().any(|word| !word.is_empty() && !ENFORCED.contains(&word.as_str())) {
            resolver.refuse(enforce, format!("the allowed values are {}", ENFORCED.join(", ")));
        } else if sorted.len() != words.len() {
            resolver.refuse(enforce, "each value may be listed only once");
        } else if has("none") && words.len() > 1 {
            resolver.refuse(enforce, "none must be the only value");
        }
        for (part, field, cgroup) in [
            ("kube-reserved", "kubeReservedCgroup", &kube),
            ("system-reserved", "systemReservedCgroup", &system),
        ] {
            let compressible = format!("{part}-compressible");
            if has(part) && has(&compressible) {
                resolver.refuse(enforce, format!("{part} and {compressible} exclude each other"));
            }
            if (has(part) || has(&compressible)) && !named(cgroup) {
                resolver.refuse(enforce, format!("{part} requires {field}, the cgroup to limit"));
            }
        }
    }
    resolver
        .set("resources.nodeAllocatable.enforce", enforce, |c, v| c.resources.node_allocatable.enforce = v);
    resolver.set("resources.nodeAllocatable.kubeReservedCgroup", kube, |c, v| {
        c.resources.node_allocatable.kube_reserved_cgroup = v;
    });
    resolver.set("resources.nodeAllocatable.systemReservedCgroup", system, |c, v| {
        c.resources.node_allocatable.system_reserved_cgroup = v;
    });
}

#[cfg(test)]
#[path = "eviction_tests.rs"]
mod tests;
