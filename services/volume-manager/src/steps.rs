//! Carries out the steps of a plan. Everything here blocks.

use std::time::Instant;

use keelson_volume_manager_core::desire::PodDesire;
use keelson_volume_manager_core::names::{VolumeKey, unescape};
use keelson_volume_manager_core::payload::{Known, Lookup, ObjectName};
use keelson_volume_manager_core::plan::Step;
use keelson_volume_manager_core::token::{TokenLookup, TokenName};
use tokio::sync::watch;

use crate::manager::Env;
use crate::metrics::Operation;
use crate::objects::Objects;
use crate::store::{SetUp, StoreError};
use crate::totals::plugin_of;
use crate::walks::Walks;

/// What came of a step.
pub(crate) struct Outcome {
    pub(crate) step: Step,
    pub(crate) holds: Option<VolumeKey>,
    pub(crate) ended: Instant,
    pub(crate) result: Result<Option<SetUp>, StoreError>,
}

/// What is known of what the volumes of one pod are made of.
pub(crate) struct Sources<T> {
    pub(crate) objects: Objects,
    pub(crate) tokens: T,
}

impl<T: Fn(&TokenName) -> TokenLookup> Known for Sources<T> {
    fn object(&self, name: &ObjectName) -> Lookup {
        self.objects.look(name)
    }

    fn token(&self, name: &TokenName) -> TokenLookup {
        (self.tokens)(name)
    }
}

/// Carries out steps in order. A folder that cannot be made and a part of a volume that cannot be unmounted end the
/// turn; a volume that fails does not.
/// `at` tells the present one, and `walks` how far it is with the files of a volume.
pub(crate) fn carry_out(
    env: &Env,
    sources: &impl Known,
    desire: &PodDesire,
    steps: Vec<Step>,
    (at, walks): (&watch::Sender<Option<Step>>, &Walks),
) -> Vec<Outcome> {
    let (store, uid) = (&env.store, &desire.pod.uid);
    let mut outcomes = Vec::with_capacity(steps.len());
    for step in steps {
        at.send_replace(Some(step.clone()));
        let mut holds = None;
        let begun = Instant::now();
        let result = match &step {
            Step::MakeFolders => store.make_pod_folders(uid).map(|()| None),
            Step::SetUp(i) | Step::Refresh(i) => match desire.volumes.get(*i) {
                Some(volume) => {
                    holds = volume.key();
                    store.set_up(desire, volume, sources, walks).map(Some)
                }
                None => Ok(None),
            },
            Step::RemoveSubpaths => store.remove_subpaths(uid).map(|()| None),
            Step::TearDown(key) => store.tear_down(uid, key).map(|()| None),
            Step::RemoveFolder => store.remove_pod_folder(uid).map(|()| None),
        };
        if let Some((plugin, operation)) = operation_of(desire, &step) {
            for walk in walks.take_ended() {
                env.operations.ended(plugin.clone(), Operation::ApplyAccessControl, walk.good, walk.took);
            }
            env.operations.ended(plugin, operation, result.is_ok(), begun.elapsed());
        }
        let stop = result.is_err() && matches!(step, Step::MakeFolders | Step::RemoveSubpaths);
        outcomes.push(Outcome { step, holds, ended: Instant::now(), result });
        if stop {
            break;
        }
    }
    outcomes
}

/// What a step does with a volume, with the name of the volume's plugin.
fn operation_of(desire: &PodDesire, step: &Step) -> Option<(String, Operation)> {
    match step {
        Step::SetUp(i) | Step::Refresh(i) => Some((plugin_of(desire.volumes.get(*i)?)?, Operation::Mount)),
        Step::TearDown(key) => Some((unescape(&key.plugin), Operation::Unmount)),
        Step::MakeFolders | Step::RemoveSubpaths | Step::RemoveFolder => None,
    }
}
