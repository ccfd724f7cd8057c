//! The pods that hold resources of the node, as admission counts them.

use std::collections::BTreeMap;
use std::sync::Arc;

use keelson_kube_model::Pod;
use keelson_pod_sync_core::admission::Denial;

use super::{PodRegistry, is_live, lock};
use crate::state::pod_state::PodState;
use crate::state::resize_queue::ResizeTrigger;

impl PodRegistry {
    /// Judges a pod against those that hold resources of the node, and gives it none.
    pub fn check_admission(
        &self,
        uid: &str,
        check: impl FnOnce(&mut dyn Iterator<Item = &Pod>) -> Option<Denial>,
    ) -> Option<Denial> {
        let pods = lock(&self.pods);
        check(&mut self.admitted_pods(&pods, uid).iter().map(|pod| &**pod))
    }

    /// Judges a pod against those that hold resources of the node, and admits it unless it is denied. Both in one step, so that of two
    /// pods that want the same only one gets it.
    pub fn admit_pod(
        &self,
        uid: &str,
        pod: &Pod,
        check: impl FnOnce(&mut dyn Iterator<Item = &Pod>) -> Option<Denial>,
    ) -> Option<Denial> {
        let mut pods = lock(&self.pods);
        let denial = check(&mut self.admitted_pods(&pods, uid).iter().map(|pod| &**pod));
        if denial.is_none()
            && let Some(state) = pods.get_mut(uid)
        {
            state.admit(pod);
            if state.admission.wanted.is_some() {
                // The other services were sent the resources that the source asked for during admission.
                self.desired_state.update(state);
                self.resizes.trigger(ResizeTrigger::PodUpdated);
            }
        }
        denial
    }

    /// The pods that hold resources of the node, without `uid`.
    fn admitted_pods(&self, pods: &BTreeMap<String, Box<PodState>>, uid: &str) -> Vec<Arc<Pod>> {
        let holding = pods.iter().filter(|(other, state)| *other != uid && state.holds_resources());
        let mut admitted: Vec<Arc<Pod>> = holding.filter_map(|(_, state)| state.admission_pod()).collect();
        let unclaimed = lock(&self.unclaimed);
        let live = |uid: &String| unclaimed.get(uid).is_some_and(is_live);
        let port_holders = lock(&self.port_holders);
        admitted.extend(port_holders.iter().filter(|(uid, _)| live(uid)).map(|(_, pod)| Arc::clone(pod)));
        admitted
    }

    /// Resources have become free: every pod that waits for admission asks again.
    pub fn wake_admission_holds(&self) {
        let pods = lock(&self.pods);
        pods.values().filter(|e| e.admission.hold.is_some()).for_each(|e| e.inbox.wake());
    }
}
