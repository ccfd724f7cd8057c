//! Whether a pod may run here, and with what.

use std::sync::Arc;

use keelson_kube_model::Pod;
use keelson_pod_sync_core::allocation::Allocation;
use keelson_pod_sync_core::resize::ResizeRecord;

/// The result of a pod's admission.
#[derive(Debug, Default)]
pub struct AdmissionRecord {
    /// It was admitted.
    pub admitted: bool,
    /// The resources that it was admitted with, or resized to.
    pub allocation: Option<Allocation>,
    /// The resources that its source asks for, if they are others.
    pub wanted: Option<Allocation>,
    /// Its resize.
    pub resize: ResizeRecord,
    /// If the pod itself is not known: a pod that has its host ports.
    pub port_holder: Option<Arc<Pod>>,
    /// Why it waits for admission: reason and message. Every status shows it. When resources become free, the pods with a
    /// hold are tried again.
    pub hold: Option<(String, String)>,
}

impl AdmissionRecord {
    /// A source has sent `pod`. Returns it with the resources that it is allocated, if these are others. What is ending keeps its
    /// resources, and no resize is pending then.
    pub fn apply_allocation(&mut self, pod: &Arc<Pod>, is_ending: bool) -> Option<Arc<Pod>> {
        let mut allocated = Arc::clone(pod);
        let is_other = self
            .allocation
            .as_ref()
            .is_some_and(|allocation| allocation.apply(Arc::make_mut(&mut allocated)));
        self.wanted = (is_other && !is_ending).then(|| Allocation::of(pod));
        if self.wanted.is_none() {
            self.resize.pending = None;
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
