//! The control plane, and the requests to it (architecture §6, §7; node-and-api.md §2.5).

mod etcd;
mod kubernetes;
mod offline;
mod taints;

use std::time::Duration;

use crate::document::Sourced;
use crate::durations::millis;
use crate::outcome::Outcome;
use crate::settings::{Files, Settings};
use etcd::EtcdAccess;
use kubernetes::KubernetesApi;
use offline::Offline;

/// The limits of the trial period of an assigned configuration. A running service is polled every ten seconds.
const TRIAL: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3600);

/// The fields; `None` where the files do not set them.
#[derive(Debug)]
pub(crate) struct ControlPlane {
    /// `controlPlane` of the KeelsonConfiguration.
    name: Option<Sourced<String>>,
    etcd: EtcdAccess,
    kubernetes: KubernetesApi,
    lease_seconds: Option<Sourced<u32>>,
    trial_period: Option<Sourced<Duration>>,
    offline: Offline,
}

impl Settings for ControlPlane {
    fn read(files: &mut Files<'_>) -> Self {
        let (kubelet, keelson) = (&mut files.kubelet, &mut files.keelson);
        let name = keelson.choice("controlPlane", &["none", "kubernetes", "etcd"]);
        let offline = Offline::read(keelson);
        let etcd = EtcdAccess::read(keelson);
        let has_trial = keelson.object("nodeConfiguration");
        Self {
            name,
            offline,
            etcd,
            trial_period: has_trial
                .then(|| keelson.duration("nodeConfiguration.trialPeriod", TRIAL))
                .flatten(),
            lease_seconds: kubelet.u32_field("nodeLeaseDurationSeconds"),
            kubernetes: KubernetesApi::read(kubelet),
        }
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        let Self { name, etcd, kubernetes, lease_seconds, trial_period, offline } = self;
        offline.resolve(out);
        out.set("nodeConfiguration.trialPeriodMs", trial_period, |c, v| {
            c.node_configuration.trial_period_ms = millis(v);
        });
        if !kubernetes.resolve(out, name.as_ref(), lease_seconds.clone()) {
            etcd.resolve(out, name, lease_seconds);
        }
    }
}

#[cfg(test)]
mod tests;
