//! One task per pod: plan, carry out, publish. There are never two operations at once for a pod.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use keelson_resource_manager_core::desire::{PodDesire, Want};
use keelson_resource_manager_core::layout::CgroupPath;
use keelson_resource_manager_core::plan::{Actual, Plan, Settled, plan};
use keelson_service_kit::Backoff;
use keelson_service_kit::status::chain;
use keelson_sync_callee::{Assignment, Next, Orders, Turn, still_runs};
use tokio::sync::watch;

use crate::cgroup::{Tree, TreeError};
use crate::manager::{Command, Env, Note};
use crate::view::{Phase, TreeState, View};

/// Retry of a cgroup that cannot be made or removed.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));

/// The task of one pod.
pub(crate) struct Worker {
    env: Arc<Env>,
    orders: Orders<PodDesire, View, Note>,
    tree: watch::Receiver<TreeState>,
    actual: Actual,
    /// What is in the tree is known.
    knows: bool,
    retry: Backoff,
    asking: Backoff,
}

impl Worker {
    /// `held` is none when nobody knows yet what is in the tree.
    pub(crate) fn new(
        env: Arc<Env>,
        orders: Orders<PodDesire, View, Note>,
        held: Option<BTreeSet<CgroupPath>>,
    ) -> Self {
        Self {
            tree: env.tree.clone(),
            env,
            orders,
            knows: held.is_some(),
            actual: Actual { held: held.unwrap_or_default(), applied: None },
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
            }
            // On the heap, so that a worker that waits, as most do, is small.
            let next = Box::pin(self.step(&turn)).await;
            let tree_changed = async { self.tree.changed().await.is_ok() };
            if !self.orders.wait(next, tree_changed).await {
                return;
            }
        }
    }

    async fn step(&mut self, turn: &Turn<PodDesire, Note>) -> Next {
        let Assignment { desire, number, note } = &turn.assignment;
        let state = self.tree.borrow_and_update().clone();
        let tree = match state {
            TreeState::Ready(tree) => Some(tree),
            TreeState::Never(text) => {
                self.publish(desire, Phase::Pending, text, String::new());
                None
            }
            TreeState::NotYet(text) => {
                self.publish(desire, Phase::Pending, text, String::new());
                return Next::WhenChanged;
            }
        };
        let Some(tree) = tree else {
            // Without a tree there was never a cgroup, and a forgotten pod is gone.
            if desire.want == Want::Forget {
                self.settle(desire, Settled::Gone, *number, String::new()).await;
            }
            return Next::WhenChanged;
        };
        if !self.knows {
            return self.look_around(desire, tree).await;
        }
        let path = tree.layout().pod(desire.qos, &self.orders.uid);
        match plan(desire, &path, note.admitted, &self.actual, turn.is_quiet) {
            Plan::Settled(end) => {
                let parent = if end == Settled::Ready { path.to_string() } else { String::new() };
                self.settle(desire, end, *number, parent).await;
                Next::WhenChanged
            }
            Plan::Make => self.make(desire, tree, path).await,
            Plan::AskRuntime => self.ask(desire).await,
            Plan::Remove => self.remove(desire, tree).await,
        }
    }

    async fn look_around(&mut self, desire: &PodDesire, tree: Arc<Tree>) -> Next {
        match blocking(move || tree.scan()).await {
            Ok(mut found) => {
                self.actual.held = found.remove(&self.orders.uid).unwrap_or_default();
                self.knows = true;
                Next::Now { is_quiet: false }
            }
            Err(text) => self.failed(desire, Phase::Pending, text),
        }
    }

    async fn settle(&mut self, desire: &PodDesire, end: Settled, number: u64, cgroup_parent: String) {
        let (phase, message) = match end {
            Settled::NotAdmitted => (Phase::Pending, "the pod to be admitted"),
            Settled::Ready => (Phase::Ready, ""),
            Settled::Ending => (Phase::Ending, ""),
            Settled::Gone => (Phase::Gone, ""),
        };
        self.retry.reset();
        self.publish(desire, phase, message.to_owned(), cgroup_parent);
        if end == Settled::Gone {
            let _ = self.env.commands.send(Command::Gone { uid: self.orders.uid.clone(), number }).await;
        }
    }

    async fn make(&mut self, desire: &PodDesire, tree: Arc<Tree>, path: CgroupPath) -> Next {
        // Whatever comes of it, something may be there.
        let known = !self.actual.held.insert(path.clone());
        let (values, target) = (desire.cgroup.clone(), path.clone());
        let begun = Instant::now();
        let result = blocking(move || tree.make_pod(&target, &values)).await;
        match result {
            Ok(()) => {
                let took = begun.elapsed();
                self.env.metrics.observe(if known { "update" } else { "create" }, took);
                let elapsed_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
                tracing::debug!(uid = self.orders.uid, cgroup = %path, elapsed_us, "the pod's cgroup is as wanted");
                self.actual.applied = Some((path, desire.cgroup.clone()));
                Next::Now { is_quiet: false }
            }
            Err(text) => {
                self.actual.applied = None;
                self.failed(desire, Phase::Pending, text)
            }
        }
    }

    async fn ask(&mut self, desire: &PodDesire) -> Next {
        let Err(why) = self.env.runtime.nothing_runs(&self.orders.uid).await else {
            self.asking.reset();
            return Next::Now { is_quiet: true };
        };
        let message = format!("its cgroup is not removed yet: {why}");
        self.publish(desire, Phase::Removing, message, String::new());
        Next::After(self.asking.next_delay())
    }

    async fn remove(&mut self, desire: &PodDesire, tree: Arc<Tree>) -> Next {
        self.publish(desire, Phase::Removing, String::new(), String::new());
        self.actual.applied = None;
        let paths = self.actual.held.clone();
        let begun = Instant::now();
        match blocking(move || paths.iter().try_for_each(|path| tree.remove(path))).await {
            Ok(()) => {
                self.env.metrics.observe("destroy", begun.elapsed());
                self.actual = Actual::default();
                Next::Now { is_quiet: false }
            }
            Err(text) => self.failed(desire, Phase::Removing, text),
        }
    }

    fn failed(&mut self, desire: &PodDesire, phase: Phase, text: String) -> Next {
        let pause = self.retry.next_delay();
        let retry_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
        let pod = &desire.pod;
        tracing::warn!(uid = self.orders.uid, pod = pod.name, namespace = pod.namespace, retry_ms, "{text}");
        self.publish(desire, phase, text, String::new());
        Next::After(pause)
    }

    fn publish(&self, desire: &PodDesire, phase: Phase, message: String, cgroup_parent: String) {
        self.orders.view.send_modify(|view| {
            view.revision = desire.revision;
            view.phase = phase;
            view.message = message;
            view.cgroup_parent = cgroup_parent;
        });
    }
}

/// Runs file work where it can hang without holding up others; the error as text.
async fn blocking<T, F>(work: F) -> Result<T, String>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, TreeError> + Send + 'static,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(|e| chain(&e)),
        Err(error) => Err(format!("the operation has ended unexpectedly: {error}")),
    }
}
