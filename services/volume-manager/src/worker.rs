//! One task per pod: plans, carries out, publishes. It never runs two operations of a pod at once.
//!
//! | module | does |
//! |---|---|
//! | `pending` | which objects, tokens and certificates actions wait for |
//! | `execute` | carries out actions, and records how they ended |
//! | `publish` | publishes the status of the pod's volumes |
//! | `details` | the parts of a status besides the phase |

mod details;
mod execute;
mod pending;
mod publish;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use keelson_pod_reconciler::{Assignment, Assignments, Next, Runtime, Turn, running_pod_backoff};
use keelson_service_kit::{Backoff, EventRing, WatchHub};
use keelson_volume_manager_core::desire::{PodDesire, Want};
use keelson_volume_manager_core::mount_latency::MountWaits;
use keelson_volume_manager_core::names::VolumeKey;
use keelson_volume_manager_core::plan::{ActualState, Plan, plan};
use tokio::sync::{OwnedMutexGuard, mpsc};

use self::details::StatusDetails;
use crate::metrics::{OperationMetrics, OrphanMetrics};
use crate::objects::{ObjectCache, Subscription};
use crate::pod_certificates::{CertificateClient, PodCertificates};
use crate::pod_plugins::{PluginStatus, PodPlugins};
use crate::resolver::Resolver;
use crate::store::Store;
use crate::tokens::{PodTokens, TokenClient};
use crate::totals::{PodCounts, VolumeTotals};
use crate::view::{MountedVolume, Phase, PodFolder, PodView, PodVolumeStatus};

/// The back-off of a failed volume (volumes.md §3.1).
const RETRY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(122));

/// A command to the manager.
pub(crate) type Command = keelson_pod_reconciler::Command<PodDesire, PodView>;

/// What all workers share.
#[derive(Debug)]
pub(crate) struct Env {
    pub(crate) store: Arc<Store>,
    pub(crate) runtime: Runtime,
    pub(crate) objects: ObjectCache,
    pub(crate) tokens: TokenClient,
    pub(crate) certificates: CertificateClient,
    pub(crate) hub: WatchHub<String, PodVolumeStatus>,
    pub(crate) events: EventRing,
    pub(crate) orphans: OrphanMetrics,
    pub(crate) operations: OperationMetrics,
    pub(crate) totals: VolumeTotals,
    pub(crate) resolver: Resolver,
    pub(crate) commands: mpsc::Sender<Command>,
    /// pod-sync has sent a complete set of pods, with all sources ready.
    pub(crate) is_set_complete: AtomicBool,
}

/// The task of one pod.
pub(crate) struct Worker {
    env: Arc<Env>,
    assignments: Assignments<PodDesire, PodView>,
    actual: ActualState,
    /// The ready volumes by name.
    mounted: BTreeMap<String, MountedVolume>,
    /// The objects that the volumes refer to.
    objects: Subscription,
    /// The tokens that the volumes contain.
    tokens: PodTokens,
    /// The certificates that the volumes contain.
    certificates: PodCertificates,
    /// The volumes that plugins provide.
    plugins: PodPlugins,
    plugin_status: PluginStatus,
    /// When this worker started.
    started: Instant,
    mount_waits: MountWaits,
    /// Volumes of unknown plugins whose first removal attempt has been counted.
    counted_foreign: BTreeSet<VolumeKey>,
    counts: PodCounts,
    retry: Backoff,
    runtime_backoff: Backoff,
}

impl Worker {
    pub(crate) fn new(
        env: Arc<Env>,
        assignments: Assignments<PodDesire, PodView>,
        actual: ActualState,
    ) -> Self {
        let (objects, counts) = (env.objects.subscribe(), env.totals.count_pod(&actual));
        let tokens = PodTokens::new(env.tokens.clone());
        let certificates = PodCertificates::new(env.certificates.clone());
        let plugins = PodPlugins::new(env.resolver.clone(), &assignments.uid);
        Self {
            env,
            assignments,
            actual,
            mounted: BTreeMap::new(),
            objects,
            tokens,
            certificates,
            plugins,
            plugin_status: PluginStatus::default(),
            started: Instant::now(),
            mount_waits: MountWaits::default(),
            counted_foreign: BTreeSet::new(),
            counts,
            retry: RETRY,
            runtime_backoff: running_pod_backoff(),
        }
    }

