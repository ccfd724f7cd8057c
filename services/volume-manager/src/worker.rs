//! One task per pod: plan, carry out, publish. There are never two operations at once for a pod.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use keelson_service_kit::status::chain;
use keelson_service_kit::{Backoff, ObjectRef, now_unix_nanos};
use keelson_sync_callee::{Assignment, Next, Orders, Turn, still_runs};
use keelson_volume_manager_core::desire::{PodDesire, Source, Volume, Want};
use keelson_volume_manager_core::figures::measure;
use keelson_volume_manager_core::names::VolumeKey;
use keelson_volume_manager_core::payload::{Lookup, ObjectName, references};
use keelson_volume_manager_core::plan::{Actual, Plan, Settled, Step, plan};
use keelson_volume_manager_core::requests::Requests;
use keelson_volume_manager_core::token::TokenLookup;
use tokio::sync::{OwnedMutexGuard, watch};
use tokio::task::JoinError;

use crate::manager::{Command, Env};
use crate::objects::Claim;
use crate::slow::Slow;
use crate::steps::{Outcome, Sources, carry_out};
use crate::store::StoreError;
use crate::tokens::{self, PodTokens};
use crate::totals::{Share, plugin_of};
use crate::view::{Folder, Mounted, Phase, Report, View};
use crate::walks::Walks;

/// Retry of a failed volume (volumes.md §3.1).
const RETRY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(122));

/// The task of one pod.
pub(crate) struct Worker {
    env: Arc<Env>,
    orders: Orders<PodDesire, View>,
    actual: Actual,
    /// Where the ready volumes are.
    paths: BTreeMap<String, Mounted>,
    /// The objects that the volumes are made of.
    claim: Claim,
    /// The tokens that the volumes hold.
    tokens: PodTokens,
    /// When this worker began.
    begun: Instant,
    requests: Requests,
    /// Volumes of plugins that nobody here knows, of which it was told whether they went.
    forced: BTreeSet<VolumeKey>,
    share: Share,
    retry: Backoff,
    asking: Backoff,
}

/// What is said of a pod beside its phase.
#[derive(Default)]
struct Said {
    message: String,
    permanent: bool,
    yours: bool,
    next_try: Option<Duration>,
    /// Nothing is left of the pod: it is listed no longer.
    gone: bool,
}

/// A step that has failed.
struct Failure {
    /// The spec itself is in the way.
    permanent: bool,
    /// What stands beside the pod is in the way.
    yours: bool,
    text: String,
}

impl Worker {
    pub(crate) fn new(env: Arc<Env>, orders: Orders<PodDesire, View>, actual: Actual) -> Self {
        let (claim, share) = (env.objects.claim(), env.totals.share(&actual));
        let tokens = PodTokens::new(env.tokens.clone());
        Self {
            env,
            orders,
            actual,
            paths: BTreeMap::new(),
            claim,
            tokens,
            begun: Instant::now(),
            requests: Requests::default(),
            forced: BTreeSet::new(),
            share,
            retry: RETRY,
            asking: still_runs(),
        }
    }

    /// Works until the manager drops the assignment.
    pub(crate) async fn run(mut self) {
        while let Some(turn) = self.orders.present().await {
            if turn.is_new {
                self.retry.reset();
                self.asking.reset();
                let desire = &turn.assignment.desire;
                self.claim.set(needed(desire));
                self.tokens.set(desire, &self.env.store.pod_folder(&self.orders.uid));
            }
            if self.claim.has_changed() | self.tokens.has_changed() | turn.is_new {
                self.actual.files_may_have_changed(&turn.assignment.desire);
            }
            self.requests.note(&turn.assignment.desire, &self.actual, self.begun.elapsed());
            self.share.of(&turn.assignment.desire, &self.actual);
            // On the heap, so that a worker that waits, as most do, is small.
            let next = Box::pin(self.step(&turn)).await;
            self.share.of(&turn.assignment.desire, &self.actual);
            let (claim, tokens) = (&self.claim, &self.tokens);
            let changed = async {
                // Cancel-safe: neither takes anything away.
                tokio::select! {
                    changed = claim.changed() => changed,
                    changed = tokens.changed() => changed,
                }
            };
            if !self.orders.wait(next, changed).await {
                return;
            }
        }
    }

