//! Folders found at startup of which no plugin knows what they are, with the plugins that unmount them. When is decided in
//! the core's `world`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use keelson_volume_manager_core::operations::PodUid;
use keelson_volume_manager_core::world::{self, UnknownFolder};

use super::records::{Placed, PodVolume};
use crate::plugins::{Plugin, PluginError, VolumePlace};
use crate::totals::VolumeTotals;

/// The folders.
#[derive(Debug, Default)]
pub(super) struct UnknownFolders {
    pub(super) folders: world::UnknownFolders,
    places: BTreeMap<UnknownFolder, (VolumePlace, Arc<dyn Plugin>)>,
}

impl UnknownFolders {
    pub(super) fn add(&mut self, place: VolumePlace, plugin: Arc<dyn Plugin>) {
        let folder = folder_of(&place);
        self.folders.add(folder.clone());
        self.places.insert(folder, (place, plugin));
    }

    /// Where they are.
    pub(super) fn places(&self) -> impl Iterator<Item = &VolumePlace> {
        self.places.values().map(|(place, _)| place)
    }

    /// The folders to unmount at `now`. They count as running until [`Self::finish`].
    pub(super) fn start(
        &mut self,
        released: &BTreeSet<PodUid>,
        placed: &BTreeMap<PodVolume, Placed>,
        now: u64,
    ) -> Vec<(VolumePlace, Arc<dyn Plugin>)> {
        let is_set_up =
            |folder: &UnknownFolder| placed.values().any(|placed| folder_of(&placed.place) == *folder);
        let started = self.folders.start(released, is_set_up, now);
        started.iter().filter_map(|folder| self.places.get(folder).cloned()).collect()
    }

    /// Records how an unmount ended. The first attempt is counted.
    pub(super) fn finish(
        &mut self,
        place: &VolumePlace,
        result: Result<(), PluginError>,
        totals: &VolumeTotals,
        now: u64,
    ) {
        if let Err(error) = &result {
            tracing::warn!(
                event = "forced_unmount_failed",
                uid = place.pod.as_str(),
                volume = place.inner_name,
                plugin = place.plugin,
                "cannot remove a volume that was found at startup: {error}"
            );
        }
        let (folder, is_gone) = (folder_of(place), result.is_ok());
        if self.folders.finish(&folder, result.map_err(|error| error.message), now) {
            totals.foreign_removal(is_gone);
        }
        if is_gone {
            self.places.remove(&folder);
        }
    }

    /// Forgets a folder whose volume was torn down: it was set up again since, so it is known.
    pub(super) fn forget(&mut self, torn_down: &VolumePlace) {
        let folder = folder_of(torn_down);
        self.folders.forget(&folder);
        self.places.remove(&folder);
    }
}

fn folder_of(place: &VolumePlace) -> UnknownFolder {
    UnknownFolder {
        plugin: place.plugin.clone(),
        inner_name: place.inner_name.clone(),
        pod: place.pod.clone(),
        is_block: place.is_block,
    }
}
