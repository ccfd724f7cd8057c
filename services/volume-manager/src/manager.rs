//! One task owns the set of wanted pods and a slot per pod; everybody else sends it commands.

use std::sync::Arc;

use keelson_service_kit::{CancellationToken, EventRing, LoopHandle, WatchHub};
use keelson_sync_callee::{News, Pods, Runtime};
use keelson_volume_manager_core::desire::PodDesire;
use keelson_volume_manager_core::plan::Actual;
use tokio::sync::mpsc;

use crate::objects::Objects;
use crate::store::Store;
use crate::view::{Phase, Report, View};
use crate::worker::Worker;

/// What the manager is asked to do.
pub(crate) type Command = keelson_sync_callee::Command<PodDesire, View>;

/// What the workers share.
#[derive(Debug)]
pub(crate) struct Env {
    pub(crate) store: Arc<Store>,
    pub(crate) runtime: Runtime,
    pub(crate) objects: Objects,
    pub(crate) hub: WatchHub<String, Report>,
    pub(crate) events: EventRing,
    pub(crate) commands: mpsc::Sender<Command>,
}

/// The owner of the set.
pub(crate) struct Manager {
    env: Arc<Env>,
    pods: Pods<PodDesire, View>,
}

impl Manager {
    /// Begins with what was found on disk; each found pod has a worker that waits for a word about it.
    pub(crate) fn new(env: Arc<Env>, found: Vec<(String, Actual)>) -> Self {
        let mut pods = Pods::default();
        for (uid, actual) in found {
            let phase = if actual.held.is_empty() { Phase::Unmounted } else { Phase::Mounted };
            let report =
                Report { phase, mounts: Vec::new(), message: "found at the start, not named since".into() };
            env.hub.set(uid.clone(), report.clone());
            let worker = |orders| Worker::new(Arc::clone(&env), orders, actual).run();
            pods.find(uid, |view: &mut View| view.report = report, worker);
        }
        Self { env, pods }
    }

    /// Takes commands until the shutdown.
    pub(crate) async fn run(
        mut self,
        mut commands: mpsc::Receiver<Command>,
        shutdown: CancellationToken,
        handle: LoopHandle,
    ) {
        while let Some(command) = self.pods.next(&mut commands, &shutdown, &handle).await {
            match self.pods.take(command) {
                Some(News::Named(desire)) => self.pods.assign(desire, |orders| {
                    Worker::new(Arc::clone(&self.env), orders, Actual::default()).run()
                }),
                Some(News::Gone(uid)) => drop(self.env.hub.remove(&uid)),
                Some(News::Asked(never)) => match never {},
                Some(News::Complete) | None => {}
            }
        }
    }
}
