//! Carries out the actions of a plan. All functions block.

use std::time::Instant;

use keelson_volume_manager_core::desire::PodDesire;
use keelson_volume_manager_core::names::{VolumeKey, unescape};
use keelson_volume_manager_core::payload::{ObjectLookup, ObjectName, SourceCache};
use keelson_volume_manager_core::plan::Action;
use keelson_volume_manager_core::pod_certificate::{CertificateLookup, CertificateName};
use keelson_volume_manager_core::token::{TokenLookup, TokenName};
use tokio::sync::watch;

use crate::metrics::{Operation, OperationMetrics};
use crate::objects::ObjectCache;
use crate::store::{ReadyVolume, Store, StoreError};
use crate::totals::plugin_of;
use crate::walks::FsGroupWalks;

/// The outcome of an action.
pub(crate) struct Outcome {
    pub(crate) action: Action,
    pub(crate) key: Option<VolumeKey>,
    pub(crate) ended: Instant,
    pub(crate) result: Result<Option<ReadyVolume>, StoreError>,
}

/// The objects, tokens and certificates that the volumes of one pod refer to.
pub(crate) struct VolumeSources<T, C> {
    pub(crate) objects: ObjectCache,
    pub(crate) tokens: T,
    pub(crate) certificates: C,
}

impl<T, C> SourceCache for VolumeSources<T, C>
where
    T: Fn(&TokenName) -> TokenLookup,
    C: Fn(&CertificateName) -> CertificateLookup,
{
    fn object(&self, name: &ObjectName) -> ObjectLookup {
        self.objects.lookup(name)
    }

    fn token(&self, name: &TokenName) -> TokenLookup {
        (self.tokens)(name)
    }

    fn certificate(&self, name: &CertificateName) -> CertificateLookup {
        (self.certificates)(name)
    }
}

/// Carries out actions in order. Stops when the pod's folders cannot be created or its subPaths cannot be unmounted,
/// but continues after an error of a volume. `current` publishes the running action, and `walks` the progress of
/// fsGroup walks.
pub(crate) fn carry_out(
    store: &Store,
    operations: &OperationMetrics,
    sources: &impl SourceCache,
    desire: &PodDesire,
    actions: Vec<Action>,
    (current, walks): (&watch::Sender<Option<Action>>, &FsGroupWalks),
) -> Vec<Outcome> {
    let uid = &desire.header.pod.uid;
    let mut outcomes = Vec::with_capacity(actions.len());
    for action in actions {
        current.send_replace(Some(action.clone()));
        let mut key = None;
        let started = Instant::now();
        let result = match &action {
            Action::CreateFolders => store.create_pod_folders(desire).map(|()| None),
            Action::SetUp(i) | Action::Refresh(i) => match desire.volumes.get(*i) {
                Some(volume) => {
                    key = volume.key();
                    store.set_up(desire, volume, sources, walks).map(Some)
                }
                None => Ok(None),
            },
            Action::RemoveSubpaths => store.remove_subpaths(uid).map(|()| None),
            // The worker requests it.
            Action::ReleasePlugins => Ok(None),
            Action::TearDown(key) => store.tear_down(uid, key).map(|()| None),
            Action::RemoveFolder => store.remove_pod_folder(uid).map(|()| None),
        };
        if let Some((plugin, operation)) = operation_of(desire, &action) {
            for walk in walks.take_ended() {
                operations.ended(
                    plugin.clone().into(),
                    Operation::ApplyAccessControl,
                    walk.succeeded,
                    walk.duration,
                );
            }
            operations.ended(plugin.into(), operation, result.is_ok(), started.elapsed());
        }
        let stop = result.is_err() && matches!(action, Action::CreateFolders | Action::RemoveSubpaths);
        outcomes.push(Outcome { action, key, ended: Instant::now(), result });
        if stop {
            break;
        }
    }
    outcomes
}

/// The plugin name and the operation of an action, as the metrics label them.
fn operation_of(desire: &PodDesire, action: &Action) -> Option<(String, Operation)> {
    match action {
        Action::SetUp(i) | Action::Refresh(i) => {
            Some((plugin_of(desire.volumes.get(*i)?)?, Operation::Mount))
        }
        Action::TearDown(key) => Some((unescape(&key.plugin), Operation::Unmount)),
        Action::CreateFolders | Action::RemoveSubpaths | Action::ReleasePlugins | Action::RemoveFolder => {
            None
        }
    }
}
