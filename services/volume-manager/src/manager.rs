//! The task that owns the set of desired pods and a slot per pod. All other tasks send it commands.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use keelson_pod_reconciler::{PodEvent, Pods};
use keelson_service_kit::{CancellationToken, LoopHandle};
use keelson_volume_manager_core::desire::{PodDesire, PodRef};
use keelson_volume_manager_core::plan::ActualState;
use tokio::sync::{Mutex, mpsc};

use crate::view::{Phase, PodFolder, PodView, PodVolumeStatus};
use crate::worker::{Command, Env, Worker};

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
            let phase = if actual.on_disk.is_empty() && !actual.subpaths && !actual.plugins.may_have_mounts {
                Phase::Unmounted
            } else {
                Phase::Mounted
            };
            let pod = PodRef { uid: uid.clone(), ..PodRef::default() };
            let message = "found on disk at startup; pod-sync has not named the pod yet".into();
            let status = PodVolumeStatus { pod, phase, mounts: Vec::new(), message, waits: Vec::new() };
            let folder = Arc::new(Mutex::new(PodFolder { has_subpaths: actual.subpaths }));
            env.hub.set(uid.clone(), status.clone());
            let worker = |assignments| Box::new(Worker::new(Arc::clone(&env), assignments, actual)).run();
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
                Some(PodEvent::Desired(desire)) => self.pods.assign(desire, |assignments| {
                    Box::new(Worker::new(Arc::clone(&self.env), assignments, ActualState::default())).run()
                }),
                Some(PodEvent::Removed(uid)) => {
                    self.env.orphans.removed(&uid);
                    drop(self.env.hub.remove(&uid));
                }
                Some(PodEvent::Request(never)) => match never {},
                Some(PodEvent::Complete { sources_ready }) => {
                    self.env.orphans.start_round();
                    if sources_ready {
                        self.env.is_set_complete.store(true, Ordering::Relaxed);
                        self.env.resolver.shared.set_populated();
                    }
                }
                None => {}
            }
        }
    }
}
