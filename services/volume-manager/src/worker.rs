//! One task per pod: plan, carry out, publish. There are never two operations at once for a pod.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use keelson_service_kit::status::chain;
use keelson_service_kit::{Backoff, ObjectRef, now_unix_nanos};
use keelson_volume_manager_core::desire::{PodDesire, Source, Volume, Want};
use keelson_volume_manager_core::names::VolumeKey;
use keelson_volume_manager_core::plan::{Actual, Plan, Settled, Step, plan};
use tokio::sync::watch;
use tokio::task::JoinError;

use crate::manager::{Command, Env};
use crate::store::{SetUp, Store, StoreError};
use crate::view::{Mounted, Phase, Report, View};

/// Retry of a failed volume (volumes.md §3.1).
const RETRY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(122));
/// Retry while something of the pod still runs.
const STILL_RUNS: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));

/// A step of the disk that takes longer than this is named.
const SLOW: Duration = Duration::from_secs(2);

/// What a worker is to bring about.
#[derive(Debug, Clone)]
pub(crate) struct Assignment {
    /// Tells one assignment of a pod from another.
    pub(crate) number: u64,
    pub(crate) desire: Arc<PodDesire>,
}

/// The task of one pod.
pub(crate) struct Worker {
    env: Arc<Env>,
    assignment: watch::Receiver<Option<Assignment>>,
    view: watch::Sender<View>,
    actual: Actual,
    uid: String,
    /// Where the ready volumes are.
    paths: BTreeMap<String, String>,
    retry: Backoff,
    asking: Backoff,
}

/// What came of a step.
struct Outcome {
    step: Step,
    holds: Option<VolumeKey>,
    result: Result<Option<SetUp>, StoreError>,
}

impl Worker {
    pub(crate) fn new(
        env: Arc<Env>,
        assignment: watch::Receiver<Option<Assignment>>,
        view: watch::Sender<View>,
        actual: Actual,
        uid: &str,
    ) -> Self {
        let paths = BTreeMap::new();
        Self { env, assignment, view, actual, uid: uid.to_owned(), paths, retry: RETRY, asking: STILL_RUNS }
    }

    /// Works until the manager drops the assignment.
    pub(crate) async fn run(mut self) {
        let mut quiet = false;
        let mut number = 0;
        loop {
            let Some(assignment) = self.assignment.borrow_and_update().clone() else {
                if self.assignment.changed().await.is_err() {
                    return;
                }
                continue;
            };
            if assignment.number != number {
                number = assignment.number;
                self.retry.reset();
                self.asking.reset();
            }
            let desire = assignment.desire;
            let pause = match plan(&desire, &self.actual, std::mem::take(&mut quiet)) {
                Plan::Settled(end) => {
                    self.settle(&desire, end, number).await;
                    None
                }
                Plan::AskRuntime => match self.ask(&desire).await {
                    None => {
                        quiet = true;
                        continue;
                    }
                    pause => pause,
                },
                Plan::Do(steps) => match self.carry_out(&desire, steps).await {
                    None => continue,
                    pause => pause,
                },
            };
            if !self.wait(pause).await {
                return;
            }
        }
    }

    /// Waits for another assignment, at most for `pause`. False when there will be none.
    async fn wait(&mut self, pause: Option<Duration>) -> bool {
        let changed = self.assignment.changed();
        match pause {
            None => changed.await.is_ok(),
            // Cancel-safe: `changed` marks nothing as seen unless it returns.
            Some(pause) => tokio::select! {
                changed = changed => changed.is_ok(),
                () = tokio::time::sleep(pause) => true,
            },
        }
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
        self.publish(desire, phase, String::new(), false, None, end != Settled::Gone);
        if end == Settled::Gone {
            let _ = self.env.commands.send(Command::Gone { uid: self.uid.clone(), number }).await;
        }
    }

