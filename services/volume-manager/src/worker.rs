//! One task per pod: plans, carries out, publishes. It never runs two operations of a pod at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use keelson_pod_reconciler::{Assignment, Assignments, Next, Runtime, Turn, running_pod_backoff};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Backoff, EventRing, ObjectRef, WatchHub, now_unix_nanos};
use keelson_volume_manager_core::desire::{PodDesire, Source, Volume, Want};
use keelson_volume_manager_core::measurement::measure_spec;
use keelson_volume_manager_core::mount_latency::MountWaits;
use keelson_volume_manager_core::names::VolumeKey;
use keelson_volume_manager_core::payload::{ObjectLookup, ObjectName, referenced_objects};
use keelson_volume_manager_core::plan::{Action, ActualState, Plan, Settled, plan};
use keelson_volume_manager_core::pod_certificate::CertificateLookup;
use keelson_volume_manager_core::token::TokenLookup;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use tokio::sync::{OwnedMutexGuard, mpsc, watch};
use tokio::task::JoinError;

use crate::actions::{Outcome, VolumeSources, carry_out};
use crate::metrics::{OperationMetrics, OrphanMetrics};
use crate::objects::{ObjectCache, Subscription};
use crate::pod_certificates::{CertificateClient, PodCertificates, certificate_names};
use crate::pod_plugins::{PluginStatus, PodPlugins};
use crate::resolver::Resolver;
use crate::slow_actions::SlowActionWatch;
use crate::store::{Store, StoreError};
use crate::tokens::{self, PodTokens, TokenClient};
use crate::totals::{PodCounts, VolumeTotals, plugin_of};
use crate::view::{MountedVolume, Phase, PodFolder, PodView, PodVolumeStatus, VolumeWait};
use crate::walks::FsGroupWalks;

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

/// The parts of a published status besides the phase.
#[derive(Default)]
struct StatusDetails {
    message: String,
    permanent: bool,
    user_can_fix: bool,
    /// Who has to act, if it is neither this service nor the user.
    owner: String,
    next_try: Option<Duration>,
    /// The same, in unix nanoseconds; 0: none.
    next_try_unix_nanos: i64,
    /// Nothing of the pod is left, so it is not listed any more.
    gone: bool,
}

/// What actions wait for.
#[derive(Default)]
struct Pending {
    texts: BTreeSet<String>,
    /// Who has to act, if it is a certificate.
    owner: Option<WaitOwner>,
}

/// The error of an action.
struct ActionError {
    /// The pod's spec itself causes the error.
    permanent: bool,
    /// An object that the pod refers to causes the error.
    user_can_fix: bool,
    message: String,
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

