//! One task owns the set of wanted pods and a slot per pod; everybody else sends it commands.

use std::sync::Arc;

use keelson_service_kit::{CancellationToken, EventRing, LoopHandle, WatchHub};
use keelson_sync_callee::{News, Pods, Runtime};
use keelson_volume_manager_core::desire::{PodDesire, PodRef};
use keelson_volume_manager_core::plan::Actual;
use tokio::sync::{Mutex, mpsc};

use crate::metrics::{Operations, Orphans};
use crate::objects::Objects;
use crate::store::Store;
use crate::tokens::Maker;
use crate::totals::Totals;
use crate::view::{Folder, Phase, Report, View};
use crate::worker::Worker;

/// What the manager is asked to do.
pub(crate) type Command = keelson_sync_callee::Command<PodDesire, View>;

/// What the workers share.
#[derive(Debug)]
pub(crate) struct Env {
    pub(crate) store: Arc<Store>,
    pub(crate) runtime: Runtime,
    pub(crate) objects: Objects,
    pub(crate) tokens: Maker,
    pub(crate) hub: WatchHub<String, Report>,
    pub(crate) events: EventRing,
    pub(crate) orphans: Orphans,
    pub(crate) operations: Operations,
    pub(crate) totals: Totals,
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
            let phase =
                if actual.held.is_empty() && !actual.subpaths { Phase::Unmounted } else { Phase::Mounted };
            let pod = PodRef { uid: uid.clone(), ..PodRef::default() };
            let message = "found at the start, not named since".into();
            let report = Report { pod, phase, mounts: Vec::new(), message };
            let folder = Arc::new(Mutex::new(Folder { has_subpaths: actual.subpaths }));
            env.hub.set(uid.clone(), report.clone());
            let worker = |orders| Worker::new(Arc::clone(&env), orders, actual).run();
            let show = |view: &mut View| {
                view.report = report;
                view.folder = folder;
            };
            pods.find(uid, show, worker);
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
                Some(News::Gone(uid)) => {
                    self.env.orphans.gone(&uid);
                    drop(self.env.hub.remove(&uid));
                }
                Some(News::Asked(never)) => match never {},
                Some(News::Complete) => self.env.orphans.begin(),
                None => {}
            }
        }
    }
}