    async fn step(&mut self, turn: &Turn<PodDesire>) -> Next {
        let Assignment { desire, number, .. } = &turn.assignment;
        let folder = match desire.want {
            Want::Run | Want::Stop => None,
            // Nothing is prepared for a container once this is held: its volumes are not wanted any more.
            Want::Unmount | Want::Forget => Some(self.folder(desire).await),
        };
        if let Some(folder) = &folder {
            self.actual.subpaths = folder.has_subpaths;
        }
        match plan(desire, &self.actual, turn.is_quiet) {
            Plan::Settled(end) => {
                drop(folder);
                self.settle(desire, end, *number).await;
                Next::WhenChanged
            }
            Plan::AskRuntime => {
                drop(folder);
                self.ask(desire).await
            }
            Plan::Do(steps) => {
                let (steps, waits) = self.possible(desire, steps);
                if steps.is_empty() {
                    self.wait_for(desire, &waits)
                } else {
                    self.carry_out(desire, steps, folder).await
                }
            }
        }
    }

    /// Waits until nothing is being prepared for a container of the pod.
    async fn folder(&self, desire: &PodDesire) -> OwnedMutexGuard<Folder> {
        let folder = Arc::clone(&self.orders.view.borrow().folder);
        if let Ok(folder) = Arc::clone(&folder).try_lock_owned() {
            return folder;
        }
        let message = "a part of a volume is still being prepared for a container".to_owned();
        self.publish(desire, Phase::Unmounting, &Said { message, ..Said::default() });
        folder.lock_owned().await
    }

    /// The steps whose objects and tokens are known, and who has to do what for the others. A volume waits for these
    /// without a try: pod-config tells of them as soon as it can.
    fn possible(&self, desire: &PodDesire, steps: Vec<Step>) -> (Vec<Step>, BTreeSet<String>) {
        let mut waits = BTreeSet::new();
        let look = self.tokens.look();
        let is_possible = |step: &Step| {
            let (Step::SetUp(i) | Step::Refresh(i)) = step else { return true };
            let Some(volume) = desire.volumes.get(*i) else { return true };
            let Some(files) = volume.files() else { return true };
            let objects = references(files, &desire.pod.namespace)
                .filter(|name| self.env.objects.look(name) == Lookup::Unknown)
                .map(|name| format!("pod-config to tell the {name}"));
            let tokens = tokens::names(volume).into_iter().filter_map(|name| match look(name) {
                TokenLookup::Waits(what) => Some(what),
                TokenLookup::Refused(_) | TokenLookup::Present(_) => None,
            });
            let unknown: Vec<String> = objects.chain(tokens).collect();
            let is_possible = unknown.is_empty();
            waits.extend(unknown);
            is_possible
        };
        let steps = steps.into_iter().filter(is_possible).collect();
        (steps, waits)
    }

    fn wait_for(&self, desire: &PodDesire, waits: &BTreeSet<String>) -> Next {
        let phase = if self.is_ready(desire) { Phase::Mounted } else { Phase::Pending };
        let message = waits.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        self.publish(desire, phase, &Said { message, ..Said::default() });
        Next::WhenChanged
    }

    /// Every wanted volume is there, up to date or not.
    fn is_ready(&self, desire: &PodDesire) -> bool {
        desire.volumes.iter().all(|volume| self.actual.ready.contains(&volume.name))
    }

    async fn settle(&mut self, desire: &PodDesire, end: Settled, number: u64) {
        let phase = match end {
            Settled::Mounted => Phase::Mounted,
            Settled::Stopping if self.actual.held.is_empty() && self.paths.is_empty() => Phase::Unmounted,
            Settled::Stopping => Phase::Mounted,
            Settled::Unmounted | Settled::Gone => Phase::Unmounted,
        };
        if matches!(end, Settled::Unmounted | Settled::Gone) {
            self.paths.clear();
            self.actual.ready.clear();
        }
        self.retry.reset();
        self.publish(desire, phase, &Said { gone: end == Settled::Gone, ..Said::default() });
        if end == Settled::Gone {
            let _ = self.env.commands.send(Command::Gone { uid: self.orders.uid.clone(), number }).await;
        }
    }

    async fn ask(&mut self, desire: &PodDesire) -> Next {
        let Err(why) = self.env.runtime.nothing_runs(&self.orders.uid).await else {
            self.asking.reset();
            return Next::Now { is_quiet: true };
        };
        let pause = self.asking.next_delay();
        let message = format!("not unmounted yet: {why}");
        self.publish(desire, Phase::Unmounting, &Said { message, next_try: Some(pause), ..Said::default() });
        Next::After(pause)
    }