    /// Runs until the manager drops the assignment.
    pub(crate) async fn run(mut self) {
        while let Some(turn) = self.assignments.present().await {
            if turn.is_new {
                self.retry.reset();
                self.runtime_backoff.reset();
                let desire = &turn.assignment.desire;
                self.objects.set(needed_objects(desire));
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

    /// Splits off the actions whose objects, tokens and certificates are known, and returns what the others wait for. These
    /// wait without an attempt, since pod-config reports objects and tokens as soon as it can.
    fn runnable(&self, desire: &PodDesire, actions: Vec<Action>) -> (Vec<Action>, Pending) {
        let mut pending = Pending::default();
        let (lookup, certificate) = (self.tokens.lookup(), self.certificates.lookup());
        let is_runnable = |action: &Action| {
            let (Action::SetUp(i) | Action::Refresh(i)) = action else { return true };
            let Some(volume) = desire.volumes.get(*i) else { return true };
            let Some(files) = volume.files() else { return true };
            let objects = referenced_objects(files, &desire.header.pod.namespace)
                .filter(|name| self.env.objects.lookup(name) == ObjectLookup::Unknown)
                .map(|name| format!("pod-config to send the {name}"));
            let tokens = tokens::token_names(volume).into_iter().filter_map(|name| match lookup(name) {
                TokenLookup::Pending(what) => Some(what),
                TokenLookup::Refused(_) | TokenLookup::Present(_) => None,
            });
            let unknown: Vec<String> = objects.chain(tokens).collect();
            let mut is_runnable = unknown.is_empty();
            pending.texts.extend(unknown);
            for name in certificate_names(volume) {
                if let CertificateLookup::Pending { what, owner } = certificate(name) {
                    is_runnable = false;
                    pending.texts.insert(what);
                    pending.owner.get_or_insert(owner);
                }
            }
            is_runnable
        };
        let actions = actions.into_iter().filter(is_runnable).collect();
        (actions, pending)
    }

    fn wait_for(&self, desire: &PodDesire, pending: &Pending) -> Next {
        let phase = if self.is_ready(desire) { Phase::Mounted } else { Phase::Pending };
        let message = pending.texts.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        let owner = pending.owner.as_ref().filter(|owner| **owner != WaitOwner::VolumeManager);
        let owner = owner.map(ToString::to_string).unwrap_or_default();
        self.publish(desire, phase, &StatusDetails { message, owner, ..StatusDetails::default() });
        Next::WhenChanged
    }

    /// Whether every desired volume is ready, up to date or not.
    fn is_ready(&self, desire: &PodDesire) -> bool {
        desire.volumes.iter().all(|volume| self.actual.ready.contains(&volume.name))
    }

    async fn settle(&mut self, desire: &PodDesire, settled: Settled, number: u64) {
        let phase = match settled {
            Settled::Mounted => Phase::Mounted,
            Settled::AwaitingPlugins | Settled::AwaitingTeardown => {
                return self.await_plugins(desire, settled);
            }
            Settled::Stopping
                if self.actual.on_disk.is_empty()
                    && self.mounted.is_empty()
                    && !self.plugin_status.may_have_mounts =>
            {
                Phase::Unmounted
            }
            Settled::Stopping => Phase::Mounted,
            Settled::Unmounted | Settled::Gone => Phase::Unmounted,
        };
        if matches!(settled, Settled::Unmounted | Settled::Gone) {
            self.mounted.clear();
            self.actual.ready.clear();
        }
        self.retry.reset();
        self.publish(
            desire,
            phase,
            &StatusDetails { gone: settled == Settled::Gone, ..StatusDetails::default() },
        );
        if settled == Settled::Gone {
            let _ = self.env.commands.send(Command::Gone { uid: self.assignments.uid.clone(), number }).await;
        }
    }

    /// Publishes what the volumes of plugins wait for.
    fn await_plugins(&mut self, desire: &PodDesire, settled: Settled) {
        self.retry.reset();
        let status = &self.plugin_status;
        if settled == Settled::AwaitingTeardown {
            let message = if status.teardown.is_empty() {
                "the volumes of plugins are being torn down".to_owned()
            } else {
                status.teardown.clone()
            };
            self.publish(desire, Phase::Unmounting, &StatusDetails { message, ..StatusDetails::default() });
            return;
        }
        let texts = status.waits.iter().map(|wait| format!("volume \"{}\": {}", wait.volume, wait.message));
        let message = texts.collect::<Vec<_>>().join("; ");
        let phase = if status.has_failed { Phase::Failed } else { Phase::Pending };
        let user_can_fix = status.waits.iter().all(|wait| wait.owner == WaitOwner::You);
        let others = |wait: &&VolumeWait| !matches!(wait.owner, WaitOwner::You | WaitOwner::VolumeManager);
        let owner = status.waits.iter().find(others).map(|wait| wait.owner.to_string()).unwrap_or_default();
        let details = StatusDetails {
            message,
            user_can_fix,
            owner,
            next_try_unix_nanos: status.next_try_unix_nanos,
            ..StatusDetails::default()
        };
        self.publish(desire, phase, &details);
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

    async fn carry_out(
        &mut self,
        desire: &Arc<PodDesire>,
        actions: Vec<Action>,
        folder: Option<OwnedMutexGuard<PodFolder>>,
    ) -> Next {
        // A volume that is only refreshed can be used meanwhile, and also when the refresh fails.
        let is_refresh =
            self.is_ready(desire) && actions.iter().all(|action| matches!(action, Action::Refresh(_)));
        let phase = match desire.header.want {
            Want::Run if is_refresh => Phase::Mounted,
            Want::Run => Phase::Pending,
            Want::Stop | Want::Unmount | Want::Forget => Phase::Unmounting,
        };
        if !is_refresh && self.assignments.view.borrow().status.phase != Phase::Failed {
            self.publish(desire, phase, &StatusDetails::default());
        }
        let started = Instant::now();
        let outcomes = match self.run_blocking(desire, phase, actions, folder).await {
            Ok(outcomes) => outcomes,
            Err(error) => {
                let delay = self.retry.next_delay();
                let message = format!("the volume operation ended unexpectedly: {error}");
                tracing::error!(uid = self.assignments.uid, "{message}");
                let details = StatusDetails { message, next_try: Some(delay), ..StatusDetails::default() };
                self.publish(desire, Phase::Failed, &details);
                return Next::After(delay);
            }
        };
        let is_released = |o: &Outcome| o.action == Action::ReleasePlugins && o.result.is_ok();
        let has_released = outcomes.iter().any(is_released);
        let errors = self.record_outcomes(desire, outcomes);
        if has_released {
            self.plugins.release().await;
        }
        let elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        if errors.is_empty() {
            tracing::debug!(uid = self.assignments.uid, elapsed_ms, "the volumes match the desired state");
            return Next::Now { is_quiet: false };
        }
        self.report_errors(desire, errors, elapsed_ms)
    }

    /// Logs and publishes the errors of actions. They are tried again after the back-off.
    fn report_errors(&mut self, desire: &PodDesire, errors: Vec<ActionError>, elapsed_ms: u64) -> Next {
        // Fixing the objects does not help while the spec itself causes an error.
        let permanent = errors.iter().all(|error| error.permanent || error.user_can_fix)
            && errors.iter().any(|error| error.permanent);
        let user_can_fix = errors.iter().all(|error| error.user_can_fix);
        let texts: Vec<String> = errors.into_iter().map(|error| error.message).collect();
        let delay = self.retry.next_delay();
        let message = texts.join("; ");
        tracing::warn!(
            uid = self.assignments.uid,
            pod = desire.header.pod.name,
            namespace = desire.header.pod.namespace,
            elapsed_ms,
            retry_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX),
            "cannot bring the volumes to the desired state: {message}"
        );
        let phase = match desire.header.want {
            Want::Run if self.is_ready(desire) => Phase::Mounted,
            Want::Run => Phase::Failed,
            Want::Stop | Want::Unmount | Want::Forget => Phase::Unmounting,
        };
        let details = StatusDetails {
            message,
            permanent,
            user_can_fix,
            next_try: Some(delay),
            ..StatusDetails::default()
        };
        self.publish(desire, phase, &details);
        Next::After(delay)
    }

    /// Carries out actions on a blocking thread. A hanging action cannot be cancelled, so it is reported while it hangs.
    async fn run_blocking(
        &self,
        desire: &Arc<PodDesire>,
        phase: Phase,
        actions: Vec<Action>,
        mut folder: Option<OwnedMutexGuard<PodFolder>>,
    ) -> Result<Vec<Outcome>, JoinError> {
        let env = Arc::clone(&self.env);
        let (tokens, certificates) = (self.tokens.lookup(), self.certificates.lookup());
        let sources = VolumeSources { objects: self.env.objects.clone(), tokens, certificates };
        let work = Arc::clone(desire);
        let (sender, current) = watch::channel(None);
        let walks = Arc::new(FsGroupWalks::default());
        let walks_in_task = Arc::clone(&walks);
        let outcomes = tokio::task::spawn_blocking(move || {
            let (store, operations) = (&env.store, &env.operations);
            let outcomes = carry_out(store, operations, &sources, &work, actions, (&sender, &walks_in_task));
            let is_removed = |o: &Outcome| o.action == Action::RemoveSubpaths && o.result.is_ok();
            if let Some(folder) = folder.as_mut().filter(|_| outcomes.iter().any(is_removed)) {
                folder.has_subpaths = false;
            }
            outcomes
        });
        let watch = SlowActionWatch { desire, current: &current, walks: &walks, events: &self.env.events };
        let report =
            |message| self.publish(desire, phase, &StatusDetails { message, ..StatusDetails::default() });
        watch.watch(outcomes, report).await
    }

    /// Updates the actual state from the outcomes and returns the errors.
    fn record_outcomes(&mut self, desire: &PodDesire, outcomes: Vec<Outcome>) -> Vec<ActionError> {
        let mut errors = Vec::new();
        for outcome in outcomes {
            self.count_outcome(desire, &outcome);
            match outcome.result {
                Ok(ready) => {
                    self.actual.record_success(&outcome.action, desire, outcome.key);
                    match (&outcome.action, ready) {
                        (Action::SetUp(i), Some(ready)) => {
                            if let Some(volume) = desire.volumes.get(*i) {
                                let mounted = MountedVolume {
                                    name: volume.name.clone(),
                                    host_path: ready.host_path.to_string_lossy().into_owned(),
                                    read_only: ready.read_only,
                                    inner_name: volume.name.clone(),
                                    plugin: plugin_of(volume).unwrap_or_default(),
                                    is_empty_dir: matches!(volume.source, Source::EmptyDir { .. }),
                                    measure: measure_spec(&volume.source, desire.storage_limited),
                                    ..MountedVolume::default()
                                };
                                self.mounted.insert(volume.name.clone(), mounted);
                            }
                        }
                        (Action::TearDown(key), _) => {
                            self.mounted.remove(&key.name);
                        }
                        (Action::RemoveFolder, _) => self.mounted.clear(),
                        _ => {}
                    }
                }
                Err(error) => {
                    self.actual.record_failure(&outcome.action, outcome.key);
                    if desire.header.want == Want::Forget {
                        self.env.orphans.failed(&self.assignments.uid);
                    }
                    errors.push(ActionError {
                        permanent: error.is_permanent(),
                        user_can_fix: error.is_fixable_by_user(),
                        message: self.error_message(desire, &outcome.action, &error),
                    });
                }
            }
        }
        errors
    }

    /// Updates the metrics of a finished action.
    fn count_outcome(&mut self, desire: &PodDesire, outcome: &Outcome) {
        let succeeded = outcome.result.is_ok();
        match &outcome.action {
            Action::SetUp(i) | Action::Refresh(i) if succeeded => {
                let Some(volume) = desire.volumes.get(*i) else { return };
                let at = outcome.ended.saturating_duration_since(self.started);
                if let (Some(waited), Some(plugin)) =
                    (self.mount_waits.finish(&volume.name, at), plugin_of(volume))
                {
                    self.env.operations.mounted(plugin, waited);
                }
            }
            Action::TearDown(key) if key.is_foreign() && self.counted_foreign.insert(key.clone()) => {
                self.env.totals.foreign_removal(succeeded);
            }
            _ => {}
        }
    }

    /// The message of an error. An error while setting up is recorded as an event of the pod, too (volumes.md §3.18).
    fn error_message(&self, desire: &PodDesire, action: &Action, error: &StoreError) -> String {
        let cause = chain(error);
        let pod = &desire.header.pod;
        let object = || ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid);
        match action {
            Action::CreateFolders => {
                let text = format!("error making pod data directories: {cause}");
                self.env.events.warning(object(), "Failed", text.clone());
                text
            }
            Action::SetUp(i) | Action::Refresh(i) => {
                let name = desire.volumes.get(*i).map_or("", |volume| volume.name.as_str());
                let text = format!("MountVolume.SetUp failed for volume \"{name}\" : {cause}");
                self.env.events.warning(object(), "FailedMount", text.clone());
                text
            }
            Action::RemoveSubpaths => format!("cannot unmount subPaths: {cause}"),
            Action::ReleasePlugins => cause,
            Action::TearDown(key) => {
                format!("UnmountVolume.TearDown failed for volume \"{}\" : {cause}", key.name)
            }
            Action::RemoveFolder => format!("cannot remove the pod's folder: {cause}"),
        }
    }

    fn publish(&self, desire: &PodDesire, phase: Phase, details: &StatusDetails) {
        let mounts = self.mounted.values().cloned().collect();
        let status = PodVolumeStatus {
            pod: desire.header.pod.clone(),
            phase,
            mounts,
            message: details.message.clone(),
            waits: self.plugin_status.waits.clone(),
        };
        if !details.gone {
            self.env.hub.set_if_changed(self.assignments.uid.clone(), status.clone());
        }
        let next_try_unix_nanos = details.next_try.map_or(details.next_try_unix_nanos, |delay| {
            now_unix_nanos().saturating_add(i64::try_from(delay.as_nanos()).unwrap_or(i64::MAX))
        });
        self.assignments.view.send_modify(|view| {
            view.revision = desire.header.revision;
            view.status = status;
            view.permanent = details.permanent;
            view.user_can_fix = details.user_can_fix;
            view.owner.clone_from(&details.owner);
            view.next_try_unix_nanos = next_try_unix_nanos;
        });
    }
}

/// The objects that the desired volumes of a pod refer to.
fn needed_objects(desire: &PodDesire) -> BTreeSet<ObjectName> {
    match desire.header.want {
        Want::Run | Want::Stop => {
            let files = desire.volumes.iter().filter_map(Volume::files);
            files.flat_map(|files| referenced_objects(files, &desire.header.pod.namespace)).collect()
        }
        Want::Unmount | Want::Forget => BTreeSet::new(),
    }
}
