//! The probes of one pod: their results and the tasks that run them.

use std::fmt::Debug;
use std::sync::Arc;

use keelson_kube_model::{ContainerKind, Pod, PodStatus};
use keelson_pod_sync_core::explain::Cause;
use keelson_pod_sync_core::observation::PodObservation;
use keelson_pod_sync_core::probe::{ProbeKind, ProbeStates, unready_cause};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

/// The probes of one UID.
#[derive(Debug, Default)]
pub struct Probes {
    /// The results and the schedule of each probe.
    pub states: ProbeStates,
    /// A vector: a pod has few probes, and a map would keep room for more.
    tasks: Vec<((String, ProbeKind), ProbeTask)>,
}

/// The task that runs one probe. It ends when this is dropped.
#[derive(Debug)]
pub struct ProbeTask {
    /// Wakes it.
    pub wake: Arc<Notify>,
    /// Ends it.
    pub handle: AbortHandle,
    /// The metric series of the probe, which exist as long as the task.
    pub series: Arc<dyn Debug + Send + Sync>,
}

impl Drop for ProbeTask {
    fn drop(&mut self) {
        self.handle.abort();
    }
}

impl Probes {
    /// Wakes all tasks: what they depend on has changed.
    pub fn wake(&self) {
        self.tasks.iter().for_each(|(_, task)| task.wake.notify_one());
    }

    /// Ends all tasks: nothing of the pod runs any more.
    pub fn end(&mut self) {
        self.tasks = Vec::new();
    }

    /// Whether the task of a probe runs.
    pub fn runs(&self, key: &(String, ProbeKind)) -> bool {
        self.tasks.iter().any(|(known, task)| known == key && !task.handle.is_finished())
    }

    /// Adds the task of a probe. An earlier one ends.
    pub fn add(&mut self, key: (String, ProbeKind), task: ProbeTask) {
        self.tasks.retain(|(known, _)| *known != key);
        self.tasks.reserve_exact(1);
        self.tasks.push((key, task));
    }

    /// Why a running container is not ready; `None` if it is ready or has no readiness.
    pub fn unready(
        &self,
        pod: &Pod,
        observed: &PodObservation,
        status: &PodStatus,
        name: &str,
    ) -> Option<Cause> {
        let record = observed.current(name).filter(|r| r.is_running())?;
        let (kind, container) = pod.container(name)?;
        let has_readiness = matches!(kind, ContainerKind::Regular | ContainerKind::Sidecar);
        has_readiness.then(|| unready_cause(container, record, Some(status), &self.states)).flatten()
    }
}
