//! The worker of a pod: plans, acts and publishes. It runs one operation at a time.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use keelson_pod_reconciler::{Assignment, Assignments, Next, Runtime, Turn, running_pod_backoff};
use keelson_resource_manager_core::desire::{PodDesire, Want};
use keelson_resource_manager_core::layout::CgroupPath;
use keelson_resource_manager_core::plan::{ObservedCgroups, Plan, Settled, plan};
use keelson_service_kit::Backoff;
use keelson_service_kit::status::chain;
use tokio::sync::{mpsc, watch};

use crate::admission::PodAdmission;
use crate::cgroup::{Tree, TreeError};
use crate::commands::Command;
use crate::metrics::CgroupMetrics;
use crate::view::{Phase, TreeState, View};

/// Backoff after a cgroup could not be created or removed.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));

/// What all workers share.
#[derive(Debug)]
pub(crate) struct WorkerEnv {
    pub(crate) tree: watch::Receiver<TreeState>,
    pub(crate) runtime: Runtime,
    pub(crate) metrics: CgroupMetrics,
    pub(crate) commands: mpsc::Sender<Command>,
}

/// The worker task of one pod.
pub(crate) struct Worker {
    env: Arc<WorkerEnv>,
    assignments: Assignments<PodDesire, View, PodAdmission>,
    tree: watch::Receiver<TreeState>,
    observed: ObservedCgroups,
    /// Whether `observed` has the pod's cgroups from the tree.
    is_scanned: bool,
    retry: Backoff,
    runtime_retry: Backoff,
}

impl Worker {
    /// `cgroups` is none when the tree was not scanned yet.
    pub(crate) fn new(
        env: Arc<WorkerEnv>,
        assignments: Assignments<PodDesire, View, PodAdmission>,
        cgroups: Option<BTreeSet<CgroupPath>>,
    ) -> Self {
        Self {
            tree: env.tree.clone(),
            env,
            assignments,
            is_scanned: cgroups.is_some(),
            observed: ObservedCgroups { cgroups: cgroups.unwrap_or_default(), applied: None },
            retry: RETRY,
            runtime_retry: running_pod_backoff(),
        }
    }

    /// Runs until the manager drops the assignment.
    pub(crate) async fn run(mut self) {
        while let Some(turn) = self.assignments.present().await {
            if turn.is_new {
                self.retry.reset();
                self.runtime_retry.reset();
            }
            // Boxed, so that a waiting worker, as most are, is small.
            let next = Box::pin(self.step(&turn)).await;
            let tree_changed = async { self.tree.changed().await.is_ok() };
            if !self.assignments.wait(next, tree_changed).await {
                return;
            }
        }
    }

    async fn step(&mut self, turn: &Turn<PodDesire, PodAdmission>) -> Next {
        let Assignment { desire, number, note } = &turn.assignment;
        let state = self.tree.borrow_and_update().clone();
        let tree = match state {
            TreeState::Ready(tree) => Some(tree),
            TreeState::Unsupported(text) => {
                self.publish(desire, Phase::Pending, text, String::new());
                None
            }
            TreeState::Pending(text) => {
                self.publish(desire, Phase::Pending, text, String::new());
                return Next::WhenChanged;
            }
        };
        let Some(tree) = tree else {
            // Without a tree the pod never had a cgroup, so a forgotten pod is gone.
            if desire.header.want == Want::Forget {
                self.publish_settled(desire, Settled::Gone, *number, String::new()).await;
            }
            return Next::WhenChanged;
        };
        if !self.is_scanned {
            return self.scan(desire, tree).await;
        }
        let path = tree.layout().pod(desire.qos, &self.assignments.uid);
        match plan(desire, &path, note.admitted, &self.observed, turn.is_quiet) {
            Plan::Settled(settled) => {
                let parent = if settled == Settled::Ready { path.to_string() } else { String::new() };
                self.publish_settled(desire, settled, *number, parent).await;
                Next::WhenChanged
            }
            Plan::Apply => self.apply(desire, tree, path).await,
            Plan::AskRuntime => self.ask_runtime(desire).await,
            Plan::Remove => self.remove(desire, tree).await,
        }
    }

    async fn scan(&mut self, desire: &PodDesire, tree: Arc<Tree>) -> Next {
        match blocking(move || tree.scan()).await {
            Ok(mut found) => {
                self.observed.cgroups = found.remove(&self.assignments.uid).unwrap_or_default();
                self.is_scanned = true;
                Next::Now { is_quiet: false }
            }
            Err(text) => self.failed(desire, Phase::Pending, text),
        }
    }

