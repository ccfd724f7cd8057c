//! Folders found at startup of which no plugin knows what they are (volumes.md §3.16 step 5). Each is unmounted by its name once
//! nothing of its pod runs, and tried again until that succeeds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use keelson_service_kit::Backoff;
use keelson_volume_manager_core::operations::{PodUid, VolumeName};

use super::records::{Placed, PodVolume};
use crate::plugins::{Plugin, PluginError, VolumePlace};

/// The back-off of an unmount that has failed (volumes.md §3.1).
const RETRY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(122));

/// The folders.
#[derive(Debug, Default)]
pub(super) struct UnknownFolders(BTreeMap<VolumePlace, Unknown>);

#[derive(Debug)]
struct Unknown {
    plugin: Arc<dyn Plugin>,
    retry: Backoff,
    /// When it may be tried again, in milliseconds.
    due: u64,
    is_running: bool,
    /// The last error; empty without one.
    error: String,
}

impl UnknownFolders {
    pub(super) fn add(&mut self, place: VolumePlace, plugin: Arc<dyn Plugin>) {
        let unknown = Unknown { plugin, retry: RETRY, due: 0, is_running: false, error: String::new() };
        self.0.insert(place, unknown);
    }

    /// The folders to unmount at `now`: of released pods, as far as nothing was set up there since. They count as running until
    /// [`Self::finish`].
    pub(super) fn start(
        &mut self,
        released: &BTreeSet<PodUid>,
        placed: &BTreeMap<PodVolume, Placed>,
        now: u64,
    ) -> Vec<(VolumePlace, Arc<dyn Plugin>)> {
        let mut due = Vec::new();
        for (place, unknown) in &mut self.0 {
            let is_set_up = placed.values().any(|placed| is_same_folder(&placed.place, place));
            if released.contains(&place.pod) && !is_set_up && !unknown.is_running && unknown.due <= now {
                unknown.is_running = true;
                due.push((place.clone(), Arc::clone(&unknown.plugin)));
            }
        }
        due
    }

    /// Records how an unmount ended.
    pub(super) fn finish(&mut self, place: &VolumePlace, result: Result<(), PluginError>, now: u64) {
        match result {
            Ok(()) => {
                self.0.remove(place);
            }
            Err(error) => {
                tracing::warn!(
                    event = "forced_unmount_failed",
                    uid = place.pod.as_str(),
                    volume = place.inner_name,
                    plugin = place.plugin,
                    "cannot remove a volume that was found at startup: {error}"
                );
                let Some(unknown) = self.0.get_mut(place) else { return };
                let delay = u64::try_from(unknown.retry.next_delay().as_millis()).unwrap_or(u64::MAX);
                unknown.is_running = false;
                unknown.due = now.saturating_add(delay);
                unknown.error = error.message;
            }
        }
    }

    /// Forgets a folder whose volume was torn down: it was set up anew since, so it is known.
    pub(super) fn forget(&mut self, torn_down: &VolumePlace) {
        self.0.retain(|place, _| !is_same_folder(torn_down, place));
    }

    /// Whether a device of the plugin may belong to one of the folders: its pod was not released, so it may be in use.
    pub(super) fn may_use(&self, device: &VolumeName, released: &BTreeSet<PodUid>) -> bool {
        let is_of = |place: &VolumePlace| {
            device.as_str().strip_prefix(&place.plugin).is_some_and(|rest| rest.starts_with('/'))
        };
        self.0.keys().any(|place| is_of(place) && !released.contains(&place.pod))
    }

    /// Whether a pod has such a folder.
    pub(super) fn has_pod(&self, pod: &PodUid) -> bool {
        self.0.keys().any(|place| place.pod == *pod)
    }

    /// The pods with such folders, each with the last error.
    pub(super) fn pods(&self) -> impl Iterator<Item = (&PodUid, &str)> {
        self.0.iter().map(|(place, unknown)| (&place.pod, unknown.error.as_str()))
    }

    /// When the next one is due after `now`.
    pub(super) fn wake_at(&self, released: &BTreeSet<PodUid>, now: u64) -> Option<u64> {
        let waiting =
            self.0.iter().filter(|(place, unknown)| released.contains(&place.pod) && !unknown.is_running);
        waiting.map(|(_, unknown)| unknown.due).filter(|due| *due > now).min()
    }
}

fn is_same_folder(left: &VolumePlace, right: &VolumePlace) -> bool {
    let of = |place: &VolumePlace| {
        (place.pod.clone(), place.plugin.clone(), place.inner_name.clone(), place.is_block)
    };
    of(left) == of(right)
}
