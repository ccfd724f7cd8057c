//! The task that owns the set of desired pods and a slot per pod. All other tasks send it commands.

use std::sync::Arc;

use keelson_service_kit::{CancellationToken, EventRing, LoopHandle, WatchHub};
use keelson_sync_callee::{News, Pods, Runtime};
use keelson_volume_manager_core::desire::{PodDesire, PodRef};
use keelson_volume_manager_core::plan::ActualState;
use tokio::sync::{Mutex, mpsc};

use crate::metrics::{OperationMetrics, OrphanMetrics};
use crate::objects::ObjectCache;
use crate::store::Store;
use crate::tokens::TokenClient;
use crate::totals::VolumeTotals;
use crate::view::{Phase, PodFolder, PodView, PodVolumeStatus};
use crate::worker::Worker;

/// A command to the manager.
pub(crate) type Command = keelson_sync_callee::Command<PodDesire, PodView>;

/// What all workers share.
#[derive(Debug)]
pub(crate) struct Env {
    pub(crate) store: Arc<Store>,
    pub(crate) runtime: Runtime,
    pub(crate) objects: ObjectCache,
    pub(crate) tokens: TokenClient,
    pub(crate) hub: WatchHub<String, PodVolumeStatus>,
    pub(crate) events: EventRing,
    pub(crate) orphans: OrphanMetrics,
    pub(crate) operations: OperationMetrics,
    pub(crate) totals: VolumeTotals,
    pub(crate) commands: mpsc::Sender<Command>,
}

/// The owner of the set of desired pods.
pub(crate) struct Manager {
    env: Arc<Env>,
    pods: Pods<PodDesire, PodView>,
}

impl Manager {
    /// Starts with the pods found on disk. Each gets a worker that waits until pod-sync names the pod.
    pub(crate) fn new(env: Arc<Env>, found: Vec<(String, ActualState)>) -> Self {
        let mut pods = Pods::default();
        for (uid, actual) in found {
            let phase =
                if actual.on_disk.is_empty() && !actual.subpaths { Phase::Unmounted } else { Phase::Mounted };
            let pod = PodRef { uid: uid.clone(), ..PodRef::default() };
            let message = "found on disk at startup; pod-sync has not named the pod yet".into();
            let status = PodVolumeStatus { pod, phase, mounts: Vec::new(), message };
            let folder = Arc::new(Mutex::new(PodFolder { has_subpaths: actual.subpaths }));
            env.hub.set(uid.clone(), status.clone());
            let worker = |orders| Worker::new(Arc::clone(&env), orders, actual).run();
            let set_view = |view: &mut PodView| {
                view.status = status;
                view.folder = folder;
            };
            pods.find(uid, set_view, worker);
        }
        Self { env, pods }
    }

    /// Handles commands until `shutdown`.
    pub(crate) async fn run(
        mut self,
        mut commands: mpsc::Receiver<Command>,
        shutdown: CancellationToken,
        handle: LoopHandle,
    ) {
        while let Some(command) = self.pods.next(&mut commands, &shutdown, &handle).await {
            match self.pods.take(command) {
                Some(News::Named(desire)) => self.pods.assign(desire, |orders| {
                    Worker::new(Arc::clone(&self.env), orders, ActualState::default()).run()
                }),
                Some(News::Gone(uid)) => {
                    self.env.orphans.removed(&uid);
                    drop(self.env.hub.remove(&uid));
                }
                Some(News::Asked(never)) => match never {},
                Some(News::Complete) => self.env.orphans.start_round(),
                None => {}
            }
        }
    }
}
