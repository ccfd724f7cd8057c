//! Shows the volumes of each pod, those in use, and their numbers.

use std::collections::BTreeMap;

use keelson_volume_manager_core::operations::PodUid;
use keelson_volume_manager_core::world::{PodState, WorldPlan, volumes_in_use};

use super::SharedVolumesTask;
use crate::shared_volumes::status::{PodStatus, statuses};

impl SharedVolumesTask {
    /// Updates the numbers of desired and mounted volumes.
    fn count_volumes(&mut self) {
        let mut counts: BTreeMap<String, (i64, i64)> = BTreeMap::new();
        for resolved in self.records.specs.values() {
            counts.entry(resolved.plugin.plugin_name(&resolved.spec)).or_default().0 += 1;
        }
        for ((volume, pod), placed) in &self.records.placed {
            let state = self.actual.volume(volume).and_then(|volume| volume.pods.get(pod));
            if state.is_some_and(|pod| pod.state == PodState::Mounted) {
                counts.entry(placed.place.plugin.clone()).or_default().1 += 1;
            }
        }
        self.counts.update(counts);
    }

    /// Shows what is known to the workers of pods and to pod-sync.
    pub(super) fn publish(&mut self, plan: &WorldPlan) {
        self.count_volumes();
        let mut new = statuses(&self.desired, &self.actual, &self.records, plan, self.clock);
        for (pod, error) in self.unknown.folders.pods() {
            let status = new.entry(pod.clone()).or_default();
            status.may_have_mounts = true;
            if !error.is_empty() {
                error.clone_into(&mut status.teardown);
            }
        }
        let mut pods = self.inbox.pods.lock();
        for pod in new.keys() {
            pods.entry(pod.as_str().to_owned()).or_default();
        }
        pods.retain(|uid, sender| {
            let status = new.remove(&PodUid::from(uid.as_str())).unwrap_or_default();
            let is_used = status != PodStatus::default() || sender.receiver_count() > 0;
            sender.send_if_modified(|old| {
                let is_new = *old != status;
                *old = status;
                is_new
            });
            is_used
        });
        drop(pods);
        self.records.publish_claims(&self.unknown, &self.actual, &self.inbox.claims);
        let in_use = volumes_in_use(&self.desired, &self.actual, &self.operations);
        self.inbox.in_use.send_if_modified(|old| {
            let is_new = *old != in_use;
            *old = in_use;
            is_new
        });
    }
}
