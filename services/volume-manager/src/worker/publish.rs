//! Publishes the status of a pod's volumes.

use keelson_service_kit::now_unix_nanos;
use keelson_volume_manager_core::desire::PodDesire;
use keelson_volume_manager_core::plan::Settled;
use keelson_volume_manager_core::wait_owner::WaitOwner;

use super::details::StatusDetails;
use super::{Command, Worker};
use crate::view::{Phase, PodVolumeStatus, VolumeWait};

impl Worker {
    pub(super) async fn settle(&mut self, desire: &PodDesire, settled: Settled, number: u64) {
        let phase = match settled {
            Settled::Mounted => Phase::Mounted,
            Settled::AwaitingPlugins | Settled::AwaitingTeardown => {
                return self.await_plugins(desire, settled);
            }
            Settled::Stopping
                if self.actual.on_disk.is_empty()
                    && self.mounted.is_empty()
                    && !self.plugin_status.may_have_mounts =>
            {
                Phase::Unmounted
            }
            Settled::Stopping => Phase::Mounted,
            Settled::Unmounted | Settled::Gone => Phase::Unmounted,
        };
        if matches!(settled, Settled::Unmounted | Settled::Gone) {
            self.mounted.clear();
            self.actual.ready.clear();
        }
        self.retry.reset();
        self.publish(
            desire,
            phase,
            &StatusDetails { gone: settled == Settled::Gone, ..StatusDetails::default() },
        );
        if settled == Settled::Gone {
            let _ = self.env.commands.send(Command::Gone { uid: self.assignments.uid.clone(), number }).await;
        }
    }

    /// Publishes what the volumes of plugins wait for.
    fn await_plugins(&mut self, desire: &PodDesire, settled: Settled) {
        self.retry.reset();
        let status = &self.plugin_status;
        if settled == Settled::AwaitingTeardown {
            let message = if status.teardown.is_empty() {
                "the volumes of plugins are being torn down".to_owned()
            } else {
                status.teardown.clone()
            };
            self.publish(desire, Phase::Unmounting, &StatusDetails { message, ..StatusDetails::default() });
            return;
        }
        let texts = status.waits.iter().map(|wait| format!("volume \"{}\": {}", wait.volume, wait.message));
        let message = texts.collect::<Vec<_>>().join("; ");
        let phase = if status.has_failed { Phase::Failed } else { Phase::Pending };
        let user_can_fix = status.waits.iter().all(|wait| wait.owner == WaitOwner::You);
        let others = |wait: &&VolumeWait| !matches!(wait.owner, WaitOwner::You | WaitOwner::VolumeManager);
        let owner = status.waits.iter().find(others).map(|wait| wait.owner.to_string()).unwrap_or_default();
        let details = StatusDetails {
            message,
            user_can_fix,
            owner,
            next_try_unix_nanos: status.next_try_unix_nanos,
            ..StatusDetails::default()
        };
        self.publish(desire, phase, &details);
    }

    pub(super) fn publish(&self, desire: &PodDesire, phase: Phase, details: &StatusDetails) {
        let mounts = self.mounted.values().cloned().collect();
        let status = PodVolumeStatus {
            pod: desire.header.pod.clone(),
            phase,
            mounts,
            message: details.message.clone(),
            waits: self.plugin_status.waits.clone(),
        };
        if !details.gone {
            self.env.hub.set_if_changed(self.assignments.uid.clone(), status.clone());
        }
        let next_try_unix_nanos = details.next_try.map_or(details.next_try_unix_nanos, |delay| {
            now_unix_nanos().saturating_add(i64::try_from(delay.as_nanos()).unwrap_or(i64::MAX))
        });
        self.assignments.view.send_modify(|view| {
            view.revision = desire.header.revision;
            view.status = status;
            view.permanent = details.permanent;
            view.user_can_fix = details.user_can_fix;
            view.owner.clone_from(&details.owner);
            view.next_try_unix_nanos = next_try_unix_nanos;
        });
    }
}
