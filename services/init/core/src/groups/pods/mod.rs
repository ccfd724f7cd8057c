//! How pods are run and what they may set, from the KubeletConfiguration (node-and-api.md §2.5).

mod security;

use std::time::Duration;

use serde_json::Value;

use crate::document::Sourced;
use crate::durations::millis;
use crate::outcome::Outcome;
use crate::reader::Reader;
use crate::settings::{Files, Settings};
use security::Security;

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(crate) struct Pods {
    sync_frequency: Option<Sourced<Duration>>,
    max_restart_period: Option<Sourced<Duration>>,
    max_pods: Option<Sourced<u32>>,
    pods_per_core: Option<Sourced<u32>>,
    pids_limit: Option<Sourced<i64>>,
    cpu_cfs_quota: Option<Sourced<bool>>,
    cpu_cfs_period: Option<Sourced<Duration>>,
    ids_per_pod: Option<Sourced<u32>>,
    security: Security,
}

impl Settings for Pods {
    fn read(files: &mut Files<'_>) -> Self {
        let reader = &mut files.kubelet;
        let max_restart_period = reader
            .object("crashLoopBackOff")
            .then(|| reader.duration_field("crashLoopBackOff.maxContainerRestartPeriod"))
            .flatten();
        let ids_per_pod = reader.object("userNamespaces").then(|| ids_per_pod(reader)).flatten();
        Self {
            ids_per_pod,
            sync_frequency: reader.duration_field("syncFrequency"),
            max_restart_period,
            max_pods: reader.u32_field("maxPods"),
            pods_per_core: reader.u32_field("podsPerCore"),
            pids_limit: reader.int_field("podPidsLimit"),
            cpu_cfs_quota: reader.boolean("cpuCFSQuota"),
            cpu_cfs_period: reader.duration_field("cpuCFSQuotaPeriod"),
            security: Security::read(reader),
        }
    }

    fn check(kubelet: &mut Reader<'_>) {
        run_once(kubelet);
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        out.set_field(self.sync_frequency, |c, v| c.pods.sync_frequency_ms = millis(v));
        out.set_field(self.max_restart_period, |c, v| c.pods.max_restart_backoff_ms = millis(v));
        out.set_field(self.max_pods, |c, v| c.resources.max_pods = v);
        out.set_field(self.pods_per_core, |c, v| c.resources.pods_per_core = v);
        out.set_field(self.pids_limit, |c, v| c.resources.pod_pids_limit = if v <= 0 { -1 } else { v });
        out.set_field(self.cpu_cfs_quota, |c, v| c.resources.cpu_cfs_quota = v);
        out.set_field(self.cpu_cfs_period, |c, v| {
            c.resources.cpu_cfs_period_us = u64::try_from(v.as_micros()).unwrap_or(u64::MAX);
        });
        out.set_field(self.ids_per_pod, |c, v| c.pods.ids_per_pod = v);
        self.security.resolve(out);
    }
}

/// `userNamespaces.idsPerPod`: a multiple of the IDs that a container image may use, below 2^32.
fn ids_per_pod(reader: &mut Reader<'_>) -> Option<Sourced<u32>> {
    const BLOCK: u32 = 65_536;
    let ids = reader.u32_field("userNamespaces.idsPerPod")?;
    if ids.value % BLOCK != 0 {
        reader.refuse(&ids, format!("this must be a multiple of {BLOCK}"));
    } else if ids.value >= 1 << 31 {
        reader.refuse(&ids, "this must be below 2147483648, so that there are IDs for at least one pod");
    }
    Some(ids)
}

/// The kubelet has removed this mode; the field is read to refuse it.
fn run_once(reader: &mut Reader<'_>) {
    let remedy = "Runonce mode has been deprecated and should not be set; remove this field";
    reader.refuse_if("runOnce", |value| *value == Value::Bool(true), remedy);
}

#[cfg(test)]
mod tests;
