//! When pods are evicted, from the KubeletConfiguration (node-and-api.md §2.5). The hard thresholds are in
//! [`super::reserved`], since they are reserved from pods.

use std::collections::BTreeMap;
use std::time::Duration;

use keelson_kube_model::parse_go_duration;

use crate::document::Sourced;
use crate::durations::millis;
use crate::outcome::{Level, Outcome};
use crate::reader::Reader;
use crate::settings::{Files, Settings};
use crate::thresholds::thresholds_by_signal;

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(crate) struct Eviction {
    soft: Option<Sourced<BTreeMap<String, String>>>,
    soft_grace: Option<Sourced<BTreeMap<String, u64>>>,
    minimum_reclaim: Option<Sourced<BTreeMap<String, String>>>,
    transition: Option<Sourced<Duration>>,
    max_pod_grace: Option<Sourced<i64>>,
    local_storage: Option<Sourced<bool>>,
    memcg_notification: Option<Sourced<bool>>,
}

impl Settings for Eviction {
    fn read(files: &mut Files<'_>) -> Self {
        let reader = &mut files.kubelet;
        let soft_grace = grace_periods(reader);
        let soft = thresholds_by_signal(reader, "evictionSoft");
        if let Some(soft) = &soft {
            for (signal, text) in &soft.value {
                if soft_grace.as_ref().is_none_or(|grace_periods| !grace_periods.value.contains_key(signal)) {
                    reader.refuse(
                        &soft.entry(signal, text),
                        format!("this requires evictionSoftGracePeriod.{signal}, such as 1m30s"),
                    );
                }
            }
        }
        Self {
            soft,
            soft_grace,
            minimum_reclaim: thresholds_by_signal(reader, "evictionMinimumReclaim"),
            transition: reader.duration_field("evictionPressureTransitionPeriod"),
            max_pod_grace: reader.int_field("evictionMaxPodGracePeriod"),
            local_storage: reader.boolean("localStorageCapacityIsolation"),
            memcg_notification: reader.boolean("kernelMemcgNotification"),
        }
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        if let Some(asked) = self.memcg_notification.as_ref().filter(|asked| asked.value)
            && !out.host.cgroup_v1
        {
            let origin = &asked.origin;
            let text = format!(
                "kernelMemcgNotification ({origin}) has no effect with cgroup v2, as in a kubelet: memory is checked every 10 s"
            );
            out.note(Level::Info, text);
        }
        out.set_field(self.soft, |c, v| c.resources.eviction.soft = v);
        out.set_field(self.soft_grace, |c, v| c.resources.eviction.soft_grace_ms = v);
        out.set_field(self.minimum_reclaim, |c, v| c.resources.eviction.minimum_reclaim = v);
        out.set_field(self.transition, |c, v| c.resources.eviction.pressure_transition_ms = millis(v));
        out.set_field(self.max_pod_grace, |c, v| c.resources.eviction.max_pod_grace_seconds = v);
        out.set_field(self.local_storage, |c, v| c.resources.eviction.local_storage_limits = v);
        out.set_field(self.memcg_notification, |c, v| c.resources.eviction.kernel_memcg_notification = v);
    }
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
                let one = given.entry(signal, text);
                reader.refuse(&one, "this must be a duration of at least 0, such as 1m30s");
            }
        }
    }
    Some(given.map(|_| grace_periods))
}

#[cfg(test)]
mod tests;