    async fn publish_settled(
        &mut self,
        desire: &PodDesire,
        settled: Settled,
        number: u64,
        cgroup_parent: String,
    ) {
        let (phase, message) = match settled {
            Settled::NotAdmitted => (Phase::Pending, "the pod is not admitted yet"),
            Settled::Ready => (Phase::Ready, ""),
            Settled::Ending => (Phase::Ending, ""),
            Settled::Gone => (Phase::Gone, ""),
        };
        self.retry.reset();
        self.publish(desire, phase, message.to_owned(), cgroup_parent);
        if settled == Settled::Gone {
            let _ = self.env.commands.send(Command::Gone { uid: self.assignments.uid.clone(), number }).await;
        }
    }

    async fn apply(&mut self, desire: &PodDesire, tree: Arc<Tree>, path: CgroupPath) -> Next {
        // Even after an error, parts of the cgroup may exist.
        let known = !self.observed.cgroups.insert(path.clone());
        let (values, target) = (desire.cgroup.clone(), path.clone());
        let started = Instant::now();
        let result = blocking(move || match tree.usage_above(&target, &values).filter(|_| known) {
            Some(usage) => Ok(Some(usage)),
            None => tree.create_pod(&target, &values).map(|()| None),
        });
        match result.await {
            Ok(Some(usage)) => self.refuse(desire, &path, usage),
            Ok(None) => {
                let took = started.elapsed();
                self.env.metrics.observe(if known { "update" } else { "create" }, took);
                let elapsed_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
                tracing::debug!(uid = self.assignments.uid, cgroup = %path, elapsed_us, "the pod's cgroup is up to date");
                self.observed.applied = Some((path, desire.cgroup.clone()));
                Next::Now { is_quiet: false }
            }
            Err(text) => {
                self.observed.applied = None;
                self.failed(desire, Phase::Pending, text)
            }
        }
    }

    /// The new memory limit of the cgroup is not above what the pod uses: nothing is written, and it is tried again.
    fn refuse(&mut self, desire: &PodDesire, path: &CgroupPath, usage: u64) -> Next {
        let limit = desire.cgroup.memory_limit.unwrap_or(0);
        let text = format!("attempting to set pod memory limit ({limit}) below current usage ({usage})");
        let pause = self.failed(desire, Phase::Ready, text.clone());
        let refused = Some((desire.cgroup.clone(), text));
        self.assignments.view.send_modify(|view| {
            view.cgroup_parent = path.to_string();
            view.refused = refused;
        });
        pause
    }

    async fn ask_runtime(&mut self, desire: &PodDesire) -> Next {
        let Err(why) = self.env.runtime.nothing_runs(&self.assignments.uid).await else {
            self.runtime_retry.reset();
            return Next::Now { is_quiet: true };
        };
        let message = format!("its cgroup is not removed yet: {why}");
        self.publish(desire, Phase::Removing, message, String::new());
        Next::After(self.runtime_retry.next_delay())
    }

    async fn remove(&mut self, desire: &PodDesire, tree: Arc<Tree>) -> Next {
        self.publish(desire, Phase::Removing, String::new(), String::new());
        self.observed.applied = None;
        let paths = self.observed.cgroups.clone();
        let started = Instant::now();
        match blocking(move || paths.iter().try_for_each(|path| tree.remove(path))).await {
            Ok(()) => {
                self.env.metrics.observe("destroy", started.elapsed());
                self.observed = ObservedCgroups::default();
                Next::Now { is_quiet: false }
            }
            Err(text) => self.failed(desire, Phase::Removing, text),
        }
    }

    fn failed(&mut self, desire: &PodDesire, phase: Phase, text: String) -> Next {
        let pause = self.retry.next_delay();
        let retry_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
        let pod = &desire.header.pod;
        tracing::warn!(
            uid = self.assignments.uid,
            pod = pod.name,
            namespace = pod.namespace,
            retry_ms,
            "{text}"
        );
        self.publish(desire, phase, text, String::new());
        Next::After(pause)
    }

    fn publish(&self, desire: &PodDesire, phase: Phase, message: String, cgroup_parent: String) {
        self.assignments.view.send_modify(|view| {
            view.revision = desire.header.revision;
            view.phase = phase;
            view.message = message;
            view.cgroup_parent = cgroup_parent;
            view.refused = None;
            view.applied = self.observed.applied.as_ref().map(|(_, values)| values.clone());
        });
    }
}

/// Runs file operations on a thread where they may hang without blocking other tasks; returns the error as text.
async fn blocking<T, F>(work: F) -> Result<T, String>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, TreeError> + Send + 'static,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(|e| chain(&e)),
        Err(error) => Err(format!("the cgroup operation has ended unexpectedly: {error}")),
    }
}