    async fn carry_out(
        &mut self,
        desire: &Arc<PodDesire>,
        steps: Vec<Step>,
        folder: Option<OwnedMutexGuard<Folder>>,
    ) -> Next {
        // What is only brought up to date can be used meanwhile, and when that fails.
        let is_refresh = self.is_ready(desire) && steps.iter().all(|step| matches!(step, Step::Refresh(_)));
        let phase = match desire.want {
            Want::Run if is_refresh => Phase::Mounted,
            Want::Run => Phase::Pending,
            Want::Stop | Want::Unmount | Want::Forget => Phase::Unmounting,
        };
        if !is_refresh && self.orders.view.borrow().report.phase != Phase::Failed {
            self.publish(desire, phase, &Said::default());
        }
        let begun = Instant::now();
        let outcomes = match self.watched(desire, phase, steps, folder).await {
            Ok(outcomes) => outcomes,
            Err(error) => {
                let pause = self.retry.next_delay();
                let message = format!("the operation has ended unexpectedly: {error}");
                tracing::error!(uid = self.orders.uid, "{message}");
                let said = Said { message, next_try: Some(pause), ..Said::default() };
                self.publish(desire, Phase::Failed, &said);
                return Next::After(pause);
            }
        };
        let failures = self.take_note(desire, outcomes);
        let elapsed_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        if failures.is_empty() {
            tracing::debug!(uid = self.orders.uid, elapsed_ms, "volumes are as wanted");
            return Next::Now { is_quiet: false };
        }
        // What stands beside the pod does not help while its spec is in the way.
        let permanent = failures.iter().all(|failure| failure.permanent || failure.yours)
            && failures.iter().any(|failure| failure.permanent);
        let yours = failures.iter().all(|failure| failure.yours);
        let texts: Vec<String> = failures.into_iter().map(|failure| failure.text).collect();
        let pause = self.retry.next_delay();
        let message = texts.join("; ");
        tracing::warn!(
            uid = self.orders.uid,
            pod = desire.pod.name,
            namespace = desire.pod.namespace,
            elapsed_ms,
            retry_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX),
            "volumes are not as wanted: {message}"
        );
        let phase = match desire.want {
            Want::Run if self.is_ready(desire) => Phase::Mounted,
            Want::Run => Phase::Failed,
            Want::Stop | Want::Unmount | Want::Forget => Phase::Unmounting,
        };
        let said = Said { message, permanent, yours, next_try: Some(pause), gone: false };
        self.publish(desire, phase, &said);
        Next::After(pause)
    }

    /// Carries out steps beside the loop. What hangs cannot be cut short, so it is named while it does.
    async fn watched(
        &self,
        desire: &Arc<PodDesire>,
        phase: Phase,
        steps: Vec<Step>,
        mut folder: Option<OwnedMutexGuard<Folder>>,
    ) -> Result<Vec<Outcome>, JoinError> {
        let env = Arc::clone(&self.env);
        let sources = Sources { objects: self.env.objects.clone(), tokens: self.tokens.look() };
        let work = Arc::clone(desire);
        let (at, now_at) = watch::channel(None);
        let walks = Arc::new(Walks::default());
        let walked = Arc::clone(&walks);
        let outcomes = tokio::task::spawn_blocking(move || {
            let outcomes = carry_out(&env, &sources, &work, steps, (&at, &walked));
            let is_removed = |o: &Outcome| o.step == Step::RemoveSubpaths && o.result.is_ok();
            if let Some(folder) = folder.as_mut().filter(|_| outcomes.iter().any(is_removed)) {
                folder.has_subpaths = false;
            }
            outcomes
        });
        let slow = Slow { desire, at: &now_at, walks: &walks, events: &self.env.events };
        let say = |message| self.publish(desire, phase, &Said { message, ..Said::default() });
        slow.watch(outcomes, say).await
    }

    /// What has failed.
    fn take_note(&mut self, desire: &PodDesire, outcomes: Vec<Outcome>) -> Vec<Failure> {
        let mut failures = Vec::new();
        for outcome in outcomes {
            self.count(desire, &outcome);
            match outcome.result {
                Ok(set_up) => {
                    self.actual.done(&outcome.step, desire, outcome.holds);
                    match (&outcome.step, set_up) {
                        (Step::SetUp(i), Some(set_up)) => {
                            if let Some(volume) = desire.volumes.get(*i) {
                                let mounted = Mounted {
                                    name: volume.name.clone(),
                                    host_path: set_up.host_path.to_string_lossy().into_owned(),
                                    read_only: set_up.read_only,
                                    empty_dir: matches!(volume.source, Source::EmptyDir { .. }),
                                    measure: measure(&volume.source, desire.storage_limited),
                                };
                                self.paths.insert(volume.name.clone(), mounted);
                            }
                        }
                        (Step::TearDown(key), _) => {
                            self.paths.remove(&key.name);
                        }
                        (Step::RemoveFolder, _) => self.paths.clear(),
                        _ => {}
                    }
                }
                Err(error) => {
                    self.actual.failed(&outcome.step, outcome.holds);
                    if desire.want == Want::Forget {
                        self.env.orphans.failed(&self.orders.uid);
                    }
                    failures.push(Failure {
                        permanent: error.is_permanent(),
                        yours: error.is_of_the_objects(),
                        text: self.describe(desire, &outcome.step, &error),
                    });
                }
            }
        }
        failures
    }

    /// Counts what a step has brought to its end.
    fn count(&mut self, desire: &PodDesire, outcome: &Outcome) {
        let is_good = outcome.result.is_ok();
        match &outcome.step {
            Step::SetUp(i) | Step::Refresh(i) if is_good => {
                let Some(volume) = desire.volumes.get(*i) else { return };
                let at = outcome.ended.saturating_duration_since(self.begun);
                if let (Some(waited), Some(plugin)) =
                    (self.requests.done(&volume.name, at), plugin_of(volume))
                {
                    self.env.operations.mounted(plugin, waited);
                }
            }
            Step::TearDown(key) if key.is_foreign() && self.forced.insert(key.clone()) => {
                self.env.totals.forced(is_good);
            }
            _ => {}
        }
    }

    /// The text of a failure; one of a set-up becomes an event of the pod as well (volumes.md §3.18).
    fn describe(&self, desire: &PodDesire, step: &Step, error: &StoreError) -> String {
        let cause = chain(error);
        let pod = &desire.pod;
        let object = || ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid);
        match step {
            Step::MakeFolders => {
                let text = format!("error making pod data directories: {cause}");
                self.env.events.warning(object(), "Failed", text.clone());
                text
            }
            Step::SetUp(i) | Step::Refresh(i) => {
                let name = desire.volumes.get(*i).map_or("", |volume| volume.name.as_str());
                let text = format!("MountVolume.SetUp failed for volume \"{name}\" : {cause}");
                self.env.events.warning(object(), "FailedMount", text.clone());
                text
            }
            Step::RemoveSubpaths => format!("cannot unmount parts of volumes: {cause}"),
            Step::TearDown(key) => {
                format!("UnmountVolume.TearDown failed for volume \"{}\" : {cause}", key.name)
            }
            Step::RemoveFolder => format!("cannot remove the pod's folder: {cause}"),
        }
    }

    fn publish(&self, desire: &PodDesire, phase: Phase, said: &Said) {
        let mounts = self.paths.values().cloned().collect();
        let report = Report { pod: desire.pod.clone(), phase, mounts, message: said.message.clone() };
        if !said.gone {
            self.env.hub.set_if_changed(self.orders.uid.clone(), report.clone());
        }
        let next_try_unix_nanos = said.next_try.map_or(0, |pause| {
            now_unix_nanos().saturating_add(i64::try_from(pause.as_nanos()).unwrap_or(i64::MAX))
        });
        self.orders.view.send_modify(|view| {
            view.revision = desire.revision;
            view.report = report;
            view.permanent = said.permanent;
            view.yours = said.yours;
            view.next_try_unix_nanos = next_try_unix_nanos;
        });
    }
}

/// The objects that the volumes of a pod are made of, while it is to have any.
fn needed(desire: &PodDesire) -> BTreeSet<ObjectName> {
    match desire.want {
        Want::Run | Want::Stop => {
            let files = desire.volumes.iter().filter_map(Volume::files);
            files.flat_map(|files| references(files, &desire.pod.namespace)).collect()
        }
        Want::Unmount | Want::Forget => BTreeSet::new(),
    }
}
