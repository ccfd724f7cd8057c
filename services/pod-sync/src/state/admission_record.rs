//! Whether a pod may run here, and with what.

use std::sync::Arc;

use keelson_kube_model::{Pod, PodStatus};
use keelson_pod_sync_core::allocation::Allocation;
use keelson_pod_sync_core::conditions::RESIZE_PENDING;

/// The result of a pod's admission.
#[derive(Debug, Default)]
pub struct AdmissionRecord {
    /// It was admitted.
    pub admitted: bool,
    /// The resources that it was admitted with.
    pub allocation: Option<Allocation>,
    /// If the pod itself is not known: a pod that has its host ports.
    pub port_holder: Option<Arc<Pod>>,
    /// Why it waits for admission: reason and message. Every status shows it. When resources become free, the pods with a
    /// hold are tried again.
    pub hold: Option<(String, String)>,
    /// Its source asks for other resources than those it was admitted with, and does not get them.
    pub resize_refused: bool,
    /// No event has reported that refusal yet.
    pub resize_unreported: bool,
}

impl AdmissionRecord {
    /// A source has sent `pod`. Returns it with the resources that it was admitted with, if these are others. What is ending keeps its
    /// resources too, and nothing counts as refused then.
    pub fn apply_allocation(
        &mut self,
        pod: &Arc<Pod>,
        is_ending: bool,
        status: &PodStatus,
    ) -> Option<Arc<Pod>> {
        let mut allocated = Arc::clone(pod);
        let is_other = self
            .allocation
            .as_ref()
            .is_some_and(|allocation| allocation.apply(Arc::make_mut(&mut allocated)));
        self.resize_refused = is_other && !is_ending;
        if self.resize_refused {
            let reported = status.condition(RESIZE_PENDING).map(|condition| condition.observed_generation);
            self.resize_unreported = reported != Some(allocated.metadata.generation);
        }
        is_other.then_some(allocated)
    }

    /// It is admitted with the resources of `pod`.
    pub fn admit(&mut self, pod: &Pod) {
        self.admitted = true;
        self.allocation.get_or_insert_with(|| Allocation::of(pod));
    }

    /// It waits for admission. Returns whether it did not wait for this reason before.
    pub fn wait(&mut self, reason: &str, message: &str) -> bool {
        let is_new = self.hold.as_ref().is_none_or(|(before, _)| before != reason);
        self.hold = Some((reason.to_owned(), message.to_owned()));
        is_new
    }
}