    /// Runs until the manager drops the assignment. The worker is on the heap, because the future would hold it twice.
    pub(crate) async fn run(mut self: Box<Self>) {
        while let Some(turn) = self.assignments.present().await {
            if turn.is_new {
                self.retry.reset();
                self.runtime_backoff.reset();
                let desire = &turn.assignment.desire;
                self.follow_objects(desire);
                self.tokens.set(desire, &self.env.store.pod_folder(&self.assignments.uid));
                self.certificates.set(desire);
                self.plugins.set(desire);
            }
            self.note_plugins(&turn.assignment.desire);
            let has_changed =
                self.objects.has_changed() | self.tokens.has_changed() | self.certificates.has_changed();
            if has_changed || turn.is_new {
                self.actual.mark_files_stale(&turn.assignment.desire);
            }
            self.mount_waits.update(&turn.assignment.desire, &self.actual, self.started.elapsed());
            self.counts.update(&turn.assignment.desire, &self.actual);
            // On the heap, so that a waiting worker, as most are, is small.
            let next = Box::pin(self.take_turn(&turn)).await;
            self.counts.update(&turn.assignment.desire, &self.actual);
            let (objects, tokens, plugins) = (&self.objects, &self.tokens, &self.plugins);
            let certificates = &self.certificates;
            let changed = async {
                // Cancel-safe: no future consumes anything.
                tokio::select! {
                    changed = objects.changed() => changed,
                    changed = tokens.changed() => changed,
                    changed = certificates.changed() => changed,
                    changed = plugins.changed() => changed,
                }
            };
            if !self.assignments.wait(next, changed).await {
                return;
            }
        }
    }

    /// Takes over what is known of the volumes that plugins provide.
    fn note_plugins(&mut self, desire: &PodDesire) {
        self.plugin_status = self.plugins.status(desire);
        self.actual.plugins.may_have_mounts = self.plugin_status.may_have_mounts;
        if desire.header.want == Want::Run {
            self.actual.plugins.released = false;
        }
        for volume in desire.volumes.iter().filter(|volume| volume.has_plugin()) {
            match self.plugin_status.mounted.get(&volume.name) {
                Some(mounted) => {
                    self.actual.ready.insert(volume.name.clone());
                    self.mounted.insert(volume.name.clone(), mounted.clone());
                }
                // Until the pod has ended its containers may use it.
                None if desire.header.want == Want::Stop => {}
                None => {
                    self.actual.ready.remove(&volume.name);
                    self.mounted.remove(&volume.name);
                }
            }
        }
    }

    async fn take_turn(&mut self, turn: &Turn<PodDesire>) -> Next {
        let Assignment { desire, number, .. } = &turn.assignment;
        let folder = match desire.header.want {
            Want::Run | Want::Stop => None,
            // Once this lock is held, nothing more is prepared for a container, because its volumes are not desired any more.
            Want::Unmount | Want::Forget => Some(self.lock_folder(desire).await),
        };
        if let Some(folder) = &folder {
            self.actual.subpaths = folder.has_subpaths;
        }
        match plan(desire, &self.actual, turn.is_quiet) {
            Plan::Settled(settled) => {
                drop(folder);
                self.settle(desire, settled, *number).await;
                Next::WhenChanged
            }
            Plan::AskRuntime => {
                drop(folder);
                self.check_runtime(desire).await
            }
            Plan::Do(actions) => {
                let (actions, pending) = self.runnable(desire, actions);
                if actions.is_empty() {
                    self.wait_for(desire, &pending)
                } else {
                    self.carry_out(desire, actions, folder).await
                }
            }
        }
    }

    /// Locks the pod's folder, once nothing is being prepared for a container of the pod.
    async fn lock_folder(&self, desire: &PodDesire) -> OwnedMutexGuard<PodFolder> {
        let folder = Arc::clone(&self.assignments.view.borrow().folder);
        if let Ok(folder) = Arc::clone(&folder).try_lock_owned() {
            return folder;
        }
        let message = "a subPath is still being prepared for a container".to_owned();
        self.publish(desire, Phase::Unmounting, &StatusDetails { message, ..StatusDetails::default() });
        folder.lock_owned().await
    }

    /// Whether the pod's folder and every desired volume are ready, up to date or not.
    fn is_ready(&self, desire: &PodDesire) -> bool {
        self.actual.folder_complete
            && desire.volumes.iter().all(|volume| self.actual.ready.contains(&volume.name))
    }

    async fn check_runtime(&mut self, desire: &PodDesire) -> Next {
        let Err(why) = self.env.runtime.nothing_runs(&self.assignments.uid).await else {
            self.runtime_backoff.reset();
            return Next::Now { is_quiet: true };
        };
        let delay = self.runtime_backoff.next_delay();
        let message = format!("not unmounted yet: {why}");
        self.publish(
            desire,
            Phase::Unmounting,
            &StatusDetails { message, next_try: Some(delay), ..StatusDetails::default() },
        );
        Next::After(delay)
    }
}