    /// The pause before the next look, or none when nothing of the pod runs.
    async fn ask(&mut self, desire: &PodDesire) -> Option<Duration> {
        let message = match self.env.runtime.what_runs(&self.uid).await {
            Ok(None) => {
                self.asking.reset();
                return None;
            }
            Ok(Some(what)) => format!("not unmounted yet: {what}"),
            Err(status) => format!("not unmounted yet: no fresh read of the runtime: {}", status.message()),
        };
        let pause = self.asking.next_delay();
        self.publish(desire, Phase::Unmounting, message, false, Some(pause), true);
        Some(pause)
    }

    /// The pause before another attempt, or none when all went well.
    async fn carry_out(&mut self, desire: &Arc<PodDesire>, steps: Vec<Step>) -> Option<Duration> {
        let phase = if desire.want == Want::Run { Phase::Pending } else { Phase::Unmounting };
        if self.view.borrow().report.phase != Phase::Failed {
            self.publish(desire, phase, String::new(), false, None, true);
        }
        let begun = std::time::Instant::now();
        let outcomes = match self.watched(desire, phase, steps).await {
            Ok(outcomes) => outcomes,
            Err(error) => {
                let pause = self.retry.next_delay();
                let text = format!("the operation has ended unexpectedly: {error}");
                tracing::error!(uid = self.uid, "{text}");
                self.publish(desire, Phase::Failed, text, false, Some(pause), true);
                return Some(pause);
            }
        };
        let failures = self.take_note(desire, outcomes);
        let elapsed_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        if failures.is_empty() {
            tracing::debug!(uid = self.uid, elapsed_ms, "volumes are as wanted");
            return None;
        }
        let permanent = failures.iter().all(|(permanent, _)| *permanent);
        let texts: Vec<String> = failures.into_iter().map(|(_, text)| text).collect();
        let pause = self.retry.next_delay();
        let text = texts.join("; ");
        tracing::warn!(
            uid = self.uid,
            pod = desire.pod.name,
            namespace = desire.pod.namespace,
            elapsed_ms,
            retry_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX),
            "volumes are not as wanted: {text}"
        );
        let phase = if desire.want == Want::Run { Phase::Failed } else { Phase::Unmounting };
        self.publish(desire, phase, text, permanent, Some(pause), true);
        Some(pause)
    }

    /// Carries out steps beside the loop. What hangs cannot be cut short, so it is named while it does.
    async fn watched(
        &self,
        desire: &Arc<PodDesire>,
        phase: Phase,
        steps: Vec<Step>,
    ) -> Result<Vec<Outcome>, JoinError> {
        let store = Arc::clone(&self.env.store);
        let work = Arc::clone(desire);
        let names: Vec<String> = steps.iter().map(|step| slow_text(desire, step)).collect();
        let (at, now_at) = watch::channel(0);
        let mut outcomes = tokio::task::spawn_blocking(move || carry_out(&store, &work, steps, &at));
        let mut told = None;
        loop {
            // Cancel-safe: the handle of a blocking task gives its result once, to whoever polls it to the end.
            tokio::select! {
                outcomes = &mut outcomes => return outcomes,
                () = tokio::time::sleep(SLOW) => {}
            }
            let at = *now_at.borrow();
            if let Some(text) = names.get(at).filter(|_| told != Some(at)) {
                told = Some(at);
                tracing::warn!(uid = self.uid, pod = desire.pod.name, namespace = desire.pod.namespace, "{text}");
                self.publish(desire, phase, text.clone(), false, None, true);
            }
        }
    }

    /// Whether each failure is due to the spec, and its text.
    fn take_note(&mut self, desire: &PodDesire, outcomes: Vec<Outcome>) -> Vec<(bool, String)> {
        let mut failures = Vec::new();
        for outcome in outcomes {
            match outcome.result {
                Ok(set_up) => {
                    self.actual.done(&outcome.step, desire, outcome.holds);
                    match (&outcome.step, set_up) {
                        (Step::SetUp(i), Some(set_up)) => {
                            if let Some(volume) = desire.volumes.get(*i) {
                                let path = set_up.host_path.to_string_lossy().into_owned();
                                self.paths.insert(volume.name.clone(), path);
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
                    failures.push((error.is_permanent(), self.describe(desire, &outcome.step, &error)));
                }
            }
        }
        failures
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
            Step::SetUp(i) => {
                let name = desire.volumes.get(*i).map_or("", |volume| volume.name.as_str());
                let text = format!("MountVolume.SetUp failed for volume \"{name}\" : {cause}");
                self.env.events.warning(object(), "FailedMount", text.clone());
                text
            }
            Step::TearDown(key) => {
                format!("UnmountVolume.TearDown failed for volume \"{}\" : {cause}", key.name)
            }
            Step::RemoveFolder => format!("cannot remove the pod's folder: {cause}"),
        }
    }

    fn publish(
        &self,
        desire: &PodDesire,
        phase: Phase,
        message: String,
        permanent: bool,
        next_try: Option<Duration>,
        listed: bool,
    ) {
        let mounts = self
            .paths
            .iter()
            .map(|(name, path)| Mounted { name: name.clone(), host_path: path.clone() })
            .collect();
        let report = Report { phase, mounts, message };
        if listed {
            self.env.hub.set_if_changed(self.uid.clone(), report.clone());
        }
        let next_try_unix_nanos = next_try.map_or(0, |pause| {
            now_unix_nanos().saturating_add(i64::try_from(pause.as_nanos()).unwrap_or(i64::MAX))
        });
        self.view.send_modify(|view| {
            view.revision = desire.revision;
            view.report = report;
            view.permanent = permanent;
            view.next_try_unix_nanos = next_try_unix_nanos;
        });
    }
}

/// Carries out steps in order. A folder that cannot be made ends the turn; a volume that fails does not.
/// `at` tells the index of the present one.
fn carry_out(
    store: &Store,
    desire: &PodDesire,
    steps: Vec<Step>,
    at: &watch::Sender<usize>,
) -> Vec<Outcome> {
    let uid = &desire.pod.uid;
    let mut outcomes = Vec::with_capacity(steps.len());
    for (index, step) in steps.into_iter().enumerate() {
        at.send_replace(index);
        let mut holds = None;
        let result = match &step {
            Step::MakeFolders => store.make_pod_folders(uid).map(|()| None),
            Step::SetUp(i) => match desire.volumes.get(*i) {
                Some(volume) => {
                    holds = Store::holds(volume);
                    store.set_up(desire, volume).map(Some)
                }
                None => Ok(None),
            },
            Step::TearDown(key) => store.tear_down(uid, key).map(|()| None),
            Step::RemoveFolder => store.remove_pod_folder(uid).map(|()| None),
        };
        let stop = result.is_err() && step == Step::MakeFolders;
        outcomes.push(Outcome { step, holds, result });
        if stop {
            break;
        }
    }
    outcomes
}

/// What is said of a step while it takes longer than [`SLOW`].
fn slow_text(desire: &PodDesire, step: &Step) -> String {
    let seconds = SLOW.as_secs();
    match step {
        Step::MakeFolders => format!("making the pod's folders takes longer than {seconds} s"),
        Step::SetUp(i) => match desire.volumes.get(*i) {
            Some(Volume { name, source: Source::HostPath { path, .. } }) => format!(
                "setting up volume \"{name}\" takes longer than {seconds} s: the file system at {path} does not answer"
            ),
            Some(Volume { name, .. }) => format!("setting up volume \"{name}\" takes longer than {seconds} s"),
            None => String::new(),
        },
        Step::TearDown(key) => format!("removing volume \"{}\" takes longer than {seconds} s", key.name),
        Step::RemoveFolder => format!("removing the pod's folder takes longer than {seconds} s"),
    }
}
