//! Carries out the actions of a plan, and records how they ended.

use std::sync::Arc;
use std::time::Instant;

use keelson_pod_reconciler::Next;
use keelson_service_kit::ObjectRef;
use keelson_service_kit::status::chain;
use keelson_volume_manager_core::desire::{PodDesire, Source, Want};
use keelson_volume_manager_core::measurement::measure_spec;
use keelson_volume_manager_core::plan::Action;
use tokio::sync::{OwnedMutexGuard, watch};
use tokio::task::JoinError;

use super::Worker;
use super::details::StatusDetails;
use crate::actions::{Outcome, VolumeSources, carry_out};
use crate::slow_actions::SlowActionWatch;
use crate::store::StoreError;
use crate::totals::plugin_of;
use crate::view::{MountedVolume, Phase, PodFolder};
use crate::walks::FsGroupWalks;

/// The error of an action.
struct ActionError {
    /// The pod's spec itself causes the error.
    permanent: bool,
    /// An object that the pod refers to causes the error.
    user_can_fix: bool,
    message: String,
}

impl Worker {
    pub(super) async fn carry_out(
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
        // Nothing of the pod's own volumes is needed for that, and their files may take long to remove.
        let is_released_first =
            actions.contains(&Action::ReleasePlugins) && !actions.contains(&Action::RemoveSubpaths);
        if is_released_first {
            self.plugins.release().await;
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
        if has_released && !is_released_first {
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
                            if key.is_foreign() {
                                let shared = &self.env.resolver.shared;
                                shared.foreign_removed(&self.assignments.uid, &key.name);
                            }
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
}
